"""The worker's agent: carries out with processes, files and signals what `core.member` orders.

It decides nothing about the world. What it decides alone has to do with this machine: what a rank's end looks like,
when a save is over, when what runs ranks has to be started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from muster import files, trimming
from muster.background import Tasks
from muster.core.member.held_round import InRound
from muster.core.member.orders import (
    AwaitSaves,
    Beat,
    CheckOwnHealth,
    Exit,
    Hasten,
    Hurry,
    KillRanks,
    Notify,
    Order,
    RestartProcesses,
    Say,
    StartRanks,
    StopRanks,
)
from muster.core.member.standing import Standing
from muster.core.member.state import EXIT_FAILED, MemberState
from muster.core.succession import electorate
from muster.node import fencing, guard, health, logs, saves, system, telling
from muster.node.findings import Findings
from muster.node.heirs import Experience
from muster.node.keeping import Keeping, Means
from muster.node.plane_restart import PlaneRestart
from muster.node.program import Program
from muster.node.rank_files import RankFiles, key_of, rank_of
from muster.node.rank_processes import RankProcesses, offer_store
from muster.node.standalone import Standalone
from muster.node.timekeeping import Timekeeper
from muster.run_token import KeptToken
from muster.types.frames import CopiesFrame, ElectorsFrame, Frame, RenewFrame, WelcomeFrame
from muster.types.state import Holding
from muster.types.world import Place, Settings
from muster.world.connection import Address
from muster.world.lifeline import Lifelines
from muster.world.membership import MemberIdentity, Membership

DUMP_WAIT_S = 3.0
FREEZE_S = 0.5  # all agents hold their ranks still by then, so that every stack shows the hang and not its end
DOUBT_S = 5.0
ORPHAN_LOOK_S = 0.005
ECHO_TIMEOUT_S = 5.0
TIMES_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class NodeConfig:
    program: Program
    identity: MemberIdentity
    log_dir: Path
    health_check: str | None = None
    join_timeout_s: float = 60.0
    no_requeue_code: int = 93
    echo: bool = True
    standalone: Standalone | None = None
    log_bytes: int = trimming.USUAL  # what is kept of a rank's output, and of its errors; 0: everything
    keeps_token: bool = False  # it was not given by a person: others of this user may find it here
    state: Means = field(default_factory=Means)
    hold: tuple[int, ...] = ()  # descriptors for everything below us to keep open
    home: Path | None = None  # of the control plane that directs this worker, if it is on this machine


class Agent:
    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        mine = config.identity
        self._trace = _Trace(os.environ.get("MUSTER_TRACE"), mine.name)
        self._scratch = files.temporary()
        self._lease_file = fencing.LeaseFile()
        words = (config.program.target, *config.program.args)
        self._saved_where = saves.Where(os.getcwd(), words, (str(config.log_dir),), self._scratch)
        self._saves = saves.Saves(self._saved_where)
        self._echo = logs.Echo(enabled=config.echo)
        self._times = Timekeeper(enabled=not config.echo)  # a copy on the terminal is in order of time already
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks = Tasks(self._failed)
        self._last_words = ""
        self._files: RankFiles | None = None
        self._restarting = False
        self._state = MemberState(
            mine.member_id,
            mine.run_id,
            Settings.parse(mine.settings),
            asyncio.get_running_loop().time(),
            join_timeout_s=config.join_timeout_s,
            no_requeue_code=config.no_requeue_code,
        )
        self._held = self._state.held
        self._lifelines = Lifelines(mine.run_id, mine.member_id, mine.name, mine.token)
        self._kept_token: KeptToken | None = None
        self._plane = None
        if config.home is not None:
            self._plane = PlaneRestart(config.home, lambda: self._state.at.connected, self._say)
        self._member = Membership(
            mine,
            self._state,
            self._carry_out,
            news=self._news,
            on_frame=self._hear,
            on_post=self._keep_token,
            on_down=self._plane.notice_loss if self._plane is not None else lambda: None,
        )
        self._keeping = Keeping(
            mine.run_id,
            mine.member_id,
            mine.token,
            lambda: self._member.addr,
            self._scratch,
            self._holds,
            config.state,
        )
        self._telling = telling.Telling(self._ranks, self._noticed, self._tasks)
        self._findings = Findings(
            config.program,
            self._member.connection.send,
            self._say,
            lambda modules: self._processes.learned(modules),
            self._tasks,
        )
        self._experience = Experience()
        self._processes = self._start_processes()

    def _holds(self, holding: Holding) -> None:
        self._member.handle(self._state.holds(holding, self._member.now))

    def _say(self, text: str) -> None:
        self._echo.say(f"muster-node[{self._config.identity.name}] {text}")

    # Life

    async def run(self) -> int:
        """Take part in the run until it ends or this worker leaves; returns the exit code."""
        loop = asyncio.get_running_loop()
        system.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._tasks.start(self._take_part())
        try:
            return await self._code
        finally:
            await self._depart()

    async def _take_part(self) -> None:
        if (standalone := self._config.standalone) is not None:
            if not await standalone.introduce(self._config.identity.run_id, self._say):
                self._end(EXIT_FAILED, "")
                return
            self._tasks.start(standalone.keep_alive(lambda: _abandoned_s(self._state.at), self._say))
        if self._config.health_check and (unfit := await health.check(self._config.health_check)):
            self._member.handle(self._state.checked(unfit, self._member.now))
        self._tasks.start(self._member.run())
        self._tasks.start(self._watch_files())
        if self._plane is not None:
            self._tasks.start(self._plane.run())
        self._findings.start()
        if self._config.log_bytes:
            self._tasks.start(logs.keep_small(self._config.log_dir, self._config.log_bytes, self._at_work, self._say))

    async def _depart(self) -> None:
        self._tasks.cancel()
        await self._tasks.finish()
        if self._processes.lost:
            await self._end_orphans()
        else:
            await self._processes.release()
        if self._state.at.outcome is not None:
            await self._member.see_off()
        if self._config.standalone is not None and self._state.at.outcome is not None:
            self._config.standalone.leave()
        self._times.finish(TIMES_TIMEOUT_S)
        self._echo.finish(self._last_words, ECHO_TIMEOUT_S)
        self._member.close()
        if self._kept_token is not None:
            self._kept_token.close(remove=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _keep_token(self, post: Address) -> None:
        """Who looks for the run where we can be asked is to find its token, too."""
        if (token := self._config.identity.token) is not None and self._config.keeps_token:
            with contextlib.suppress(OSError):
                self._kept_token = KeptToken(files.home(), *post, token)
                self._kept_token.listens()

    def _failed(self, error: BaseException) -> None:
        if not self._code.done():
            self._code.set_exception(error)

    def _end(self, code: int, why: str) -> None:
        if not self._code.done():
            self._last_words = f"muster-node[{self._config.identity.name}] {why}" if why else ""
            self._code.set_result(code)

    def _signalled(self, number: signal.Signals) -> None:
        self._member.handle(self._state.leave(number.name, 128 + number, self._member.now))

    def _hear(self, frame: Frame) -> None:
        self._findings.hear(frame)
        if isinstance(frame, WelcomeFrame) and self._files is not None:
            self._files.tell_again()
        if isinstance(frame, WelcomeFrame | ElectorsFrame):
            standalone = self._config.standalone.addresses if self._config.standalone is not None else []
            welcomed_at = self._member.connection.place if isinstance(frame, WelcomeFrame) else None
            self._lifelines.follow(frame.electorate, standalone, welcomed_at)
        elif isinstance(frame, CopiesFrame):
            self._keeping.order(frame)
        self._trace.note(frame)

    # Orders

    def _carry_out(self, order: Order) -> None:
        match order:
            case Say(text=text):
                self._say(text)
            case Beat():
                self._lease_file.publish(order.fence, order.until - order.lease_s)
                self._processes.tell_guard(guard.word(order, self._member.addresses()))
            case StartRanks(place=place):
                self._start(place)
            case StopRanks():
                self._tasks.start(self._stop(order))
            case Hasten(grace_s=grace_s):
                self._processes.hasten(grace_s)
            case KillRanks():
                self._processes.signal(signal.SIGKILL, self._processes.alive)
            case Notify():
                self._telling.notify(order)
            case AwaitSaves():
                self._tasks.start(self._await_saves(order))
            case Hurry(now=now):
                self._processes.hurry(now)
            case RestartProcesses():
                self._tasks.start(self._restart_processes())
            case CheckOwnHealth(after_s=after_s):
                self._tasks.start(self._check_health(after_s))
            case Exit(code=code, why=why):
                self._end(code, why)

    def _start(self, place: Place) -> None:
        mine = self._config.identity
        try:
            self._keeping.begin(place.number, place.round.resume, place.durable_step)
            settings = self._state.at.settings
            where = self._config.log_dir, self._scratch, self._echo, self._times, self._keeping.path
            lease, limit_s = self._lease_file.path, settings.store_timeout_s
            self._files = RankFiles(place, mine.run_id, *where, settings.bench_s, lease, limit_s)
            self._findings.begin(place, self._files)
            if place.hosts_store and (listener := self._member.take_listener()) is not None:
                at = place.round.store_addr, place.round.store_port
                offer_store(self._processes, listener, at, lambda: self._runs(place.number) is not None)
            self._processes.spawn(self._files.starts())
        except OSError as error:
            self._member.handle(self._state.cannot_start(str(error), self._member.now))

    def _noticed(self, number: int, calls: int, *, seen: bool = False, done: bool = False) -> None:
        self._member.handle(self._held.noticed(number, calls, self._member.now, seen=seen, done=done))

    def _ranks_signalled(self) -> None:
        telling.over(self._files.marks.values() if self._files is not None else ())

    async def _stop(self, order: StopRanks) -> None:
        if order.dump:
            await self._processes.stop(signal.SIGABRT, DUMP_WAIT_S, freeze_s=FREEZE_S)
        else:
            await self._keeping.finish_copies()
            await self._processes.stop(signal.SIGTERM, order.grace_s)
        await self._keeping.settle()
        self._member.handle(self._held.cleared(order.round, self._member.now))

    async def _await_saves(self, order: AwaitSaves) -> None:
        def tell(what: str) -> None:
            self._member.handle(self._held.saving(order.round, what, self._member.now))

        patience = saves.Patience(order.writing_s, order.saving_s)
        await self._saves.over(lambda: self._ranks(order.round), patience, tell)
        self._member.handle(self._held.saves_over(order.round, self._member.now))

    async def _check_health(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        unfit = await health.check(self._config.health_check) if self._config.health_check else None
        self._member.handle(self._state.checked(unfit, self._member.now))

    # Ranks

    def _runs(self, number: int) -> InRound | None:
        """That round, as long as its ranks run and nobody ends them."""
        current = self._held.current
        return current if current is not None and current.number == number and not current.stopping else None

    def _ranks(self, number: int) -> list[saves.WatchedRank]:
        if (current := self._runs(number)) is None or self._files is None:
            return []
        pids = {rank: self._processes.pid_of(key_of(number, rank)) for rank in current.place.ranks}
        return [saves.WatchedRank(rank, self._files.marks[rank], pid) for rank, pid in pids.items() if pid is not None]

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(saves.SAMPLE_S)
            if (current := self._held.current) is not None:
                self._saves.sample(self._ranks(current.number), self._member.now)

    def _at_work(self) -> tuple[int, Sequence[int]] | None:
        current = self._held.current
        return (current.number, current.place.ranks) if current is not None and not current.stopping else None

    def _news(self) -> RenewFrame:
        """What the coordinator hears with every renewal."""
        doing = self._processes.doing
        if self._files is None or not self._held.runs or not (steps := self._files.fresh_steps()):
            return RenewFrame(doing=doing)
        first_step, first_step_age = self._files.first_step() or (None, None)
        return RenewFrame(steps=steps, first_step=first_step, first_step_age=first_step_age, doing=doing)

    def _rank_exited(self, key: str, status: int) -> None:
        self._findings.tell()
        number, rank = rank_of(key)
        if status == fencing.EXIT_LEASE_OVER:  # the rank did not fail: it exits because the lease is over
            self._member.handle(self._state.tick(self._member.now))
        current = self._held.current
        if current is None or current.number != number or self._files is None:
            return
        end = self._files.describe(current, rank, status, self._config.identity.name)
        self._files.let_go(rank)
        if end.failed and end.stderr_tail:
            end = replace(end, path=self._saves.named(end.stderr_tail))
        self._member.handle(self._held.exited(end, self._member.now))

    # Below us

    def _start_processes(self) -> RankProcesses:
        mine = self._config.identity
        lease_s, addresses = self._state.at.settings.lease_s, tuple(mine.addresses())
        posting = guard.Posting(mine.run_id, mine.member_id, mine.name, lease_s, addresses, self._saved_where)
        return RankProcesses(
            self._config.program,
            posting,
            hold=(*self._config.hold, self._lifelines.descriptor),
            experience=self._experience,
            on_up=self._ranks_up,
            on_signalled=self._ranks_signalled,
            on_exit=self._rank_exited,
            on_lost=lambda why: self._member.handle(self._held.processes_lost(why, self._member.now)),
            on_note=self._say,
        )

    def _ranks_up(self) -> None:
        """Their parent has imported what it was to import, and forked them all."""
        if (current := self._held.current) is not None:
            if self._processes.doomed:
                self._tasks.start(self._up_later(current.number))
            else:
                self._member.handle(self._held.up(current.number, self._member.now))
            if self._files is not None:
                self._findings.follow(current, self._files, self._runs, self._ranks)

    async def _up_later(self, number: int) -> None:
        """Ranks that will hardly get past their imports do not run before they have shown that they do."""
        await asyncio.sleep(DOUBT_S)
        if self._runs(number) is not None:
            self._member.handle(self._held.up(number, self._member.now))

    async def _restart_processes(self) -> None:
        if self._restarting:
            return  # whoever does it says so when it is done
        self._restarting = True
        if self._processes.lost:
            await self._end_orphans()
            self._processes = self._start_processes()
        self._restarting = False
        self._member.handle(self._held.restarted(self._member.now))

    async def _end_orphans(self) -> None:
        """Whatever lost processes left comes to us as an orphan."""
        self._processes.dismiss()
        await _end_children([pid for pid in [self._config.standalone and self._config.standalone.pid] if pid])


def _abandoned_s(at: Standing) -> float:
    """How long a coordinator may be away until nobody else is going to replace it."""
    if at.connected:
        return math.inf
    return at.settings.lease_s if electorate.can_succeed(at.electorate) else 0.0


async def _end_children(spare: Sequence[int]) -> None:
    while not system.kill_children(spare):
        system.reap()
        await asyncio.sleep(ORPHAN_LOOK_S)


class _Trace:
    """`MUSTER_TRACE=FILE`: one line per frame received, with its monotonic time; agents may share the file."""

    def __init__(self, path: str | None, name: str) -> None:
        self._name = name
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1

    def note(self, frame: Frame) -> None:
        if self._file >= 0:
            os.write(self._file, f"{time.monotonic():.6f} {self._name} {frame.type} {frame.round}\n".encode())


async def _take_part(config: NodeConfig) -> int:
    return await Agent(config).run()


def main(config: NodeConfig) -> NoReturn:
    """Run the agent and end the process. A copy of rank output that nobody reads must not keep it from ending."""
    code = asyncio.run(_take_part(config))
    os._exit(code)
