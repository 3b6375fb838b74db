"""A program that cannot work is not tried four times, and is not called ready before it has got past its imports."""

from __future__ import annotations

import pytest

from tests.fleet import Fleet


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("print(1\n", "SyntaxError: '(' was never closed"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()\n",
            "--data",
        ),
    ],
)
def test_two_rounds_are_enough_to_know(fleet: Fleet, program: str, line: str) -> None:
    script = fleet.folder / "train.py"
    script.write_text(program)
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1", program=(str(script),))
    assert node.wait() == 1
    assert line in node.text and "round 1 before the first step, as in the round before" in node.text
    assert "round 2:" not in node.text
