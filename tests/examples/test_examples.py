"""Does every example do what its first lines say? Each runs as a user runs it, only shorter."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.fleet import Process
from tests.plane import Plane

PATIENCE_S = 120.0
EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.xdist_group("examples")  # torch on all cores at once would be slow for everyone


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Plane]:
    """A home without a control plane: the first example that needs one starts it."""
    made = Plane(tmp_path)
    made.env["OMP_NUM_THREADS"] = "1"  # several ranks share few cores
    yield made
    made.muster("server", "stop", "--cancel").wait()
    made.close()


def example(shell: Plane, name: str, *words: str) -> Process:
    return shell.start(sys.executable, str(EXAMPLES / name), *words)


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.pages
def test_the_cnn_survives_the_loss_of_a_worker_and_goes_on_alone_where_it_was(shell: Plane) -> None:
    words = ("--name", "cifar", "--workers", "2", "--spares", "1", "--max-restarts", "0")
    script = str(EXAMPLES / "ddp_cifar_like.py")
    run = shell.muster("run", script, *words, "--", "--steps", "80", "--every", "5")
    run.expect(r"step 10: loss")
    shell.kill_worker("cifar-1")
    assert run.wait(PATIENCE_S) == 0, run.text
    starts = [int(step) for step in re.findall(r"of 2 starts at step (\d+)", run.text)]
    assert len(starts) == 4 and starts[:2] == [0, 0] and starts[2] == starts[3] >= 10
    found = losses(run.text)
    assert found[-1] < 0.5 * found[0]
    alone = example(shell, "ddp_cifar_like.py", "--steps", "90")
    assert alone.wait(PATIENCE_S) == 0, alone.text
    assert "rank 0 of 1 starts at step 80" in alone.text
    assert losses(alone.text)[-1] < 0.5 * found[0]


@pytest.mark.torches
@pytest.mark.pages
def test_a_training_survives_the_kill_of_a_worker(shell: Plane) -> None:
    run = example(shell, "survive_kill.py", "--steps", "200")
    assert run.wait(PATIENCE_S) == 0, run.text
    killed = re.search(r"kill -9 \d+: the agent of (\S+-1), which has rank 1", run.text)
    assert killed
    heir = re.search(r"(\S+) has rank 1 now; restarts spent: 0", run.text)
    assert heir and heir[1] != killed[1]
    [step] = set(re.findall(r"round 1: rank \d of 2 starts at step (\d+)", run.text))
    assert int(step) >= 50
    assert re.search(r"WorkerLost .*\n(.*\n)*.*RoundReleased +round 1: 2 workers", run.text)
    assert run.text.endswith("succeeded\n")
    assert shell.client.list() == [], "it is removed"
    times = r"ranks run after \S+ m?s, next step after \S+ m?s"
    assert re.search(rf"Healed +{killed[1]} lost; {heir[1]} has rank 1; {times}; back at step \d+", run.text)


@pytest.mark.torches
@pytest.mark.pages
def test_a_training_grows_and_shrinks(shell: Plane) -> None:
    run = example(shell, "elastic_scale.py", "2", "1")
    assert run.wait(PATIENCE_S) == 0, run.text
    reached = re.findall(r"^reached WorldStatus\(ready=(\d), target=(\d)", run.text, re.MULTILINE)
    assert reached == [("2", "2"), ("1", "1")]
    assert "  target 1 → 2: scaled up on request\n  target 2 → 1: scaled down on request\n" in run.text
    assert "restarts spent: 0" in run.text and "was cancelled: cancelled on request" in run.text
    assert shell.client.list() == [], "it is removed"


@pytest.mark.skipif(
    metadata.version("torch").startswith("2.8."),
    reason="torch 2.8 adds up what gloo's reduce_scatter should average: gradients depend on the size of the world",
)
@pytest.mark.torches
@pytest.mark.pages
def test_a_sharded_training_is_killed_grown_and_shrunk_and_its_loss_goes_on_as_if_nothing_had_been(
    shell: Plane, tmp_path: Path
) -> None:
    picture = tmp_path / "loss.svg"
    run = example(shell, "fsdp2_survives.py", str(picture), "--steps", "4")
    assert run.wait(3 * PATIENCE_S) == 0, run.text
    starts = re.findall(r"round (\d): rank 0 of (\d) starts at step (\d+)", run.text)
    assert [(number, world) for number, world, _ in starts] == [("0", "2"), ("1", "2"), ("2", "3"), ("3", "2")]
    went_on = [int(step) for _, _, step in starts]
    assert went_on[0] == 0 and all(before < after for before, after in itertools.pairwise(went_on))
    told = re.search(r"equal bit by bit up to step (\d+), never further apart than ([\d.e+-]+)", run.text)
    assert told and int(told[1]) >= went_on[2] and float(told[2]) < 1e-5, run.text
    drawn = picture.read_text()
    assert drawn.count("<polyline") == 2 and all(f">{word}<" in drawn for word in ("worker killed", "3 workers"))
    assert shell.client.list() == [], "it is removed"


@pytest.mark.pages
def test_two_pipelines_learn_and_lend_each_other_gpus(shell: Plane) -> None:
    run = example(shell, "two_rl_pipelines.py", "--steps", "5")
    assert run.wait(PATIENCE_S) == 0, run.text
    for name, pair in (("a", "0, 1"), ("b", "2, 3")):
        rewards = re.findall(
            rf"^{name} step \d: mean reward ([\d.]+) .* trained on \[{pair}\]$", run.text, re.MULTILINE
        )
        assert len(rewards) == 5 and max(map(float, rewards[2:])) > float(rewards[0])
    lanes = re.findall(r"^GPU \d  ([abAB.]+)$", run.text, re.MULTILINE)
    assert [{"A" in lane, "B" in lane} for lane in lanes] == [{True, False}] * 4, "each trains on its own pair"
    assert "b" in lanes[0] + lanes[1], "the one with more to do borrows"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 120
    head = text.split('"""')[1]
    assert re.search(rf"examples/{path.name}|make demo|{path.name} ", head)
