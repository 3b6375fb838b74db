"""What does a training on a GPU lose with a worker, and what do its commits cost? It needs torch and muster alone.

    PYTHONPATH=src python bench/state_gpu.py --gb 12 [--json]
    PYTHONPATH=src python bench/state_gpu.py --gb 0.05 --device cpu     # without a GPU, to see that it runs

A coordinator, two workers of one rank each (gloo, both on the one GPU) and a spare. Each rank has so much state:
weights and Adam's two moments, the same on both, as with DDP; `--split` gives each its own half of it instead. All
processes of one worker are killed; the times of the next round are counted from there. First the same steps run with
commits and without, by turns, in one worker alone.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WIDTH = {"cuda": 4096, "cpu": 512}
TOKENS = {"cuda": 4096, "cpu": 64}
BYTES = 12  # of a weight in float32 and its two moments
STAGES = ("script begins", "group formed", "device ready", "model built", "state restored", "first step")
COPIES = 4  # of a rank's state that its worker may have at once: two sealed, the one that is safe, one in progress
LIMIT_S = 300.0


# What a rank does --------------------------------------------------------------------------------


class Rank:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.on = torch.device(given.device)
        self.rank = int(os.environ.get("RANK", "0"))
        torch.set_num_threads(1)  # on a CPU several ranks share few cores
        self.mark("script begins")
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        self.mark("group formed")
        self.sync()
        torch.zeros(1, device=self.on)
        self.mark("device ready")
        torch.manual_seed(self.rank if given.split else 0)
        layers = max(1, round(given.gb * (0.5 if given.split else 1) * 1e9 / BYTES / WIDTH[given.device] ** 2))
        width = WIDTH[given.device]
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False, device=self.on) for _ in range(layers))
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=given.device == "cuda")
        self.sync()
        self.mark("model built")

    def restore(self) -> int:
        import muster

        self.state = muster.State(model=self.model, optimizer=self.optimizer, overhead=self.given.overhead)
        step = self.state.restore()
        self.sync()
        self.mark("state restored", step)
        return step

    def mark(self, word: str, step: int = 0, value: object = None) -> None:
        told = {"at": time.monotonic(), "word": word, "rank": self.rank, "pid": os.getpid(), "step": step}
        out = os.open(self.given.notes / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(out, (json.dumps(told | {"value": value}) + "\n").encode())
        os.close(out)

    def sync(self) -> None:
        if self.on.type == "cuda":
            torch.cuda.synchronize()

    def step(self, number: int, repeats: int) -> torch.Tensor:
        """As many passes over small batches as take the time of a step; the same batches on all ranks."""
        self.optimizer.zero_grad()
        made = torch.Generator(self.on).manual_seed(number)
        loss = torch.zeros(1, device=self.on)
        for _ in range(repeats):
            rows = torch.randn(TOKENS[self.on.type], WIDTH[self.on.type], device=self.on, generator=made)
            with torch.autocast(self.on.type, dtype=torch.bfloat16, enabled=self.on.type == "cuda"):
                loss = (self.model(rows).float() ** 2).mean()
            loss.backward()
        dist.all_reduce(torch.ones(1))  # ranks keep pace; what they compute is the same, so that is all they need
        self.optimizer.step()
        return loss

    def repeats(self) -> int:
        """How many passes a step has: found out once, by rank 0, and kept for all rounds."""
        noted = self.given.notes / "repeats"
        if self.rank == 0 and not noted.exists():
            times = []
            for _ in range(4):
                self.sync()
                began = time.monotonic()
                self.step(0, 3)
                self.sync()
                times.append((time.monotonic() - began) / 3)
            draft = noted.with_suffix(".new")
            draft.write_text(str(max(1, round(self.given.step_s / min(times)))))
            draft.rename(noted)
        elif not noted.exists():
            for _ in range(4):
                self.step(0, 3)
            while not noted.exists():
                time.sleep(0.01)
        return int(noted.read_text())

    def train(self) -> None:
        repeats = self.repeats()  # of the first round; from then on it only reads
        step = begun = self.restore()
        while step < self.until():
            float(self.step(step, repeats))
            if step == begun:
                self.mark("first step", step)
            began = time.monotonic()
            self.state.commit(step + 1)
            step += 1
            called = time.monotonic() - began
            behind = step - (self.state.saved.step or 0)
            self.mark("done", step, {"called": called, "behind": behind})
        self.state.wait()
        self.mark("end", step, self.digest())

    def until(self) -> int:
        try:
            return int((self.given.notes / "until").read_text())
        except (FileNotFoundError, ValueError):
            return sys.maxsize

    def digest(self) -> str:
        found = hashlib.sha256()
        for one in self.model.parameters():
            found.update(one.detach().cpu().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()[:16]

    def cost(self) -> None:
        """Blocks of steps with commits and without; in one kind the host waits for the GPU at each step."""
        repeats = self.repeats()
        step = self.restore()
        for _ in range(8):  # until there is memory for all of it
            float(self.step(step, repeats))
            step += 1
            self.state.commit(step)
            self.state.wait()
            time.sleep(0.5)
        for turn in range(self.given.turns):
            for synced in (False, True):
                for commit in (False, True) if turn % 2 else (True, False):
                    step = self.block(step, repeats, commit, synced)
        self.mark("end", step)

    def block(self, step: int, repeats: int, commit: bool, synced: bool) -> int:
        """What is left of copies at its end is waited for, outside of the time: it runs beside what follows."""
        self.sync()
        make: Any = torch.cuda.Event
        events = [make(enable_timing=True) for _ in range(2)] if self.on.type == "cuda" else []
        called = 0.0
        began = time.monotonic()
        for event in events[:1]:
            event.record()
        for _ in range(self.given.block):
            loss = self.step(step, repeats)
            if synced:
                float(loss)
            step += 1
            if commit:
                asked = time.monotonic()
                self.state.commit(step)
                called += time.monotonic() - asked
        for event in events[1:]:
            event.record()
        self.sync()
        wall = time.monotonic() - began
        device = events[0].elapsed_time(events[1]) / 1000 if events else wall
        self.state.wait()
        word = f"{'with' if commit else 'without'} {'synced' if synced else 'unsynced'}"
        self.mark(word, step, {"wall": wall, "device": device, "called": called})
        return step


# What starts and kills them -----------------------------------------------------------------------


class Job:
    def __init__(self, given: argparse.Namespace, folder: Path, what: str, workers: int, spares: int) -> None:
        self.given, self.folder = given, folder
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._what, self._size = what, (workers, spares)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._env = {**os.environ, "MUSTER_RUN_TOKEN": "a token of the bench, which opens nothing"}
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders if folder)
        self._env |= {"MUSTER_HOME": str(folder / "home"), "TMPDIR": str(folder)}
        self._coordinator = self._start("coordinator", "-m", "muster.coordinator", "--listen", self._address)
        self._made = 0

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *words], env=self._env, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )

    def add(self) -> None:
        name = f"w{self._made}"
        self._made += 1
        workers, spares = self._size
        words = ["-m", "muster.node.cli", "--coordinator", self._address, "--run-id", "run", "--name", name]
        words += ["--nnodes", str(workers), "--spares", str(spares), "--local-addr", "127.0.0.1"]
        words += ["--log-dir", str(self.folder / f"logs-{name}")]
        words += [word for module in self.given.preload for word in ("--preload", module)]
        rank = [str(Path(__file__).resolve()), "--notes", str(self.notes), "--rank", self._what]
        for option in ("device", "gb", "step_s", "overhead", "turns", "block"):
            rank += [f"--{option.replace('_', '-')}", str(getattr(self.given, option))]
        rank += ["--split"] if self.given.split else []
        self.workers[name] = self._start(name, *words, *rank)

    def marks(self, word: str | None = None) -> list[dict[str, Any]]:
        try:
            lines = (self.notes / "marks").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [mark for mark in found if word is None or mark["word"] == word]

    def done(self, before: float = float("inf")) -> int:
        newest = {mark["rank"]: mark["step"] for mark in self.marks("done") if mark["at"] < before}
        return min(newest.values()) if len(newest) >= self._size[0] else 0

    def until(self, what: str, reached: Any, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not reached():
            ended = [name for name, worker in self.workers.items() if worker.poll() not in (None, 0)]
            if ended or time.monotonic() > deadline:
                words = "\n".join((self.folder / f"{name}.log").read_text()[-1500:] for name in self.workers)
                raise SystemExit(f"not in {limit_s:g} s: {what}; ended: {ended}\n{words}")
            time.sleep(0.02)

    def lose(self, rank: int) -> dict[str, Any]:
        """All processes of the worker with that rank; what came when, in seconds, of the slower rank."""
        pid = [mark["pid"] for mark in self.marks("done") if mark["rank"] == rank][-1]
        name, doomed = next((name, doomed) for name, doomed in self._families() if pid in doomed)
        del self.workers[name]
        struck = time.monotonic()
        for one in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)

        def after(word: str) -> dict[int, dict[str, Any]]:
            return {mark["rank"]: mark for mark in reversed(self.marks(word)) if mark["at"] > struck}

        self.until("the next first step", lambda: len(after("first step")) >= self._size[0])
        stages = {word: max(mark["at"] for mark in after(word).values()) - struck for word in STAGES}
        begun = min(mark["step"] for mark in after("state restored").values())
        committed = self.done(struck)
        return {"rank": rank, **stages, "committed": committed, "restored": begun, "lost": committed - begun}

    def _families(self) -> Iterator[tuple[str, list[int]]]:
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    parents.setdefault(int(parent), []).append(int(entry.name))
        for name, worker in self.workers.items():
            found = [worker.pid]
            for one in found:
                found += parents.get(one, [])
            yield name, found

    def warnings(self) -> list[str]:
        """What State said that went wrong."""
        lines = (line for path in self.folder.glob("*.log") for line in path.read_text(errors="replace").splitlines())
        return sorted({line.partition("muster.State: ")[2] for line in lines if "muster.State: " in line})[:5]

    def close(self) -> None:
        doomed = [pid for _, found in self._families() for pid in found] + [self._coordinator.pid]
        for one in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        for worker in [*self.workers.values(), self._coordinator]:
            worker.wait()


def costs(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    job = Job(given, folder, "cost", 1, 0)
    try:
        job.add()
        limit_s = 120 + given.turns * given.block * 4 * given.step_s * 4
        job.until("blocks with commits and without", lambda: job.marks("end"), limit_s)
        told: dict[str, Any] = {"warnings": job.warnings()}
        for kind in ("unsynced", "synced"):
            found = {word: [mark["value"] for mark in job.marks(f"{word} {kind}")] for word in ("without", "with")}
            told[kind] = compared(found["without"], found["with"], given.block)
        return told
    finally:
        job.close()


def compared(without: list[dict[str, float]], with_commits: list[dict[str, float]], block: int) -> dict[str, float]:
    """Medians of one step, in seconds, and what commits take of it, by both clocks."""

    def median(blocks: list[dict[str, float]], key: str) -> float:
        return statistics.median(one[key] for one in blocks) / block

    told: dict[str, float] = {"steps": float(block * len(with_commits)), "commit call": median(with_commits, "called")}
    for clock in ("wall", "device"):
        before, after = median(without, clock), median(with_commits, clock)
        told |= {f"step, {clock}": before, f"step with commits, {clock}": after, f"share, {clock}": after / before - 1}
    return told


def kills(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    job = Job(given, folder, "train", 2, 1)
    try:
        for _ in range(3):
            job.add()
        found = []
        for turn in range(given.kills):
            reached = job.done()
            time.sleep(given.settle_s if turn else 0.0)
            job.until(f"{given.steps} more steps", lambda wanted=reached + given.steps: job.done() >= wanted)
            found.append(job.lose((turn + 1) % 2))
            say(f"kill {turn + 1}: first step after {found[-1]['first step']:.2f} s, {found[-1]['lost']} lost")
            job.add()
        (job.notes / "until").write_text(str(job.done() + 4))
        job.until("the end", lambda: len(job.marks("end")) >= 2)
        ends = sorted({(mark["step"], mark["value"]) for mark in job.marks("end")})
        told: dict[str, Any] = {"kills": found, "end": ends, "warnings": job.warnings()}
        commits = [mark["value"] for mark in job.marks("done")]
        for key, name in (("called", "commit call"), ("behind", "steps that were not yet safe")):
            told[name] = statistics.median(one[key] for one in commits)
        return told
    finally:
        job.close()


def machine(given: argparse.Namespace) -> dict[str, Any]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    own = given.gb * (0.5 if given.split else 1.0)
    told: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "host GB free": free / 1e9}
    told |= {"state of a rank, GB": own, "host GB wanted at most": own * COPIES * 2 + given.gb * (COPIES - 1)}
    if given.device == "cuda":
        about = torch.cuda.get_device_properties(0)
        told |= {"gpu": about.name, "gpu GB": about.total_memory / 1e9}
    if told["host GB wanted at most"] > told["host GB free"]:
        told["does not fit"] = "workers and spare may want more memory than there is: commits may be refused"
    return told


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.2, help="of state: weights and two moments, in 1e9 bytes (1.2)")
    parser.add_argument("--split", action="store_true", help="each rank has its own half of that")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--step-s", type=float, default=1.0, help="length of a step, about (1)")
    parser.add_argument("--overhead", type=float, default=0.03, help="of muster.State (0.03)")
    parser.add_argument("--kills", type=int, default=2, help="workers that are killed; 0: none (2)")
    parser.add_argument("--steps", type=int, default=15, help="before each of them (15)")
    parser.add_argument("--settle-s", type=float, default=15.0, help="which a new spare has until the next (15)")
    parser.add_argument("--turns", type=int, default=4, help="blocks of each kind; 0: none (4)")
    parser.add_argument("--block", type=int, default=8, help="steps of a block (8)")
    parser.add_argument("--preload", action="append", default=[], metavar="MOD", help="warm parents import this")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--rank", choices=("train", "cost"), help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank = Rank(given)
        rank.cost() if given.rank == "cost" else rank.train()
        return
    told: dict[str, Any] = {"machine": machine(given)}
    with tempfile.TemporaryDirectory(prefix="muster-state-") as folder:
        if given.turns:
            say("what commits cost")
            told["cost"] = costs(given, Path(folder) / "cost")
        if given.kills:
            say("kills")
            told["kills"] = kills(given, Path(folder) / "kills")
    print(json.dumps(told) if given.json else shown(told))


def shown(told: dict[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in told.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", shown(value, indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{indent}{key}", *(shown(one, indent + "  ") + "\n" for one in value)]
        else:
            lines.append(f"{indent}{key:<28} {value if not isinstance(value, float) else format(value, '.4g')}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
