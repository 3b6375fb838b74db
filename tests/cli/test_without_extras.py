"""A muster that was installed without extras names the command that installs what is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from muster.cli import exits
from tests.fleet import Fleet

# The environment of the tests has every extra: this hides one, as if pip had never installed it.
HIDING = """
import importlib.machinery, sys

class WithoutServer(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] in {"starlette", "uvicorn", "httptools"}
        return None if missing else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutServer
"""


@pytest.mark.scenario
def test_run_without_the_server_extra_says_in_one_line_what_to_type(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "sitecustomize.py").write_text(HIDING)
    (tmp_path / "x.py").write_text("print('trained')\n")
    run = fleet.start(sys.executable, "-m", "muster.cli.main", "run", "x.py", PYTHONPATH=str(tmp_path / "hiding"))
    assert run.wait(60.0) == exits.UNAVAILABLE, run.text
    (line,) = [line for line in run.text.splitlines() if "is not installed" in line]
    assert re.search(r"starlette, uvicorn, httptools is not installed: pip install '\.\[server\]' in the clone", line)
    assert "Traceback" not in run.text and "trained" not in run.text
