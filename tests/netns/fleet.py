"""A run of `muster-node` alone over several machines, and what its ranks say about it themselves."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muster.types.frames import AskFrame
from muster.types.world import RunId
from muster.world.connection import ask
from tests.fleet import PROGRAMS, Fleet, Process, eventually
from tests.netns import fenced_log
from tests.netns.faults import Loss
from tests.netns.fenced_log import Mark
from tests.netns.machines import Machines

PORT = 29400
PATIENCE_S = 90.0


class MachineFleet(Fleet):
    """One worker on each machine; the first has the coordinator. Its ranks share one log.

    `any_may_lead`: workers are told the addresses of all machines, for whoever leads the run when the first is lost.
    """

    def __init__(
        self,
        folder: Path,
        machines: Machines,
        *,
        spares: int,
        program: str = "fenced.py",
        any_may_lead: bool = False,
    ) -> None:
        super().__init__(folder)
        self.machines = machines
        self.spares = spares
        self.world = machines.count - spares
        self.host, self.port = machines.address(0), PORT
        self.env |= {"MUSTER_RUN_TOKEN": secrets.token_hex(32), "GLOO_SOCKET_IFNAME": "eth0", "MUSTER_IDLE_S": "3"}
        self.workers: dict[int, Process] = {}
        self.names: dict[int, str] = {}
        self.thawed: dict[str, float] = {}
        self.away: set[int] = set()
        self._any_may_lead = any_may_lead
        self._program = (str(PROGRAMS / program), str(self.notes))
        self._started = 0

    # Starting

    def begin(self) -> None:
        """Everybody, one after the other, so that the last are the spares."""
        for machine in range(self.machines.count):
            self.work(machine)
            self._joined(machine + 1)
        self.whole()

    def _joined(self, count: int) -> None:
        self.until(f"{count} are there", lambda v: len(v["members"]) == count)

    def work(self, machine: int) -> Process:
        """Start the worker of a machine; another one, with another name, if it had one before."""
        name = self.names[machine] = f"m{machine}-{self._started}"
        self._started += 1
        where = self._first() if name == "m0-0" else self._joins()
        settings = ("--nnodes", str(self.world), "--spares", str(self.spares), "--max-restarts", "0")
        own = ("--name", name, "--local-addr", self.machines.address(machine), "--log-dir", str(self.folder / name))
        command = (sys.executable, "-m", "muster.node.cli", *where, "--run-id", self.run_id, *settings, *own)
        home = self.folder / f"home-{machine}"  # a machine has no files of another
        home.mkdir(exist_ok=True)
        self.workers[machine] = self.start(
            *self.machines.inside(machine), *command, *self._program, MUSTER_HOME=str(home), TMPDIR=str(home)
        )
        return self.workers[machine]

    def strike(self, loss: Loss, machine: int) -> float:
        """Returns when."""
        self.away.add(machine)
        struck = time.monotonic()
        loss.strike(self.machines, machine)
        return struck

    def mend(self, loss: Loss, machine: int) -> None:
        """A machine that was off, or of which nothing is left, gets another worker."""
        if loss.stands_still:
            self.thawed[self.names[machine]] = time.monotonic()
        loss.mend(self.machines, machine)
        if not self.machines.pids(machine):
            self.work(machine)
        self.away.discard(machine)

    def _first(self) -> tuple[str, ...]:
        return ("--standalone", "--listen", f"{self.host}:{PORT}")

    def _joins(self) -> tuple[str, ...]:
        return ("--coordinator", ",".join(f"{host}:{port}" for host, port in self._places()))

    def _places(self) -> list[tuple[str, int]]:
        machines = range(self.machines.count) if self._any_may_lead else range(1)
        return [(self.machines.address(machine), PORT) for machine in machines]

    # Looking

    def _ask(self, question: AskFrame, run_id: str, timeout_s: float = 5.0) -> dict[str, Any]:
        away = {self.machines.address(machine) for machine in self.away}
        where = [place for place in self._places() if place[0] not in away]
        return dict(asyncio.run(ask(where, RunId(run_id), question, token=self.token, timeout_s=timeout_s)))

    @property
    def log(self) -> Path:
        return self.notes / "fenced.log"

    def marks(self) -> list[Mark]:
        return fenced_log.read_file(self.log)

    def at_work(self) -> tuple[int, dict[int, str]] | None:
        """The newest round with rank → worker, if all its ranks have left a mark just now."""
        return fenced_log.at_work(fenced_log.read_file(self.log, last=fenced_log.RECENT), time.monotonic())

    def trains(self, what: str, right: Callable[[int, set[str]], bool], timeout_s: float = PATIENCE_S) -> int:
        """Wait until all ranks of a round are at work for which `right(round, workers)` holds."""

        def look() -> list[int]:
            found = self.at_work()
            return [found[0]] if found and right(found[0], set(found[1].values())) else []

        try:
            return eventually(look, what, timeout_s)[0]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def whole(self) -> dict[str, Any]:
        """All ranks are at work, on all machines, the spares stand by, and whoever may lead has a voice."""
        names = set(self.names.values())
        everywhere = set(range(self.machines.count))

        def complete(view: dict[str, Any]) -> bool:
            members = {member["name"] for member in view["members"]}
            ready = view["state"] == "training" and members == names and view["spares"] == self.spares
            return ready and (not self._any_may_lead or self._electors(view) == everywhere)

        try:
            view = self.until("everybody is there", complete, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None
        self.trains("all ranks are at work", lambda number, workers: number >= view["round"] and workers <= names)
        return view

    def began(self, number: int) -> float:
        """When all ranks of that round were at work."""
        began = fenced_log.beginning(self.marks(), number)
        assert began is not None, f"round {number} was never whole"
        return began

    def leader(self, view: dict[str, Any]) -> int:
        """The machine that leads: a worker's, or that of the coordinator which the first one brought."""
        leads = [machine for machine, name in self.names.items() if name == view["leader"]]
        return leads[0] if leads else 0

    def _electors(self, view: dict[str, Any]) -> set[int]:
        posts = {elector["post"].rpartition(":")[0] for elector in view["electors"]}
        return {machine for machine in range(self.machines.count) if self.machines.address(machine) in posts}

    def story(self) -> str:
        """For whoever has to find out what went wrong."""
        said = {name: self.workers[machine].text[-1500:] for machine, name in self.names.items()}
        return "\n".join([f"--- {name}\n{text}" for name, text in said.items()] + [json.dumps(self.view())[:3000]])

    # Ending

    def finish(self) -> None:
        """Everybody who is there succeeds; nothing is left, and no two rounds were ever at work at once."""
        self.go()
        codes = {self.names[machine]: worker.wait(PATIENCE_S) for machine, worker in self.workers.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{self.story()}"
        outcomes = {worker.expect(r"succeeded: .*")[0] for worker in self.workers.values()}
        assert len(outcomes) == 1, f"they were told different things: {outcomes}"
        assert not fenced_log.problems(self.marks(), self.thawed)
        self.assert_nothing_left(PATIENCE_S)
        # A process that is ending has no variables any more by which the line above could find it.
        machines = range(self.machines.count)
        eventually(lambda: not any(self.machines.pids(machine) for machine in machines), "no process on any machine")


@contextmanager
def a_machine_fleet(
    folder: Path, *, workers: int, spares: int, program: str = "fenced.py", any_may_lead: bool = False
) -> Iterator[MachineFleet]:
    with Machines(workers + spares) as machines:
        fleet = MachineFleet(folder, machines, spares=spares, program=program, any_may_lead=any_may_lead)
        try:
            yield fleet
        finally:
            fleet.close()
