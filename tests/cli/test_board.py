from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from muster.cli import board
from muster.cli.board import Board
from muster.types.training import Condition, RankStatus
from tests.cli.stand_in import a_training

NOW = datetime.now(UTC)
LONG = "needs 6 GPUs (2 workers × 3), there are only 4 here: it can never start unless somebody adds a machine"


def a_pool(**fields: Any) -> dict[str, Any]:
    def held(pipeline: str, cluster: str, state: str = "held") -> dict[str, Any]:
        return {"pipeline": pipeline, "cluster": cluster, "rank": 0, "state": state, "epoch": 1}

    return {
        "name": "default",
        "gpus": 6,
        "leases": {"0": held("p1", "actor_train"), "1": held("p1", "actor_train"), "2": held("p2", "actor_infer")},
        "idle": [3, 4],
        "pending": [
            {"pipeline": "p2", "cluster": "actor_train", "priority": "ACTOR_TRAINING", "reason": "waits for p1"}
        ],
        "quarantined": {"p3": "shrink timed out"},
        "pipelines": [{"id": "p1"}, {"id": "p2", "remaining": 44, "target": 64}],
    } | fields


def pending(name: str, reason: str) -> Any:
    return a_training(name, phase="pending", conditions=(Condition("Admitted", "False", "NoGpu", reason),))


def texts(shown: Board, width: int = 80, height: int = 24) -> list[str]:
    return [board.text_of(line) for line in board.lines(shown, NOW, width, height)]


def test_a_long_reason_stands_whole_below_its_row_where_the_screen_is_narrow() -> None:
    lines = texts(Board((pending("late", LONG),)))
    at = next(at for at, line in enumerate(lines) if line.startswith("late"))

    assert " ".join(line.strip() for line in lines[at + 1 : at + 3]) == LONG
    assert not any("REASON" in line for line in lines)


def test_on_a_wide_screen_the_reason_is_the_last_column() -> None:
    title, row = texts(Board((pending("late", LONG),)), 200)[2:4]

    assert row[title.index("REASON") :] == LONG


def test_trainings_that_run_come_first_and_show_the_step_of_the_slowest_rank() -> None:
    running = a_training("runs", ranks=(RankStatus(0, step=7), RankStatus(1, step=5)))
    title, first, second = texts(Board((a_training("ended", phase="failed"), running)), 120)[2:5]

    assert (first.split()[0], second.split()[0]) == ("runs", "ended")
    assert first[title.index("STEP") :].split()[0] == "5"


def test_a_pool_shows_who_holds_which_gpus_who_waits_and_why() -> None:
    lines = texts(Board(pools=(a_pool(),)))
    rows = [line.split() for line in lines]

    assert "POOL default   6 GPUs, 2 idle, 1 waiting" in lines
    assert ["0-1", "p1", "actor_train", "held", "-"] in rows
    assert ["2", "p2", "actor_infer", "held", "44", "of", "64"] in rows
    assert ["3-4", "-", "-", "idle", "-"] in rows
    assert ["5", "-", "-", "out", "of", "use", "-"] in rows
    assert ["p2", "actor_train", "ACTOR_TRAINING", "waits", "for", "p1"] in rows
    assert ["p3", "shrink", "timed", "out"] in rows


def test_more_than_fits_is_counted_and_the_pool_keeps_its_place() -> None:
    lines = texts(Board(tuple(a_training(f"t{at:03}") for at in range(100)), (a_pool(),)), 80, 24)

    assert len(lines) <= 24
    assert "POOL default   6 GPUs, 2 idle, 1 waiting" in lines
    [more] = [line for line in lines if line.endswith("more: muster ps")]
    shown = sum(line.startswith("t0") for line in lines)
    assert more == f"… and {100 - shown} more: muster ps"


def test_a_board_without_trainings_says_what_to_run() -> None:
    assert "no trainings here yet: muster run SCRIPT" in texts(Board())


def test_what_is_out_of_date_says_so() -> None:
    assert "out of date: the control plane does not answer" in texts(Board(trouble="the control plane does not answer"))
    assert "warning: the disk is full" in texts(Board(warning="the disk is full"))


def test_words_of_others_cannot_steer_the_terminal() -> None:
    shown = Board(
        (pending("late", "bad\x1b[2J\x07 news"),), (a_pool(pending=[], quarantined={"p\x1b[m": "x\x1b]0;y"}),)
    )

    assert all(line.isprintable() for width in (40, 80, 200) for line in texts(shown, width))
    assert all(line.isprintable() for line in board.plain(shown, NOW))


@given(
    width=st.integers(20, 220),
    height=st.integers(1, 40),
    names=st.lists(st.from_regex(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", fullmatch=True), max_size=6, unique=True),
    reason=st.text(max_size=300),
    pipeline=st.text(min_size=1, max_size=40),
)
def test_no_line_is_wider_and_no_frame_is_taller_than_the_screen(
    width: int, height: int, names: list[str], reason: str, pipeline: str
) -> None:
    trainings = tuple(pending(name, reason) for name in names)
    pool = a_pool(quarantined={pipeline: reason})
    drawn = board.lines(Board(trainings, (pool,), "default", "http://h:1", reason), NOW, width, height)

    assert len(drawn) <= height
    assert all(cell_len("".join(span.text for span in line)) <= width for line in drawn)
