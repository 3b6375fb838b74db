"""Do the commands of the first pages run as they are printed, one after the other, and answer as it says there?"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import Process
from tests.plane import Plane

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
BROKEN = """import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("the data is not there")
time.sleep(60)
"""


def printed(page: str) -> list[tuple[str, list[str]]]:
    """Each command behind a prompt, and the lines that are said to answer it."""
    blocks = "".join(_BLOCK.findall((ROOT / "docs" / page).read_text()))
    parts = re.split(r"^\$ ", blocks, flags=re.MULTILINE)[1:]
    return [(lines[0], [line for line in lines[1:] if line]) for lines in (part.splitlines() for part in parts)]


def likeness(line: str) -> str:
    """What stays the same from one run to the next: words, but no numbers, ages, widths or names of machines."""
    line = re.sub(r"\d[\d.]*(ms|m\d+s|s|m|h)?", "N", line)
    return " ".join(re.sub(r"from \S+$", "from HOST", line).split())


def differences(said: list[str], text: str) -> list[str]:
    """Lines that were promised and did not come. On the way to ready not every step is seen each time."""
    came = {likeness(line) for line in text.splitlines()}
    sure = [line for line in said if line.strip() != "…" and "  pending  " not in line]
    return [line for line in sure if likeness(line) not in came]


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Plane]:
    """A clone, what the pages take for granted, and nothing else."""
    made = Plane(tmp_path)
    made.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made.env["OMP_NUM_THREADS"] = "1"  # several ranks share few cores
    (tmp_path / "examples").mkdir()
    for place in (tmp_path / "examples" / "train.py", tmp_path / "train.py"):
        shutil.copy(ROOT / "examples" / "train.py", place)
    (tmp_path / "broken.py").write_text(BROKEN)
    made.serve(MUSTER_GPUS="2")
    made.train("broken", script=str(tmp_path / "broken.py"), world=(2, 2, 2), max_restarts=1)
    made.train("g2", "sleep", world=(1, 1, 1), resources={"gpus": 2})
    made.train("g3", "sleep", world=(1, 1, 1), resources={"gpus": 1})
    yield made
    made.close()


def typed(shell: Plane, command: str) -> Process:
    return shell.start("bash", "-c", command)


def test_the_commands_of_the_first_pages_do_what_they_say(newcomer: Plane) -> None:
    (run, *look), scale = printed("first-training.md"), printed("scaling.md")
    path = [run, *scale, *look]  # looking takes for granted that something was scaled
    assert len(path) >= 13 and {command.split()[0] for command, _ in path} == {"muster"}
    wrong = {}
    for command, said in path:
        process = typed(newcomer, command)
        process.wait(120)
        if missing := differences(said, process.text):
            wrong[command] = (missing, process.text)
    assert wrong == {}


def test_an_answer_that_differs_would_be_found() -> None:
    assert differences(["first ready 2/2", "…"], "first  ready   1/2\n") == []
    assert differences(["first ready 2/2"], "first failed 2/2\n") == ["first ready 2/2"]
