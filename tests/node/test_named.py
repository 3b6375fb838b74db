"""A checkpoint that cannot be read is found in a rank's last words, and told when it stops the run a second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.node import named
from tests.fleet import Fleet


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("RuntimeError: cannot read 'ckpt/model.pt'", "ckpt/model.pt"),
        ("OSError: [Errno 22] Invalid argument: 'CWD/ckpt'", "ckpt"),
        ("ValueError: CWD/ckpt/model.pt: bad magic number.", "ckpt/model.pt"),
        ('KeyError: "model.pt" and ckpt/model.pt, in this order', "ckpt/model.pt"),
        ("safetensors: file=ckpt/model.pt is incomplete", "ckpt/model.pt"),
        ("FileNotFoundError: 'ckpt/none.pt'", ""),
        ('  File "CWD/ckpt/model.pt", line 3, in load', ""),
        ("ImportError: CWD/train.py", ""),
        ("ValueError: /etc/passwd is elsewhere, and so is ../..", ""),
        ("\0 " + "x" * 5000 + " '" + "a/" * 3000 + "'", ""),
        ("", ""),
    ],
)
def test_a_path_is_found_in_the_last_lines(tmp_path: Path, line: str, found: str) -> None:
    cwd = tmp_path / "cwd"
    (cwd / "ckpt").mkdir(parents=True)
    (cwd / "ckpt" / "model.pt").touch()
    (cwd / "train.py").touch()
    told = named.path_in(["Traceback", line.replace("CWD", str(cwd))], str(cwd), [f"{cwd}/"])
    assert told == (str(cwd / found) if found else "")


def test_a_checkpoint_that_stops_every_restart_stands_in_the_reason(fleet: Fleet) -> None:
    script, bad = fleet.folder / "train.py", fleet.folder / "ckpt.pt"
    bad.write_text("half")
    script.write_text("raise RuntimeError('cannot read ckpt.pt')\n")
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1", "--max-restarts", "2", program=(str(script),))
    assert node.wait() == 1
    assert f"worker a, round 2, 3 times with {bad}; 2 of 2 restarts used" in node.text
    assert f"after rank 0 on a: Exit 1, twice with {bad}" in node.text
