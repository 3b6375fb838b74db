"""How long does it take from a clone to an own training that was killed and healed? Machine time, nobody reads.

python -m bench.newcomer [--json] [--venv FOLDER] [--steps N]

Everything as a stranger has it: a fresh clone, a fresh environment, a fresh home, and a small transformer of his own
that keeps its state with three lines. What pip has in its cache is there already. With --venv the clone uses that
environment instead of a fresh one, and the time of its installation is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import report
from bench.report import Figure, progress
from tests.fleet import family, kill_all

HERE = Path(__file__).parents[1]
LIMIT_S = 120.0
BOUND_S = 1800.0  # pip may have to fetch everything
OWN = """
import torch
import torch.distributed as dist

import muster

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters())
state = muster.State(model=model, optimizer=optimizer)
step = state.restore()
while step < STEPS:
    tokens = torch.randn(8, 16, 64)
    loss = (model(tokens) - tokens).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    optimizer.step()
    step += 1
    state.commit(step)
    muster.progress(step)
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
"""


class _Newcomer:
    """Somebody with a folder, who types one command after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.clone = folder / "muster"
        self._env = {**os.environ, "HOME": str(folder / "home"), "PIP_CACHE_DIR": _pip_cache()}
        self._env.pop("MUSTER_HOME", None)
        (folder / "home").mkdir()
        self.took: dict[str, float] = {}

    def types(self, what: str, *words: str) -> str:
        """A command, and how long it took is added to that part."""
        begun = time.monotonic()
        done = subprocess.run(
            words,
            cwd=self.clone if self.clone.exists() else self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
        )
        self.took[what] = self.took.get(what, 0.0) + time.monotonic() - begun
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-300:]}"
        return done.stdout

    def muster(self, what: str, *words: str) -> str:
        return self.types(what, str(self.clone / ".venv/bin/muster"), *words)


def newcomer(given: argparse.Namespace) -> Iterator[Figure]:
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    someone = _Newcomer(folder)
    try:
        someone.types("clone", "git", "clone", "-q", str(HERE), str(someone.clone))
        if given.venv is None:
            progress("the environment is made")
            someone.types("install", "make", "venv", f"PYTHON={sys.executable}")
        else:
            (someone.clone / ".venv").symlink_to(given.venv.resolve())
        (someone.clone / "own.py").write_text(OWN.replace("STEPS", str(given.steps)))
        _train(someone)
    finally:
        if (someone.clone / ".venv/bin/muster").exists():
            someone.muster("remove", "server", "stop", "--cancel")
        shutil.rmtree(folder, ignore_errors=True)
    took = {name: seconds for name, seconds in someone.took.items() if name != "remove"}
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items())
    total = sum(took.values())
    yield Figure(
        "clone → own training killed (every process of one worker), healed and succeeded",
        total,
        "s",
        f"≤ {LIMIT_S:g} s",
        total <= LIMIT_S,
        note=parts,
    )


def _train(someone: _Newcomer) -> None:
    someone.muster("train", "run", "own.py", "--name", "own", "-d", "--workers", "2", "--spares", "1")
    someone.muster("train", "wait", "own", "--for=target", "--timeout", "2m")
    kill_all(family(_agent(someone.clone.parent, "own-1")))
    someone.muster("heal", "wait", "own", "--timeout", "5m")
    told = someone.muster("heal", "events", "own")
    assert re.search(r"own-2 takes rank 1", told), f"nobody took its rank:\n{told}"


def _agent(folder: Path, worker: str) -> int:
    """Return the pid of a worker of this run. Another run on the machine may have a worker of the same name."""
    listing = subprocess.run(["pgrep", "-a", "-f", "--", f"--name {worker}( |$)"], capture_output=True, text=True)
    return next(int(line.split()[0]) for line in listing.stdout.splitlines() if f"{folder}/" in line)


def _pip_cache() -> str:
    asked = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True)
    return asked.stdout.strip()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=400, help="steps of the training (400)")
    parser.add_argument("--venv", type=Path, metavar="FOLDER", help="use this environment and install nothing")


if __name__ == "__main__":
    raise SystemExit(report.run("From a clone to an own training that was healed", {"newcomer": newcomer}, _options))
