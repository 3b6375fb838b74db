from __future__ import annotations

import io
from typing import Any

import pytest

from muster.cli.follow import Lines, Panel, panel_of, view_of
from muster.types.training import Condition, RankStatus, WorldStatus
from tests.cli.stand_in import a_training

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
