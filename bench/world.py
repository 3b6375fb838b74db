"""How fast does the world form, heal and end? With torchrun, ft_launcher and torchft beside us, in the same run.

python -m bench.world [--json] [--only PART] [--repeat-peers N] …

What is killed is the same for all. torchrun is "tuned" as bench.launchers says. `--repeat-peers 0` leaves peers out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from bench import launchers, losses, programs, report, swarm
from bench.control import a_plane
from bench.launchers import Launcher, Spot
from bench.losses import Case, a_fleet
from bench.report import Figure, Goal, Sample, stories
from tests.fleet import Fleet, Process, eventually, family, free_port, kill_all
from tests.kube import binaries
from tests.netns.machines import why_not
from tests.node.kills import random_kills

NOOP = ("--no-python", "sleep", "100000")


# 64 agents ---------------------------------------------------------------------------------------


def sixty_four(given: argparse.Namespace) -> Iterator[Figure]:
    for what, doomed in (("every process of one worker", family), ("only one worker's agent", lambda pid: [pid])):
        seen = _sixty_four(given.workers, given.repeat, doomed)
        job = f"{given.workers} workers on these cores, 1 spare; killed: {what}"
        yield report.compared(f"{job} → a survivor is told", seen.told, {}, "ms", Goal(p99=100))
        yield report.compared(f"{job} → next round released", seen.released, {}, "ms", Goal(p50=50))
        yield report.compared(f"{job} → the last agent has it", seen.everyone, {}, "ms", Goal(p50=120))


@dataclass
class _Struck:
    told: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)
    everyone: list[float] = field(default_factory=list)


def _sixty_four(workers: int, repeat: int, doomed: Callable[[int], list[int]]) -> _Struck:
    seen = _Struck()
    with a_fleet() as fleet:
        trace = fleet.folder / "trace"
        fleet.env["MUSTER_TRACE"] = str(trace)
        fleet.coordinator()
        options = ("--nnodes", str(workers), "--spares", "1", "--max-restarts", "0", "--last-call-s", "30")
        nodes = {f"w{i}": fleet.node(f"w{i}", *options, program=NOOP) for i in range(workers + 1)}
        fleet.until("all train", lambda v: v["state"] == "training" and v["world"] == workers, 120)
        for turn in range(repeat):
            number = _settled(fleet, trace, workers)
            pids = doomed(nodes[f"w{turn}"].pid)
            struck = time.monotonic()
            kill_all(pids)
            eventually(lambda n=number: _count(trace, "release", n + 1) >= workers, "all released again")  # type: ignore[misc]
            seen.told += [at - struck for at in _times(trace, "recall", number)]
            seen.everyone.append(max(_times(trace, "release", number + 1)) - struck)
            story = fleet.until("it is told", lambda v: v["round"] > number)["story"]  # noqa: B023
            seen.released.append(next(line["at"] for line in story[::-1] if line["kind"] == "release") - struck)
            report.progress(f"{turn + 1} of {repeat}: {seen.released[-1] * 1000:.0f} ms")
            nodes[f"n{turn}"] = fleet.node(f"n{turn}", *options, program=NOOP)
    return seen


def _settled(fleet: Fleet, trace: Path, workers: int) -> int:
    """The round that trains; everybody has been told, and the spare has come to rest."""
    view = fleet.until("settled", lambda v: v["state"] == "training" and v["spares"] == 1, 60)
    number = int(view["round"])
    eventually(lambda: _count(trace, "release", number) >= workers, "all released")
    time.sleep(1.0)
    return number


def _times(trace: Path, kind: str, number: int) -> list[float]:
    rows = (line.split() for line in trace.read_text().splitlines())
    return [float(at) for at, _, what, which in rows if what == kind and which == str(number)]


def _count(trace: Path, kind: str, number: int) -> int:
    return len(_times(trace, kind, number))


# Simulated agents --------------------------------------------------------------------------------


def thousand(given: argparse.Namespace) -> Iterator[Figure]:
    """Those whose guards tell are known to be gone; for the others a lease is waited."""
    target = given.agents
    lose = max(1, target // 100)
    size = {"members": target + 3 * lose, "target": target, "spares": 3 * lose, "lose": lose}
    seen, failed = _swarms(given.repeat_swarm, size, swarm.LEASE_S)
    waited = Goal(p50=swarm.LEASE_S + 1.0)
    count = f"{target:,}"
    yield _formed(count, "form", [one.form_s for one in seen], failed, Goal(p50=1.0))
    yield _formed(count, "1 % is killed, guards tell → re-formed", [one.told_s for one in seen], failed, Goal(p50=1.0))
    yield _formed(count, "1 % is killed with its guards → re-formed", [one.closed_s for one in seen], failed, waited)
    yield _formed(count, "1 % falls silent → re-formed", [one.silent_s for one in seen], failed, waited)
    if seen:
        worst = max(max(one.idle_up, one.idle_down) for one in seen)
        name = f"{count} simulated agents: idle messages per second and agent, each way, worst"
        yield Figure(name, worst, "/s", "≤ 2 /s", worst <= 2.0, samples=len(seen))


def ten_thousand(given: argparse.Namespace) -> Iterator[Figure]:
    """With a lease that one core can renew for all of them; the process of the agents needs 20,000 descriptors."""
    target = 10 * given.agents
    lose = max(1, target // 100)
    size = {"members": target + lose, "target": target, "spares": lose, "lose": lose}
    seen, failed = _swarms(given.repeat_swarm, size, 30.0)
    count = f"{target:,}"
    yield _formed(count, "form", [one.form_s for one in seen], failed, Goal(p50=5.0))
    yield _formed(count, "1 % is killed, guards tell → re-formed", [one.told_s for one in seen], failed, Goal(p50=5.0))


def _swarms(repeat: int, size: dict[str, int], lease_s: float) -> tuple[list[swarm.Seen], list[str]]:
    """Each in a run of its own, until one fails."""
    seen: list[swarm.Seen] = []
    for _ in range(repeat):
        with a_fleet() as fleet:
            fleet.coordinator()
            try:
                seen.append(swarm.run(fleet.host, fleet.port, fleet.token or "", **size, idle_s=2.0, lease_s=lease_s))
            except (TimeoutError, OSError, AssertionError) as problem:
                return seen, [f"never: {type(problem).__name__} {problem}".strip()]
        report.progress(str(seen[-1]))
    return seen, []


def _formed(count: str, what: str, times: list[float], failed: list[str], goal: Goal) -> Figure:
    name = f"{count} simulated agents{' ' if what == 'form' else ', '}{what}"
    return report.compared(name, [*times, *failed], {}, "s", goal)


# A worker is lost --------------------------------------------------------------------------------

JOB = "2 workers, 1 spare"
NEXT_GROUP = "first all-reduce of the next group"


def worker(given: argparse.Namespace) -> Iterator[Figure]:
    """Under muster-node alone: with launcher and ranks, or the launcher alone, which our guard survives."""
    case = Case(losses.every_process)
    ours = losses.series(launchers.muster, case, given.repeat_losses, patient=True)
    name = f"{JOB}; killed: every process of one worker → {NEXT_GROUP}"
    peers = _peers(given, case, launchers.PEERS)
    yield report.compared(name, ours.first_all_reduce, peers, "ms", Goal(p50=150, p99=400))
    ours = losses.series(launchers.muster, Case(losses.launcher_only), given.repeat, patient=True)
    name = f"{JOB}; killed: only one worker's agent → {NEXT_GROUP}"
    yield report.compared(name, ours.first_all_reduce, {}, "ms", Goal(p50=150))


def machine(given: argparse.Namespace) -> Iterator[Figure]:
    """Nothing of it answers and nothing is closed. The machine is not the one where the others meet."""
    case = Case(losses.link, of_machines=True)
    if why := why_not():
        yield _did_not_run(f"{JOB}; lost: the link of one machine", why)
        return
    ours = losses.series(launchers.muster, case, given.repeat_machines, watch=True, patient=True)
    name = f"{JOB}; lost: the link of one machine → next round released"
    yield report.compared(name, [*ours.released, *stories(ours.first_all_reduce)], {}, "s", Goal(p50=2.0, p99=2.5))
    name = f"{JOB}; lost: the link of one machine → {NEXT_GROUP}"
    yield report.compared(name, ours.first_all_reduce, _peers(given, case, launchers.QUICKEST), "s", Goal())


def coordinator(given: argparse.Namespace) -> Iterator[Figure]:
    """The first machine hosts what the others meet at: our coordinator, torchrun's store, torchft's lighthouse."""
    job, meeting = "3 workers, 1 spare", "the machine of the coordinator (store, lighthouse)"
    if why := why_not():
        yield _did_not_run(f"{job}; lost: {meeting}", why)
        return
    for what, how, goal in (
        (f"killed: everything on {meeting}", losses.machine_killed, Goal(p50=1.0)),
        (f"lost: the link of {meeting}", losses.link, Goal(p50=4.0)),
    ):
        case = Case(how, active=3, of_machines=True, first=True)
        ours = losses.series(launchers.muster, case, given.repeat_coordinator, patient=True)
        peers = _peers(given, case, launchers.QUICKEST)
        yield report.compared(f"{job}; {what} → {NEXT_GROUP}", ours.first_all_reduce, peers, "s", goal)


def _peers(given: argparse.Namespace, case: Case, who: tuple[Launcher, ...]) -> dict[str, list[Sample]]:
    repeat = given.repeat_peers
    return {peer.name: losses.series(peer, case, repeat).first_all_reduce for peer in who if repeat}


def _did_not_run(name: str, why: str) -> Figure:
    return Figure(name, None, "s", "it goes on", False, note=f"did not run: {why}")


# Under a control plane ---------------------------------------------------------------------------


def control_plane(given: argparse.Namespace) -> Iterator[Figure]:
    with a_plane() as plane:
        samples = losses.under_a_control_plane(plane, plane.worker_pids, given.repeat_control)
    name = f"control plane, {JOB}; killed: every process of one worker → {NEXT_GROUP}"
    yield report.compared(name, samples, {}, "ms", Goal(p50=250))


def kubernetes(given: argparse.Namespace) -> Iterator[Figure]:
    """In a process of its own, because its Pods live in a network of their own."""
    try:
        binaries.find()
    except binaries.NotFound as problem:
        yield _did_not_run("Kubernetes' test nodes", str(problem))
        return
    words = ("-m", "bench.kube", "--only", "loss", "--json", "--losses", str(given.repeat_kube))
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        yield _did_not_run("Kubernetes' test nodes", "bench.kube failed")
        return
    for told in json.loads(done.stdout)["figures"]:
        yield Figure(**{one.name: told[one.name] for one in fields(Figure)})


# Two ranks that crash, and that start -------------------------------------------------------------


def crash(given: argparse.Namespace) -> Iterator[Figure]:
    name = "2 ranks of one worker; killed: one rank → the same rank is back, group ready"
    yield _single(given, name, _crash, Goal(share=0.15))


def start(given: argparse.Namespace) -> Iterator[Figure]:
    yield _single(given, "first start, 2 ranks of one worker → group ready", _first_start, Goal(share=0.6))


def _single(given: argparse.Namespace, name: str, once: Callable[[Launcher], Sample], goal: Goal) -> Figure:
    """torchft has no launcher that would start a rank again."""
    peers = {peer.name: _again(once, peer, given.repeat_peers) for peer in (launchers.torchrun, launchers.ft_launcher)}
    ours = _again(once, launchers.muster, given.repeat_torch)
    return report.compared(name, ours, peers if given.repeat_peers else {}, "s", goal)


def _again(once: Callable[[Launcher], Sample], launcher: Launcher, repeat: int) -> list[Sample]:
    """Until it fails, for which a minute and more may have been waited."""
    samples: list[Sample] = [launcher.missing] if launcher.missing else []
    while len(samples) < repeat and not stories(samples):
        samples.append(once(launcher))
        report.progress(f"{launcher.name}, {len(samples)} of {repeat}: {report.show(samples[-1])}")
    return samples


def _crash(launcher: Launcher) -> Sample:
    """Seconds from a rank's SIGKILL of itself to both ranks having all-reduced again."""
    with a_fleet() as fleet:
        process, _ = _launch(fleet, launcher, "1")
        ready = _ready(fleet, process, 4)
        return ready[3][0] - programs.marks(fleet.notes, "crash")[0][0] if len(ready) >= 4 else _instead(process)


def _first_start(launcher: Launcher) -> Sample:
    with a_fleet() as fleet:
        process, begun = _launch(fleet, launcher)
        ready = _ready(fleet, process, 2)
        return ready[1][0] - begun if len(ready) >= 2 else _instead(process)


def _launch(fleet: Fleet, launcher: Launcher, *words: str) -> tuple[Process, float]:
    spot = Spot("a", "127.0.0.1", f"127.0.0.1:{free_port()}", first=True, active=1, nproc=2, spares=0)
    program = (programs.write(fleet.folder)[launcher.program], str(fleet.notes), *words)
    begun = time.monotonic()
    return fleet.start(*launcher.command(spot, program), **launcher.env(spot)), begun


def _ready(fleet: Fleet, process: Process, count: int) -> list[tuple[float, int, int]]:
    deadline = time.monotonic() + losses.LIMIT_S
    while len(ready := programs.marks(fleet.notes, "ready")) < count:
        if time.monotonic() > deadline or process.proc.poll() is not None:
            break
        time.sleep(0.005)
    return ready


def _instead(process: Process) -> str:
    code = process.proc.poll()
    return f"never in {losses.LIMIT_S:g} s" if code is None else f"never: the job ended with exit {code}"


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
    yield report.compared("last active done → last spare exited", gaps, {}, "ms", Goal(p50=100))


def kills(given: argparse.Namespace) -> Iterator[Figure]:
    with a_fleet() as fleet:
        tally = random_kills(fleet, seed=given.seed, kills=given.kills)
    broken = len(tally.broken) + len(tally.left)
    name = f"{given.kills} random kills: invariants broken + processes left"
    note = f"{tally.rounds} rounds; " + "; ".join([*tally.broken, *tally.left][:3])
    yield Figure(name, float(broken), "", "0", broken == 0, note=note)


def _options(parser: argparse.ArgumentParser) -> None:
    for name, default, of in (
        ("losses", 50, "workers of ours that are killed"),
        ("control", 15, "workers that are killed under the control plane"),
        ("kube", 10, "workers that are killed on Kubernetes"),
        ("machines", 20, "machines of ours whose link is taken down"),
        ("coordinator", 3, "machines with our coordinator that are lost"),
        ("peers", 3, "each peer; 0: none. One that did not heal is not asked again"),
        ("torch", 5, "a start, and a crash, of ours"),
        ("swarm", 3, "1,000 and 10,000 simulated agents"),
    ):
        parser.add_argument(f"--repeat-{name}", type=int, default=default, help=f"samples: {of} ({default})")
    parser.add_argument("--repeat", type=int, default=10, help="samples of what is quick (10)")
    parser.add_argument("--workers", type=int, default=64, help="workers of the part `sixty-four` (64)")
    agents = "simulated agents of `thousand`; `ten-thousand` has ten times as many (1000)"
    parser.add_argument("--agents", type=int, default=1000, help=agents)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)


PARTS = {
    "worker": worker,
    "control-plane": control_plane,
    "kubernetes": kubernetes,
    "machine": machine,
    "coordinator": coordinator,
    "sixty-four": sixty_four,
    "thousand": thousand,
    "ten-thousand": ten_thousand,
    "crash": crash,
    "start": start,
    "ending": ending,
    "kills": kills,
}

if __name__ == "__main__":
    sys.exit(report.run("bench world", PARTS, _options))
