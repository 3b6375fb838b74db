"""Arguments become a request, or one error that lists everything that is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import InvalidRequest
from muster.sdk.submission import training_of, unique_name
from muster.types.training import DNS_LABEL, Mesh, Resources, Spec, WorldSize


def spec_of(**given: Any) -> Spec:
    return training_of({"script": "/train.py", **given}).spec


def fields_of(caught: pytest.ExceptionInfo[InvalidRequest]) -> set[str]:
    return {problem.field for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("given_size", "size"),
    [
        (WorldSize(1, 2, 4), WorldSize(1, 2, 4)),
        ((1, 2, 4), WorldSize(1, 2, 4)),
        (3, WorldSize(3, 3, 3)),
        ({"min": 1, "target": 2, "max": 4}, WorldSize(1, 2, 4)),
    ],
)
def test_a_world_size_can_be_written_in_several_ways(given_size: Any, size: WorldSize) -> None:
    assert spec_of(world_size=given_size).world_size == size


def test_resources_and_mesh_are_dicts_or_records() -> None:
    made = spec_of(resources={"gpus": 1, "memory": "4Gi"}, mesh={"required": True, "timeout_seconds": 5})
    assert made.resources == Resources(gpus=1, memory="4Gi")
    assert made.mesh == Mesh(required=True, timeout_seconds=5.0)
    assert spec_of(resources=Resources(gpus=2), mesh=Mesh(True)).resources.gpus == 2


def test_a_script_means_the_file_that_it_means_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = spec_of(script="train.py")
    assert (made.script, made.working_dir) == (str(tmp_path / "train.py"), str(tmp_path))
    assert spec_of(script=Path("train.py")).script == str(tmp_path / "train.py")
    placed = spec_of(script="train.py", working_dir="/data")
    assert (placed.script, placed.working_dir) == ("train.py", "/data")


@pytest.mark.parametrize(
    ("program", "stem"),
    [
        ({"script": "/a/My_Train.v2.py"}, "my-train"),
        ({"module": "pkg.fine_tune"}, "fine-tune"),
        ({"command": ["/usr/bin/python3", "x"]}, "python3"),
        ({"script": "/Größe.py"}, "gr-e"),
        ({"script": "/__.py"}, "training"),
    ],
)
def test_a_name_tells_what_runs_and_differs_each_time(program: dict[str, Any], stem: str) -> None:
    names = [training_of(program).metadata.name for _ in range(2)]
    assert names[0] != names[1]
    assert all(re.fullmatch(rf"{stem}-[0-9a-f]{{6}}", name) for name in names)


@given(st.text(max_size=80))
def test_any_text_makes_a_name(stem: str) -> None:
    name = unique_name(stem)
    assert re.fullmatch(DNS_LABEL, name) and len(name) <= 52


def test_every_bad_field_is_listed_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        training_of(
            {
                "script": "/a.py",
                "name": "Not_A_Name",
                "world_size": (3, 2, 1),
                "args": "--lr 0.1",
                "spares": -1,
                "env": {"MUSTER_X": "1"},
                "resources": {"gpu": 1},
                "wrold_size": 2,
                "labels": {"-": "x"},
            }
        )
    assert fields_of(caught) == {
        "metadata.name",
        "metadata.labels.-",
        "spec.worldSize",
        "spec.args",
        "spec.spares",
        "spec.env.MUSTER_X",
        "spec.resources.gpu",
        "spec.wroldSize",
    }
    assert "did you mean 'gpus'" in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"world_size": "2"}, "spec.worldSize"),
        ({"world_size": True}, "spec.worldSize.min"),
        ({"world_size": 0}, "spec.worldSize.min"),
        ({"args": [1]}, "spec.args[0]"),
        ({"env": {"A": 1}}, "spec.env.A"),
        ({"script": 5}, "spec.script"),
        ({"working_dir": 5}, "spec.workingDir"),
        ({"module": "a"}, "spec"),
        ({"command": ()}, "spec"),
    ],
)
def test_what_is_wrong_is_named(bad: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec_of(**bad)
    assert field in fields_of(caught)


def test_without_a_program_there_is_nothing_to_run() -> None:
    with pytest.raises(InvalidRequest, match="exactly one of command, script and module"):
        training_of({})
