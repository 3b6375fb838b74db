"""What is a machine here, and how is it lost? A network namespace on a bridge: its power, its cable, its processes.

The bridge is in the network of whoever makes the fleet, who has an address on it, too. Everybody shares one clock, one
file system and one list of processes. Whose fleet it is says a lock that ends with its owner: the next fleet removes
what one without an owner has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Literal

Direction = Literal["in", "out"]
File = int | IO[bytes] | IO[str] | None

_LOCKS = Path("/run/muster-machines")
_NAMESPACES = Path("/run/netns")
_NAMED = re.compile(r"muster-(\d+)-\d+")
_FLEETS = range(2000)
_PATIENCE_S = 10.0
_MAC = "02:6d:75:73:{:02x}:{:02x}"
_DEAD = ("", "Z", "X")
_OPEN = "locked off learning on flood on bcast_flood on mcast_flood on fdb_flush"
_DEAF = "learning off flood off bcast_flood off mcast_flood off fdb_flush"
_MUTE = "locked on learning off fdb_flush"


@functools.cache
def why_not() -> str:
    """What is missing here for machines; nothing, one hopes."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Machines(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as problem:
        detail = getattr(problem, "stderr", "") or problem
        return f"no network namespaces here: {str(detail).strip()}"


class Machines:
    """Numbered from 0; on and connected when made. Several fleets may be there at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._held = contextlib.ExitStack()
        self._number = -1

    def __enter__(self) -> Machines:
        with contextlib.ExitStack() as undo:
            self._number = undo.enter_context(_claimed())
            undo.callback(_remove, self._number)
            _remove(self._number)  # of an owner that is gone
            # An address of its own: else it is that of one of its machines, and goes with that one's power.
            _ip(f"link add {self._bridge} address {_MAC.format(*divmod(self._number, 256))} type bridge")
            _ip(f"addr add {self.here}/24 dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
            for machine in range(self.count):
                self._install(machine)
            self._held = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    # What is where

    def address(self, machine: int) -> str:
        return f"{self._network}.{machine + 1}"

    @property
    def here(self) -> str:
        """The address of whoever made them, in the same network."""
        return f"{self._network}.254"

    def pids(self, machine: int) -> list[int]:
        """All its processes, also those that have left their parents."""
        return _alive_in(self._name(machine))

    def start(
        self,
        machine: int,
        argv: list[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: File = subprocess.DEVNULL,
        stdout: File = None,
        stderr: File = None,
    ) -> subprocess.Popen[bytes]:
        """Its id is that of the command. It is one of the machine's processes when this returns."""
        argv = [*self.inside(machine), *argv]
        started = subprocess.Popen(argv, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)
        wanted = os.stat(_NAMESPACES / self._name(machine))
        while _state(started.pid) not in _DEAD and not _is_in(started.pid, wanted):
            time.sleep(0.0005)
        return started

    def inside(self, machine: int) -> tuple[str, ...]:
        """What to put in front of a command that is to run there."""
        return ("nsenter", f"--net={_NAMESPACES / self._name(machine)}", "--")

    # Its cable

    def link(self, machine: int, *, up: bool) -> None:
        """Pulled, or put back. Connections stay as they are; nobody is told of anything."""
        _ip(f"link set {self._cable(machine)} {'up' if up else 'down'}")

    def one_way(self, machine: int, lost: Direction | None) -> None:
        """What comes to it, or what leaves it, is lost without a word; None: nothing is."""
        rules = {"in": _DEAF, "out": _MUTE, None: ""}[lost]
        for rule in (_OPEN, rules):
            if rule:
                _ip(f"link set {self._cable(machine)} type bridge_slave {rule}")

    # Its processes

    def freeze(self, machine: int) -> None:
        """Everything on it stands still; its kernel does not, and answers for its connections."""
        self._signal_until(machine, signal.SIGSTOP, _stands_still)

    def thaw(self, machine: int) -> None:
        for pid in self.pids(machine):
            _signal(pid, signal.SIGCONT)

    def kill(self, machine: int) -> None:
        """Everything on it in one instant: nobody sees another die and does something about it. Its kernel lives."""
        self.freeze(machine)
        self._signal_until(machine, signal.SIGKILL, lambda pid: False)

    # Its power

    def power_off(self, machine: int) -> None:
        """Nothing of it answers and nothing is closed: what its kernel says at the end reaches nobody."""
        self.link(machine, up=False)
        self.kill(machine)

    def power_on(self, machine: int) -> None:
        """As after a reboot: the same address, and a kernel that knows nothing of what was."""
        self.kill(machine)
        _ip(f"link del {self._cable(machine)}")
        _ip(f"netns del {self._name(machine)}")
        self._install(machine)

    # How it is made

    @property
    def _network(self) -> str:
        return f"10.{96 + self._number // 250}.{self._number % 250}"

    @property
    def _bridge(self) -> str:
        return _bridge(self._number)

    def _name(self, machine: int) -> str:
        return f"muster-{self._number}-{machine}"

    def _cable(self, machine: int) -> str:
        return f"mm{self._number}-{machine}"

    def _install(self, machine: int) -> None:
        name, cable = self._name(machine), self._cable(machine)
        _ip(f"netns add {name}")
        _ip(f"link add {cable} type veth peer name eth0 netns {name}")
        _ip(f"link set {cable} master {self._bridge} up")
        _ip(f"-n {name} addr add {self.address(machine)}/24 dev eth0")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} link set eth0 up")
        _ip(f"-n {name} route add default via {self.here}")
        for server in _name_servers():  # they cannot be reached from here: who asks is told at once, and waits no 10 s
            _ip(f"-n {name} route add unreachable {server}")

    def _signal_until(self, machine: int, number: int, done: Callable[[int], bool]) -> None:
        """Again until all have obeyed: one of them may have started another meanwhile."""
        _insist(lambda: [pid for pid in self.pids(machine) if not done(pid)], number)


@contextlib.contextmanager
def _claimed() -> Iterator[int]:
    """The number of a fleet, ours for as long as this lasts or this process lives."""
    _prune()
    for number in _FLEETS:
        with _locked(number) as ours:
            if ours:
                yield number
                return
    raise OSError("too many fleets of machines")


@contextlib.contextmanager
def _locked(number: int) -> Iterator[bool]:
    _LOCKS.mkdir(exist_ok=True)
    with open(_LOCKS / str(number), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _prune() -> None:
    """Remove the machines of owners that are gone."""
    for number in {int(found[1]) for name in _namespaces() if (found := _NAMED.fullmatch(name))}:
        with _locked(number) as ours:
            if ours:
                _remove(number)


def _remove(number: int) -> None:
    """All machines of a fleet, with what runs there."""
    names = [name for name in _namespaces() if name.startswith(f"muster-{number}-")]
    for name in names:
        _insist(functools.partial(_alive_in, name), signal.SIGKILL)
    if _bridge(number) in _ip("-o link show type bridge"):
        for line in _ip(f"-o link show master {_bridge(number)}").splitlines():
            _ip(f"link del {line.split(':')[1].partition('@')[0]}")
        _ip(f"link del {_bridge(number)}")
    for name in names:
        _ip(f"netns del {name}")


def _name_servers() -> list[str]:
    words = [line.split() for line in Path("/etc/resolv.conf").read_text().splitlines()]
    found = {line[1] for line in words if line[:1] == ["nameserver"] and len(line) > 1}
    return sorted(server for server in found if ":" not in server and not server.startswith("127."))


def _bridge(number: int) -> str:
    return f"mm{number}-bridge"


def _namespaces() -> list[str]:
    return sorted(os.listdir(_NAMESPACES)) if _NAMESPACES.exists() else []


def _alive_in(name: str) -> list[int]:
    """Asked of the kernel process by process: who has left its parent is found, too. Zombies do not count."""
    wanted = os.stat(_NAMESPACES / name)
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if _is_in(pid, wanted) and _state(pid) not in _DEAD]


def _is_in(pid: int, namespace: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), namespace)
    except OSError:
        return False


def _insist(left: Callable[[], list[int]], number: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while pids := left():
        for pid in pids:
            _signal(pid, number)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pids} did not obey signal {number}")


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _state(pid: int) -> str:
    """A letter as in `ps`; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _stands_still(pid: int) -> bool:
    """Also one that waits in the kernel for a child that was stopped before its exec: it stops before it goes on."""
    state = _state(pid)
    return state in ("T", "t") or (state == "D" and _is_pending(pid, signal.SIGSTOP))


def _is_pending(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout
