"""What a user imports: every name is there, nothing is loaded before it is needed, and a script passes mypy."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import muster
from muster import errors

TYPES = "WorldSize WorldStatus RankStatus RankExit Condition Outcome Resources Training Event Usage"
CALLS = "Client DistributedTraining distributed distributed_async progress __version__"
HEAVY = ("httpx2", "asyncio", "ssl", "http.client", "subprocess", "pydantic", "rich", "typer")

SCRIPT = """
import muster
from muster import WorldSize

t = muster.distributed(script="train.py", name="demo", world_size=WorldSize(min=2, target=2, max=4), spares=1)
t.wait_until_min_world(timeout=60)
world: muster.WorldStatus = t.scale(target=3)
t.wait_until_target_world(timeout=300)
try:
    t.result()
except muster.TrainingFailed as failed:
    print([exit.exit_code for exit in failed.rank_exits], failed.required_min)
for line in t.logs(follow=True):
    print(line.upper())


@muster.distributed(world_size=2, resources={"gpus": 1})
def train(lr: float, steps: int = 10) -> None:
    muster.progress(steps)


handle: muster.DistributedTraining = train(0.1, steps=3)


async def main() -> None:
    async with muster.Client() as client:
        made = await client.train_async(command=["true"], world_size=(1, 2, 4))
        print((await made.wait_async()).ready)
        async for change in client.watch_async():
            print(change.type, change.training.name)
"""
WRONG = """
import muster

muster.distributed(script="train.py", world_sise=2)
muster.distributed(script="train.py", spares="2")


@muster.distributed(world_size=2)
def train(lr: float) -> None: ...


train("0.1")
train(0.1).scale("3")
"""


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", [*TYPES.split(), *CALLS.split()])
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(muster, name) is not None
    assert name in muster.__all__ and name in dir(muster)


def test_every_error_is_public() -> None:
    tree = {name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, errors.MusterError)}
    assert tree <= set(muster.__all__)
    assert all(getattr(muster, name) is getattr(errors, name) for name in tree)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = muster.nothing_like_this


def test_importing_muster_loads_nothing_heavy_and_naming_the_sdk_no_http_client(tmp_path: Path) -> None:
    bare = f"import sys, muster; print([name for name in {HEAVY} if name in sys.modules])"
    named = "import sys, muster; muster.distributed, muster.Client; print('httpx2' in sys.modules)"
    assert run("-c", bare, folder=tmp_path).stdout == "[]\n"
    assert run("-c", named, folder=tmp_path).stdout == "False\n"


def test_a_user_s_script_passes_mypy_and_its_mistakes_do_not(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(WRONG)
    said = run("-m", "mypy", "--strict", "script.py", "wrong.py", folder=tmp_path).stdout
    errors = [line.split(":")[:2] for line in said.splitlines() if ": error:" in line]
    assert {(name, int(number)) for name, number in errors} == {("wrong.py", line) for line in (4, 5, 12, 13)}, said
    assert "checked 2 source files" in said, said


def test_an_uncaught_error_prints_its_hint() -> None:
    program = "import muster; raise muster.NotFound('there is no training', hint='muster ps lists them')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert ended.stderr.endswith("NotFound: there is no training\nhint: muster ps lists them\n")
