"""The mesh gate of a stand-alone world, with real agents."""

from __future__ import annotations

import socket

from tests.fleet import Fleet

WORLD = ("--nnodes", "2:2", "--local-addr", "127.0.0.1")


def test_nodes_probe_each_other_before_their_ranks_start(fleet: Fleet) -> None:
    fleet.coordinator()
    nodes = [fleet.node(name, *WORLD, "--gate-timeout-s", "30") for name in ("a", "b")]
    view = fleet.training(0, 2)
    assert view["mesh"]["state"] == "ready" and 0 < view["mesh"]["slowest_s"] < 5
    kinds = [line["kind"] for line in view["story"]]
    assert kinds.index("mesh-ready") < kinds.index("release")
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0]


def test_a_node_that_is_not_reached_is_named_and_ranks_start_all_the_same(fleet: Fleet) -> None:
    fleet.coordinator()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        gate = ("--gate-timeout-s", "1.5")
        nodes = [fleet.node("a", *WORLD, *gate), fleet.node("b", *WORLD, *gate, "--probe-addr", where)]
        view = fleet.training(0, 2)
    assert view["mesh"]["state"] == "degraded"
    assert view["mesh"]["pairs"] == [["a", "b", "only over the relay: no answer in 1 s", False]]
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0]
