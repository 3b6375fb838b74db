"""How fast are the ways between its workers? What a rank of the first round does before its program, if that was asked.

A process of its own measures: neither what it imports, nor a GPU's context, nor a hang is left to the rank. It has so
much time and no more, and whatever goes wrong is written down for the agent and is nobody's end. The warm parent
imports this, so it must cost next to nothing.
"""

from __future__ import annotations

import os
import sys

FILE_VARIABLE, TIME_VARIABLE = "MUSTER_BENCH_FILE", "MUSTER_BENCH_S"
MARK = "muster-bench-net "
SIZES = (1 << 10, 1 << 20, 16 << 20)
_EACH_S = 0.5


def variables(path: str, seconds: float) -> dict[str, str]:
    """For a rank that is to measure; the one with a path writes down what came out."""
    return {FILE_VARIABLE: path, TIME_VARIABLE: f"{seconds:g}"}


def measure() -> None:
    """In a rank, before its program, if its agent asks for it."""
    path, given = os.environ.pop(FILE_VARIABLE, ""), os.environ.pop(TIME_VARIABLE, "")
    if given:
        told = _result(float(given))
        if path:
            _write(path, told)


def _result(seconds: float) -> str:
    """What rank 0 printed, as it is; or one line with the reason why there is nothing."""
    import subprocess

    from muster.node.program import interpreter_flags

    sizes = ["--sizes", ",".join(map(str, SIZES)), "--repeat", "50", "--seconds", str(_EACH_S)]
    # -P: what lies beside the program must not stand in for what we import
    module = ["-P", "-m", "muster.node.allreduce", "--beside", str(seconds)]
    command = [sys.executable, *interpreter_flags(), *module, *sizes]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"it was not done after {seconds:g} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    lines = done.stdout.decode(errors="replace").splitlines()
    found = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if found:
        return found[-1]
    said = done.stderr.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(said) if line.strip()), f"it ended with {done.returncode}")


def _write(path: str, told: str) -> None:
    """All of it or nothing: its agent may look at any time."""
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(told)
        os.replace(f"{path}.new", path)
    except OSError:
        return  # then nobody hears of it, and the program begins all the same
