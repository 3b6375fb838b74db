"""The lab itself: what is left of it when whoever runs it is interrupted, or killed?"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers import cgroups
from tests.containers.conftest import why_not
from tests.fleet import eventually

pytestmark = pytest.mark.containers


def processes_about(text: str) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_nothing_is_left_of_a_lab(number: signal.Signals) -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.containers.lab"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    folder = Path(next(iter(re.findall(r"KUBECONFIG=(\S+)/kubeconfigs/", line)), ""))
    assert folder.name.startswith("lab-"), line
    assert cgroups.everywhere(f"muster-{folder.name}") and processes_about(folder.name)
    process.send_signal(number)
    process.wait(60)
    eventually(lambda: not processes_about(folder.name), "its processes are gone", 60)
    assert not folder.exists()
    assert cgroups.everywhere(f"muster-{folder.name}") == []
    assert folder.name not in Path("/proc/mounts").read_text()
