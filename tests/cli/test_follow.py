from __future__ import annotations

import io
from typing import Any, cast

import pytest

from muster.cli.follow import Lines, Panel, follow, panel_of, view_of
from muster.types.bench import Bench, BenchSize
from muster.types.event import Event
from muster.types.training import Condition, RankStatus, WorldStatus
from tests.cli.stand_in import StandIn, StandInHandle, a_training

BENCH = Bench(0, None, "gloo", 2, 4, 0.0003, 1.2e9, (BenchSize(1024), BenchSize(16 << 20)))
RESIZING = Condition("Resizing", "True", "ScalingUp", "one more worker\nis starting")


def drawn(what: Any, width: int = 100) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_view_has_the_slowest_rank_and_the_reason_on_one_line() -> None:
    ranks = (RankStatus(0, step=9), RankStatus(1, step=4), RankStatus(2))
    view = view_of(a_training(ranks=ranks, conditions=(RESIZING,)))

    assert str(view) == "demo  ready  2/2 workers  round 0  step 4  one more worker is starting"


def test_the_target_is_what_was_asked_for_even_before_the_control_plane_saw_it() -> None:
    view = view_of(a_training(world_size=WorldStatus(ready=2, target=1, min=1, max=4)))

    assert (view.ready, view.target) == (2, 2)


def test_a_line_is_printed_once_per_change_and_not_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    show = Lines()
    for training in (
        a_training(ranks=(RankStatus(0, step=1),)),
        a_training(ranks=(RankStatus(0, step=2),)),
        a_training(round=1),
        a_training(round=1, conditions=(RESIZING,)),
    ):
        show.change(training)
    out, err = capsys.readouterr()

    assert out == ""
    assert [line.split("  ")[3:] for line in err.splitlines()] == [
        ["round 0", "step 1"],
        ["round 1"],
        ["round 1", "one more worker is starting"],
    ]


def test_the_panel_has_phase_workers_round_step_and_reason() -> None:
    text = drawn(panel_of(view_of(a_training(ranks=(RankStatus(0, step=4),), conditions=(RESIZING,)))))

    for part in ("demo", "ready", "2/2 workers", "round 0", "step 4", "one more worker is starting"):
        assert part in text


def test_the_panel_shows_markup_of_others_as_text() -> None:
    odd = Condition("Resizing", "True", "X", "[red]boo[/]")

    assert "[red]boo[/]" in drawn(panel_of(view_of(a_training(conditions=(odd,)))))


def test_output_of_ranks_stands_above_the_panel_as_it_was() -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        show = Panel(live)
        show.change(a_training())
        show.output("loss [0.5] is a list\n")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()

    assert text.count("loss [0.5] is a list") == 1
    assert "2/2 workers" in text


def test_the_panel_shows_how_long_it_has_been_going_on() -> None:
    view = view_of(a_training())
    assert "  0s" in drawn(panel_of(view)) and "  2m5s" in drawn(panel_of(view, elapsed_s=125.0))


def test_time_goes_on_in_the_panel_without_news(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    from rich.live import Live

    clock = [100.0]
    monkeypatch.setattr("muster.cli.follow.time.monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        Panel(live).change(a_training())
        clock[0] += 61.0
        live.refresh()
    assert isinstance(console.file, io.StringIO)
    assert "  1m1s" in console.file.getvalue()


@pytest.mark.parametrize(
    ("bench", "told"),
    [
        (
            BENCH,
            "demo  all-reduce between 4 ranks on 2 workers over gloo: 0.3 ms for 1024 bytes, 1200 MB/s for 16777216",
        ),
        (Bench(error="no torch\x1b[2J"), "demo  all-reduce was not measured: no torch"),
    ],
)
def test_what_was_measured_between_workers_is_told_once(
    capsys: pytest.CaptureFixture[str], bench: Bench, told: str
) -> None:
    later = [a_training(bench=bench), a_training(bench=bench, round=1), a_training(bench=bench, phase="succeeded")]
    control = StandIn(history=later)
    follow(cast(Any, StandInHandle(control, a_training())), lambda: iter(control.history), Lines())
    lines = [line for line in capsys.readouterr().err.splitlines() if "all-reduce" in line]
    assert len(lines) == 1 and lines[0].startswith(told) and "\x1b" not in lines[0]


def test_a_heal_and_a_hang_that_nobody_would_notice_are_told_and_other_entries_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready = a_training()
    told = "demo-0 lost; demo-2 has rank 0 after 54 ms\x1b[2J"
    unwatched = Event("HangUnwatched", "a hang would not be noticed", training="demo")
    news = [Event("RoundReleased", "round 1"), Event("Healed", told, training="demo"), unwatched]
    control = StandIn(history=[*news, a_training(phase="succeeded")])
    follow(cast(Any, StandInHandle(control, ready)), lambda: iter(control.history), Lines())
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("demo  healed: demo-0 lost; demo-2 has rank 0 after 54 ms")
    assert lines[2] == "demo  a hang would not be noticed"
    assert "\x1b" not in lines[1] and len(lines) == 4
