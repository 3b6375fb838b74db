"""How fast does the world form, heal and end? With torchrun (c10d) and, where installed, ft_launcher beside us.

python -m bench.world [--json] [--only PART] [--repeat N] [--kills N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench import programs, report, swarm
from bench.report import Figure, below, p50, p99
from tests.fleet import Fleet, Process, eventually, free_port
from tests.node.kills import random_kills

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PEERS = Path(sys.executable).parents[1] / "peers"
FT_LAUNCHER = (sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ignore-missing-fault-tol-cfg")
NOOP = ("--no-python", "sleep", "100000")
KEEP_ALIVE = "read_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"


@contextlib.contextmanager
def a_fleet() -> Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


# 64 agents ---------------------------------------------------------------------------------------


def sixty_four(given: argparse.Namespace) -> Iterator[Figure]:
    told: list[float] = []
    released: list[float] = []
    everyone: list[float] = []
    with a_fleet() as fleet:
        trace = fleet.folder / "trace"
        fleet.env["MUSTER_TRACE"] = str(trace)
        fleet.coordinator()
        options = ("--nnodes", "64", "--spares", "1", "--max-restarts", "0", "--last-call-s", "30", "--lease-s", "10")
        nodes = {f"w{i}": fleet.node(f"w{i}", *options, program=NOOP) for i in range(65)}
        fleet.until("64 train", lambda v: v["state"] == "training" and v["world"] == 64, 120)
        for turn in range(given.repeat):
            view = fleet.until("settled", lambda v: v["state"] == "training" and v["spares"] == 1, 60)
            number = view["round"]
            eventually(lambda n=number: _count(trace, "release", n) >= 64, "all released")  # type: ignore[misc]
            time.sleep(1.0)
            victim = f"w{turn}"
            struck = time.monotonic()
            nodes[victim].kill()
            eventually(lambda n=number: _count(trace, "release", n + 1) >= 64, "all released again")  # type: ignore[misc]
            told += [at - struck for at in _times(trace, "recall", number)]
            everyone.append(max(_times(trace, "release", number + 1)) - struck)
            story = fleet.until("it is told", lambda v: v["round"] > number)["story"]  # noqa: B023
            released.append(next(line["at"] for line in story[::-1] if line["kind"] == "release") - struck)
            nodes[f"n{turn}"] = fleet.node(f"n{turn}", *options, program=NOOP)
    yield below("agent SIGKILL → every survivor told, 64 agents, p99", p99(told) * 1000, 100, "ms")
    yield below(
        "loss of one active, one spare → new round released, 64, p50",
        p50(released) * 1000,
        50,
        "ms",
        note=f"the last agent has it after {p50(everyone) * 1000:.0f} ms",
    )


def _times(trace: Path, kind: str, number: int) -> list[float]:
    rows = (line.split() for line in trace.read_text().splitlines())
    return [float(at) for at, _, what, which in rows if what == kind and which == str(number)]


def _count(trace: Path, kind: str, number: int) -> int:
    return len(_times(trace, kind, number))


# 1,000 simulated agents --------------------------------------------------------------------------


def thousand(given: argparse.Namespace) -> Iterator[Figure]:
    with a_fleet() as fleet:
        fleet.coordinator()
        seen = swarm.run(fleet.host, fleet.port, members=1010, target=1000, spares=10, lose=10, idle_s=4.0)
    yield below("1,000 simulated agents form", seen.form_s, 1.0, "s")
    yield below("1,000 simulated agents: lose 1 %, re-form", seen.reform_s, 1.0, "s")
    worst = max(seen.idle_up, seen.idle_down)
    yield Figure("idle messages per second and agent, each way", worst, "/s", "<= 2 /s", worst <= 2.0)


# Two ranks that crash ----------------------------------------------------------------------------


def crash(given: argparse.Namespace) -> Iterator[Figure]:
    ours = [_crash(_muster_single) for _ in range(given.repeat_torch)]
    tries = 0
    torchrun = None
    while torchrun is None and tries < 3:
        tries += 1
        torchrun = _crash(_torchrun_single)
    peers = {"torchrun": torchrun or f"hung or ended, {tries} times", "ft_launcher": _if_installed(_crash)}
    mine = p50([value for value in ours if value is not None])
    ratio = mine / torchrun if torchrun else None
    name = "rank crash → same rank back, 2-rank gloo group ready"
    note = f"ratio {ratio:.3f}, torchrun at its try {tries}" if ratio else "torchrun gave no time to compare with"
    yield Figure(name, mine, "s", "<= 0.15 x torchrun", ratio is not None and ratio <= 0.15, peers, note)


def _crash(launch: Callable[[Fleet, str], Process]) -> float | None:
    """Seconds from a rank's SIGKILL of itself to both ranks having all-reduced again; None if that never came."""
    with a_fleet() as fleet:
        script = programs.write(fleet.folder)["group"]
        process = launch(fleet, f"{script} {fleet.notes} 1")
        try:
            eventually(
                lambda: len(programs.marks(fleet.notes, "ready")) >= 4 or process.proc.poll() is not None, "again", 90
            )
        except AssertionError:
            return None
        ready = programs.marks(fleet.notes, "ready")
        if len(ready) < 4:
            return None
        return ready[-1][0] - programs.marks(fleet.notes, "crash")[0][0]


def _muster_single(fleet: Fleet, program: str) -> Process:
    return fleet.node("a", "--standalone", "--nproc", "2", program=tuple(program.split()), join=False)


def _torchrun_single(fleet: Fleet, program: str) -> Process:
    place = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ("--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", place)
    return fleet.start(*TORCHRUN, *options, *program.split())


def _ft_single(fleet: Fleet, program: str) -> Process:
    place = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ("--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", place)
    return fleet.start(*FT_LAUNCHER, *options, *program.split(), PYTHONPATH=str(PEERS))


def _if_installed(measure: Callable[[Callable[[Fleet, str], Process]], float | None]) -> float | str:
    if not PEERS.exists():
        return "not installed"
    value = measure(_ft_single)
    return value if value is not None else "hung or ended"


# First start -------------------------------------------------------------------------------------


def start(given: argparse.Namespace) -> Iterator[Figure]:
    ours: list[float] = []
    torchrun: list[float] = []
    for _ in range(given.repeat_torch):
        for times, launch in ((ours, _muster_single), (torchrun, _torchrun_single)):
            if (value := _first_start(launch)) is not None:
                times.append(value)
    peers: dict[str, float | str] = {"torchrun": p50(torchrun), "ft_launcher": _if_installed(_first_start)}
    ratio = p50(ours) / p50(torchrun)
    name = "first start, 2 ranks to group ready"
    yield Figure(name, p50(ours), "s", "<= 0.6 x torchrun", ratio <= 0.6, peers, f"ratio {ratio:.3f}")


def _first_start(launch: Callable[[Fleet, str], Process]) -> float | None:
    with a_fleet() as fleet:
        script = programs.write(fleet.folder)["group"]
        begun = time.monotonic()
        launch(fleet, f"{script} {fleet.notes}")
        try:
            eventually(lambda: len(programs.marks(fleet.notes, "ready")) >= 2, "ready", 90)
        except AssertionError:
            return None
        return programs.marks(fleet.notes, "ready")[1][0] - begun


# A node dies -------------------------------------------------------------------------------------


def node_loss(given: argparse.Namespace) -> Iterator[Figure]:
    ours = [_node_loss(_muster_nodes, victim=1) for _ in range(given.repeat_torch)]
    peers = _peer_losses(victim=1)
    found = [value for value in ours if value is not None]
    value = p50(found) * 1000 if len(found) == len(ours) else None
    name = "2 active + 1 spare, SIGKILL one node → first all-reduce, p50"
    yield below(name, value, 500, "ms", peers=peers)
    host = _node_loss(_muster_standalone, victim=0)
    name = "the same, killing the node that started the coordinator"
    peers = _peer_losses(victim=0)
    yield Figure(name, host and host * 1000, "ms", "the job goes on", host is not None, peers)


def _peer_losses(victim: int) -> dict[str, float | str]:
    peers: dict[str, float | str] = {}
    for name, launcher in (("torchrun", TORCHRUN), ("ft_launcher", FT_LAUNCHER)):
        if launcher is FT_LAUNCHER and not PEERS.exists():
            peers[name] = "not installed"
            continue
        value = _node_loss(partial(_c10d_nodes, launcher=launcher), victim=victim)
        peers[name] = value * 1000 if value is not None else "job ended or hung"
    return peers


def _node_loss(launch: Callable[[Fleet, str], list[Process]], victim: int) -> float | None:
    """Kill the node of that rank with all that belongs to it; time to the first all-reduce of the next group."""
    with a_fleet() as fleet:
        script = programs.write(fleet.folder)["group"]
        nodes = launch(fleet, f"{script} {fleet.notes}")
        eventually(lambda: len(programs.marks(fleet.notes, "ready")) >= 2, "ready", 90)
        time.sleep(4.0)  # the spare has warmed up, as it has in any real job
        ready = programs.marks(fleet.notes, "ready")
        rank_pid = {rank: pid for _, rank, pid in ready}[victim]
        node = _node_of(rank_pid, nodes)
        struck = time.monotonic()
        _kill_node(node, rank_pid)
        try:
            eventually(
                lambda: (
                    len(programs.marks(fleet.notes, "ready")) >= len(ready) + 2
                    or all(one.proc.poll() is not None for one in nodes)
                ),
                "healed",
                60,
            )
        except AssertionError:
            return None
        again = programs.marks(fleet.notes, "ready")[len(ready) :]
        return min(at for at, _, _ in again) - struck if len(again) >= 2 else None


def _node_of(pid: int, nodes: list[Process]) -> Process:
    ours = {node.pid: node for node in nodes}
    while pid not in ours:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return ours[pid]


def _kill_node(node: Process, rank_pid: int) -> None:
    """A node that loses power: its launcher and its ranks at once. muster's guard is left to show its work."""
    node.kill()
    if "muster.node.cli" not in node.command:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank_pid, signal.SIGKILL)


def _muster_nodes(fleet: Fleet, program: str) -> list[Process]:
    fleet.coordinator()
    options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0")
    return [fleet.node(name, *options, program=tuple(program.split())) for name in ("a", "b", "c")]


def _muster_standalone(fleet: Fleet, program: str) -> list[Process]:
    fleet.port = free_port()
    options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0")
    words = tuple(program.split())
    place = ("--standalone", "--listen", fleet.address, "--run-id", fleet.run_id)
    first = fleet.node("a", *place, *options, program=words, join=False, MUSTER_IDLE_S="1")
    first.expect("joined run")
    return [first, *(fleet.node(name, *options, program=words) for name in ("b", "c"))]


def _c10d_nodes(fleet: Fleet, program: str, launcher: tuple[str, ...]) -> list[Process]:
    """torchrun or ft_launcher, tuned to notice a death as early as it can."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    conf = f"--rdzv-conf={KEEP_ALIVE},is_host="
    options = ("--nnodes=2:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=bench")
    nodes = []
    for index in range(3):
        host = "1" if index == 0 else "0"
        nodes.append(
            fleet.start(
                *(*launcher, *options, endpoint, conf + host, *program.split()),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                PYTHONPATH=str(PEERS) if launcher is FT_LAUNCHER else "",
            )
        )
        time.sleep(1.0 if index == 0 else 0.0)
    return nodes


# The end -----------------------------------------------------------------------------------------


def ending(given: argparse.Namespace) -> Iterator[Figure]:
    gaps = []
    for _ in range(given.repeat):
        with a_fleet() as fleet:
            fleet.coordinator()
            script = programs.write(fleet.folder)["wait"]
            options = ("--nnodes", "3", "--spares", "2")
            nodes = [fleet.node(f"w{i}", *options, program=(script, str(fleet.notes))) for i in range(5)]
            fleet.training(0, 3)
            eventually(lambda f=fleet: len(programs.marks(f.notes, "start")) == 3, "started")  # type: ignore[misc]
            fleet.until("all are here", lambda v: len(v["members"]) == 5)
            fleet.go()
            for node in nodes:
                node.wait()
            done = max(at for at, _, _ in programs.marks(fleet.notes, "done"))
            gaps.append(max(node.ended_at for node in nodes) - done)
    yield below("last active done → last spare exited, p50", p50(gaps) * 1000, 100, "ms")


def kills(given: argparse.Namespace) -> Iterator[Figure]:
    with a_fleet() as fleet:
        tally = random_kills(fleet, seed=given.seed, kills=given.kills)
    broken = len(tally.broken) + len(tally.left)
    name = f"{given.kills} random kills: invariants broken + processes left"
    note = f"{tally.rounds} rounds; " + "; ".join([*tally.broken, *tally.left][:3])
    yield Figure(name, float(broken), "", "0", broken == 0, note=note)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=10, help="samples of the quick parts")
    parser.add_argument("--repeat-torch", type=int, default=5, help="samples of parts with torch")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)


PARTS = {
    "sixty-four": sixty_four,
    "thousand": thousand,
    "crash": crash,
    "node-loss": node_loss,
    "start": start,
    "ending": ending,
    "kills": kills,
}

if __name__ == "__main__":
    sys.exit(report.run("bench world", PARTS, _options))
