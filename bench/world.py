"""How fast does the world form, heal and end? With torchrun (c10d) and, where installed, ft_launcher beside us.

python -m bench.world [--json] [--only PART] [--repeat N] [--repeat-torch N] [--repeat-peers N] [--kills N]
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench import programs, report, swarm
from bench.report import Figure, below, p50, p99, spread
from muster.types.world import Settings
from tests.fleet import Fleet, Process, eventually, family, free_port, gone, kill_all
from tests.node.kills import random_kills

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PEERS = Path(sys.executable).parents[1] / "peers"
FT_LAUNCHER = (sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ignore-missing-fault-tol-cfg")
WAITED_S = 60.0  # for a job that may never recover
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
    note = f"p50 {p50(told) * 1000:.3g}"
    told_all = spread(told, 1000)
    yield below(
        "64 workers, one agent is killed → a survivor is told, p99", p99(told) * 1000, 100, "ms", note=note, **told_all
    )
    yield below(
        "64 workers, one agent is killed, one spare → new round released, p50",
        p50(released) * 1000,
        50,
        "ms",
        note=f"the last agent has it after {p50(everyone) * 1000:.0f} ms",
        **spread(released, 1000),
    )


def _times(trace: Path, kind: str, number: int) -> list[float]:
    rows = (line.split() for line in trace.read_text().splitlines())
    return [float(at) for at, _, what, which in rows if what == kind and which == str(number)]


def _count(trace: Path, kind: str, number: int) -> int:
    return len(_times(trace, kind, number))


# 1,000 simulated agents --------------------------------------------------------------------------


def thousand(given: argparse.Namespace) -> Iterator[Figure]:
    seen = []
    for _ in range(given.repeat_swarm):
        with a_fleet() as fleet:
            fleet.coordinator()
            size = {"members": 1020, "target": 1000, "spares": 20, "lose": 10}
            seen.append(swarm.run(fleet.host, fleet.port, fleet.token or "", **size, idle_s=4.0))
    form, closed, silent = [one.form_s for one in seen], [one.closed_s for one in seen], [one.silent_s for one in seen]
    lease = f"of which a lease of {swarm.LEASE_S:g} s and its margin are waiting"
    limit = swarm.LEASE_S + Settings().kill_margin_s + 1.0
    yield below("1,000 simulated agents form, p50", p50(form), 1.0, "s", **spread(form))
    name = "1,000 simulated agents, 1 % is killed with its guards: connections close → re-formed"
    yield below(f"{name}, p50", p50(closed), limit, "s", note=lease, **spread(closed))
    name = "1,000 simulated agents, 1 % falls silent: connections stay open → re-formed"
    yield below(f"{name}, p50", p50(silent), limit, "s", note=lease, **spread(silent))
    worst = max(max(one.idle_up, one.idle_down) for one in seen)
    name = "idle messages per second and agent, each way, worst"
    yield Figure(name, worst, "/s", "<= 2 /s", worst <= 2.0, samples=len(seen))


# Two ranks that crash ----------------------------------------------------------------------------


def crash(given: argparse.Namespace) -> Iterator[Figure]:
    ours = [_crash(_muster_single) for _ in range(given.repeat_torch)]
    peers = {name: [_crash(launch) for _ in range(given.repeat_peers)] for name, launch in _singles()}
    name = "a rank is killed → same rank back, 2-rank gloo group ready, p50"
    yield _beside(name, ours, peers, "s", _at_most(0.15))


def _crash(launch: Callable[[Fleet, str], Process]) -> Sample:
    """Seconds from a rank's SIGKILL of itself to both ranks having all-reduced again."""
    with a_fleet() as fleet:
        script = programs.write(fleet.folder)["group"]
        process = launch(fleet, f"{script} {fleet.notes} 1")
        try:
            eventually(
                lambda: len(programs.marks(fleet.notes, "ready")) >= 4 or process.proc.poll() is not None, "again", 90
            )
        except AssertionError:
            return "never (waited 90 s)"
        ready = programs.marks(fleet.notes, "ready")
        if len(ready) < 4:
            return "the job ends"
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


def _singles() -> list[tuple[str, Callable[[Fleet, str], Process]]]:
    return [("torchrun", _torchrun_single), *([("ft_launcher", _ft_single)] if PEERS.exists() else [])]


# Beside peers ------------------------------------------------------------------------------------

Sample = float | str  # seconds, or what came instead


Judge = Callable[[float, float | None], bool]  # our value and its ratio to torchrun's


def _at_most(share: float) -> tuple[str, Judge]:
    return f"<= {share:g} x torchrun", lambda _, ratio: ratio is not None and ratio <= share


def _under(limit: float, unit: str) -> tuple[str, Judge]:
    return f"< {limit:g} {unit}", lambda value, _: value < limit


GOES_ON: tuple[str, Judge] = ("the job goes on", lambda value, ratio: True)


def _beside(
    name: str, ours: list[Sample], peers: dict[str, list[Sample]], unit: str, goal: tuple[str, Judge]
) -> Figure:
    """Our median beside theirs. One sample without a time is a miss, and is said."""
    scale = 1000.0 if unit == "ms" else 1.0
    times = _times_of(ours)
    value = p50(times) * scale if len(times) == len(ours) else None
    shown = {who: _median_or_story(samples, scale) for who, samples in peers.items()}
    theirs = _times_of(peers.get("torchrun", []))
    ratio = value / (p50(theirs) * scale) if value is not None and theirs else None
    ok = value is not None and goal[1](value, ratio)
    notes = [_stories(ours)] if value is None else [f"ratio {ratio:.3f}"] if ratio is not None else []
    notes += [f"{who} {_peer_note(samples, scale)}" for who, samples in peers.items()]
    counted = spread(times, scale) | {"samples": len(ours)}
    return Figure(name, value, unit, goal[0], ok, shown, "; ".join(notes), **counted)


def _times_of(samples: list[Sample]) -> list[float]:
    return [sample for sample in samples if isinstance(sample, float)]


def _median_or_story(samples: list[Sample], scale: float) -> Sample:
    """A median; where not every sample has a time, what the others have."""
    times = _times_of(samples)
    if len(times) == len(samples):
        return p50(times) * scale
    return ", or ".join([*([report.show(p50(times) * scale)] if times else []), _stories(samples)])


def _stories(samples: list[Sample]) -> str:
    told = Counter(sample for sample in samples if isinstance(sample, str))
    return ", ".join(f"{story} ({count} of {len(samples)})" for story, count in told.items())


def _peer_note(samples: list[Sample], scale: float) -> str:
    times = _times_of(samples)
    return f"{len(samples)} samples" + (f", worst {report.show(max(times) * scale)}" if times else "")


# First start -------------------------------------------------------------------------------------


def start(given: argparse.Namespace) -> Iterator[Figure]:
    ours = [_first_start(_muster_single) for _ in range(given.repeat_torch)]
    peers = {name: [_first_start(launch) for _ in range(given.repeat_peers)] for name, launch in _singles()}
    yield _beside("first start, 2 ranks to group ready, p50", ours, peers, "s", _at_most(0.6))


def _first_start(launch: Callable[[Fleet, str], Process]) -> Sample:
    with a_fleet() as fleet:
        script = programs.write(fleet.folder)["group"]
        begun = time.monotonic()
        launch(fleet, f"{script} {fleet.notes}")
        try:
            eventually(lambda: len(programs.marks(fleet.notes, "ready")) >= 2, "ready", 90)
        except AssertionError:
            return "never (waited 90 s)"
        return programs.marks(fleet.notes, "ready")[1][0] - begun


# A worker dies -----------------------------------------------------------------------------------


def worker_loss(given: argparse.Namespace) -> Iterator[Figure]:
    """Two active workers and a spare. What is killed is the same for all, and the name says what it is."""
    every, launcher = "every process of one worker is killed", "only one worker's agent (launcher) is killed"
    starter = "the worker that started the coordinator"
    for what, doomed, hosts, goal in (
        (every, family, False, _at_most(1.0)),
        (launcher, launcher_only, False, _under(500, "ms")),
        (f"{starter}: every process is killed, the coordinator too", family, True, GOES_ON),
        (f"{starter}: only its agent (launcher) is killed", launcher_only, True, GOES_ON),
    ):
        launch = _muster_standalone if hosts else _muster_nodes
        ours = [_loss(launch, doomed, hosts=hosts) for _ in range(given.repeat_peers if hosts else given.repeat_torch)]
        peers = {
            name: [_loss(partial(_c10d_nodes, launcher=words), doomed, hosts=hosts) for _ in range(given.repeat_peers)]
            for name, words in (("torchrun", TORCHRUN), *([("ft_launcher", FT_LAUNCHER)] if PEERS.exists() else []))
        }
        yield _beside(f"{what} → first all-reduce, p50", ours, peers, "ms", goal)


def _loss(launch: Callable[[Fleet, str], list[Process]], doomed: Callable[[int], list[int]], *, hosts: bool) -> Sample:
    """Kill an active worker, or a part of it; time to the first all-reduce of the next group.

    `hosts`: the first one, with which the others meet; else one that it is not.
    """
    with a_fleet() as fleet:
        script = programs.write(fleet.folder)["group"]
        nodes = launch(fleet, f"{script} {fleet.notes}")
        eventually(lambda: len(programs.marks(fleet.notes, "ready")) >= 2, "ready", 90)
        time.sleep(4.0)  # the spare has warmed up, as it has in any real job
        ready = programs.marks(fleet.notes, "ready")
        victim = next((node for pid in _pids(ready) if ((node := _node_of(pid, nodes)) is nodes[0]) is hosts), None)
        if victim is None:
            return "the first one was the spare"
        pids = doomed(victim.pid)
        struck = time.monotonic()
        kill_all(pids)
        others = [node for node in nodes if node is not victim]

        def over() -> bool:
            healed = len(programs.marks(fleet.notes, "ready")) >= len(ready) + 2
            return healed or all(node.proc.poll() is not None for node in others)

        try:
            eventually(over, "healed or ended", WAITED_S)
        except AssertionError:
            left = sum(not gone(pid) for pid in _pids(ready))
            return f"no new group (waited {WAITED_S:g} s, {left} of {len(ready)} ranks go on)"
        again = programs.marks(fleet.notes, "ready")[len(ready) :]
        return min(at for at, _, _ in again) - struck if len(again) >= 2 else "the job ends"


def _pids(marks: list[tuple[float, int, int]]) -> list[int]:
    return [pid for _, _, pid in marks]


def launcher_only(pid: int) -> list[int]:
    return [pid]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it has just ended


def _node_of(pid: int, nodes: list[Process]) -> Process:
    ours = {node.pid: node for node in nodes}
    while pid not in ours:
        pid = _parent(pid)
        assert pid > 1, "a rank of nobody"
    return ours[pid]


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
    yield below("last active done → last spare exited, p50", p50(gaps) * 1000, 100, "ms", **spread(gaps, 1000))


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
    parser.add_argument("--repeat-peers", type=int, default=3, help="samples of each peer")
    parser.add_argument("--repeat-swarm", type=int, default=3, help="samples of the simulated agents")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)


PARTS = {
    "sixty-four": sixty_four,
    "thousand": thousand,
    "crash": crash,
    "worker-loss": worker_loss,
    "start": start,
    "ending": ending,
    "kills": kills,
}

if __name__ == "__main__":
    sys.exit(report.run("bench world", PARTS, _options))
