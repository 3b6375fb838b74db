"""Publisher of a mesh's keys for programs that muster does not start.

It asks an agent on each node, or a command, whether the mesh is ready. It writes `PREFIX/mesh-ready/NODE` when it is,
or `PREFIX/mesh-degraded/NODE` after the timeout. `core.world.gates` decides; degraded may become ready, ready stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from muster.background import Tasks
from muster.backoff import Backoff
from muster.core.world import gates
from muster.errors import InvalidRequest, Unavailable
from muster.mesh import lines
from muster.mesh.lines import BrokenTalk
from muster.mesh.probe import Path
from muster.ports import Keys
from muster.types.world import Gate, GateState, Member, MemberId, Reach

RETRY = Backoff(0.1, 2.0)
AGAIN_S = 30.0  # between two checks that the keys still exist
COMMAND_S = 30.0  # for one run of the command
MOST_OUTPUT = 4096  # bytes of the command's output that are read
MOST_VALUE = 1024  # characters of a key's value
READY, DEGRADED = "mesh-ready", "mesh-degraded"


@dataclass(frozen=True)
class Finding:
    """The gate to publish, and the reason. At `look_at` it may change without any news."""

    gate: Gate
    reason: str
    look_at: float | None = None


class Observer(Protocol):
    """A source of verdicts about the mesh. It calls `changed` whenever its verdict may have changed."""

    def start(self, changed: Callable[[], None]) -> None: ...

    def judge(self, before: Gate | None, timeout_s: float, now: float) -> Finding: ...

    async def stop(self) -> None: ...


# Probes ------------------------------------------------------------------------------------------


class Agents:
    """Observer that keeps a connection to an agent on each node."""

    def __init__(self, nodes: Mapping[str, Path], secret: str) -> None:
        self._nodes = dict(nodes)
        self._secret = secret.encode()
        self._people = [Member(MemberId(name), name) for name in nodes]
        self._reach = {MemberId(name): self._shut(name, "its agent has not answered yet") for name in nodes}
        self._tasks = Tasks()
        self._changed: Callable[[], None] = lambda: None

    def start(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        for name in self._nodes:
            self._tasks.start(self._follow(name))

    def judge(self, before: Gate | None, timeout_s: float, now: float) -> Finding:
        verdict = gates.judge(self._people, self._reach, before, timeout_s, now)
        ready = f"all {_nodes(len(self._people))} reach each other"
        reason = ready if verdict.gate.state is GateState.READY else verdict.reason
        return Finding(verdict.gate, reason, verdict.look_at)

    async def stop(self) -> None:
        self._tasks.cancel()
        await self._tasks.finish()

    async def _follow(self, name: str) -> None:
        failures = 0
        while True:
            has_report = False
            try:
                async for rows in self._reports(name):
                    has_report, failures = True, 0
                    self._take(name, rows)
            except (BrokenTalk, OSError, TimeoutError) as why:
                text = getattr(why, "strerror", None) or str(why) or "no answer"
                self._set(name, self._shut(name, f"agent of {name}: {text}"))
            failures += 1
            await asyncio.sleep(RETRY.after(1 if has_report else failures))

    async def _reports(self, name: str) -> Any:
        host, port = self._nodes[name]
        async with asyncio.timeout(lines.LINE_S):
            reader, writer = await asyncio.open_connection(host, port, limit=lines.MOST_LINE)
        try:
            talk = await lines.begin(reader, writer, self._secret)
            peers = {other: list(path) for other, path in self._nodes.items() if other != name}
            await talk.send({"name": name, "peers": peers})
            while True:
                report = await talk.receive(lines.SILENCE_S)
                if "refused" in report:
                    raise BrokenTalk(str(report["refused"])[:200])
                yield report.get("rows")
        finally:
            writer.close()

    def _take(self, name: str, rows: object) -> None:
        reach = self._reach[MemberId(name)]
        opened, shut = dict(reach.open), dict(reach.shut)
        for row in rows if isinstance(rows, list) else ():
            match row:
                case [str(peer), (int() | float()) as rtt, _] if peer in self._nodes:
                    opened[MemberId(peer)] = float(rtt)
                    shut.pop(MemberId(peer), None)
                case [str(peer), None, str(why)] if peer in self._nodes:
                    opened.pop(MemberId(peer), None)
                    shut[MemberId(peer)] = why[:200]
                case _:
                    raise BrokenTalk("it reports something other than probes")
        self._set(name, Reach(opened, shut))

    def _set(self, name: str, reach: Reach) -> None:
        self._reach[MemberId(name)] = reach
        self._changed()

    def _shut(self, name: str, why: str) -> Reach:
        return Reach({}, {MemberId(other): why for other in self._nodes if other != name})


# A command's verdict -----------------------------------------------------------------------------


class CommandVerdict:
    """Observer that runs a command every `every_s` until it exits with 0, which means that the mesh is ready."""

    def __init__(self, command: Sequence[str], nodes: Sequence[str], every_s: float) -> None:
        self._command = list(command)
        self._nodes = list(nodes)
        self._every_s = every_s
        self._tasks = Tasks()
        self._ready = False
        self._why = "the command has not ended yet"

    def start(self, changed: Callable[[], None]) -> None:
        self._tasks.start(self._ask(changed))

    def judge(self, before: Gate | None, timeout_s: float, now: float) -> Finding:
        return judge_command(self._ready, self._why, len(self._nodes), before, timeout_s, now)

    async def stop(self) -> None:
        self._tasks.cancel()
        await self._tasks.finish()

    async def _ask(self, changed: Callable[[], None]) -> None:
        while not self._ready:
            code, last_line = await run_bounded(self._command, {"MUSTER_MESH_NODES": " ".join(self._nodes)})
            self._ready = code == 0
            self._why = last_line or f"exit code {code}"
            changed()
            if not self._ready:
                await asyncio.sleep(self._every_s)


def judge_command(is_ready: bool, why: str, size: int, before: Gate | None, timeout_s: float, now: float) -> Finding:
    """Return the gate by a command's verdict, under the same rules as `gates.judge`."""
    since = now if before is None else before.since
    if is_ready:
        return Finding(Gate(GateState.READY, size, since), f"the command calls the mesh of {_nodes(size)} ready")
    until = since + timeout_s
    if now < until:
        gate = Gate(GateState.CONVERGING, size, since)
        return Finding(gate, f"the mesh converges: {why}; it opens anyway after {timeout_s:g} s", until)
    return Finding(Gate(GateState.DEGRADED, size, since), f"the mesh is degraded after {timeout_s:g} s: {why}")


async def run_bounded(command: Sequence[str], more: Mapping[str, str]) -> tuple[int, str]:
    """Run a command for at most `COMMAND_S`. Return its exit code and the last line that it printed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **more},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as why:
        raise InvalidRequest(
            f"--verdict {command[0]!r} cannot be run: {why.strerror or why}", hint="give the path of a program"
        ) from why
    assert process.stdout is not None
    tail = b""
    try:
        async with asyncio.timeout(COMMAND_S):
            while data := await process.stdout.read(MOST_OUTPUT):
                tail = (tail + data)[-MOST_OUTPUT:]
            code = await process.wait()
    except TimeoutError:
        code, tail = -1, f"the command did not end in {COMMAND_S:g} s".encode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also processes that the command has left behind
        await process.wait()
    words = tail.decode(errors="replace").strip().splitlines()
    return code, words[-1][:200] if words else ""


# Keys --------------------------------------------------------------------------------------------


def expected_keys(prefix: str, nodes: Sequence[str], finding: Finding) -> dict[str, str]:
    """Return the keys that must exist; under this prefix no other key of a verdict may exist."""
    if not finding.gate.is_open:
        return {}
    kind = READY if finding.gate.state is GateState.READY else DEGRADED
    return {f"{prefix}/{kind}/{node}": finding.reason[:MOST_VALUE] for node in nodes}


async def update_keys(keys: Keys, prefix: str, expected: Mapping[str, str]) -> None:
    """Write the keys that are missing, then remove the others. In this order a node always has a verdict."""
    there = {**await keys.list(f"{prefix}/{READY}"), **await keys.list(f"{prefix}/{DEGRADED}")}
    for path, value in expected.items():
        if there.get(path) != value:
            await keys.put(path, value)
    for path in there:
        if path not in expected:
            await keys.delete(path)


class MeshPublisher:
    """Publisher of an observer's findings. It calls `on_finding` for each finding with a new reason."""

    def __init__(
        self,
        keys: Keys,
        prefix: str,
        nodes: Sequence[str],
        observer: Observer,
        *,
        timeout_s: float,
        on_finding: Callable[[Finding], None],
        trouble: Callable[[str], None],
    ) -> None:
        self._keys = keys
        self._prefix = prefix
        self._nodes = list(nodes)
        self._observer = observer
        self._timeout_s = timeout_s
        self._on_finding = on_finding
        self._trouble = trouble
        self._news = asyncio.Event()
        self._unwritten = asyncio.Event()
        self._expected: dict[str, str] = {}
        self._written: Mapping[str, str] | None = None
        self._complete = asyncio.Event()

    async def run(self, *, stay: bool) -> Finding:
        """Publish until the mesh is ready and its keys are written, or forever with `stay`."""
        loop = asyncio.get_running_loop()
        writing = loop.create_task(self._write())
        self._unwritten.set()  # first remove the keys of an earlier publisher
        self._observer.start(self._news.set)
        try:
            finding = await self._judge(loop, writing)
            while stay or self._written != self._expected:
                self._complete.clear()
                completed = loop.create_task(self._complete.wait())
                await asyncio.wait({completed, writing}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
            return finding
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await self._observer.stop()

    async def _judge(self, loop: asyncio.AbstractEventLoop, writing: asyncio.Task[None]) -> Finding:
        """Publish each finding until the mesh is ready. Later failures concern the next start of the programs."""
        before: Finding | None = None
        while True:
            self._news.clear()
            gate = before.gate if before is not None else None
            finding = self._observer.judge(gate, self._timeout_s, loop.time())
            if before is None or finding.reason != before.reason:
                self._on_finding(finding)
            before = finding
            self._expect(expected_keys(self._prefix, self._nodes, finding))
            if finding.gate.state is GateState.READY:
                return finding
            news = loop.create_task(self._news.wait())
            until = None if finding.look_at is None else max(0.0, finding.look_at - loop.time())
            try:
                await asyncio.wait({news, writing}, timeout=until, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if writing.done():
                writing.result()

    def _expect(self, expected: dict[str, str]) -> None:
        if expected != self._expected:
            self._expected = expected
            self._unwritten.set()

    async def _write(self) -> None:
        failures = 0
        while True:
            self._unwritten.clear()
            expected = self._expected
            try:
                await update_keys(self._keys, self._prefix, expected)
            except Unavailable as why:
                failures += 1
                if failures == 1:
                    self._trouble(f"{why.message}; it is tried again until it answers" + _hint(why.hint))
                await asyncio.sleep(RETRY.after(failures))
                self._unwritten.set()
                continue
            if failures:
                self._trouble(f"{self._prefix}: the keys could be written again")
            failures = 0
            self._written = expected
            self._complete.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._unwritten.wait()


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _hint(hint: str) -> str:
    return f" ({hint})" if hint else ""
