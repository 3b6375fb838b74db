"""The suite itself: a script's background job starts it with signals ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

_GRANDCHILD = "import signal; print([s.name for s in signal.Signals if signal.getsignal(s) is signal.SIG_IGN])"
_CHILD = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {_GRANDCHILD!r}], check=True)"


def _ignore() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


def test_processes_of_tests_ignore_nothing_that_the_parent_of_the_suite_ignored() -> None:
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", _CHILD], preexec_fn=_ignore, cwd=root, capture_output=True, text=True)
    assert ran.stdout.strip() == "['SIGPIPE', 'SIGXFSZ']", ran.stderr
