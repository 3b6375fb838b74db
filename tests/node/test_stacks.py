"""Stacks that faulthandler left in a log tell where a rank stood, and whether it waited for others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muster.node import stacks
from muster.node.stacks import Stand

WAIT = "import os, signal\n\ndef wait():\n    os.kill(os.getpid(), signal.SIGABRT)\n"

BUSY = {"busy.py": WAIT}


def dump(folder: Path, script: str, modules: dict[str, str]) -> list[str]:
    """What a rank leaves on stderr when it gets SIGABRT."""
    for name, text in {"train.py": script, **modules}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, "-X", "faulthandler", str(folder / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode < 0, done.stderr
    return done.stderr.splitlines()


def test_it_stands_where_its_own_code_stands(tmp_path: Path) -> None:
    lines = dump(tmp_path, "from busy import wait\n\ndef step():\n    wait()\n\nstep()\n", BUSY)
    assert stacks.read(lines) == Stand(f"{tmp_path}/busy.py:4 in wait", waiting=False)


def test_inside_torch_it_waits_and_the_callers_line_is_told(tmp_path: Path) -> None:
    script = "from torch.distributed import c10d\n\ndef step():\n    c10d.all_reduce()\n\nstep()\n"
    inside = "from torch.distributed.c10d_logger import wait\n\ndef all_reduce():\n    wait()\n"
    modules = {"__init__.py": "", "distributed/__init__.py": "", "distributed/c10d.py": inside}
    modules = {f"torch/{name}": text for name, text in {**modules, "distributed/c10d_logger.py": WAIT}.items()}
    lines = dump(tmp_path, script, modules)
    assert stacks.read(lines) == Stand(f"{tmp_path}/train.py:4 in step", waiting=True)


def test_a_folder_called_torch_is_not_torch(tmp_path: Path) -> None:
    lines = dump(tmp_path / "torch", WAIT + "\nwait()\n", {})
    assert stacks.read(lines) == Stand(f"{tmp_path}/torch/train.py:4 in wait", waiting=False)


def test_the_main_thread_counts_whatever_the_others_do(tmp_path: Path) -> None:
    script = """\
import threading
from busy import wait
started, never = threading.Event(), threading.Event()

def idle():
    started.set()
    never.wait()

for _ in range(3):
    threading.Thread(target=idle, daemon=True).start()
started.wait()
wait()
"""
    lines = dump(tmp_path, script, BUSY)
    assert sum(line.startswith("Thread 0x") for line in lines) == 3
    assert stacks.read(lines).frame == f"{tmp_path}/busy.py:4 in wait"
    last_first = [*lines[lines.index("") :], "Thread 0x00007f0000000000 (most recent call first):", *lines[-3:]]
    assert stacks.read(last_first).frame == f"{tmp_path}/busy.py:4 in wait"


def test_the_last_dump_counts(tmp_path: Path) -> None:
    script = "import faulthandler\nfrom busy import wait\nfaulthandler.dump_traceback()\nwait()\n"
    assert stacks.read(dump(tmp_path, script, BUSY)).frame == f"{tmp_path}/busy.py:4 in wait"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["step 1", 'File "train.py", line 3 in main'],
        ["Current thread 0x00007f0000000000 (most recent call first):", "  <no Python frame>"],
    ],
    ids=["nothing", "no dump", "no frame"],
)
def test_there_is_nothing_to_read_in(lines: list[str]) -> None:
    assert stacks.read(lines) == Stand()


def test_the_stack_of_c_that_newer_pythons_add_is_passed_over() -> None:
    lines = [
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x00007f64c7a6f740 [python] (most recent call first):",
        '  File "/home/me/train.py", line 7 in step',
        '  File "/home/me/train.py", line 9 in <module>',
        "",
        "Current thread's C stack trace (most recent call first):",
        '  Binary file "python", at _Py_DumpStack+0x48 [0x55d1b4f1f2a4]',
        '  Binary file "/lib/libc.so.6", at +0x3fc30 [0x7f64c7aafc30]',
        "",
        "Extension modules: numpy._core._multiarray_umath (total: 1)",
    ]
    assert stacks.read(lines) == Stand("/home/me/train.py:7 in step", waiting=False)


def test_without_threads_the_only_stack_counts() -> None:
    lines = ["Stack (most recent call first):", '  File "/home/me/train.py", line 7 in step']
    assert stacks.read(lines).frame == "/home/me/train.py:7 in step"


def test_the_words_of_a_program_are_not_those_of_the_dump(tmp_path: Path) -> None:
    script = """\
import sys, threading
from busy import wait
never = threading.Event()
for _ in range(30):
    threading.Thread(target=never.wait, daemon=True).start()
print("the data is not there", file=sys.stderr)
wait()
"""
    lines = dump(tmp_path, script, BUSY)
    assert len(lines) > 100 and lines[-1] != "the data is not there"
    assert stacks.words([*lines, "Extension modules: numpy.core (total: 1)"]) == ["the data is not there"]
    assert stacks.words([*lines, "terminate called"]) == ["the data is not there", "terminate called"]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: no"],
        ["Fatal Python error: init_fs_encoding: failed to get the Python codec"],
        ["Extension modules: are what this program talks about", ""],
    ],
)
def test_what_is_no_dump_stays(lines: list[str]) -> None:
    assert stacks.words(lines) == lines
