"""Specs that make no sense: refused by the schema, or told so by a condition, with nothing half-created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muster import InvalidRequest
from tests.fleet import eventually
from tests.kube.api import MERGE, Json, Refused
from tests.kube.plane import KubePlane

HUGE = "x" * 300_000

# name → what is wrong with the spec, and a word that the server uses for it
REFUSED: dict[str, tuple[Json, str]] = {
    "no-world": ({"worldSize": {"min": 0, "target": 0, "max": 0}}, "worldSize.min"),
    "huge-world": ({"worldSize": {"min": 1, "target": 10**5, "max": 10**5}}, "less than or equal to 10000"),
    "two-programs": ({"command": ["true"]}, "oneOf"),
    "no-program": ({"script": None}, "oneOf"),
    "empty-script": ({"script": ""}, "spec.script"),
    "empty-command": ({"script": None, "command": []}, "spec.command"),
    "bad-module": ({"script": None, "module": "a b"}, "spec.module"),
    "env-number": ({"env": {"A": 1}}, "spec.env.A"),
    "long-word": ({"args": ["x" * 200_000]}, "spec.args"),
    "many-words": ({"args": ["x"] * 20_000}, "at most 10000 items"),
    "too-large": ({"args": ["x" * 100_000] * 20}, "too large"),
    "memory-0": ({"resources": {"memory": "0Gi"}}, "memory"),
    "memory-less": ({"resources": {"memory": "-1Gi"}}, "memory"),
    "memory-words": ({"resources": {"memory": "lots"}}, "memory"),
    "cpu-0": ({"resources": {"cpu": 0}}, "greater than 0"),
    "cpu-text": ({"resources": {"cpu": "500m"}}, "number"),
    "gpus-2000": ({"resources": {"gpus": 2000}}, "less than or equal to 1024"),
    "gpus-half": ({"resources": {"gpus": 0.5}}, "integer"),
    "cancel": ({"cancel": {"requestedAt": "yesterday"}}, "date-time"),
    "ttl": ({"ttlSecondsAfterFinished": -1}, "ttlSecondsAfterFinished"),
    "priority": ({"priority": 2**60}, "priority"),
    "n" * 53: ({}, "52 "),  # "52 chars" of old servers, "52 bytes" of new ones
    "Upper": ({}, "lower"),
    "dotted.name": ({}, "metadata.name"),
}

# name → what only the control plane can find wrong, and what its condition says
TOLD: dict[str, tuple[Json, str]] = {
    "over-max": ({"worldSize": {"min": 1, "target": 5, "max": 2}}, "the target (5) is above the maximum (2)"),
    "under-min": ({"worldSize": {"min": 3, "target": 2, "max": 4}}, "the target (2) is below the minimum (3)"),
    "own-name": ({"env": {"MUSTER_X": "1"}}, "spec.env.MUSTER_X: is muster's own"),
    "equals": ({"env": {"A=B": "1"}}, "spec.env.A=B: is not a name for a variable"),
    "nameless": ({"env": {"": "1"}}, "is not a name for a variable"),
    "nothing": ({"env": {"A": None}}, "spec.env.A: must be a text, not null"),
    "nul": ({"env": {"A": "x\0y"}}, "NUL"),
    "nul-word": ({"args": ["a\0b"]}, "spec.args[0]: must not contain a NUL"),
    "huge-env": ({"env": {"A": HUGE}}, "at most 131071 are possible"),
    "huge-all": ({"args": ["x" * 100_000] * 11}, "at most 1048576 are possible"),
    "no-secret": ({"secretEnv": ["NOPE"]}, "'NOPE' is not a key of env"),
    "wordless": ({"script": None, "command": [""]}, "must name a program"),
    "no-unit": ({"resources": {"memory": "1.5"}}, "'1.5' is less than 1Mi"),
    "no-image": ({"image": " not an image "}, "spec.image"),
    "no-probe": ({"mesh": {"probeAddress": "not an address"}}, "spec.mesh.probeAddress"),
    "year-0": ({"cancel": {"requestedAt": "0000-01-01T00:00:00Z"}}, "must be a time"),
}

# name → what nobody could start, and how the training ends
FAILS: dict[str, tuple[Json, str]] = {
    "relative": ({"workingDir": "some/where"}, "spec.workingDir must be absolute"),
    "no-script": ({"script": "/no/such/script.py"}, "no such script: /no/such/script.py"),
}

# what is odd, but fine
FINE: dict[str, Json] = {
    "n" * 52: {},
    "1digit": {},
    "nulls": {"mesh": None, "cancel": None, "env": None, "args": None},
    "cpu-tiny": {"resources": {"cpu": 1e-9}},
    "wide": {"args": [HUGE[:100_000]] * 3},
}


def path_of(plane: KubePlane, name: str = "") -> str:
    return f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings" + (f"/{name}" if name else "")


def send(plane: KubePlane, name: str, change: Json, *words: str) -> None:
    """Around kubectl, which refuses some of it by itself."""
    body = json.loads(plane.manifest(name, *(words or ("exit=0",)), world=(1, 1, 2)))
    body["spec"] |= change
    plane.cluster.api("POST", path_of(plane), body)


def edit(plane: KubePlane, change: Json, name: str = "demo") -> None:
    plane.cluster.api("PATCH", path_of(plane, name), {"spec": change}, kind=MERGE)


def left(plane: KubePlane) -> list[str]:
    """All that there is in the namespace beside trainings."""
    return [
        f"{kind}/{item['metadata']['name']}"
        for kind in ("pods", "secrets", "services")
        for item in plane.cluster.api("GET", f"/api/v1/namespaces/{plane.namespace}/{kind}")["items"]
        if item.get("type") != "kubernetes.io/service-account-token"
    ]


def condition(shown: Json | None, kind: str) -> Json:
    found: list[Json] = ((shown or {}).get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {})


def told(plane: KubePlane, words: str, name: str = "demo") -> Json:
    """Wait until the training is called invalid in those words."""

    def look(item: Any) -> bool:
        valid = condition(item, "Valid")
        return valid.get("status") == "False" and words in valid["message"]

    found = plane.cluster.until(path_of(plane, name), look, f"{name}: {words}", 20)
    assert found is not None
    return found


def test_the_server_refuses_what_a_field_says_wrongly(kube_plane: KubePlane) -> None:
    plane = kube_plane
    for name, (change, words) in REFUSED.items():
        with pytest.raises(Refused) as caught:
            send(plane, name, change)
        assert words in str(caught.value), f"{name}: {caught.value}"
    said = plane.kubectl("create", "-f", "-", input=plane.manifest(worldSize={"min": 0}), check=False)
    assert "spec.worldSize.min" in said and "greater than or equal to 1" in said
    said = plane.kubectl("create", "-f", "-", input=plane.manifest(nosuch=1), check=False)
    assert "unknown field" in said or "nosuch" in said
    assert not plane.cluster.api("GET", path_of(plane))["items"] and not left(plane)


def test_what_several_fields_say_wrongly_is_told_and_nothing_is_created(kube_plane: KubePlane) -> None:
    plane = kube_plane
    for name, (change, _) in TOLD.items():
        send(plane, name, change)
    for name, (_, words) in TOLD.items():
        shown = told(plane, words, name)
        assert shown["status"]["phase"] == "pending" and shown["status"]["observedGeneration"] == 1
        assert condition(shown, "TargetReached")["reason"] == "InvalidSpec"
    assert not left(plane)
    assert plane.said("ps").count("pending") == len(TOLD), "all are seen through the API"
    assert "is not a key of env" in plane.said("explain", "no-secret")
    events = json.loads(plane.kubectl("get", "events", "-o", "json"))["items"]
    named = {one["involvedObject"]["name"] for one in events if one["reason"] == "InvalidSpec"}
    assert named == set(TOLD)

    edit(plane, {"worldSize": {"max": 5}}, "over-max")
    edit(plane, {"secretEnv": []}, "no-secret")
    edit(plane, {"env": None}, "nothing")
    for name in ("over-max", "no-secret", "nothing"):
        assert condition(plane.phase("succeeded", name), "Valid")["status"] == "True", "it was corrected, and went"
    plane.kubectl("delete", "trainings", "--all")
    eventually(lambda: not plane.cluster.api("GET", path_of(plane))["items"], "all are gone", 20)


def test_what_cannot_start_fails_at_once_in_words_and_what_is_odd_runs(kube_plane: KubePlane, tmp_path: Path) -> None:
    plane = kube_plane
    quiet = tmp_path / "quiet.py"
    quiet.write_text("")
    send(plane, "relative", FAILS["relative"][0])
    shown = plane.phase("failed", "relative")
    assert not left(plane), "not even a Secret"
    send(plane, "no-script", FAILS["no-script"][0])
    for name, change in FINE.items():
        send(plane, name, {"script": str(quiet), "args": [], **change})
    for name, (_, words) in FAILS.items():
        shown = plane.phase("failed", name)
        assert shown["status"]["outcome"]["reason"] == "cannot_start", shown["status"]["outcome"]
        assert words in shown["status"]["outcome"]["message"]
        assert shown["status"]["rankExits"] == []
    for name in FINE:
        plane.phase("succeeded", name)
    services = plane.cluster.api("GET", f"/api/v1/namespaces/{plane.namespace}/services")["items"]
    assert "t-1digit" in [one["metadata"]["name"] for one in services], "a Service's name begins with a letter"


def test_a_backend_that_is_not_here_keeps_it_waiting_until_it_is_corrected(kube_plane: KubePlane) -> None:
    plane = kube_plane
    send(plane, "demo", {"backend": "nosuch"})
    shown = plane.cluster.until(
        path_of(plane, "demo"), lambda item: condition(item, "Admitted"), "it was looked at", 20
    )
    admitted = condition(shown, "Admitted")
    assert admitted["status"] == "False" and "there is no backend 'nosuch' here" in admitted["message"]
    assert not left(plane)
    edit(plane, {"backend": "kube"})
    plane.phase("succeeded")


def test_as_many_gpus_as_a_spec_takes_are_waited_for_also_after_a_restart(kube_plane: KubePlane) -> None:
    """The cluster writes a thousand as 1k."""
    plane = kube_plane
    send(plane, "many", {"resources": {"gpus": 1000}})
    (pod,) = eventually(lambda: list(plane.pods("many").values()), "its Pod is there", 20)
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1k"
    plane.crash()
    plane.serve()
    send(plane, "demo", {})
    plane.phase("succeeded")
    assert "with 1000 GPUs" in plane.said("events", "many")
    plane.kubectl("delete", "training", "many", "--wait=false")
    plane.gone("many")


def test_words_reach_the_program_as_they_were_written(kube_plane: KubePlane, tmp_path: Path) -> None:
    plane = kube_plane
    echo = tmp_path / "echo.py"
    echo.write_text(
        "import json, os, pathlib, sys\n"
        f"pathlib.Path({str(plane.notes)!r}, 'words').write_text(json.dumps([sys.argv[1:], os.environ['ODD']]))\n"
    )
    words = [
        "$(HOME)",
        "$$",
        "$HOME",
        "`id`",
        "; rm -rf x",
        "",
        " ",
        "a\nb",
        "é\u2028💥",
        "--nproc",
        "--",
        "%s",
        "\\",
        '"',
    ]
    send(plane, "demo", {"script": str(echo), "args": words, "env": {"ODD": "$(PATH)\n=é"}})
    plane.phase("succeeded")
    assert json.loads((plane.notes / "words").read_text()) == [words, "$(PATH)\n=é"]


def test_an_edit_that_makes_no_sense_leaves_a_running_training_as_it_was(kube_plane: KubePlane) -> None:
    plane = kube_plane
    training = plane.train()
    training.wait_until_target_world(timeout=30)
    pods = plane.running()
    for wrong, words in (
        ({"worldSize": {"target": 9}}, "the target (9) is above the maximum (4)"),
        ({"worldSize": {"target": 3}, "env": {"A": None}}, "spec.env.A: must be a text"),
    ):
        generation = plane.cluster.api("GET", path_of(plane, "demo"))["metadata"]["generation"]
        plane.cluster.api("PUT", path_of(plane, "demo"), edited(plane, wrong))
        shown = told(plane, words)
        assert shown["status"]["observedGeneration"] == generation + 1
        assert (shown["status"]["phase"], shown["status"]["worldSize"]["ready"]) == ("ready", 2)
        assert condition(shown, "TargetReached")["status"] == "False"
        assert plane.running() == pods, "nothing moves"
    with pytest.raises(InvalidRequest, match=r"spec\.env\.A"):
        training.scale(target=4)
    plane.crash()
    plane.serve()
    assert plane.running() == pods
    edit(plane, {"env": None})
    assert plane.client.get("demo").wait_until_target_world(timeout=30).ready == 3, "it was corrected, and went"
    plane.go()
    plane.phase("succeeded")

    plane.cluster.api("PUT", path_of(plane, "demo"), edited(plane, {"env": {"A": None}}))
    eventually(lambda: "UDTerminalState" in [event.reason for event in training.events()], "the edit was noticed", 20)
    edit(plane, {"env": None})
    shown = plane.phase("succeeded")
    assert len(shown["status"]["rankExits"]) == 3, "an end stays an end"
    plane.kubectl("delete", "training", "demo")
    plane.gone()


def test_a_spec_that_cannot_be_read_can_be_deleted(kube_plane: KubePlane) -> None:
    plane = kube_plane
    training = plane.train(stop_grace_seconds=1)
    training.wait_until_target_world(timeout=30)
    plane.cluster.api("PUT", path_of(plane, "demo"), edited(plane, {"env": {"A": None}}))
    told(plane, "spec.env.A")
    plane.kubectl("delete", "training", "demo")
    plane.gone(timeout_s=15)


def edited(plane: KubePlane, change: Json) -> Json:
    """The whole object with other fields: a patch could not put a null into it."""
    found: Json = plane.cluster.api("GET", path_of(plane, "demo"))
    spec = found["spec"]
    for name, value in change.items():
        spec[name] = {**spec[name], **value} if isinstance(spec.get(name), dict) else value
    return found
