"""The worker's agent: keeps its place in the world and runs the ranks that the place gives it.

It obeys the coordinator (`release`, `recall`, `outcome`, …), reports what its ranks do, and presents all of it
again whenever the connection had to be made anew. It decides one thing alone: when nothing has been heard from the
coordinator for a lease, its ranks must end, because the world may be going on without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from muster.node import logs, progress, rank_env, saves, stacks, system
from muster.node.rank_env import Place
from muster.node.rank_processes import Program, RankProcesses, Start
from muster.node.standalone import CannotStart, Standalone
from muster.types.world import Outcome, OutcomeState, RankExit
from muster.world import wire
from muster.world.connection import Refused
from muster.world.membership import Identity, Membership
from muster.world.wire import Frame

EXIT_FAILED = 1
EXIT_COORDINATOR_LOST = 75
DUMP_WAIT_S = 3.0
FREEZE_S = 0.5  # all agents hold their ranks still by then, so that every stack shows the hang and not its end
RECONNECT_LOOK_S = 0.05
ORPHAN_LOOK_S = 0.005
HEALTH_TIMEOUT_S = 60.0
TAILS_TOLD = 8
HEALTH_RETRY_S = 30.0
ECHO_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class NodeConfig:
    program: Program
    identity: Identity
    log_dir: Path
    health_check: str | None = None
    join_timeout_s: float = 60.0
    no_requeue_code: int = 93
    echo: bool = True
    standalone: Standalone | None = None
    hold: tuple[int, ...] = ()  # descriptors for everything below us to keep open


@dataclass
class _InRound:
    """The round that this worker has, or last had, a place in."""

    place: Place
    log_starts: dict[int, int] = field(default_factory=dict)
    progress_files: dict[int, str] = field(default_factory=dict)
    exits: dict[int, tuple[RankExit, float]] = field(default_factory=dict)
    told_steps: dict[int, int] = field(default_factory=dict)
    oom_kills: int = 0  # of our memory group, as far as they are accounted for
    running: bool = True  # its ranks, or what they left behind, may still be there
    stopping: bool = False
    hung: bool = False
    up: bool = False
    finished: bool = False
    why_stopped: str = ""

    @property
    def number(self) -> int:
        return self.place.number


class Agent:
    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._round: _InRound | None = None
        self._outcome: Outcome | None = None
        self._welcomed_once = False
        self._trace = _open_trace(os.environ.get("MUSTER_TRACE"))
        self._scratch = tempfile.mkdtemp(prefix="muster-")
        self._saves = saves.Saves(
            os.getcwd(), (config.program.target, *config.program.args), (str(config.log_dir), self._scratch)
        )
        self._echo = logs.Echo(enabled=config.echo)
        self._farewell = asyncio.Event()
        self._link_lost = asyncio.Event()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False
        self._reason = ""
        self._last_words = ""
        self._seq = 0
        self._save_lock = asyncio.Lock()
        self._stop_lock = asyncio.Lock()
        self._hire_lock = asyncio.Lock()
        self._member = Membership(
            config.identity,
            on_frame=self._on_frame,
            on_silent=self._silence,
            present=self._present,
            steps=self._fresh_steps,
            on_beat=lambda: self._crew.beat(),
            on_down=self._on_down,
        )
        self._crew = self._hire()

    def _say(self, text: str) -> None:
        self._echo.say(f"muster-node[{self._config.identity.name}] {text}")

    # Life

    async def run(self) -> int:
        """Take part in the run until it ends or this worker leaves; returns the exit code."""
        loop = asyncio.get_running_loop()
        system.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._spawn_task(self._take_part())
        try:
            return await self._code
        finally:
            await self._depart()

    async def _take_part(self) -> None:
        if (standalone := self._config.standalone) is not None:
            try:
                await asyncio.to_thread(standalone.await_ready)
            except CannotStart:
                self._end(EXIT_FAILED, "")  # it has said why itself
                return
            shown = wire.show_address(*standalone.addresses[0])
            run_id = self._config.identity.run_id
            self._say(f"coordinator on {shown}; others join with --coordinator {shown} --run-id {run_id}")
        if self._config.health_check and (unfit := await self._check_health()):
            self._member.unfit = unfit
            self._say(f"parked: {unfit}")
            self._spawn_task(self._recheck(after_s=HEALTH_RETRY_S))
        self._spawn_task(self._stay_member())
        self._spawn_task(self._watch_files())
        self._spawn_task(self._lose_patience())

    async def _depart(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._crew.lost:
            await self._end_orphans()
        else:
            await self._crew.release()
        if self._config.standalone is not None and self._outcome is not None:
            self._config.standalone.leave()
        self._echo.finish(self._last_words, ECHO_TIMEOUT_S)
        self._member.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._code.done():
            self._code.set_exception(error)

    def _end(self, code: int, why: str) -> None:
        if not self._code.done():
            self._last_words = f"muster-node[{self._config.identity.name}] {why}" if why else ""
            self._code.set_result(code)

    # The connection

    def _present(self) -> dict[str, Any]:
        """Everything that a coordinator which knows nothing of us needs to know."""
        shown: dict[str, Any] = {}
        if self._outcome is not None:
            shown["outcome"] = self._outcome.to_wire()
        if (current := self._round) is not None:
            shown |= {
                "round": current.number,
                "running": current.running,
                "up": current.up,
                "finished": current.finished,
                "exits": self._exits_to_wire(current),
                "why": current.why_stopped,
            }
        return shown

    async def _stay_member(self) -> None:
        try:
            await self._member.run()
        except* Refused as refused:
            first = refused.exceptions[0]
            self._end(EXIT_FAILED, f"refused by the coordinator: {first}")

    async def _lose_patience(self) -> None:
        """Before the first welcome wait `join_timeout_s`, after it `orphan_s`."""
        loop = asyncio.get_running_loop()
        started, warned = loop.time(), False
        link = self._member.link
        while True:
            if link.up:
                self._link_lost.clear()
                await self._link_lost.wait()
            await asyncio.sleep(RECONNECT_LOOK_S)
            if link.up:
                continue
            if self._config.standalone is not None:
                self._config.standalone.revive(self._say)
            joined = self._member.joined
            limit = self._member.settings.orphan_s if joined else self._config.join_timeout_s
            waited = link.down_s if joined else loop.time() - started
            if not warned and not joined and waited > 1.0:
                warned = True
                self._say(f"cannot reach the coordinator ({link.why_down}); trying for {limit:g} s")
            if waited > limit:
                what = "the coordinator was lost" if joined else "no coordinator"
                self._end(EXIT_COORDINATOR_LOST, f"{what} ({link.why_down}); gave up after {limit:g} s")
                return

    def _on_down(self, why: str) -> None:
        self._link_lost.set()
        if not self._code.done() and self._outcome is None and not self._leaving:
            ranks = "ranks go on, " if self._round is not None and self._round.running else ""
            self._say(f"lost the coordinator ({why}); {ranks}reconnecting")

    def _on_frame(self, frame: Frame) -> None:
        if self._trace >= 0:
            line = f"{time.monotonic():.6f} {self._config.identity.name} {frame['type']} {frame.get('round')}\n"
            os.write(self._trace, line.encode())
        match frame["type"]:
            case "welcome":
                self._welcomed()
            case "renewed":
                self._renewed(frame)
            case "hold":
                self._say(f"waiting: {frame.get('reason')}")
            case "release":
                self._released(frame["record"])
            case "record":
                self._crew.hurry(False)
            case "recall":
                self._spawn_task(self._recalled(frame))
            case "check":
                self._spawn_task(self._recheck())
            case "dismiss":
                self._end(0, f"leaving: {frame.get('reason')}")
            case "outcome":
                self._spawn_task(self._ended(frame))
            case "farewell":
                self._farewell.set()

    def _welcomed(self) -> None:
        if not self._welcomed_once:
            self._welcomed_once = True
            self._say(f"joined run {self._config.identity.run_id}")
        self._crew.beat(lease_s=self._member.settings.lease_s, addresses=self._config.identity.addresses())

    def _renewed(self, frame: Frame) -> None:
        reason = frame.get("reason")
        if reason and reason != self._reason:
            self._reason = reason
            if self._round is None or not self._round.running:
                self._say(f"waiting: {reason}")

    async def _silence(self) -> None:
        """Nothing from the coordinator for a lease: on the other side of a partition our ranks may be given away."""
        if (current := self._round) is not None and current.running and self._outcome is None:
            self._say("the coordinator is silent: ending ranks, the world may go on without them")
            await self._stop(current, 0.0, why="the coordinator was silent for a lease")

    # Rounds

    def _released(self, record: dict[str, Any]) -> None:
        """A round is out, or is told again after a reconnect."""
        place = rank_env.find(record, self._config.identity.member_id)
        if place is None or self._outcome is not None or self._leaving:
            return
        current = self._round
        if current is not None and place.number <= current.number:
            if place.number == current.number and not current.running:
                self._confirm_stop(current)
            return
        if self._crew.lost or (current is not None and current.running):
            self._spawn_task(self._catch_up(current, place))
        else:
            self._start(place)

    async def _catch_up(self, current: _InRound | None, place: Place) -> None:
        """Not ready for a round yet: an older one still runs here, or what runs ranks has to be started again."""
        if current is not None:
            await self._stop(current, 0.0, why="a newer round was released")
        await self._rehire()
        if self._round is current:
            self._start(place)

    def _start(self, place: Place) -> None:
        if self._member.lease_over:
            self._member.link.drop("a release was read too late")  # the world may have gone on; the next hello tells
            return
        try:
            self._start_ranks(place)
        except OSError as error:
            self._member.send("leaving", why=f"it cannot start ranks: {error}")
            self._end(EXIT_FAILED, f"cannot start ranks: {error}")

    def _start_ranks(self, place: Place) -> None:
        self._round = current = _InRound(place, oom_kills=system.oom_kills())
        ranks = place.ranks
        span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        # Before their output: where only the copy of it is kept, this line tells the round.
        self._say(f"round {place.number}: {span} of {place.round.rank_count}; {place.round.why}")
        folder = self._config.log_dir / f"round-{place.number}"
        folder.mkdir(parents=True, exist_ok=True)
        self._crew.beat(round=place.number)
        starts = []
        for local_rank, rank in enumerate(ranks):
            out, err = (str(folder / f"rank-{rank}.{end}") for end in ("out", "err"))
            current.log_starts[rank] = logs.size(err)
            current.progress_files[rank] = os.path.join(self._scratch, f"progress-{place.number}-{rank}")
            progress.create(current.progress_files[rank])
            for path in (out, err):
                logs.make(path)
                self._echo.follow(path, f"[{rank}] ", error=path == err)
            env = rank_env.environment(place, local_rank, self._config.identity.run_id)
            env |= {progress.FILE_VARIABLE: current.progress_files[rank]}
            starts.append(Start(_key(place.number, rank), env, out, err))
        if place.hosts_store:
            self._serve_store(current)
        self._crew.spawn(starts)
        self._member.send("started", round=place.number)

    def _serve_store(self, current: _InRound) -> None:
        """Start the round's store: at once where torch is loaded, else when the first rank asks for it."""
        listener = self._member.take_listener()
        if listener is None:
            return
        host, port = current.place.round.store_addr, current.place.round.store_port
        loop, crew = asyncio.get_running_loop(), self._crew

        def serve() -> None:
            if listener.fileno() < 0:
                return
            loop.remove_reader(listener)
            if self._round is current and not current.stopping and not crew.lost:
                crew.serve_store(listener, host, port)
            else:
                listener.close()

        if crew.torch_loaded:
            serve()
            return
        loop.add_reader(listener, serve)
        crew.warm_ready.add_done_callback(lambda _: serve() if crew.torch_loaded else None)

    async def _recalled(self, frame: Frame) -> None:
        number = int(frame["round"])
        current = self._round
        if current is None or current.number < number:
            self._member.send("stopped", round=number, store_port=self._member.store_port())
        elif current.number == number:
            if current.running:
                self._say(f"round {number} is called back: {frame.get('reason')}")
                grace_s, dump = float(frame.get("grace_s") or 0.0), bool(frame.get("dump"))
                grace_s = grace_s if dump else await self._let_save(current, grace_s)
                await self._stop(current, grace_s, dump=dump)
            self._confirm_stop(current)

    async def _let_save(self, current: _InRound, grace_s: float, *, at_most_s: float = math.inf) -> float:
        """Those that are in the middle of a save end it before they are asked to go; returns what is left of the grace.

        Without a grace they must go at once, because the world may have gone on without them.
        """
        settings, began, told = self._member.settings, time.monotonic(), set[str]()
        patience = saves.Patience(min(settings.save_grace_s, at_most_s), min(settings.saving_timeout_s, at_most_s))

        def tell(busy: saves.Busy) -> None:
            if busy.told not in told:
                told.add(busy.told)
                what = f"{busy.told}, and is given up to {patience.of(busy):g} s for it"
                self._say(f"round {current.number}: {what}")
                self._member.send("saving", round=current.number, what=what)

        async with self._save_lock:
            if grace_s > 0 and current.running and not current.stopping:
                await self._saves.over(lambda: self._ranks(current), patience, tell)
        return max(grace_s - (time.monotonic() - began), min(grace_s, settings.restart_grace_s))

    def _ranks(self, current: _InRound) -> list[saves.Rank]:
        """Those that run, as long as nobody ends them."""
        if not current.running or current.stopping:
            return []
        pids = {rank: self._crew.pid_of(_key(current.number, rank)) for rank in current.place.ranks}
        return [saves.Rank(rank, current.progress_files[rank], pid) for rank, pid in pids.items() if pid is not None]

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(saves.SAMPLE_S)
            if self._round is not None:
                self._saves.sample(self._ranks(self._round), asyncio.get_running_loop().time())

    def _confirm_stop(self, current: _InRound) -> None:
        self._member.send(
            "stopped",
            round=current.number,
            store_port=self._member.store_port(),
            why=current.why_stopped,
            exits=self._exits_to_wire(current),
        )

    async def _stop(self, current: _InRound, grace_s: float, *, why: str = "", dump: bool = False) -> None:
        """End the ranks of a round and all that they left; returns when nothing is left."""
        if self._stop_lock.locked():
            self._crew.hasten(grace_s)
        async with self._stop_lock:
            if not current.running:
                return
            current.stopping, current.hung = True, dump
            if dump:
                await self._crew.stop(signal.SIGABRT, DUMP_WAIT_S, freeze_s=FREEZE_S)
            else:
                await self._crew.stop(signal.SIGTERM, grace_s)
            current.why_stopped = why
            current.running = False
        await self._rehire()

    def _rank_exited(self, key: str, status: int) -> None:
        number, rank = (int(part) for part in key.split("."))
        current = self._round
        if current is None or current.number != number:
            return
        end = self._describe(current, rank, status)
        current.exits[rank] = (end, time.monotonic())
        folder = self._config.log_dir / f"round-{number}"
        for ending in ("out", "err"):
            self._echo.let_go(str(folder / f"rank-{rank}.{ending}"))
        if end.failed and not end.hung:
            self._say(f"rank {rank}: {end.reason}")
        if not current.stopping:  # else they travel with the confirmation
            self._seq += 1
            self._member.send("exits", round=number, seq=self._seq, exits=self._exits_to_wire(current, [rank]))
        every = [exit for exit, _ in current.exits.values()]
        if not current.stopping and len(every) == current.place.seat.procs and all(e.exit_code == 0 for e in every):
            current.finished = True
            self._member.send("finished", round=number)

    def _describe(self, current: _InRound, rank: int, status: int) -> RankExit:
        known: dict[str, Any] = {
            "worker": self._config.identity.name,
            "round": current.number,
            "finished_at": time.time(),
        }
        if current.stopping and not current.hung:
            return RankExit.from_status(rank, status, stopped=status != 0, **known)
        mark = progress.read(current.progress_files[rank])
        if mark is not None:
            known |= {"step": mark[0], "idle_s": round(time.monotonic() - mark[1], 3)}
        if status == -signal.SIGKILL and system.oom_kills() > current.oom_kills:
            current.oom_kills += 1
            known["oom"] = True
        if status != 0:
            err = str(self._config.log_dir / f"round-{current.number}" / f"rank-{rank}.err")
            known["stderr_tail"] = logs.tail(err, current.log_starts[rank])
            if current.hung:
                stand = stacks.read(logs.whole(err, current.log_starts[rank]))
                known |= {"hung": True, "stack": stand.frame, "waiting": stand.waiting}
        return RankExit.from_status(rank, status, **known)

    def _exits_to_wire(self, current: _InRound, ranks: list[int] | None = None) -> list[dict[str, Any]]:
        """As they travel: with their age, and with the last lines of only the first few, for a frame has a limit."""
        now = time.monotonic()
        shown: list[dict[str, Any]] = []
        for rank, (end, at) in sorted(current.exits.items(), key=lambda item: item[1][1]):
            if ranks is None or rank in ranks:
                tail = end.stderr_tail if len(shown) < TAILS_TOLD else ()
                shown.append({**end.to_wire(), "stderr_tail": tail, "age_s": round(now - at, 4)})
        return shown

    def _fresh_steps(self) -> list[list[float]]:
        current = self._round
        if current is None or not current.running:
            return []
        now, fresh = time.monotonic(), []
        for rank, path in current.progress_files.items():
            mark = progress.read(path)
            if mark is not None and current.told_steps.get(rank) != mark[0]:
                current.told_steps[rank] = mark[0]
                fresh.append([rank, mark[0], round(now - mark[1], 4)])
        return fresh

    # Ending

    async def _ended(self, frame: Frame) -> None:
        """The outcome is known: stop what runs, say so, and stay until everyone knows."""
        if self._outcome is not None:
            self._acknowledge()
            return
        self._outcome = outcome = Outcome.from_wire(frame["outcome"])
        if self._round is not None:
            grace_s = await self._let_save(self._round, float(frame.get("grace_s") or 0.0))
            await self._stop(self._round, grace_s)
        self._acknowledge()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(frame.get("farewell_s") or self._member.settings.farewell_s)):
                await self._farewell.wait()
        self._end(self._exit_code(outcome), f"{outcome.state}: {outcome.message}")

    def _acknowledge(self) -> None:
        exits = self._exits_to_wire(self._round) if self._round else []
        number = self._round.number if self._round else None
        self._member.send("ack", round=number, exits=exits)

    def _exit_code(self, outcome: Outcome) -> int:
        if outcome.state is OutcomeState.SUCCEEDED:
            return 0
        return self._config.no_requeue_code if outcome.reason == "no_progress" else EXIT_FAILED

    def _signalled(self, number: signal.Signals) -> None:
        code = 128 + number
        if self._leaving:
            self._crew.signal(signal.SIGKILL, self._crew.alive)
            return
        self._leaving = True
        self._say(f"{number.name}: leaving")
        self._spawn_task(self._leave(code, number.name))

    async def _leave(self, code: int, name: str) -> None:
        self._member.send("leaving", why=f"it was told to leave ({name})")
        if self._round is not None and self._round.running:
            grace_s = self._member.settings.stop_grace_s
            grace_s = await self._let_save(self._round, grace_s, at_most_s=grace_s)
            await self._stop(self._round, grace_s, why=f"it left ({name})")
            self._confirm_stop(self._round)
        await asyncio.sleep(0)
        self._end(code, "")

    # Below us

    def _hire(self) -> RankProcesses:
        config = {
            "addresses": self._config.identity.addresses(),
            "run_id": self._config.identity.run_id,
            "member_id": self._config.identity.member_id,
            "name": self._config.identity.name,
            "lease_s": self._member.settings.lease_s,
        }
        return RankProcesses(
            self._config.program,
            config,
            hold=self._config.hold,
            on_up=self._ranks_up,
            on_exit=self._rank_exited,
            on_lost=self._crew_lost,
            on_note=self._say,
        )

    def _ranks_up(self) -> None:
        """Their parent has imported what it was to import, and forked them all."""
        if self._round is not None:
            self._round.up = True
            self._member.send("up", round=self._round.number)

    def _crew_lost(self, why: str) -> None:
        self._say(f"{why}: its ranks are gone, starting another")
        if self._round is None or not self._round.running:
            self._spawn_task(self._rehire())

    async def _rehire(self) -> None:
        """Another crew, if ours is lost."""
        async with self._hire_lock:
            if self._crew.lost:
                await self._end_orphans()
                self._crew = self._hire()

    async def _end_orphans(self) -> None:
        """Whatever a lost crew left comes to us as an orphan."""
        self._crew.dismiss()
        keep = [pid for pid in [self._config.standalone and self._config.standalone.pid] if pid]
        while not system.kill_children(keep):
            system.reap()
            await asyncio.sleep(ORPHAN_LOOK_S)

    # Health

    async def _check_health(self) -> str | None:
        """None if well, else what is wrong."""
        assert self._config.health_check is not None
        command = ["/bin/sh", "-c", self._config.health_check]
        guarded = [sys.executable, "-m", "muster.node.contained", str(os.getpid()), *command]
        check = await asyncio.create_subprocess_exec(
            *guarded, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                output, _ = await check.communicate()
        except TimeoutError:
            return f"health check took longer than {HEALTH_TIMEOUT_S:g} s"
        finally:
            if check.returncode is None:
                check.terminate()
                await check.wait()  # until it has ended what it started
        if check.returncode == 0:
            return None
        last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        return f"health check failed with {check.returncode}: {last[0]}"

    async def _recheck(self, after_s: float = 0.0) -> None:
        """Asked before a promotion; a failed check is repeated until it passes."""
        while True:
            await asyncio.sleep(after_s)
            unfit = await self._check_health()
            self._member.unfit = unfit or ""
            if unfit is None:
                self._member.send("fit")
                return
            self._say(f"parked: {unfit}")
            self._member.send("unfit", why=unfit)
            after_s = HEALTH_RETRY_S


def _open_trace(path: str | None) -> int:
    """`MUSTER_TRACE=FILE`: one line per frame received, with its monotonic time; agents may share the file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1


def _key(number: int, rank: int) -> str:
    return f"{number}.{rank}"


async def _take_part(config: NodeConfig) -> int:
    return await Agent(config).run()


def main(config: NodeConfig) -> NoReturn:
    """Run the agent and end the process. A copy of rank output that nobody reads must not keep it from ending."""
    code = asyncio.run(_take_part(config))
    os._exit(code)
