"""A training goes on where it was, bit by bit, whatever has died: real agents, ranks and gloo."""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster.state import disk
from tests.fleet import Fleet, Process, eventually, family, kill_all

pytestmark = pytest.mark.xdist_group("state")  # so that what is compared with is made once
KEPT = str(Path(__file__).parents[1] / "programs" / "kept.py")
STEPS = 12


@dataclass
class Run:
    """Workers that run the program, and what its ranks wrote down."""

    fleet: Fleet
    nodes: dict[str, Process]

    def lines(self, kind: str) -> list[list[str]]:
        try:
            lines = (self.fleet.notes / "kept.log").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line.split()[1:] for line in lines if line.split()[0] == kind]

    def steps(self, number: int) -> dict[int, int]:
        """The last step that each rank of a round has committed."""
        return {int(rank): int(step) for told, rank, step in self.lines("step") if int(told) == number}

    def begun(self, number: int) -> dict[int, int]:
        return {int(rank): int(step) for told, rank, step, *_ in self.lines("begin") if int(told) == number}

    def reaches(self, step: int, number: int = 0, ranks: int = 2) -> None:
        def look() -> bool:
            there = self.steps(number)
            return len(there) == ranks and min(there.values()) >= step

        eventually(lambda: look() or None, f"step {step} of round {number}", 60)

    def is_held(self, step: int, copies: int, within_s: float = 60.0) -> None:
        """So many workers have that step, or a later one: a spare is given the first ones later than buddies."""

        def look(view: dict[str, Any]) -> bool:
            kept = view.get("kept_state") or {}
            return bool((kept.get("step") or 0) >= step and kept["copies"] >= copies)

        self.fleet.until(f"{copies} workers have step {step}", look, within_s)

    def goes_on(self, number: int, ranks: int = 2) -> None:
        eventually(lambda: len(self.begun(number)) == ranks or None, f"all ranks go on in round {number}", 60)

    def worker_of(self, rank: int, number: int = 0) -> str:
        return next(one[3] for one in self.lines("begin") if one[:2] == [str(number), str(rank)])

    def kill(self, worker: str) -> None:
        kill_all(family(self.nodes[worker].pid))

    def ends(self) -> dict[int, tuple[str, ...]]:
        """What each rank had in the end."""
        view = self.fleet.until("it has ended", lambda v: v["state"] in ("succeeded", "failed"), 60)
        assert view["state"] == "succeeded", view["story"]
        return {int(rank): tuple(rest) for _, rank, *rest in self.lines("end")}

    def story(self, kind: str) -> list[str]:
        view = self.fleet.view()
        assert view is not None
        return [event["text"] for event in view["story"] if event["kind"] == kind]


def started(
    fleet: Fleet, workers: int, spares: int, *words: str, options: tuple[str, ...] = (), steps: int = STEPS
) -> Run:
    fleet.coordinator()
    known = ("--nnodes", str(workers), "--spares", str(spares), "--max-restarts", "3", *options)
    program = (KEPT, str(fleet.notes), str(steps), *words)
    return Run(fleet, {f"w{i}": fleet.node(f"w{i}", *known, program=program) for i in range(workers + spares)})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, ...]]:
    fleet = Fleet(tmp_path_factory.mktemp("undisturbed"))
    try:
        return started(fleet, 2, 0).ends()
    finally:
        fleet.close()


@pytest.mark.torches
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.scenario)])
def test_a_killed_worker_costs_no_committed_step(
    fleet: Fleet, undisturbed: dict[int, tuple[str, ...]], rank: int
) -> None:
    run = started(fleet, 2, 1, "pause=0.05", "wait=1", "optim=1")
    run.reaches(5)
    committed = min(run.steps(0).values())
    run.kill(run.worker_of(rank))
    assert run.ends() == undisturbed
    assert set(run.begun(1).values()) >= {committed} or min(run.begun(1).values()) > committed
    assert len(set(run.begun(1).values())) == 1
    assert re.search(r"from step \d+ in memory", run.story("release")[-1])


def test_what_was_not_waited_for_is_there_too(fleet: Fleet, undisturbed: dict[int, tuple[str, ...]]) -> None:
    """One kill each round, as soon as a step is told of: nobody had time to prove anything but the word."""
    run = started(fleet, 2, 1, "pause=0.6")
    for number, step in ((0, 3), (1, 6)):
        run.reaches(step, number)
        committed = min(run.steps(number).values())
        victim = run.worker_of(1, number)
        run.kill(victim)
        run.goes_on(number + 1)
        assert set(run.begun(number + 1).values()) == {committed}
        run.nodes[f"n{number}"] = fleet.node(
            f"n{number}", "--nnodes", "2", "--spares", "1", program=(KEPT, str(fleet.notes), str(STEPS), "pause=0.6")
        )
    assert run.ends() == undisturbed


def test_structured_tensors_of_two_ranks_are_never_mixed_up(fleet: Fleet) -> None:
    """Masks and their complements, one-hot rows, permutations, and tensors that differ in a few numbers only."""
    fleet.coordinator()
    program = (str(Path(KEPT).with_name("masks.py")), str(fleet.notes))

    def join(name: str) -> Process:
        return fleet.node(name, "--nnodes", "2", "--spares", "1", "--max-restarts", "9", program=program)

    def lines() -> list[list[str]]:
        with contextlib.suppress(FileNotFoundError):
            return [line.split() for line in (fleet.notes / "masks.log").read_text().splitlines()]
        return []

    def in_round(kind: str, number: int) -> dict[int, list[str]]:
        """The last line of each rank."""
        return {int(line[2]): line for line in lines() if line[0] == kind and line[1] == str(number)}

    nodes = {name: join(name) for name in ("a", "b", "c")}
    restored = 0
    for number in range(4):

        def trained(number: int = number) -> dict[int, list[str]] | None:
            steps, begun = in_round("commit", number), in_round("begin", number)
            enough = len(steps) == 2 and all(int(steps[rank][3]) >= int(begun[rank][3]) + 4 for rank in steps)
            return steps if enough else None

        steps = eventually(trained, f"round {number} trains", 60)
        worker = steps[number % 2][5]
        kill_all(family(nodes.pop(worker).pid))

        def restored_both(number: int = number) -> dict[int, list[str]] | None:
            begun = in_round("begin", number + 1)
            return begun if len(begun) == 2 else None

        begun = eventually(restored_both, "both go on", 60)
        committed = {(line[2], line[3]): line[4] for line in lines() if line[0] == "commit"}
        for rank, line in begun.items():
            assert int(line[3]) > 0
            assert line[4] == committed[str(rank), line[3]], f"rank {rank} has another state at step {line[3]}"
            restored += 1
        nodes[f"n{number}"] = join(f"n{number}")
    assert restored == 8


def test_a_rank_that_ends_right_after_a_commit(fleet: Fleet, undisturbed: dict[int, tuple[str, ...]]) -> None:
    run = started(fleet, 2, 0, "crash=1:4", "wait=1")
    assert run.ends() == undisturbed
    assert set(run.begun(1).values()) == {4}


def memory_of(agent: Process) -> list[Path]:
    """The memory in which an agent keeps state, each once."""
    folder = Path(f"/proc/{agent.pid}/fd")
    found = [path for path in folder.iterdir() if "muster-state" in os.readlink(path)]
    return list({path.stat().st_ino: path for path in found}.values())


def flip_all(agent: Process) -> int:
    """One bit in every 4 KiB of all that it keeps."""
    found = memory_of(agent)
    for path in found:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            for offset in range(100, size, 4096):
                file.seek(offset)
                (byte,) = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ 4]))
    return len(found)


def test_damaged_memory_is_not_used(fleet: Fleet, undisturbed: dict[int, tuple[str, ...]]) -> None:
    """The worker that goes on has its own memory damaged: what its ranks need comes from the spare."""
    run = started(fleet, 2, 1, "stop=6", "wait=1")
    run.reaches(6)
    run.is_held(6, 3)
    stays, goes = run.worker_of(0), run.worker_of(1)
    assert flip_all(run.nodes[stays]) >= 2
    run.kill(goes)
    (fleet.notes / "on").touch()
    assert run.ends() == undisturbed
    assert run.story("state-damaged")
    assert set(run.begun(1).values()) == {6}


def test_where_all_memory_is_damaged_nothing_of_it_is_used(
    fleet: Fleet, undisturbed: dict[int, tuple[str, ...]], tmp_path: Path
) -> None:
    run = started(fleet, 2, 1, "stop=10", "wait=1", f"durable={tmp_path / 'kept'}", "every=0.01", "pause=0.4")
    run.reaches(10)
    eventually(lambda: disk.steps(tmp_path / "kept") or None, "a whole step on disk")
    for node in run.nodes.values():
        flip_all(node)
    run.kill(run.worker_of(1))
    (fleet.notes / "on").touch()
    assert run.ends() == undisturbed
    assert run.story("state-damaged")


def test_a_step_that_fails_at_once_is_not_tried_again_and_again(
    fleet: Fleet, undisturbed: dict[int, tuple[str, ...]]
) -> None:
    run = started(fleet, 2, 0, "crash=1:6", "nan=0:6:1", "wait=1")
    assert run.ends() == undisturbed
    assert set(run.begun(1).values()) == {6}
    assert set(run.begun(2).values()) == {5}
    assert "because rounds from step 6 on failed at once" in run.story("release")[-1]


@pytest.mark.torches
def test_a_world_that_grows_and_shrinks_learns_what_it_would_have_learned(fleet: Fleet) -> None:
    words = ("pause=0.05", "wait=1", "any=1")
    run = started(fleet, 2, 2, *words, options=("--nnodes", "1:4"), steps=60)
    run.reaches(3)
    for number, size in enumerate((4, 3, 2)):
        before = min(run.steps(number).values())
        fleet.order("set-target", target=size)
        run.goes_on(number + 1, size)
        begun = set(run.begun(number + 1).values())
        assert len(begun) == 1 and min(begun) >= before
        run.reaches(min(begun) + 3, number + 1, size)
    (learned,) = {one[-1] for one in run.ends().values()}
    fleet.run_id = "undisturbed"
    (fleet.notes / "kept.log").unlink()
    program = (KEPT, str(fleet.notes), "60", "any=1")
    run.nodes = {name: fleet.node(name, "--nnodes", "2", program=program) for name in ("u0", "u1")}
    assert {one[-1] for one in run.ends().values()} == {learned}


def test_too_little_room_is_told_and_the_training_goes_on(
    fleet: Fleet, undisturbed: dict[int, tuple[str, ...]]
) -> None:
    run = started(fleet, 2, 0, options=("--state-memory", "64Ki"))
    assert run.ends() == undisturbed
    assert "do not fit" in run.story("state-refused")[0]
    run.nodes["w0"].expect("muster.State: .* do not fit")


@pytest.mark.torches
def test_a_total_loss_goes_on_from_disk(fleet: Fleet, undisturbed: dict[int, tuple[str, ...]], tmp_path: Path) -> None:
    words = (f"durable={tmp_path / 'kept'}", "every=0.01", "pause=0.3")
    # Two of three voices are lost at once. That counts as long as both had promised lately, also on a busy machine.
    run = started(fleet, 2, 0, *words, options=("--lease-s", "15"))
    eventually(lambda: disk.steps(tmp_path / "kept") or None, "a whole step on disk", 60)
    for worker in list(run.nodes):
        run.kill(worker)
    run.nodes = {
        name: fleet.node(name, "--nnodes", "2", program=(KEPT, str(fleet.notes), str(STEPS), *words))
        for name in ("x0", "x1")
    }
    assert run.ends() == undisturbed
    last = max(int(number) for number, *_ in run.lines("begin"))
    assert min(run.begun(last).values()) > 0


@pytest.mark.soak
def test_after_the_death_of_a_coordinator_what_is_held_is_known_again(
    fleet: Fleet, undisturbed: dict[int, tuple[str, ...]]
) -> None:
    run = started(fleet, 2, 1, "stop=6", "wait=1")
    run.reaches(6)
    fleet.settled(4)
    fleet.processes[0].kill()
    fleet.processes[0].wait()
    fleet.coordinator()
    fleet.until("all are back", lambda v: v["state"] == "training" and len(v["members"]) == 3)
    run.kill(run.worker_of(0))
    (fleet.notes / "on").touch()
    assert run.ends() == undisturbed
    assert set(run.begun(1).values()) == {6}


@pytest.mark.soak
def test_two_of_four_may_die_at_once(fleet: Fleet, tmp_path: Path) -> None:
    """What one of them held for the other is lost with it: then the disk counts, and it is said."""
    words = ("stop=12", "wait=1", f"durable={tmp_path / 'kept'}", "every=0.01", "pause=0.3")
    run = started(fleet, 4, 2, *words, steps=16)
    run.reaches(12, ranks=4)
    eventually(lambda: list((tmp_path / "kept").glob("step-*/rank-*3*")) or None, "a step on disk")
    victims = [run.worker_of(1), run.worker_of(2)]
    kill_all([pid for name in victims for pid in family(run.nodes[name].pid)])
    (fleet.notes / "on").touch()
    ends = run.ends()
    assert len(ends) == 4 and len({end[-1] for end in ends.values()}) == 1
    assert len(set(run.begun(1).values())) == 1 and min(run.begun(1).values()) > 0
    assert re.search(r"from step \d+ (in memory|on disk)", run.story("release")[-1])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_random_kills_cost_no_step_that_was_waited_for(fleet: Fleet, seed: int) -> None:
    """Twenty kills of whole workers in one run; a new worker comes after each."""
    draw = random.Random(seed)
    words = ("pause=0.1", "wait=1", f"mib={draw.choice([0, 1, 8])}")
    run = started(fleet, 2, 1, *words, steps=10_000, options=("--max-restarts", "0"))
    for number in range(20):
        run.goes_on(number)
        run.reaches(max(run.begun(number).values()) + 2, number)
        time.sleep(draw.random() / 3)
        committed = min(run.steps(number).values())
        run.kill(run.worker_of(draw.randrange(2), number))
        name = f"n{number}"
        program = (KEPT, str(fleet.notes), "10000", *words)
        run.nodes[name] = fleet.node(name, "--nnodes", "2", "--spares", "1", "--max-restarts", "0", program=program)
        run.goes_on(number + 1)
        assert len(set(run.begun(number + 1).values())) == 1
        assert run.begun(number + 1)[0] >= committed, run.story("release")[-1]
        fleet.until("a spare is here", lambda v: len(v["members"]) == 3)
    fleet.order("cancel", why="enough")


def test_wherever_temporary_files_are(fleet: Fleet, undisturbed: dict[int, tuple[str, ...]]) -> None:
    """The name of a socket may have about a hundred bytes, a folder's many more."""
    far = fleet.folder / ("d" * 120)
    far.mkdir()
    fleet.env["TMPDIR"] = str(far)
    run = started(fleet, 2, 0, "crash=1:4", "wait=1")
    assert run.ends() == undisturbed
    assert set(run.begun(1).values()) == {4}


def test_a_training_without_state_pays_nothing(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1")
    fleet.started(0, 1)
    threads = [path.read_text() for path in Path(f"/proc/{node.pid}/task").glob("*/comm")]
    assert not any("keeper" in one for one in threads)
    assert not memory_of(node)
    fleet.go()
    assert node.wait() == 0
