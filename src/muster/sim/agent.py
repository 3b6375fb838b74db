"""A simulated worker: does on virtual time what `node.agent` does with processes.

Where the real agent awaits, this one passes what is to be done next. What every agent owes the world, and what
therefore must hold there as it does here:

    a stop with a shorter grace cuts a longer one that is under way
    a release that is read when the lease is over starts nothing; the connection is made anew instead
    a release starts nothing either if the connection that brought it has ended before everything was ready
    what happens between a hello and its welcome is told after the welcome
    a beat tells the guard until when ranks may run, so that it ends them even if the agent is stopped while cut off
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random
from typing import Any

from muster.sim.clock import Process
from muster.sim.coordinator import SimulatedCoordinator
from muster.sim.link import Link
from muster.sim.machine import Guard, Machine, Rank
from muster.sim.network import Network
from muster.sim.places import Config, InRound, Then, parsed
from muster.types.world import MemberId, Outcome, OutcomeState, Round, Seat
from muster.world.wire import Frame

EXIT_FAILED, EXIT_LOST, EXIT_NO_PROGRESS = 1, 75, 93
DUMP_WAIT_S = 3.0
FORK_S = 0.005
HIRE_S = 0.02
HEALTH_S = 0.05
HEALTH_RETRY_S = 30.0
PROBE_S, PROBE_AGAIN_S = 0.01, 0.25
JOIN_TIMEOUT_S = 60.0
SIGTERM_CODE = 128 + signal.SIGTERM


class Agent:
    def __init__(
        self,
        config: Config,
        member_id: MemberId,
        machine: Machine,
        network: Network,
        coordinator: SimulatedCoordinator,
        rng: Random,
        *,
        on_end: Callable[[Agent], None],
    ) -> None:
        self.config = config
        self.member_id = member_id
        self.machine = machine
        self.process = Process(machine.clock)
        self.healthy = True
        self.record: dict[str, Any] | None = None
        self.round: InRound | None = None
        self.outcome: Outcome | None = None
        self.code: int | None = None
        self.refusal: str = ""
        self.ports = 0
        self._network = network
        self._coordinator = coordinator
        self._rng = rng
        self._on_end = on_end
        self._settings = parsed(tuple(config.settings.items()))
        self._joined = False
        self._farewell = False
        self.leaving = False
        self._listening = False
        self._unfit: str | None = None
        self._lease_from = self._born_at = machine.clock.now
        self._renew_sent: float | None = None
        self._hello_sent = 0.0
        self._presented = (0, False, False)
        self._crew_lost = False
        self._peers: list[Any] = []
        self._reached: list[Any] = []
        self._guard = self._hire()
        self.link = Link(
            self.process,
            network,
            coordinator,
            machine.name,
            rng,
            kind="agent",
            hello=self._hello,
            on_frame=self._on_frame,
            on_refused=self._refused,
            on_failed=self._lose_patience,
        )

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def now(self) -> float:
        return self.process.clock.now

    @property
    def alive(self) -> bool:
        return self.process.alive

    # Life

    def start(self) -> None:
        if self.config.checks_health and not self.healthy:
            self._unfit = "health check failed with 1: bad"
        self.link.connect()
        self._renew()
        self._watch_silence()

    def _hire(self) -> Guard:
        guard = Guard(
            self.member_id,
            self.machine,
            self._network,
            self._coordinator,
            self._rng,
            name=self.name,
            lease_s=self._settings.lease_s,
            on_swept=lambda: self.process.read(self._swept),
            on_end=lambda: self.process.read(self._guard_ended, guard),
        )
        return guard

    def _end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.link.close()
            self._guard.release()
            self.process.end()
            self._on_end(self)

    def kill(self) -> None:
        """SIGKILL: the kernel closes what it had open."""
        if self.alive:
            self.link.close()
            self.process.end()
            self._guard.agent_ended()
            self._on_end(self)

    def kill_guard(self) -> None:
        if self._guard.process.alive:
            self._guard.kill()

    def kill_both(self) -> None:
        self.kill()
        self._guard.kill()

    def reset(self, *, guard: bool, half: bool) -> None:
        """A connection breaks; with `half`, the coordinator does not see it."""
        (self._guard.link if guard else self.link).reset(half=half)

    def power_off(self) -> None:
        self._network.power_off(self.machine.name)
        self.link.vanish()
        self.process.end()
        self._guard.vanish()
        self.machine.power_off()
        self._on_end(self)

    # The connection

    def _hello(self) -> dict[str, Any]:
        self._hello_sent = self.now
        member = self.config.to_wire() | {"member_id": self.member_id, "store_port": self._store_port()}
        return {"member": member, "settings": self.config.settings, "present": self._present()}

    def _present(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"epoch": self.link.epoch, "record": self.record}
        if self.outcome is not None:
            shown["outcome"] = self.outcome.to_wire()
        if (current := self.round) is not None:
            self._presented = current.state
            shown |= {
                "round": current.number,
                "running": current.running,
                "up": current.up,
                "finished": current.finished,
                "exits": current.exits_to_wire(self.now),
                "why": current.why_stopped,
                "store_port": self._store_port(),
            }
        return shown

    def _store_port(self) -> int:
        """A socket that it already listens on; each round's store takes it away."""
        if not self._listening:
            self._listening = True
            self.ports += 1
        return self.ports

    def _lose_patience(self) -> None:
        limit = self._settings.orphan_s if self._joined else JOIN_TIMEOUT_S
        since = self.link.down_since if self._joined else self._born_at
        if since is not None and self.now - since > limit:
            self._end(EXIT_LOST)

    def _refused(self, code: str, message: str) -> None:
        self.refusal = f"{message} [{code}]"
        self._end(EXIT_FAILED)

    def _on_frame(self, frame: Frame) -> None:
        match frame["type"]:
            case "welcome":
                self._welcomed(frame)
            case "renewed":
                if self._renew_sent is not None:
                    self._lease_from = max(self._lease_from, self._renew_sent)
                    self._renew_sent = None
            case "release":
                self._released(frame["record"])
            case "record":
                self.record = frame["record"]
            case "recall":
                self._recalled(frame)
            case "check":
                self.process.after(HEALTH_S, self._recheck)
            case "dismiss":
                self._end(0)
            case "reach":
                self._told_to_reach(frame)
            case "outcome":
                self._ended(frame)
            case "farewell":
                self._farewell = True
                self._leave_with_outcome()

    def _welcomed(self, frame: Frame) -> None:
        if settings := frame.get("settings"):
            self._settings = parsed(tuple(settings.items()))
        self._lease_from = max(self._lease_from, self._hello_sent)
        self._renew_sent = None
        self._joined = True
        self._guard.lease_s = self._settings.lease_s
        self._beat()
        if self._unfit:
            self.link.send("unfit", why=self._unfit)
        if self._settings.gate_timeout_s is not None:
            self.link.send("listens", paths=[[self.machine.name, 1]])
        self._tell_since_hello()

    def _told_to_reach(self, frame: Frame) -> None:
        gone, more = frame.get("gone"), dict(frame["peers"])
        kept = {} if gone is None else {peer: where for peer, where in self._peers if peer not in gone}
        self._peers, self._reached = list((kept | more).items()), []
        self.process.after(PROBE_S, self._probe, self._peers)

    def _probe(self, peers: list[Any]) -> None:
        """Try to reach every peer, and tell what is new, until it is told of others."""
        if peers is not self._peers:
            return
        here = self.machine.name
        rows = [
            [peer, 0.001, ""] if self._network.joins(here, host) else [peer, None, "refused"]
            for peer, [[host, _]] in peers
            if peer != self.member_id
        ]
        if rows != self._reached and self.link.up:
            self._reached = rows
            self.link.send("reached", peers=rows)
        self.process.after(PROBE_AGAIN_S, self._probe, peers)

    def _tell_since_hello(self) -> None:
        """What happened between the hello and the welcome was neither presented nor sent."""
        current = self.round
        if current is None or current.state == self._presented:
            return
        if current.up:
            self.link.send("up", round=current.number)
        self.link.send("exits", round=current.number, seq=0, exits=current.exits_to_wire(self.now))
        if current.finished:
            self.link.send("finished", round=current.number)
        if not current.running:
            self._confirm_stop(current)

    def _renew(self) -> None:
        self._beat()
        if self.link.up:
            if self._renew_sent is None:
                self._renew_sent = self.now
            number = int(self.record["round"]) if self.record else None
            running = self.round is not None and self.round.running and self._counts_steps
            if running and self.round and (steps := self.round.fresh_steps(self.machine.ranks, self.now)):
                self.link.send("renew", round=number, steps=steps)
            else:
                self.link.send_plain("renew", number)
        self.process.after(self._settings.lease_s / 3, self._renew)

    @property
    def _deadline(self) -> float:
        """When its ranks must end if nothing more is heard."""
        return max(self._lease_from, self.link.dead_at) + self._settings.lease_s

    def _beat(self) -> None:
        self._guard.beat(self._deadline)

    def _watch_silence(self) -> None:
        deadline = self._deadline
        if self.now < deadline:
            self.process.after(deadline - self.now, self._watch_silence)
        elif (current := self.round) is not None and current.running and self.outcome is None:
            self._stop(current, 0.0, self._gave_up_on_silence, why="the coordinator was silent for a lease")
        else:
            self._gave_up_on_silence()

    def _gave_up_on_silence(self) -> None:
        self.link.drop()
        self.process.after(self._settings.lease_s / 3, self._watch_silence)

    @property
    def _counts_steps(self) -> bool:
        return self._settings.hang_timeout_s is not None or self._settings.no_progress_rounds is not None

    # Rounds

    def _released(self, record: dict[str, Any]) -> None:
        self.record = record
        formed = Round.from_wire(record)
        seat = formed.seat_of(self.member_id)
        if seat is None or self.outcome is not None or self.leaving:
            return
        current = self.round
        if current is not None and formed.number <= current.number:
            if formed.number == current.number and not current.running:
                self._confirm_stop(current)
            return
        session = self.link.session
        if current is not None and current.running:
            why = "a newer round was released"
            self._stop(current, 0.0, lambda: self._catch_up(current, formed, seat, session), why=why)
        else:
            self._catch_up(current, formed, seat, session)

    def _catch_up(self, current: InRound | None, formed: Round, seat: Seat, session: int) -> None:
        """Where what runs the ranks is gone, another is started first; the release may have become old meanwhile."""
        if self._guard.standing_down:
            self._rehire()
            self.process.after(HIRE_S, self._catch_up, current, formed, seat, session)
        elif self.round is current and session == self.link.session:
            self._start(formed, seat)

    def _start(self, formed: Round, seat: Seat) -> None:
        if self.now >= self._lease_from + self._settings.lease_s:
            self.link.drop()  # read too late: the world may have gone on; the next hello tells
            return
        self.round = current = InRound(formed, seat, self._counts_steps)
        self._guard.round = formed.number
        self._beat()
        if seat.rank == 0:
            assert formed.store_port == self.ports and self._listening, f"{self.name} does not listen for the store"
            self._listening = False
        for rank in range(current.first_rank, current.first_rank + seat.procs):
            config = self.config
            self.machine.start(
                Rank(formed.number, rank, self.member_id, self.machine, self.now, config.stubborn, config.term_s)
            )
        self.link.send("started", round=formed.number)
        if self._counts_steps:  # only then does anyone ask whether all ranks are up
            self.process.after(FORK_S, self._ranks_up, current)

    def _ranks_up(self, current: InRound) -> None:
        if not current.stopping:
            current.up = True
            self.link.send("up", round=current.number)

    def _recalled(self, frame: Frame) -> None:
        number = int(frame["round"])
        current = self.round
        if current is None or current.number < number:
            self.link.send("stopped", round=number, store_port=self._store_port())
        elif current.number == number:
            grace, dump = float(frame.get("grace_s") or 0.0), bool(frame.get("dump"))
            self._stop(current, grace, lambda: self._confirm_stop(current), dump=dump)

    def _confirm_stop(self, current: InRound) -> None:
        fields = {"round": current.number, "store_port": self._store_port(), "why": current.why_stopped}
        self.link.send("stopped", **fields, exits=current.exits_to_wire(self.now))

    # Stopping ranks

    def _stop(self, current: InRound, grace_s: float, then: Then, *, why: str = "", dump: bool = False) -> None:
        if not current.running:
            then()
            return
        current.afterwards.append(then)
        if not current.stopping:
            current.stopping, current.hung, current.why_stopped = True, dump, why
            if dump:
                self.machine.signal(signal.SIGABRT)
                grace_s = DUMP_WAIT_S
            elif grace_s > 0:
                self.machine.signal(signal.SIGTERM)
        if current.kill_at is None or self.now + grace_s < current.kill_at:
            current.kill_at = self.now + grace_s
            self.process.after(grace_s, self._kill_ranks, current)
        self._sweep_when_empty(current)

    def _kill_ranks(self, current: InRound) -> None:
        if current.running:
            self.machine.signal(signal.SIGKILL)

    def _sweep_when_empty(self, current: InRound) -> None:
        if current.stopping and not current.sweeping and not self.machine.ranks:
            current.sweeping = True
            if self._crew_lost:
                self._swept()
            else:
                self._guard.sweep()

    def _swept(self) -> None:
        """Nothing is left of the round."""
        current = self.round
        if current is None or not current.sweeping:
            return
        current.running = current.sweeping = False
        if self._crew_lost:
            self._rehire()
        afterwards, current.afterwards = current.afterwards, []
        for then in afterwards:
            if self.alive:
                then()

    def _guard_ended(self, guard: Guard) -> None:
        """A crew without its guard is lost; its ranks are reported as they end."""
        if guard is not self._guard:
            return
        self._crew_lost = True
        if self.round is None or not self.round.running:
            self._rehire()
        elif self.round.sweeping:
            self._swept()

    def _rehire(self) -> None:
        self._crew_lost = False
        self._guard.dismiss()
        self._guard = self._hire()

    def rank_ended(self, rank: Rank, status: int) -> None:
        """Called on the machine; the agent reads it when it runs."""
        self.process.read(self._rank_exited, rank, status)

    def _rank_exited(self, rank: Rank, status: int) -> None:
        current = self.round
        if current is None or current.number != rank.round:
            return
        current.note_exit(rank, status, self.name, self.now)
        if not current.stopping:  # else they travel with the confirmation
            self.link.send("exits", round=rank.round, seq=0, exits=current.exits_to_wire(self.now, rank.rank))
        done = [one.exit_code for one, _ in current.exits.values()]
        if not current.stopping and len(done) == current.seat.procs and not any(done):
            current.finished = True
            self.link.send("finished", round=rank.round)
        self._sweep_when_empty(current)

    # Ending

    def _ended(self, frame: Frame) -> None:
        if self.outcome is not None:
            self._acknowledge()
            return
        self.outcome = Outcome.from_wire(frame["outcome"])
        farewell_s = float(frame.get("farewell_s") or self._settings.farewell_s)

        def stopped() -> None:
            self._acknowledge()
            self.process.after(farewell_s, self._bid, True)
            self._bid(self._farewell)

        if self.round is not None:
            self._stop(self.round, float(frame.get("grace_s") or 0.0), stopped)
        else:
            stopped()

    def _leave_with_outcome(self) -> None:
        if self.outcome is not None and (self.round is None or not self.round.running):
            self._bid(True)

    def _bid(self, farewell: bool) -> None:
        if farewell and self.outcome is not None:
            self._end(self._exit_code(self.outcome))

    def _acknowledge(self) -> None:
        exits = self.round.exits_to_wire(self.now) if self.round else []
        self.link.send("ack", round=self.round.number if self.round else None, exits=exits)

    def _exit_code(self, outcome: Outcome) -> int:
        if outcome.state is OutcomeState.SUCCEEDED:
            return 0
        return EXIT_NO_PROGRESS if outcome.reason == "no_progress" else EXIT_FAILED

    def leave(self) -> None:
        """SIGTERM."""
        self.process.read(self._leave)

    def _leave(self) -> None:
        if self.leaving:
            self.machine.signal(signal.SIGKILL)
            return
        self.leaving = True
        self.link.send("leaving", why="it was told to leave (SIGTERM)")
        current = self.round
        if current is not None and current.running:
            self._stop(current, self._settings.stop_grace_s, lambda: self._gone(current), why="it left (SIGTERM)")
        else:
            self._end(SIGTERM_CODE)

    def _gone(self, current: InRound) -> None:
        self._confirm_stop(current)
        self._end(SIGTERM_CODE)

    # Health

    def _recheck(self) -> None:
        if self.healthy:
            self._unfit = None
            self.link.send("fit")
            return
        self._unfit = "health check failed with 1: bad"
        self.link.send("unfit", why=self._unfit)
        self.process.after(HEALTH_RETRY_S, self._recheck)
