"""`muster bench net` with real ranks: what it measures, and what it says of the mesh."""

from __future__ import annotations

import json
import socket

from tests.plane import Plane


def test_bench_net_measures_every_size_and_says_that_the_mesh_was_degraded(plane: Plane) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        words = ("--sizes", "1KiB,256KiB", "--repeat", "5", "--mesh-timeout", "1s", "--probe-address", where)
        bench = plane.muster("bench", "net", *words, "-o", "json", "--name", "net")
        assert bench.wait() == 0, bench.text
    assert "this ran over a degraded mesh: the mesh is degraded after 1 s: net-0 ↔ net-1" in bench.text
    found = json.loads(bench.text[bench.text.index("{") :])
    assert (found["via"], found["ranks"], found["workers"], found["mesh"]) == ("gloo", 2, 2, "degraded")
    assert [(one["bytes"], one["count"]) for one in found["sizes"]] == [(1024, 5), (262144, 5)]
    for one in found["sizes"]:
        assert 0 < one["seconds"]["p10"] <= one["seconds"]["p50"] <= one["seconds"]["p90"]
        assert 0 < one["bytesPerSecond"]["p10"] <= one["bytesPerSecond"]["p50"] <= one["bytesPerSecond"]["p90"]
    assert plane.client.list() == [], "what measured is removed"


def test_bench_net_prints_a_table_and_waits_for_a_mesh_that_is_there(plane: Plane) -> None:
    bench = plane.muster("bench", "net", "--sizes", "4KiB", "--repeat", "5", "--keep")
    assert bench.wait() == 0, bench.text
    assert "degraded" not in bench.text and "4 KiB" in bench.text and "p50 MB/s" in bench.text
    [training] = plane.client.list()
    assert {one.type for one in training.conditions if one.status == "True"} >= {"MeshReady"}
