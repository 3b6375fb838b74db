"""How long does the page take to show a large training, and what happens to it? In a real Chromium.

python -m bench.page [--json] [--events N] [--lines N] [--repeat N]

A training with 64 ranks, 100,000 entries in its journal and a million lines of log, written through the product's own
store and as its own files; the product's server, routes and log reader answer. No worker runs: ranks are told to be
at another step twice a second, and write a line each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from playwright.sync_api import Page, sync_playwright

from bench import report
from bench.report import Figure, below, p99, progress, spread
from muster.backends.local import logs
from muster.clock import SystemClock
from muster.ports import LogQuery, Write
from muster.server.app import build
from muster.server.auth import Tokens
from muster.server.protocol import Protocol
from muster.server.services import Services
from muster.server.serving import ApiServer
from muster.store.sqlite import SqliteStore
from muster.types.event import WORKER_EXITED, WORKER_STARTED, Event
from muster.types.training import RankStatus, SparesStatus, Status, Training, Uid, WorldStatus
from tests.server.house import Pretender
from tests.training_builders import a_training

RANKS = 64
FIRST_PAINT_S, UPDATE_MS = 1.0, 200.0
BEAT_S = 0.5
AT_ONCE = 1000
T = TypeVar("T")

# Shown: every rank, the newest of the journal and of the log.
_SHOWN = """ranks => new Promise((done) => {
    const look = () => {
        const whole = document.querySelectorAll("button.rank").length >= ranks && document.querySelector(".timeline li")
            && document.querySelector(".log pre")?.textContent.includes("step");
        if (whole) requestAnimationFrame(() => done(performance.now())); else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
})"""
_HEARD = """words => new Promise((done) => {
    const newest = () => [...document.querySelectorAll(".timeline li")].slice(0, 5);
    const look = () => newest().some((one) => one.textContent.includes(words))
        ? requestAnimationFrame(() => done(Date.now())) : requestAnimationFrame(look);
    look();
})"""


class LogFiles(Pretender):
    """A backend without workers, whose log files are real."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    async def logs(self, uid: Uid, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(logs.read(self.root, query, ended)) as chunks:
            async for chunk in chunks:
                yield chunk

    def file(self, rank: int, round_number: int) -> Path:
        folder = self.root / f"large-{rank}" / f"round-{round_number}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank-{rank}.out"

    def fill(self, lines: int, round_number: int) -> None:
        for rank in range(RANKS):
            with self.file(rank, round_number).open("w") as file:
                file.writelines(f"step {step} loss {1 / (step + 1):.6f} lr 0.0003\n" for step in range(lines // RANKS))


class Stage:
    """A server with one large training, on a loop of its own thread."""

    def __init__(self, folder: Path, events: int, lines: int) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.store = self.run(self._open(folder / "muster.db"))
        self.files = LogFiles(folder / "logs")
        self.training = self.run(self._told(events))
        self.files.fill(lines, self.training.status.round or 0)
        tokens = Tokens(folder)
        self.token = tokens.create("root", "admin")
        clock = SystemClock()
        services = Services(self.store, {"local": self.files}, tokens, clock, "0.0-bench", clock.now())
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = ApiServer(uvicorn.Config(build(services), http=Protocol, ws="none", log_level="critical"))
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve([self._socket]), self._loop)
        self._beating = asyncio.run_coroutine_threadsafe(self._beat(), self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    async def _open(self, path: Path) -> SqliteStore:
        return SqliteStore.open(path, synchronous="NORMAL")

    async def _told(self, count: int) -> Training:
        """The training with a journal: rounds that end because a worker is lost, and begin with another."""
        training = a_training("large", status=_status(0, 0), world=(1, RANKS, RANKS), spares=2)
        events = list(_events(count))
        await self.store.write(Write(put=training, expect=0))
        for at in range(0, count, AT_ONCE):
            await self.store.write(Write(put=training, events=events[at : at + AT_ONCE]))
        last = max((event.round or 0 for event in events), default=0)
        return replace(training, status=_status(last, 0))

    async def _beat(self) -> None:
        step = 0
        while True:
            step += 1
            await self.tell(step)
            for rank in range(RANKS):
                with self.files.file(rank, self.training.status.round or 0).open("a") as file:
                    file.write(f"step {step} goes on\n")
            await asyncio.sleep(BEAT_S)

    async def tell(self, step: int, *events: Event) -> None:
        status = _status(self.training.status.round or 0, step)
        await self.store.write(Write(put=replace(self.training, status=status), events=events))

    def close(self) -> None:
        self._beating.cancel()
        self._server.should_exit = True
        self.run(self.store.close())
        with contextlib.suppress(TimeoutError):
            self._serving.result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._socket.close()


def _status(round_number: int, step: int) -> Status:
    began = datetime.now(UTC) - timedelta(hours=3)
    ranks = tuple(
        RankStatus(rank, f"large-{rank}", "here", "running", round_number, started_at=began, step=step)
        for rank in range(RANKS)
    )
    world = WorldStatus(RANKS, RANKS, 1, RANKS)
    spares = SparesStatus(2, 2)
    return Status(1, "ready", world_size=world, spares=spares, round=round_number, ranks=ranks, started_at=began)


def _events(count: int) -> Iterator[Event]:
    """Six to a round, one each second, up to now."""
    begin = datetime.now(UTC) - timedelta(seconds=count)
    for number in range(count):
        at, (turn, part) = begin + timedelta(seconds=number), divmod(number, 6)
        lost, fresh = f"large-{turn % RANKS}", f"large-{(turn + 1) % RANKS}"
        yield (
            Event("RoundReleased", f"round {turn}: {RANKS} workers; {fresh} takes rank 1", round=turn, at=at),
            Event("WorkerLost", f"{lost}: its connection closed", "Warning", round=turn, at=at),
            Event("RoundRecalled", f"lost {lost}: its connection closed", round=turn, at=at),
            Event(WORKER_EXITED, f"{lost}: exit 1", data={"worker": lost, "gpus": 0, "exitCode": 1}, at=at),
            Event(WORKER_STARTED, fresh, data={"worker": fresh, "gpus": 0}, at=at),
            Event("WorkerJoined", f"{fresh} from here", round=turn, at=at),
        )[part]


def shown(page: Page) -> tuple[float, float]:
    """Seconds from the address to the first paint, and until all parts are there."""
    page.reload(wait_until="commit")
    whole = page.evaluate(_SHOWN, RANKS)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null")
    return paint / 1000, whole / 1000


def heard(stage: Stage, page: Page, number: int) -> float:
    """Milliseconds from the moment an event is written to the frame that shows it."""
    words = f"an event of the measurement, number {number}."
    page.evaluate(f"words => {{ window.heard = ({_HEARD})(words) }}", words)
    began = time.time()
    stage.run(stage.tell(number, Event("DegradedMesh", words, "Warning", at=datetime.now(UTC))))
    return float(page.evaluate("window.heard")) - began * 1000


def measured(given: argparse.Namespace) -> Iterator[Figure]:
    chromium = shutil.which("chromium")
    assert chromium is not None, "there is no chromium here (Debian: apt-get install chromium)"
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-page-"))
    progress(f"{given.events} events, {given.lines} lines")
    stage = Stage(folder, given.events, given.lines)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            page.goto(f"{stage.url}/#/trainings/default/large")
            page.get_by_label("Token").fill(stage.token)
            page.get_by_role("button", name="Sign in").click()
            page.locator(".timeline li").first.wait_for(timeout=60_000)
            paints = [shown(page) for _ in range(given.repeat)]
            updates = [heard(stage, page, number) for number in range(4 * given.repeat)]
            found = _search(page)
            browser.close()
    finally:
        stage.close()
        shutil.rmtree(folder, ignore_errors=True)
    size = f"{RANKS} ranks, {given.events:,} events, {given.lines:,} lines"
    first, whole = [paint for paint, _ in paints], [all_of_it for _, all_of_it in paints]
    yield below(f"page of {size}: first paint", statistics.median(first), FIRST_PAINT_S, "s", **spread(first))
    yield below("ranks, timeline and log are there", statistics.median(whole), FIRST_PAINT_S, "s", **spread(whole))
    yield below(
        "an event is written → it is on the page",
        statistics.median(updates),
        UPDATE_MS,
        "ms",
        **spread(updates),
        p99=p99(updates),
    )
    yield below("a word is typed → found in all of the log", found, 10.0, "s")


def _search(page: Page) -> float:
    began = time.monotonic()
    page.get_by_label("Find in all of the log").fill("step 4711 ")
    page.get_by_text("lines with “step 4711 ”").wait_for(timeout=60_000)
    return time.monotonic() - began


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=100_000, metavar="N")
    parser.add_argument("--lines", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="loads of the page")


if __name__ == "__main__":
    raise SystemExit(report.run("the page", {"page": measured}, options))
