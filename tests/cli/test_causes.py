"""Ways to break a training: the last line alone says what went wrong.

All of them run on one control plane, a few at a time. Behind the last line there may be a hint, which says what to
type next.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plane import Plane, reasons

pytestmark = pytest.mark.xdist_group("causes")  # one control plane for all, whoever runs them

AT_ONCE = 4
ONCE = ("--max-restarts", "0")
USAGE = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()\n"
MANY = "try:\n    open('/nowhere')\nexcept OSError as error:\n    raise RuntimeError('no data\\nat all') from error\n"
NOISE = "import atexit, sys\natexit.register(print, 'Warning: the group was not destroyed', file=sys.stderr)\n"
CRASH = "import ctypes, sys\nprint('step 7', file=sys.stderr)\nctypes.string_at(0)\n"
ABORT = "import os, sys\nprint('what():  bad weights', file=sys.stderr, flush=True)\nos.abort()\n"
ONE = "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('rank 1 has no data')\ntime.sleep(60)\n"
LOG = "import logging\nlogging.basicConfig(level=20)\n"
INFO = LOG + "logging.error('no shard 4')\nlogging.info('saved step 7')\nraise SystemExit(3)\n"
HANG = "import muster, time\nmuster.progress(3)\ntime.sleep(60)\n"
SLEEP = "import time\ntime.sleep(60)\n"


@dataclass(frozen=True)
class Break:
    """A script or a command, how it is run, and what the last line has to say."""

    says: tuple[str, ...]
    script: str = ""
    command: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


BREAKS = {
    "syntax": Break(("SyntaxError: '(' was never closed at train.py:1 (rank 0)",), "print(1\n"),
    "module": Break(("ModuleNotFoundError: No module named 'numpi'",), "import numpi\n"),
    "name": Break(("ImportError: cannot import name 'pathh' from 'os'",), "from os import pathh\n"),
    "usage": Break(("error: the following arguments are required: --data",), USAGE),
    "file": Break(("FileNotFoundError", "'/nowhere/data.bin'"), "open('/nowhere/data.bin')\n", options=ONCE),
    "assertion": Break(("AssertionError: 3 shards, not 4",), "assert 3 == 4, '3 shards, not 4'\n", options=ONCE),
    "restarts": Break(("KeyError: 'lr'", "1 of 1 restarts used"), "{}['lr']\n", options=("--max-restarts", "1")),
    "one-rank": Break(
        ("ValueError: rank 1 has no data at train.py:3 (rank 1)",), ONE, options=("--workers", "2", *ONCE)
    ),
    "many-lines": Break(("RuntimeError: no data",), MANY, options=ONCE),
    "noise": Break(("ZeroDivisionError: division by zero",), NOISE + "1 / 0\n", options=ONCE),
    "exit": Break(
        ("exited with code 3 (rank 0); last output: no space left",),
        "import sys\nprint('no space left', file=sys.stderr)\nsys.exit(3)\n",
        options=ONCE,
    ),
    "info": Break(("exited with code 3 (rank 0); last output: ERROR:root:no shard 4; worker",), INFO, options=ONCE),
    "words": Break(
        ("exited with code 1 (rank 0)", "the licence has run out"),
        "raise SystemExit('the licence has run out')\n",
        options=ONCE,
    ),
    "memory": Break(("MemoryError at train.py:1 (rank 0)",), "bytearray(1 << 62)\n", options=ONCE),
    "killed": Break(("Signal SIGKILL", "memory"), "import os\nos.kill(os.getpid(), 9)\n", options=ONCE),
    "crash": Break(("Signal SIGSEGV at ", "string_at (rank 0)"), CRASH, options=ONCE),
    "abort": Break(("Signal SIGABRT", "bad weights"), ABORT, options=ONCE),
    "not-found": Break(("no such command: trian",), command=("trian",)),
    "forbidden": Break(("permission denied: ./train.py",), SLEEP, command=("./train.py",)),
    "shell": Break(
        ("exited with code 7", "no such bucket"), command=("sh", "-c", "echo no such bucket >&2; exit 7"), options=ONCE
    ),
    "late": Break(("its deadline of 2 s",), SLEEP, options=("--deadline", "2s", "--grace", "0.2s")),
    "waits": Break(("64 GPUs",), SLEEP, options=("--gpus", "64", "--deadline", "1s")),
    "hang": Break(("HangDetected at ", "train.py:3"), HANG, options=("--hang-timeout", "1s", *ONCE)),
    "no-script": Break(("there is no script 'trian.py'",), command=()),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    plane = Plane(tmp_path_factory.mktemp("causes"))
    plane.serve()
    yield plane
    plane.close()


@pytest.fixture(scope="module")
def last_lines(broken: Plane) -> dict[str, str]:
    with ThreadPoolExecutor(AT_ONCE) as several:
        return dict(zip(BREAKS, several.map(lambda name: last_line(broken, name, BREAKS[name]), BREAKS), strict=True))


def last_line(plane: Plane, name: str, case: Break) -> str:
    folder = plane.folder / name
    folder.mkdir()
    script = folder / "train.py"
    if case.script:
        script.write_text(case.script)
    words = ("--command", "--", *case.command) if case.command else (str(script) if case.script else "trian.py",)
    there = ("/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), str(Path(sys.executable).parent / "muster"))
    run = plane.start(*there, "run", "--name", name, *case.options, *words)
    assert run.wait(60) != 0, run.text
    return said_last(run.text)


def said_last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next(line for line in reversed(lines) if not line.startswith("hint:"))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", BREAKS)
def test_the_last_line_says_why(last_lines: dict[str, str], name: str) -> None:
    for part in BREAKS[name].says:
        assert part in last_lines[name]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", ["syntax", "module"])
def test_ranks_that_die_in_their_imports_were_never_ready(broken: Plane, last_lines: dict[str, str], name: str) -> None:
    assert last_lines[name] and "Ready" not in reasons(broken.client.get(name))
    assert "Ready" in reasons(broken.client.get("hang")), "others are"


@pytest.mark.usefixtures("processes")
def test_a_folder_that_is_not_there_is_named(broken: Plane) -> None:
    broken.train(
        "lost", script="train.py", working_dir="/nowhere/code", world=(1, 1, 1), active_deadline_seconds=5, force=True
    )
    wait = broken.muster("wait", "lost")
    assert wait.wait(30) == 100
    assert "/nowhere/code" in said_last(wait.text)


@pytest.mark.usefixtures("processes")
def test_whoever_cancelled_it_is_not_told_of_failures(broken: Plane) -> None:
    training = broken.train("enough", "sleep", world=(1, 1, 1))
    training.wait_until_min_world(timeout=30)
    training.cancel(grace_seconds=0.1)
    wait = broken.muster("wait", "enough")
    assert wait.wait(30) == 103
    assert "was cancelled: cancelled on request" in said_last(wait.text)


@pytest.mark.usefixtures("processes")
def test_ps_and_explain_have_the_same_line(broken: Plane, last_lines: dict[str, str]) -> None:
    cause = "AssertionError: 3 shards, not 4 at train.py:1 (rank 0); worker assertion-0, round 0; 0 of 0 restarts used"
    assert cause in last_lines["assertion"]
    listed, explained = broken.muster("ps"), broken.muster("explain", "assertion")
    assert listed.wait() == 0 and explained.wait() == 0
    assert cause in listed.text and cause in explained.text.splitlines()[0]
