"""What a training may ask for, and what of it may be shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muster.types.codec import Invalid
from muster.types.storage import Storage
from muster.types.training import LAST_APPLIED, MASK, Key, Resources, Training, check, problems_of
from tests.training_builders import a_rank_exit, a_training


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"command": ("a",), "script": "b"}, "spec"),
        ({"script": None}, "spec"),
        ({"command": ()}, "spec.command"),
        ({"command": ("",)}, "spec.command"),
        ({"script": ""}, "spec.script"),
        ({"world": (2, 1, 3)}, "spec.worldSize"),
        ({"world": (1, 4, 3)}, "spec.worldSize"),
        ({"env": {"1A": "x"}}, "spec.env.1A"),
        ({"env": {"MUSTER_HOME": "x"}}, "spec.env.MUSTER_HOME"),
        ({"env": {"A": "\0"}}, "spec.env.A"),
        ({"env": {"A": "x" * 131_070}}, "spec.env.A"),
        ({"args": ("é" * 100_000,) * 6}, "spec.args"),
        ({"resources": Resources(memory="1.5")}, "spec.resources.memory"),
        ({"image": "not an image"}, "spec.image"),
        ({"secret_env": ("TOKEN",)}, "spec.secretEnv"),
        ({"world": (2, 2, 4), "segment": 4}, "spec.worldSize.min spec.worldSize.target"),
        ({"world": (2, 3, 4), "segment": 2}, "spec.worldSize.target"),
        ({"template": {"kind": "Pod"}}, "spec.template.kind"),
        ({"storage": (Storage("a", "data", claim="x"),)}, "spec.storage[a].mount"),
        ({"labels": {"-": "x"}}, "metadata.labels.-"),
        ({"labels": {"a": "not a value!"}}, "metadata.labels.a"),
    ],
)
def test_what_cannot_be_is_named_by_its_field(asked: dict[str, Any], field: str) -> None:
    assert [problem.field for problem in problems_of(a_training(**asked))] == field.split()


def test_several_problems_are_told_together() -> None:
    with pytest.raises(Invalid) as raised:
        check(a_training(world=(3, 2, 1), env={"1": ""}, secret_env=("X",), labels={"-": ""}))
    assert len(raised.value.problems) == 4


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"command": ("python", "")},
        {"module": "a.b"},
        {"world": (1, 1, 1)},
        {"world": (2, 4, 5), "segment": 2, "topology_key": "topology.kubernetes.io/rack"},
        {"template": {}, "storage": (Storage("ckpt", "/ckpt", size="1Gi"), Storage("data", "/data", claim="there"))},
        {"labels": {"example.com/team": "", "a.b_c-d": "X.y"}},
        {"env": {"A": "", "_B9": "é"}, "secret_env": ("A",)},
        {"env": {"A": "x" * 131_069}, "args": ("x" * 131_072,) * 6, "resources": Resources(memory="1Mi")},
    ],
)
def test_what_can_be_is_passed_on(asked: dict[str, Any]) -> None:
    training = a_training(**asked)
    assert check(training) is training


def test_secrets_are_masked_and_the_rest_is_shown() -> None:
    training = a_training(env={"TOKEN": "s3cret", "MODE": "fast"}, secret_env=("TOKEN",))
    assert training.masked().spec.env == {"TOKEN": MASK, "MODE": "fast"}
    assert training.spec.env["TOKEN"] == "s3cret"
    about = replace(training.metadata, annotations={LAST_APPLIED: "s3cret", "team": "a"})
    applied = replace(training, metadata=about).masked()
    assert applied.metadata.annotations == {"team": "a"}, "kubectl's copy of the document has them too"
    open_book = a_training(env={"MODE": "fast"})
    assert open_book.masked() is open_book


def test_a_training_knows_its_address_version_and_end() -> None:
    training = a_training("a", namespace="n", phase="failed")
    assert training.key == Key("n", "a") and str(training.key) == "n/a"
    assert training.version == 0 and training.is_terminal
    assert not a_training(phase="ready").is_terminal


@pytest.mark.parametrize(
    ("memory", "size"), [(None, None), ("1", 1), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2k", 2000)]
)
def test_memory_is_counted_in_bytes(memory: str | None, size: int | None) -> None:
    assert Resources(memory=memory).memory_bytes == size


@pytest.mark.parametrize(
    ("code", "reason", "failed"),
    [(0, "Completed", False), (1, "Exit 1", True), (None, "NodeLost", True), (143, "Stopped", False)],
)
def test_a_rank_that_muster_stopped_did_not_fail(code: int | None, reason: str, failed: bool) -> None:
    assert a_rank_exit(0, code, termination_reason=reason).failed is failed


def test_a_rank_exit_reads_as_one_clause() -> None:
    assert str(a_rank_exit(1, 137, termination_reason="OOMKilled")) == "rank 1: exit_code=137 reason=OOMKilled"


def test_what_a_newer_version_stored_is_read_as_far_as_it_is_known() -> None:
    wire = a_training().to_wire()
    wire["spec"]["fromTheFuture"] = {"a": 1}
    wire["status"]["alsoNew"] = []
    assert Training.from_wire(wire).spec == a_training().spec
