"""`muster kill`: what it refuses, and what it does to real processes."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from muster import Client, errors
from muster.backends.kube.backend import KubeBackend
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training
from tests.cli.test_shell import running
from tests.fleet import eventually
from tests.plane import Plane, fresh, reasons


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["demo"], 2, "RANK is missing"),
        (["demo", "99", "--yes"], 3, "demo has no rank 99: its ranks are 0 to 2"),
        (["demo", "2", "--yes"], 4, "rank 2 of demo does not run now: lost"),
        (["done", "0", "--yes"], 4, "done has ended: succeeded"),
        (["demo", "1"], 2, "muster kill asks first, and there is no terminal here to answer"),
        (["nosuch", "1", "--yes"], 3, "there is no training 'nosuch' in namespace 'default'"),
    ],
)
def test_what_cannot_be_killed_is_answered_in_one_line(
    muster: Muster, control: StandIn, words: list[str], code: int, said: str
) -> None:
    control.add(running(), a_training("done", phase="succeeded"))
    answer = muster("kill", *words)

    assert (answer.code, answer.err.splitlines()[0]) == (code, f"muster: {said}")


def test_on_kubernetes_the_answer_is_what_kubectl_does() -> None:
    killing = KubeBackend.kill(cast(KubeBackend, None), running(), "demo-1", 0)
    with pytest.raises(errors.Conflict, match="workers are Pods") as refused:
        asyncio.run(killing)
    assert refused.value.hint == "kubectl delete pod demo-1 -n default --grace-period=0 --force"


@pytest.mark.shared
@pytest.mark.scenario
def test_a_killed_rank_and_a_killed_worker_are_healed(plane: Plane) -> None:
    training = plane.train("demo", world=(2, 2, 2), spares=1)
    training.wait_until_target_world(timeout=60)
    assert plane.muster("kill", "demo", "1", "--yes").wait() == 0
    eventually(lambda: fresh(training).training.status.round == 1, "the rank's end began a round")
    training.wait_until_target_world(timeout=60)
    assert fresh(training).training.status.restarts == 1
    lost = next(rank.worker for rank in training.ranks if rank.rank == 1)

    answer = plane.muster("kill", "demo", "1", "--worker", "--yes")
    assert answer.wait() == 0 and f"every process of worker {lost} (rank 1 of demo) was killed" in answer.text
    eventually(lambda: fresh(training).training.status.round == 2, "the worker's end began a round")
    training.wait_until_target_world(timeout=60)
    assert lost not in plane.worker_pids(training.training.uid)
    assert fresh(training).training.status.restarts == 1, "a worker that is lost costs no restart"
    assert reasons(training).count("KillRequested") == 2

    stale = plane.client.get("demo")
    plane.muster("kill", "demo", "0", "--yes").wait()
    eventually(lambda: fresh(training).training.status.round == 3, "another round began")
    with pytest.raises(errors.Conflict, match="not 2"):
        stale.kill(0)


def test_a_viewer_kills_nothing(plane: Plane) -> None:
    training = plane.train("demo", world=(1, 1, 1))
    training.wait_until_target_world(timeout=60)
    made = plane.muster("token", "create", "eve", "--role", "viewer")
    assert made.wait() == 0
    client = Client(url=plane.url, token=made.text.split()[0])
    with client, pytest.raises(errors.Forbidden):
        client.get("demo").kill(0)
    audit = plane.muster("audit", "-o", "json")
    assert audit.wait() == 0 and "/kill" in audit.text
    assert fresh(training).training.status.round == 0
