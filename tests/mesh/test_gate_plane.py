"""The mesh gate with a real control plane, real workers, and an overlay that the test holds in its hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from muster import Condition, DistributedTraining
from tests.fleet import eventually
from tests.mesh import servers
from tests.mesh.switchboard import Switchboard
from tests.plane import Plane, fresh, reasons


@pytest.fixture
def board(plane: Plane) -> Iterator[Switchboard]:
    made = Switchboard(plane)
    yield made
    made.close()


def gated(board: Switchboard, timeout_s: float = 60.0) -> dict[str, Any]:
    return {"mesh": {"required": True, "timeout_seconds": timeout_s, "probe_address": board.address}}


def condition(training: DistributedTraining, kind: str) -> Condition:
    found = [one for one in fresh(training).conditions if one.type == kind]
    return found[0] if found else Condition(kind, "Unknown")


def until(training: DistributedTraining, kind: str, status: str, words: str = "") -> Condition:
    """Wait until a condition has that status, with those words in its message."""
    last = [Condition(kind, "Unknown")]

    def look() -> Condition | None:
        last[0] = condition(training, kind)
        return last[0] if last[0].status == status and words in last[0].message else None

    try:
        return eventually(look, f"{kind}={status}", 20)
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {last[0]}") from None


def endpoint(plane: Plane) -> str:
    return (plane.home / "mesh.addr").read_text().strip()


def keys(address: str, name: str = "demo", namespace: str = "default") -> dict[str, str]:
    """What waiters of that training find: `mesh-ready/WORKER` → value."""
    prefix = f"/muster/{namespace}/{name}/"
    answer = servers.ask(address, "GET", f"muster/{namespace}/{name}", "recursive=true")
    found: dict[str, str] = {}

    def walk(node: dict[str, Any]) -> None:
        if "value" in node:
            found[node["key"].removeprefix(prefix)] = node["value"]
        for child in node.get("nodes", ()):
            walk(child)

    if answer.status == 200:
        walk(answer.body["node"])
    return found


def keys_become(address: str, **wanted: str) -> None:
    expected = {f"{key.replace('_', '-')}/demo-{i}": "" for key, ids in wanted.items() for i in ids.split()}
    eventually(lambda: set(keys(address)) == set(expected), f"keys {set(expected)}, not {keys(address)}", 10)


@pytest.mark.shared
@pytest.mark.scenario
def test_ranks_are_held_until_the_mesh_is_ready(plane: Plane, board: Switchboard) -> None:
    board.cut("demo-1")
    training = plane.train(spares=1, **gated(board))
    waiting = until(training, "MeshReady", "False", "demo-0 → demo-1 (only over the relay")
    assert waiting.reason == "Converging"
    assert condition(training, "DegradedMesh").status == "False"
    assert len(plane.worker_pids()) == 3, "agents start at once"
    assert not plane.told("start") and not keys(endpoint(plane))
    assert "demo-0 → demo-1" in plane.muster("explain", "demo").expect("demo is pending.*")[0]
    board.cut()
    training.wait_until_target_world(timeout=20)
    assert until(training, "MeshReady", "True").message.startswith("all 2 workers reach each other")
    keys_become(endpoint(plane), mesh_ready="0 1")
    story = [
        one for one in reasons(training) if one in ("MeshConverging", "MeshReady", "RoundReleased", "FieldIgnored")
    ]
    assert story == ["MeshConverging", "MeshReady", "RoundReleased"]
    plane.go()
    training.result(timeout=20)
    keys_become(endpoint(plane))


@pytest.mark.shared
@pytest.mark.scenario
def test_a_gate_that_fails_open_names_the_pair_and_heals(plane: Plane, board: Switchboard) -> None:
    board.passes = lambda source, target: (source, target) != ("demo-2", "demo-0")
    training = plane.train(world=(3, 3, 3), **gated(board, 1.0))
    training.wait_until_target_world(timeout=20)
    alert = until(training, "DegradedMesh", "True")
    assert "demo-2 → demo-0 (only over the relay" in alert.message and "demo-1" not in alert.message
    assert condition(training, "MeshReady").status == "False"
    keys_become(endpoint(plane), mesh_degraded="0 1 2")
    assert len(plane.started(0, 3)) == 3, "ranks run all the same"
    board.cut()
    until(training, "MeshReady", "True")
    assert condition(training, "DegradedMesh").status == "False"
    keys_become(endpoint(plane), mesh_ready="0 1 2")
    assert fresh(training).world.ready == 3 and training.ranks[0].round == 0, "nobody was disturbed"
    warned = [event for event in training.events() if event.reason == "DegradedMesh"]
    assert [event.type for event in warned] == ["Warning"] and "demo-2 → demo-0" in warned[0].message
    training.cancel()
    plane.no_worker_left()
    keys_become(endpoint(plane))


@pytest.mark.shared
def test_a_newcomer_is_probed_before_the_world_takes_it_in(plane: Plane, board: Switchboard) -> None:
    training = plane.train(**gated(board, 1.0))
    training.wait_until_target_world(timeout=20)
    first = plane.started(0, 2)
    board.cut("demo-2")
    training.scale(target=3)
    until(training, "Resizing", "True", "demo-2 stays out: demo-0 → demo-2")
    assert ("Warning", "demo-2 stays out") in {
        (event.type, event.message[:16]) for event in training.events() if event.reason == "WorkerKeptOut"
    }
    assert [one["pid"] for one in plane.started(0, 2)] == [one["pid"] for one in first] and not plane.told("start", 1)
    until(training, "MeshReady", "True")  # of the world that trains
    keys_become(endpoint(plane), mesh_ready="0 1")
    board.cut()
    training.wait_until_target_world(timeout=20)
    keys_become(endpoint(plane), mesh_ready="0 1 2")
    assert set(keys(endpoint(plane)).values()) == {"round 1"}
    plane.go()
    training.result(timeout=20)


@pytest.mark.shared
def test_a_worker_that_is_gone_leaves_no_key_and_a_known_spare_takes_over(plane: Plane, board: Switchboard) -> None:
    training = plane.train(spares=1, **gated(board))
    training.wait_until_target_world(timeout=20)
    keys_become(endpoint(plane), mesh_ready="0 1")
    plane.kill_worker("demo-1")
    plane.started(1, 2)
    keys_become(endpoint(plane), mesh_ready="0 2")
    assert set(keys(endpoint(plane)).values()) == {"round 1"}
    told = reasons(training)
    assert "MeshConverging" not in told[told.index("RoundRecalled") :], "its pairs were known"
    plane.go()
    training.result(timeout=20)


def test_a_control_plane_that_is_killed_while_the_mesh_converges_goes_on(plane: Plane, board: Switchboard) -> None:
    board.cut("demo-1")
    training = plane.train(**gated(board))
    until(training, "MeshReady", "False", "demo-0 → demo-1")
    workers = plane.worker_pids()
    plane.crash()
    plane.serve()
    until(training, "MeshReady", "False", "demo-0 → demo-1")
    assert plane.worker_pids() == workers and not plane.told("start")
    board.cut()
    training.wait_until_target_world(timeout=20)
    before = endpoint(plane)
    keys_become(before, mesh_ready="0 1")
    plane.crash()
    plane.serve()
    assert endpoint(plane) == before, "workers were told that address"
    keys_become(before, mesh_ready="0 1")
    assert condition(training, "MeshReady").status == "True"
    plane.go()
    training.result(timeout=20)


def test_keys_in_an_etcd_survive_nobody(plane: Plane, real_etcd: servers.Etcd) -> None:
    plane.crash()
    plane.serve("--etcd", f"http://{real_etcd.address}")
    name = f"demo-{plane.folder.name[-12:].replace('_', '-')}".rstrip("-").lower()
    training = plane.train(name, spares=1, mesh={"required": True})
    training.wait_until_target_world(timeout=20)
    wanted = {f"mesh-ready/{name}-0", f"mesh-ready/{name}-1"}
    eventually(lambda: keys(real_etcd.address, name).keys() == wanted, "keys in etcd", 10)
    with real_etcd.frozen():
        plane.kill_worker(f"{name}-1")
        plane.started(1, 2)
    wanted = {f"mesh-ready/{name}-0", f"mesh-ready/{name}-2"}
    eventually(lambda: keys(real_etcd.address, name).keys() == wanted, "the keys follow when it answers again", 10)
    assert set(keys(real_etcd.address, name).values()) == {"round 1"}
    servers.ask(real_etcd.address, "PUT", f"muster/default/{name}/mesh-degraded/{name}-7", value="round 3")
    plane.crash()
    plane.serve("--etcd", f"http://{real_etcd.address}")
    eventually(lambda: keys(real_etcd.address, name).keys() == wanted, "what is stale is removed", 10)
    training.cancel()
    plane.no_worker_left()
    eventually(lambda: not keys(real_etcd.address, name), "no key is left", 10)


@pytest.mark.shared
@pytest.mark.parametrize(("cut", "timeout_s", "status"), [((), 60.0, "ready"), (("demo-0", "demo-1"), 0.5, "degraded")])
def test_ranks_that_ask_learn_how_their_mesh_is(
    plane: Plane, board: Switchboard, cut: tuple[str, ...], timeout_s: float, status: str
) -> None:
    script = plane.folder / "asks.py"
    script.write_text("import muster\nmuster.mesh_wait()\nprint('mesh is', muster.mesh_status())\n")
    board.cut(*cut)
    training = plane.train(script=str(script), **gated(board, timeout_s))
    training.result(timeout=40)
    said = "".join(training.logs())
    assert said.count(f"mesh is {status}") == 2, said


@pytest.mark.shared
def test_without_a_gate_nobody_is_probed_and_no_rank_is_told_where_to_wait(plane: Plane) -> None:
    training = plane.train("plain", "wait", world=(2, 2, 2))
    training.wait_until_target_world(timeout=20)
    assert condition(training, "MeshReady").status == "Unknown"
    assert not keys(endpoint(plane), "plain")
    for pid in plane.worker_pids().values():
        with open(f"/proc/{pid}/environ") as file:
            env = dict(line.partition("=")[::2] for line in file.read().split("\0"))
        assert "MUSTER_MESH_ENDPOINT" not in env and env["NODE_NAME"].startswith("plain-")
    plane.go()
    training.result(timeout=20)
