"""What does a person see while a training runs?

On a terminal one panel that stays at the bottom, with the ranks' output above it. Elsewhere one line on stderr for
each change, and the ranks' output on stdout, so that a pipe gets what the training printed and nothing else.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

import typer

from muster.cli import exits, safe_text
from muster.cli.output import is_live
from muster.cli.safe_text import shown as on_one_line
from muster.cli.terminal import silent_keys
from muster.cli.trainings import reason_of, target_of
from muster.core.training.explain import explain, show_age
from muster.errors import MusterError
from muster.types import plural
from muster.types.event import HEALED, STATE_LOST, UNWATCHED, Event

if TYPE_CHECKING:
    from muster.sdk.training import DistributedTraining
    from muster.types.bench import Bench
    from muster.types.training import Training

_WIDEST = 100  # a panel, in columns
_DRAWN_PER_S = 1  # though nothing has changed but the time
_ENDED = ("succeeded", "failed", "cancelled")  # phases in which no worker is expected
_DRAIN_S = 10.0  # how long output may still come after the end
_COLOURS = {"pending": "yellow", "ready": "green", "succeeded": "bright_green", "failed": "red", "cancelled": "magenta"}


@dataclass(frozen=True)
class View:
    """A training in one glance."""

    name: str
    phase: str
    ready: int
    target: int
    round: int | None
    step: int | None
    reason: str

    @property
    def key(self) -> tuple[object, ...]:
        """What makes a line worth printing. Steps alone do not: they would drown the rest."""
        return (self.phase, self.ready, self.target, self.round, self.reason)

    def __str__(self) -> str:
        parts = [self.name, self.phase]
        parts += [] if self.phase in _ENDED else [plural.workers(self.target, f"{self.ready}/")]
        parts += [] if self.round is None else [f"round {self.round}"]
        parts += [] if self.step is None else [f"step {self.step}"]
        return "  ".join(parts + ([self.reason] if self.reason else []))


def view_of(training: Training) -> View:
    status = training.status
    steps = [rank.step for rank in status.ranks if rank.step is not None]
    return View(
        name=on_one_line(training.metadata.name),
        phase=on_one_line(status.phase),
        ready=status.world_size.ready,
        target=target_of(training),
        round=status.round,
        step=min(steps, default=None),  # the world is where its slowest rank is
        reason=on_one_line(reason_of(training)),
    )


def ending(training: Training) -> str:
    """How it ended: a clause for each rank that failed, and last the sentence that says why."""
    status = training.status
    text = explain(training, (), datetime.now(UTC)).summary
    clauses = [str(one) for one in status.rank_exits or () if one.failed and str(one) not in text]
    return "\n".join([*(safe_text.line(f"  {clause}") for clause in clauses), safe_text.line(text)])


# Two ways to show it -----------------------------------------------------------------------------


class Show(Protocol):
    def change(self, training: Training) -> None: ...
    def output(self, line: str) -> None: ...
    def note(self, text: str) -> None: ...


class Lines:
    """One line per change on stderr, ranks' output on stdout."""

    def __init__(self) -> None:
        self._shown: tuple[object, ...] | None = None
        self._turn = threading.Lock()  # output comes from a thread of its own; lines must not mix

    def change(self, training: Training) -> None:
        view = view_of(training)
        if view.key != self._shown:
            self._shown = view.key
            self.note(str(view))

    def output(self, line: str) -> None:
        with self._turn:
            out = safe_text.raw(sys.stdout)
            out.write(line if line.endswith("\n") else f"{line}\n")
            out.flush()

    def note(self, text: str) -> None:
        with self._turn:
            print(safe_text.line(text), file=sys.stderr, flush=True)


class Panel:
    """One live panel, redrawn in place."""

    def __init__(self, live: Any) -> None:
        self._live = live
        self._began = time.monotonic()  # not when the control plane says: its clock may be another one

    def change(self, training: Training) -> None:
        self._live.update(_Moving(view_of(training), self._began, self._live.console), refresh=True)

    def output(self, line: str) -> None:
        from rich.text import Text

        self._live.console.print(Text.from_ansi(line.rstrip("\n")), soft_wrap=True)

    def note(self, text: str) -> None:
        self._live.console.print(safe_text.line(text), markup=False, highlight=False, style="dim")


class _Moving:
    """What the panel holds at the moment at which it is drawn: time goes on without anyone telling."""

    def __init__(self, view: View, began: float, console: Any) -> None:
        self._view, self._began, self._console = view, began, console

    def __rich__(self) -> Any:
        return panel_of(self._view, self._console.width, time.monotonic() - self._began)


def panel_of(view: View, width: int = _WIDEST, elapsed_s: float = 0.0) -> Any:
    """What the panel holds. A reason that does not fit beside the rest has lines of its own."""
    from rich.console import Group
    from rich.panel import Panel as Box
    from rich.text import Text

    colour = _COLOURS.get(view.phase, "white")
    dash, width = "–", min(width, _WIDEST)
    numbers = [
        *([] if view.phase in _ENDED else [plural.workers(view.target, f"{view.ready}/")]),
        f"round {dash if view.round is None else view.round}",
        f"step {dash if view.step is None else view.step}",
        show_age(timedelta(seconds=elapsed_s)),
    ]
    row = Text("   ").join([Text(view.phase, style=f"bold {colour}"), *map(Text, numbers)])
    reason = Text(view.reason, style="dim")
    beside = row.cell_len + 3 + reason.cell_len <= width - 4
    held: Any = Text("   ").join([row, reason]) if beside else Group(row, reason)
    return Box(held, title=Text(view.name, style="bold"), title_align="left", border_style=colour, width=width)


@contextlib.contextmanager
def _live() -> Iterator[Panel]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=safe_text.raw(sys.stdout), highlight=False)
    with silent_keys(), Live(console=console, refresh_per_second=_DRAWN_PER_S, transient=True) as live:
        yield Panel(live)


def shown() -> AbstractContextManager[Show]:
    """The way that suits where the output goes."""
    if is_live():
        return _live()
    return contextlib.nullcontext(Lines())


# Following ---------------------------------------------------------------------------------------


def follow(handle: DistributedTraining, changes: Callable[[], Iterator[Training | Event]], show: Show) -> Training:
    """Show a training until it ends; how it is then. The end is told only after the last output."""
    show.change(handle.training)
    told = tell_of_bench(None, handle.training, show.note)
    pump = threading.Thread(target=_pump, args=(handle, show), daemon=True)
    pump.start()
    last = handle.training
    if not last.is_terminal:
        for news in changes():
            if isinstance(news, Event):
                tell_of(news, show.note)
                continue
            last = news
            told = tell_of_bench(told, last, show.note)
            if last.is_terminal:
                break
            show.change(last)
    pump.join(_DRAIN_S)
    show.change(last)
    return last


def _pump(handle: DistributedTraining, show: Show) -> None:
    try:
        for line in handle.logs(follow=True):
            show.output(line)
    except MusterError as error:
        show.note(f"its output cannot be followed: {error.message}")
    except (BrokenPipeError, ValueError):
        return  # nobody reads any more; the training goes on


def tell_of(event: Event, tell: Callable[[str], None]) -> None:
    """What no view of a training shows: a loss that was made good before anyone looked, a watch that sees nothing."""
    if event.reason == HEALED:
        tell(healed(event))
    elif event.reason in (UNWATCHED, STATE_LOST):
        tell(f"{on_one_line(event.training)}  {on_one_line(event.message)}")


def tell_of_bench(told: Bench | None, training: Training, tell: Callable[[str], None]) -> Bench | None:
    """What was measured between its workers, once: returns what has been told by now."""
    found = training.status.bench
    if found is not None and found != told:
        tell(f"{on_one_line(training.metadata.name)}  {on_one_line(str(found))}")
    return found if found is not None else told


def healed(event: Event) -> str:
    return f"{on_one_line(event.training)}  healed: {on_one_line(event.message)}"


@contextlib.contextmanager
def leaving(handle: DistributedTraining, namespace: str, order: str = "") -> Iterator[None]:
    """At Ctrl-C, print what goes on and how to come back, and exit with 130. `order` says what was asked for before."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(f"{order}{come_back(handle.name, namespace)}", file=sys.stderr)
        raise typer.Exit(exits.INTERRUPT) from None


def come_back(name: str, namespace: str, *, removing: bool = False) -> str:
    """What to type after having left. Who was to remove it at its end has left, too."""
    name, where = safe_text.line(name), "" if namespace == "default" else f" -n {namespace}"
    return (
        f"detached; {name} goes on. To come back:\n"
        f"  muster logs -f {name}{where}\n  muster wait {name}{where}\n  muster cancel {name}{where}"
    ) + (f"\n--rm ends here; when it has ended:\n  muster delete {name}{where}" if removing else "")


def exit_code(training: Training) -> int:
    return exits.OF_PHASE.get(training.status.phase, exits.ERROR)
