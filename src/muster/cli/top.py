"""`muster top`: how is everything, now and as it changes?

Trainings are pushed by the control plane. Pools have no watch, so they are asked for; that question also tells whether
the control plane is still there. It is only looked at: one that was stopped is not started again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from muster.cli import board, choosing, safe_text, session
from muster.cli.board import Board
from muster.cli.choosing import Choice, Order
from muster.cli.follow import view_of
from muster.cli.output import is_live
from muster.cli.terminal import Screen, coloured
from muster.errors import MusterError, Unavailable
from muster.sdk import flows
from muster.types.event import HEALED, Event
from muster.types.training import Uid

if TYPE_CHECKING:
    from muster.sdk.client import Client
    from muster.types.training import Training

app = typer.Typer(rich_markup_mode=None)

POOLS_EVERY_S = 1.0
HEAL_SHOWN_S = 60.0  # a training that has healed stands there with that, unless there is more to say of it
_REDRAW_S = 1.0  # ages move without anyone telling
_LEAST_S = 0.1  # between two frames
_LOG_LINES = 200


@app.command(epilog="Example: muster top")
def top(
    follow: bool = typer.Option(False, "-f", "--follow", help="Where it is piped: go on, with a line for each change."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Show trainings and shared GPUs, and follow every change. Arrows or j and k choose a training: enter shows its
    log, + and - scale it, x cancels it, e hides what has ended; q leaves. Where it is piped, show them once."""
    client = session.open_client(url, token, namespace)
    if not follow and not sys.stdout.isatty():
        found = tuple(session.listed(client, None, None, every=False))
        print("\n".join(board.plain(Board(found, session.pools(client)), datetime.now(UTC))))
        return
    client = session.open_client(client.url, token, namespace)
    logging.getLogger("muster.sdk").addHandler(logging.NullHandler())  # what it warns of stands on the board
    if is_live():
        with contextlib.suppress(KeyboardInterrupt):
            _live(client)
    else:
        _lines(client)


# What is known -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heal:
    text: str
    at: float  # on our clock

    @property
    def is_news(self) -> bool:
        return time.monotonic() < self.at + HEAL_SHOWN_S


class Feed:
    """What is there, then kept up to date by two threads; whoever shows it is told of each change."""

    def __init__(self, client: Client, tell: Callable[[], None]) -> None:
        self._client = client
        self._tell = tell
        found, self._version = client.run(flows.listed(client.namespace, None, None))
        self._trainings = {training.uid: training for training in found}
        self._heals: dict[Uid, Heal] = {}
        self._pools = session.pools(client)
        self._trouble = ""
        self._warning = client.warning
        self._error: MusterError | None = None
        for work in (self._watch, self._ask):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def board(self) -> Board:
        """As it is now; what ended the feed is raised here."""
        if self._error is not None:
            raise self._error
        return Board(
            tuple(self._trainings.copy().values()),
            self._pools,
            self._client.namespace,
            self._client.url,
            self._trouble,
            {uid: heal.text for uid, heal in self._heals.copy().items() if heal.is_news},
            self._warning,
        )

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except MusterError as error:
            self._error = error
            self._tell()

    def _watch(self) -> None:
        for news in session.watched(self._client, self._version):
            if isinstance(news, Event):
                self._hear(news)
                continue
            deleted, training = news
            if deleted:
                self._trainings.pop(training.uid, None)
                self._heals.pop(training.uid, None)
            else:
                self._trainings[training.uid] = training
            self._tell()

    def _hear(self, event: Event) -> None:
        if event.reason == HEALED and event.uid in self._trainings:
            self._heals[Uid(event.uid)] = Heal(event.message, time.monotonic())
            self._tell()

    def _ask(self) -> None:
        while True:
            before = (self._pools, self._trouble, self._warning)
            try:
                self._pools, self._trouble = session.pools(self._client), ""
            except Unavailable as error:
                self._trouble = error.message
            self._warning = self._client.warning
            if (self._pools, self._trouble, self._warning) != before:
                self._tell()
            time.sleep(POOLS_EVERY_S)


# Two ways to show it -----------------------------------------------------------------------------


def _live(client: Client) -> None:
    on = Screen()
    feed = Feed(client, on.wake)  # what is wrong from the start is told on the terminal as it was
    hand = Hand(client, on.wake)
    choice = Choice()
    with on:
        while not choice.quits:
            now = replace(
                feed.board(), chosen=choice.uid, without_ended=choice.without_ended, said=hand.trouble or choice.said
            )
            log = hand.log_of(next((one for one in now.trainings if choice.log and one.uid == choice.uid), None))
            lines = board.lines(now, datetime.now(UTC), *on.size) if log is None else board.logged(*log, *on.size)
            on.draw(["".join(coloured(safe_text.line(span.text), span.style) for span in line) for line in lines])
            drawn = time.monotonic()
            for key in choosing.keys(on.key(_REDRAW_S)):
                hand.trouble = ""
                choice, order = choosing.press(choice, key, board.in_order(now))
                if order is not None:
                    hand.carry_out(order)
            time.sleep(max(0.0, drawn + _LEAST_S - time.monotonic()))


class Hand:
    """Does what was ordered and reads logs, each on a thread: a control plane that is away does not stop the keys."""

    def __init__(self, client: Client, tell: Callable[[], None]) -> None:
        self._client = client
        self._tell = tell
        self._log: LogReader | None = None
        self.trouble = ""

    def carry_out(self, order: Order) -> None:
        threading.Thread(target=self._carry_out, args=(order,), daemon=True).start()

    def _carry_out(self, order: Order) -> None:
        handle = session.handle_on(self._client, order.training)
        try:
            if order.verb == "cancel":
                handle.cancel()
            else:
                handle.scale(order.target)
        except MusterError as error:
            self.trouble = error.message
            self._tell()

    def log_of(self, training: Training | None) -> tuple[str, Sequence[str]] | None:
        """The name and the last lines of that one; of none, nothing is read any more."""
        if self._log is not None and (training is None or training.uid != self._log.uid):
            self._log.stop.set()
            self._log = None
        if training is None:
            return None
        if self._log is None:
            self._log = LogReader(self._client, training, self._tell)
        return training.metadata.name, self._log.lines


class LogReader:
    """The last lines of a training's log, read again and again until it is stopped."""

    def __init__(self, client: Client, training: Training, tell: Callable[[], None]) -> None:
        self.uid = training.uid
        self.lines: Sequence[str] = ()
        self.stop = threading.Event()
        self._handle = session.handle_on(client, training)
        self._tell = tell
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while not self.stop.is_set():
            try:
                self.lines = list(self._handle.logs(tail=_LOG_LINES))[-_LOG_LINES:]
            except MusterError as error:
                self.lines = [*self.lines, error.message][-_LOG_LINES:]
            self._tell()
            self.stop.wait(_REDRAW_S)


def _lines(client: Client) -> None:
    """One line for each change, as `muster run` writes them."""
    news = threading.Event()
    feed = Feed(client, news.set)
    news.set()
    shown: dict[str, _Row] = {}
    while True:
        news.wait()
        news.clear()
        rows = _rows(feed.board())
        for key, (mark, text) in rows.items():
            if key not in shown or shown[key][0] != mark:
                print(safe_text.line(text), flush=True)
        for key in shown.keys() - rows.keys():
            if ending := _ENDINGS.get(key.partition(" ")[0]):
                print(safe_text.line(ending.format(shown[key][1].partition("  ")[0])), flush=True)
        shown = rows
        time.sleep(_LEAST_S)


_Row = tuple[object, str]  # what makes it worth printing, and what is printed
_ENDINGS = {
    "training": "{}  deleted",
    "trouble": "the control plane is back",
    "warning": "the control plane can write again",
}


def _rows(now: Board) -> dict[str, _Row]:
    views = {f"training {one.uid}": view_of(one) for one in now.trainings}
    rows: dict[str, _Row] = {key: (view.key, str(view)) for key, view in views.items()}
    heals = {one.uid: (one.metadata.name, now.heals[one.uid]) for one in now.trainings if one.uid in now.heals}
    rows |= {f"heal {uid}": (text, f"{name}  healed: {text}") for uid, (name, text) in heals.items()}
    rows |= {f"pool {key}": (text, text) for pool in now.pools for key, text in board.changes(pool)}
    rows |= {"warning": (now.warning, f"warning: {now.warning}")} if now.warning else {}
    return rows | ({"trouble": (now.trouble, f"out of date: {now.trouble}")} if now.trouble else {})
