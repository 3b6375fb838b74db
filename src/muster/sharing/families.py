"""Families of pipeline processes on this machine: the registered processes, and the members that still run.

A family consists of the processes that a registration named, their descendants, and all processes with the family's
mark. A mark is an environment variable, which programs inherit, and an open file, which forks inherit. So a child is
found even after its parent has exited. On a machine with GPUs, every process that has one of the pipeline's GPUs open
counts as well, unless it belongs to another pipeline or training of the pool.

This module decides nothing: `tenants` ends a pipeline once its family is gone. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster import sockets
from muster.clock import boot_id
from muster.types.sharing import MOST_PROCESSES, PipelineProcess

MARK = "MUSTER_PIPELINE_PROCESS"  # in the environment of each program that a pipeline's process starts
_MARK_FILE = "muster-pipeline-"  # in the name of a file that forks of the process have open
_PROC = Path("/proc")
_GPU_FILE = re.compile(r"/dev/nvidia(\d+)|/dev/kfd")
# Programs that have GPUs open and compute nothing.
_MONITORS = frozenset({"nvidia-persiste", "nv-hostengine", "nvidia-smi", "dcgm-exporter"})
_DEAD = frozenset("ZX")
_ASK_S = 5.0
_MOST_NAMED = 3

_marks: dict[int, int] = {}  # descriptors by pid: a fork gets a mark of its own


class Unknowable(Exception):
    """This process cannot see whether a family is gone."""


# The pipeline's side ------------------------------------------------------------------------------


def mark_this_process(name: str) -> None:
    """Mark this process, and with it all programs and forks that it starts from now on."""
    os.environ[MARK] = name
    pid = os.getpid()
    if pid in _marks:
        return
    for inherited in _marks.values():
        with contextlib.suppress(OSError):
            os.close(inherited)  # a fork that registers a pipeline itself begins its own family
    _marks.clear()
    with contextlib.suppress(OSError):
        _marks[pid] = os.memfd_create(_MARK_FILE + name, os.MFD_CLOEXEC)


# The control plane's side -------------------------------------------------------------------------


def space() -> str:
    """Return the name of the space in which pids mean something here: this boot and this pid namespace."""
    try:
        return f"{boot_id()}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def prove(
    connection: socket.socket, pids: Sequence[int]
) -> tuple[tuple[PipelineProcess, ...], tuple[PipelineProcess, ...]]:
    """Return the named processes and their descendants, if the first process is at the other end of the connection.

    The other processes must run as the same user. In case of doubt return nothing.
    """
    registered = _proved(connection, pids)
    tree = descendants({"": registered})[""] if registered else ()
    children = [process for process in tree if process not in registered]
    return (registered, tuple(children)) if len(children) <= MOST_PROCESSES else ((), ())


def _proved(connection: socket.socket, pids: Sequence[int]) -> tuple[PipelineProcess, ...]:
    if not pids or len(pids) > MOST_PROCESSES or not (here := space()):
        return ()
    try:
        own_end, peer_end = sockets.end(connection.getsockname()), sockets.end(connection.getpeername())
        peer = sockets.find(peer_end, own_end)
    except OSError:
        return ()
    if peer is None or not peer.inode or not _holds(pids[0], f"socket:[{peer.inode}]"):
        return ()
    table = _stats()
    processes = []
    for pid in dict.fromkeys(pids):
        stat = table.get(pid)
        if stat is None or stat.is_dead or _user_of(pid) != peer.uid:
            return ()
        processes.append(PipelineProcess(pid, stat.started, here))
    return tuple(processes)


def open_pidfd(process: PipelineProcess) -> int | None:
    """Return a descriptor that is readable once a process is gone; None if it is gone already.

    Raises OSError if the kernel gives no descriptor, and Unknowable if the pid has no meaning here.
    """
    _check_space(process)
    if _is_of_earlier_boot(process):
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    stat = _stat(process.pid)
    if stat is None or stat.started != process.started or stat.is_dead:
        os.close(descriptor)
        return None
    return descriptor


def descendants(families: Mapping[str, Iterable[PipelineProcess]]) -> dict[str, tuple[PipelineProcess, ...]]:
    """Return for each family its living processes and their current descendants.

    This control plane and its own descendants belong to no family.
    """
    here, table = space(), _stats()
    trees = {}
    for name, processes in families.items():
        roots = {process.pid for process in processes if process.space == here and _is(table.get(process.pid), process)}
        living = sorted(pid for pid in _below(table, roots) if not table[pid].is_dead)
        trees[name] = tuple(PipelineProcess(pid, table[pid].started, here) for pid in living)
    return trees


@dataclass(frozen=True)
class Family:
    """The processes of a pipeline, as far as this machine shows them."""

    mark: str
    registered: tuple[PipelineProcess, ...]
    others: tuple[PipelineProcess, ...] = ()  # descendants that were observed


@dataclass(frozen=True)
class Neighbours:
    """Other users that may have a GPU of the pool open: families of other pipelines, and runs of trainings."""

    families: tuple[Family, ...] = ()
    runs: frozenset[str] = frozenset()


def survivors(family: Family, devices: Sequence[str], neighbours: Neighbours) -> str:
    """Return in words which processes of a family still run or use one of these devices; "" if there is none.

    Raises Unknowable if that cannot be determined. Call it in a thread: it reads all of /proc.
    """
    for process in family.registered:
        _check_space(process)
    # The second look finds the child of a process that forks and exits during the first look.
    remaining = dict.fromkeys(_running(family) or _running(family), "of its family still runs")
    users = _users_of(devices)
    excused = {pid for neighbour in neighbours.families for pid in _running(neighbour)} if users else set()
    for pid, use in users.items():
        if pid not in remaining and pid not in excused and _run_of(pid) not in neighbours.runs:
            remaining[pid] = use
    named = [f"process {pid} ({_command(pid)}) {use}" for pid, use in sorted(remaining.items())]
    more = f", and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return "; ".join(named[:_MOST_NAMED]) + more


def _running(family: Family) -> set[int]:
    """Return the living processes of a family."""
    here, table = space(), _stats()
    living = {pid: stat for pid, stat in table.items() if not stat.is_dead and pid != os.getpid()}
    processes = [process for process in (*family.registered, *family.others) if process.space == here]
    found_by_pid = {process.pid for process in processes if _is(living.get(process.pid), process)}
    # The kernel does not reuse the id of a session or group while a process is in it.
    led = {process.pid for process in processes if process.pid not in table or _is(table[process.pid], process)}
    members = {pid for pid, stat in living.items() if stat.session in led or stat.group in led}
    marked = {pid for pid in living if _is_marked(pid, family.mark)}
    return _below(table, found_by_pid | members | marked) & living.keys()


def _below(table: Mapping[int, _Stat], roots: Collection[int]) -> set[int]:
    """Return these processes and their descendants, without the descendants of this process."""
    children: dict[int, list[int]] = {}
    for pid, stat in table.items():
        if pid != os.getpid():
            children.setdefault(stat.parent, []).append(pid)
    below, pending = set[int](), list(roots)
    while pending:
        pid = pending.pop()
        if pid not in below:
            below.add(pid)
            pending += children.get(pid, ())
    return below


# /proc --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    group: int
    session: int
    threads: int
    started: int  # clock ticks after the boot

    @property
    def is_dead(self) -> bool:
        """Return True if all threads have ended. A process may live on after its first thread."""
        return self.state in _DEAD and self.threads <= 1


def _stat(pid: int) -> _Stat | None:
    try:
        words = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Stat(words[0], int(words[1]), int(words[2]), int(words[3]), int(words[17]), int(words[19]))
    except (OSError, IndexError, ValueError):
        return None


def _stats() -> dict[int, _Stat]:
    return {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdigit())


def _is(stat: _Stat | None, process: PipelineProcess) -> bool:
    return stat is not None and stat.started == process.started


def _is_of_earlier_boot(process: PipelineProcess) -> bool:
    return process.space.partition("/")[0] != boot_id() != ""


def _check_space(process: PipelineProcess) -> None:
    """Raise Unknowable if the process is of another pid namespace. A process of an earlier boot is certainly gone."""
    if not _is_of_earlier_boot(process) and process.space != space():
        raise Unknowable(f"process {process.pid} belongs to another pid namespace")


def _user_of(pid: int) -> int | None:
    try:
        return os.stat(_PROC / str(pid)).st_uid
    except OSError:
        return None


def _links(pid: int) -> Iterator[str]:
    """Yield the open files of a process, as far as this user may see them."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield os.readlink(f"{folder}/{name}")


def _holds(pid: int, link: str) -> bool:
    return link in _links(pid)


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_marked(pid: int, mark: str) -> bool:
    if not mark:
        return False
    if f"{MARK}={mark}".encode() in _environment(pid):
        return True
    return _holds(pid, f"/memfd:{_MARK_FILE}{mark} (deleted)")


def _run_of(pid: int) -> str:
    prefix = b"MUSTER_RUN_ID="
    runs = (entry[len(prefix) :] for entry in _environment(pid) if entry.startswith(prefix))
    return os.fsdecode(next(runs, b""))


def _name(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        printable = "".join(letter if letter.isprintable() else "?" for letter in words)
        if printable:
            return printable[:80]
    return "its command is not known"


# GPUs ---------------------------------------------------------------------------------------------


def _users_of(devices: Sequence[str]) -> dict[int, str]:
    """Return which processes use these devices, and how; nothing on a machine that has no GPU."""
    if not any(_GPU_FILE.fullmatch(f"/dev/{name}") for name in os.listdir("/dev")):
        return {}
    files = _files_of(devices)
    users: dict[int, str] = {}
    for pid in _pids():
        if pid == os.getpid() or (stat := _stat(pid)) is None or stat.is_dead or _name(pid) in _MONITORS:
            continue
        links = (link for link in _links(pid) if _GPU_FILE.fullmatch(link))
        if (file := next((link for link in links if not files or link in files), None)) is not None:
            users[pid] = f"has {file} open"
    return users | _computing(devices if files else ())


def _files_of(devices: Sequence[str]) -> set[str]:
    """Return the files of these devices, or nothing if the file of one is unknown: then every GPU file counts."""
    gpus = []
    for place in sorted(_PROC.glob("driver/nvidia/gpus/*/information")):  # by bus, as nvidia-smi counts them
        with contextlib.suppress(OSError):
            text = place.read_text(errors="replace")
            minor, uuid = re.search(r"Device Minor:\s*(\d+)", text), re.search(r"GPU UUID:\s*(\S+)", text)
            gpus.append((minor[1] if minor else "", uuid[1] if uuid else ""))
    files = set()
    for device in devices:
        number = next((number for number, uuid in gpus if uuid == device), "")
        if device.isdecimal() and int(device) < len(gpus):
            number = gpus[int(device)][0]
        if not number:
            return set()
        files.add(f"/dev/nvidia{number}")
    return files


def _computing(devices: Sequence[str]) -> dict[int, str]:
    """Return the processes that the driver lists for these GPUs, or for all GPUs if none is named.

    The list includes processes whose files this user may not read.
    """
    chosen = [f"--id={','.join(devices)}"] if devices else []
    command = ["nvidia-smi", *chosen, "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
    except FileNotFoundError:
        return {}
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unknowable(f"nvidia-smi does not list the GPUs' processes: {error}") from error
    if answer.returncode != 0:
        raise Unknowable(f"nvidia-smi does not list the GPUs' processes: {answer.stdout.strip()[:200]}")
    return {int(line): "computes on its GPUs" for line in answer.stdout.split() if line.isdecimal()}
