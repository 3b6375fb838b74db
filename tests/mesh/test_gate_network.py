"""The gate over real routes, in a network namespace: a pair that is cut, one that heals, a newcomer nobody reaches."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APART = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
LOOPBACK = ["sh", "-c", 'ip link set lo up && exec "$@"', "lo"]


def test_a_pair_without_a_route_degrades_the_mesh_and_a_newcomer_without_one_stays_out(tmp_path: Path) -> None:
    missing = [name for name in ("unshare", "ip") if shutil.which(name) is None]
    if missing or subprocess.run([*APART, *LOOPBACK, "true"], capture_output=True).returncode:
        pytest.skip("routes are cut in a network namespace, which needs unshare, ip and the right to use them")
    scene = [sys.executable, "-m", "tests.mesh.cut_pair", str(tmp_path)]
    done = subprocess.run([*APART, *LOOPBACK, *scene], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
