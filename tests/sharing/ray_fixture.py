"""The cases on a real Ray cluster, run once for all tests that ask what became of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("ray_cases.py")
# Its own network: only loopback. Its own processes: all of them end with the first.
APART = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
LOOPBACK = ["bash", "-c", 'ip link set lo up; exec "$@"', "lo"]
BOUND_S = 800  # on a busy machine; a hundred when it is quiet


@pytest.fixture(scope="session")
def ray_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each case; "" if all is well."""
    pytest.importorskip("ray")
    if shutil.which("unshare") is None or subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("Ray takes the machine's own address unless it is in a network namespace, and unshare is refused")
    report = tmp_path_factory.mktemp("ray") / "report.xml"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))}
    inner = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*APART, *LOOPBACK, *inner, str(CASES)],
        cwd=CASES.parents[2],
        env={**own, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
    )
    assert report.exists(), done.stdout[-4000:]
    return {case.attrib["name"]: _told(case) for case in xml.parse(report).iter("testcase")}


def _told(case: xml.Element) -> str:
    return "\n".join(found.text or found.attrib.get("message", "") for found in case if found.tag != "system-out")
