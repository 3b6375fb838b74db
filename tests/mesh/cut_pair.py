"""Workers between which routes are cut and mended, in a network of their own. Run by `test_gate_network`.

python -m tests.mesh.cut_pair FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fleet import Fleet

ADDRESS = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}
OPTIONS = ("--nnodes", "2:3", "--gate-timeout-s", "1.5", "--last-call-s", "0.2")


def route(verb: str, name: str) -> None:
    """Nobody reaches that worker any more, or everybody does again; it reaches the others all the while."""
    subprocess.run(["ip", "route", verb, "unreachable", f"{ADDRESS[name]}/32", "table", "local"], check=True)


def start(fleet: Fleet, name: str) -> None:
    fleet.node(name, *OPTIONS, "--local-addr", ADDRESS[name])


def degraded_then_healed(fleet: Fleet) -> None:
    route("add", "b")
    start(fleet, "a")
    start(fleet, "b")
    view = fleet.training(0, 2)
    assert view["mesh"]["state"] == "degraded", view["mesh"]
    assert view["mesh"]["pairs"] == [["a", "b", "no route to host", False]], view["mesh"]
    began = pids(fleet.started(0, 2))
    route("del", "b")
    fleet.until("the mesh heals", lambda view: view["mesh"]["state"] == "ready")
    assert pids(fleet.started(0, 2)) == began and not fleet.told("start", 1), "nobody was disturbed"


def kept_out_then_taken_in(fleet: Fleet) -> None:
    route("add", "c")
    start(fleet, "c")
    view = fleet.until("c is kept out", lambda view: "c stays out: a → c (no route to host)" in view["reason"])
    assert (view["round"], view["world"], view["mesh"]["state"]) == (0, 2, "ready")
    assert not fleet.told("start", 1)
    route("del", "c")
    assert fleet.training(1, 3)["mesh"]["state"] == "ready"


def pids(notes: list[dict[str, Any]]) -> list[int]:
    return [note["pid"] for note in notes]


def main() -> None:
    fleet = Fleet(Path(sys.argv[1]))
    try:
        fleet.coordinator()
        degraded_then_healed(fleet)
        kept_out_then_taken_in(fleet)
    finally:
        fleet.close()


if __name__ == "__main__":
    main()
