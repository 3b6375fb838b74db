"""A decorated function: calling it submits, a rank runs it, and what cannot travel is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.sdk.functions import RUNNER, address_of
from tests.sdk import functions_to_run
from tests.sdk.scripted import PATIENCE_S, House, Plane

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(autouse=True)
def speaks_to_the_house(house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MUSTER_URL", house.url)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))


async def a_coroutine() -> None: ...


def run_rank(args: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", RUNNER, *args], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S * 3
    )


def test_a_call_submits_a_training_that_runs_the_function(plane: Plane, tmp_path: Path) -> None:
    made = functions_to_run.write(str(tmp_path / "a"), times=2)
    spec = made.training.spec
    assert isinstance(made, muster.DistributedTraining) and made.name.startswith("write-")
    assert (spec.module, spec.world_size.target, spec.max_restarts) == (RUNNER, 2, 0)
    assert not (tmp_path / "a").exists()
    done = run_rank(list(spec.args), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "a").read_text() == "written written "
    assert (tmp_path / "a.again").read_text() == "written "
    assert len(plane.writes()) == 1


def test_each_call_is_a_training_of_its_own(plane: Plane) -> None:
    names = {functions_to_run.bare().name for _ in range(2)}
    names.add(asyncio.run(functions_to_run.bare.submit_async()).name)
    assert len(names) == 3
    assert functions_to_run.bare.local() == 5


def test_a_function_of_the_program_itself_is_found_by_its_file(tmp_path: Path, plane: Plane) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import muster\n"
        "@muster.distributed(name='mine')\n"
        "def train(path: str) -> None:\n"
        "    open(path, 'w').write(__name__)\n"
        "if __name__ == '__main__':\n"
        "    print(train('out').name)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=PATIENCE_S * 3)
    assert (done.stdout, done.stderr) == ("mine\n", "")
    args = plane.trainings["mine"].spec.args
    assert args[0] == f"{program}:train"
    assert run_rank(list(args), tmp_path).returncode == 0
    assert (tmp_path / "out").read_text() == "__muster_main__"


def test_a_function_that_is_not_decorated_can_be_named_too(tmp_path: Path) -> None:
    target, root = address_of(functions_to_run.plain)
    assert (target, root) == ("tests.sdk.functions_to_run:plain", ROOT)
    run_rank([target, json.dumps({"args": [str(tmp_path / "b")], "kwargs": {}}), root], tmp_path)
    assert (tmp_path / "b").read_text() == "plain"


def test_a_failure_of_the_function_is_the_rank_s(tmp_path: Path) -> None:
    done = run_rank(["tests.sdk.functions_to_run:plain", '{"args": ["/nowhere/x"], "kwargs": {}}', ROOT], tmp_path)
    assert done.returncode == 1 and "FileNotFoundError" in done.stderr


def test_what_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    done = run_rank(["tests.sdk.functions_to_run:nobody", '{"args": [], "kwargs": {}}', ROOT], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "muster: tests.sdk.functions_to_run has no function 'nobody'\n"


def test_what_a_rank_cannot_import_is_refused_when_it_is_decorated() -> None:
    def nested() -> None: ...

    refused: list[tuple[Any, str]] = [
        (lambda: None, "lambda"),
        (nested, "not at the top of its module"),
        (House.die, "not at the top of its module"),
        (print, "is not a function"),
        (a_coroutine, "must be a plain function"),
    ]
    for function, why in refused:
        with pytest.raises(muster.InvalidRequest, match=why):
            muster.distributed(function)


@pytest.mark.parametrize("value", [object(), {1: "a"}, [Path("/")], {"a": b"x"}, {1, 2}])
def test_an_argument_that_does_not_fit_into_json_is_refused(plane: Plane, value: Any) -> None:
    with pytest.raises(muster.InvalidRequest, match="argument 0"):
        functions_to_run.write(value)
    assert plane.writes() == []


def test_a_call_that_does_not_fit_the_function_is_refused_here(plane: Plane) -> None:
    wrong: Any = functions_to_run.write
    with pytest.raises(TypeError, match="unexpected"):
        wrong("a", colour="red")
    assert plane.writes() == []


def test_a_program_is_submitted_in_one_call_and_its_twin(plane: Plane) -> None:
    made = muster.distributed(script=__file__, world_size=2, name="one", labels={"team": "vision"})
    twin = asyncio.run(muster.distributed_async(command=["true"], name="two", namespace="lab"))
    assert (made.name, made.training.metadata.labels) == ("one", {"team": "vision"})
    assert (twin.name, twin.namespace) == ("two", "lab")
    assert plane.writes()[-1].path == "/v1/namespaces/lab/trainings"


def test_a_client_and_a_key_can_be_given(plane: Plane, house: House) -> None:
    with muster.Client(house.url, namespace="lab") as client:
        made = muster.distributed(module="a.b", client=client, idempotency_key="mine")
    assert made.namespace == "lab"
    assert plane.writes()[-1].headers["idempotency-key"] == "mine"


GUARDED = """\
import asyncio
import sys
import muster

@muster.distributed(name="mine", force={force})
def train() -> None:
    print("trains")

def main() -> None:
    {call}

try:
    {body}
except muster.InvalidRequest as error:
    sys.exit(f"{{error}}; {{error.hint}}")
"""


def run_program(folder: Path, *, body: str, call: str = "train()", force: bool = False) -> str:
    """What a program says that is refused."""
    program = folder / "program.py"
    program.write_text(GUARDED.format(body=body, call=call, force=force))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=PATIENCE_S * 3)
    return done.stderr


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("pass", "train()"),
        ("train()", "main()"),
        ("asyncio.run(train.submit_async())", "main()"),
        ("train()", "for _ in range(2): main()"),
    ],
)
def test_a_call_that_every_rank_would_repeat_is_not_submitted(
    plane: Plane, tmp_path: Path, call: str, body: str
) -> None:
    said = run_program(tmp_path, call=call, body=body)
    assert "train is called at the top of its module (line 13): ranks, which import the module" in said
    assert "put the call below `if __name__ == '__main__':`" in said
    assert plane.writes() == []


def test_a_guarded_call_is_submitted_and_so_is_one_that_insists(plane: Plane, tmp_path: Path) -> None:
    assert run_program(tmp_path, body="main() if False else None\n    if __name__ == '__main__': main()") == ""
    assert run_program(tmp_path, body="train()", force=True) == ""
    assert len(plane.writes()) == 2


@pytest.mark.parametrize("again", ["train()", "muster.distributed(command=['true'])"])
def test_a_rank_that_comes_by_a_call_while_it_imports_says_so(plane: Plane, tmp_path: Path, again: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import muster\n@muster.distributed\ndef train(): ...\nif True: {again}\n")
    done = run_rank([f"{program}:train", '{"args": [], "kwargs": {}}', str(tmp_path)], tmp_path)
    assert done.returncode == 1
    assert "is called while this rank imports its module" in done.stderr.splitlines()[-2]
    assert plane.writes() == []


def test_a_script_that_is_not_there_is_refused_where_the_control_plane_would_look_for_it_here(
    plane: Plane, tmp_path: Path
) -> None:
    where = tmp_path / "nowhere.py"
    with pytest.raises(muster.InvalidRequest, match=f"there is no file {where}") as refused:
        muster.distributed(script=where)
    assert refused.value.problems[0].field == "spec.script" and "force=True" in refused.value.hint
    with pytest.raises(muster.InvalidRequest, match=r"there is no file /data/train\.py"):
        asyncio.run(muster.distributed_async(script="train.py", working_dir="/data"))
    assert plane.writes() == []
    muster.distributed(script=where, force=True)
    muster.distributed(script=where, image="registry.example.com/it:1")
    plane.place = "elsewhere"
    muster.distributed(script=where)
    assert [one.params.get("force") for one in plane.writes()] == ["true", None, None]
