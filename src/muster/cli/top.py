"""`muster top`: how is everything, now and as it changes?

Trainings are pushed by the control plane. Pools have no watch, so they are asked for; that question also tells whether
the control plane is still there. It is only looked at: one that was stopped is not started again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from muster.cli import board, safe_text, session
from muster.cli.board import Board
from muster.cli.follow import view_of
from muster.cli.output import is_live
from muster.cli.terminal import Screen, coloured
from muster.errors import MusterError, Unavailable
from muster.sdk import flows

if TYPE_CHECKING:
    from muster.sdk.client import Client

app = typer.Typer(rich_markup_mode=None)

POOLS_EVERY_S = 1.0
_REDRAW_S = 1.0  # ages move without anyone telling
_LEAST_S = 0.1  # between two frames
_LEAVE = {"q", "Q", "\x1b", "\x04"}


@app.command(epilog="Example: muster top")
def top(
    follow: bool = typer.Option(False, "-f", "--follow", help="Where it is piped: go on, with a line for each change."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Show trainings and shared GPUs, and follow every change; q leaves. Where it is piped, show them once."""
    client = session.open_client(url, token, namespace)
    if not follow and not sys.stdout.isatty():
        found = tuple(session.listed(client, None, None, every=False))
        print("\n".join(board.plain(Board(found, session.pools(client)), datetime.now(UTC))))
        return
    client = session.open_client(client.url, token, namespace)
    if is_live():
        with contextlib.suppress(KeyboardInterrupt):
            _live(client)
    else:
        _lines(client)


# What is known -----------------------------------------------------------------------------------


class Feed:
    """What is there, then kept up to date by two threads; whoever shows it is told of each change."""

    def __init__(self, client: Client, tell: Callable[[], None]) -> None:
        self._client = client
        self._tell = tell
        found, self._version = client.run(flows.listed(client.namespace, None, None))
        self._trainings = {training.uid: training for training in found}
        self._pools = session.pools(client)
        self._trouble = ""
        self._error: MusterError | None = None
        for work in (self._watch, self._ask):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def board(self) -> Board:
        """As it is now; what ended the feed is raised here."""
        if self._error is not None:
            raise self._error
        return Board(
            tuple(self._trainings.copy().values()), self._pools, self._client.namespace, self._client.url, self._trouble
        )

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except MusterError as error:
            self._error = error
            self._tell()

    def _watch(self) -> None:
        for deleted, training in session.watched(self._client, self._version):
            if deleted:
                self._trainings.pop(training.uid, None)
            else:
                self._trainings[training.uid] = training
            self._tell()

    def _ask(self) -> None:
        while True:
            before = (self._pools, self._trouble)
            try:
                self._pools, self._trouble = session.pools(self._client), ""
            except Unavailable as error:
                self._trouble = error.message
            if (self._pools, self._trouble) != before:
                self._tell()
            time.sleep(POOLS_EVERY_S)


# Two ways to show it -----------------------------------------------------------------------------


def _live(client: Client) -> None:
    on = Screen()
    feed = Feed(client, on.wake)  # what is wrong from the start is told on the terminal as it was
    with on:
        while True:
            lines = board.lines(feed.board(), datetime.now(UTC), *on.size)
            on.draw(["".join(coloured(safe_text.line(span.text), span.style) for span in line) for line in lines])
            drawn = time.monotonic()
            if on.key(_REDRAW_S) in _LEAVE:
                return
            time.sleep(max(0.0, drawn + _LEAST_S - time.monotonic()))


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
_ENDINGS = {"training": "{}  deleted", "trouble": "the control plane is back"}


def _rows(now: Board) -> dict[str, _Row]:
    views = {f"training {one.uid}": view_of(one) for one in now.trainings}
    rows: dict[str, _Row] = {key: (view.key, str(view)) for key, view in views.items()}
    rows |= {f"pool {key}": (text, text) for pool in now.pools for key, text in board.changes(pool)}
    return rows | ({"trouble": (now.trouble, f"out of date: {now.trouble}")} if now.trouble else {})
