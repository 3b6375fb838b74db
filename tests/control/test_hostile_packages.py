"""Packages that attack their reader harm neither the control plane nor the trainings of other namespaces."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.fleet import PROGRAMS, eventually
from tests.plane import Plane, reasons

MAX_GROWTH_KB = 64 << 10


def peak_memory_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]


def test_sparse_maps_cost_neither_memory_nor_a_round(plane: Plane) -> None:
    training = plane.train("bystander")
    eventually(lambda: "RoundReleased" in reasons(training), "it trains")
    assert plane.daemon is not None
    pid = plane.daemon.proc.pid
    before = peak_memory_kb(pid)
    created = plane.muster(
        "token", "create", "mallory", "--role", "editor", "-n", "team-b", MUSTER_HOME=str(plane.home)
    )
    assert created.wait() == 0, created.text
    token = re.search(r"mst_\S+", created.text)
    assert token is not None, created.text
    attack = plane.start(sys.executable, str(PROGRAMS / "sparse_packages.py"), plane.url, token[0], "team-b", "3")
    assert attack.wait(300) == 0, attack.text
    answers = attack.expect(r"answers ([\d ]+)")[1].split()
    assert answers and set(answers) <= {"422", "429", "503"}, answers
    assert peak_memory_kb(pid) - before < MAX_GROWTH_KB
    assert reasons(training).count("RoundReleased") == 1 and "WorkerLost" not in reasons(training)
    plane.go()
    training.result(timeout=120)
