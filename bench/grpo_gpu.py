"""Two GRPO pipelines on one GPU: how long together, and how long one after the other?

    PYTHONPATH=src python bench/grpo_gpu.py [--steps 8] [--json]
    PYTHONPATH=src python bench/grpo_gpu.py --tiny --steps 2       # on a CPU, to see that it runs

It needs torch, transformers and what a control plane needs. The pool has one slot, the whole GPU: a pipeline has all of
its memory, or none. Each pipeline is a process with a Llama of random weights (about 1.1 B parameters, bfloat16) and
AdamW, whose weights and optimizer state go to pinned host memory whenever it does not hold the slot. A step: generate
(`transformers`), reward on the CPU (the distance of every answer to many references, in plain Python), then one update
by group-relative advantages. Loading is not measured. What is checked at each change: that nothing but small remains of
the one that leaves is on the device, as the device says; and that answers are sampled from the newest weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("A", "B")


# One pipeline ------------------------------------------------------------------------------------


class Pipeline:
    def __init__(self, given: argparse.Namespace) -> None:
        from muster.sharing import sync

        self.given, self.name = given, given.child
        self.pool = sync.connect(self.name, gpus=[0], url=given.url, token=given.token)
        import torch

        self.torch = torch
        self.on = torch.device("cpu" if given.tiny else "cuda")
        torch.manual_seed(sum(map(ord, self.name)))
        self.log = Path(given.folder, f"{self.name}.log")
        self.model, self.optimizer = self._made()
        self._train(*self._batch(self._generate()), rate=0.0)  # the optimizer's state is made
        from muster.sharing.engines import TorchEngine

        self.engine = TorchEngine(self.model, caches={"optimizer": self.optimizer}, device=self.on, may_keep=256 << 20)
        self.engine.publish(0)
        self.pool.attach(self.engine)  # it goes to the host, and the slot is given back
        dice = random.Random(self.name)
        self.references = [[dice.randrange(1000) for _ in range(given.tokens)] for _ in range(given.references)]

    def _made(self) -> tuple[Any, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        wide, deep = (64, 2) if self.given.tiny else (2048, 22)
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=wide,
            num_hidden_layers=deep,
            intermediate_size=wide * 11 // 4,
            num_attention_heads=wide // 64,
            num_key_value_heads=max(1, wide // 512),
        )
        model = LlamaForCausalLM(config).to(self.on, self.torch.bfloat16)
        return model, self.torch.optim.AdamW(model.parameters(), lr=1e-6)

    def tell(self, what: str, **more: Any) -> None:
        with self.log.open("a") as log:
            log.write(json.dumps({"at": time.time(), "who": self.name, "what": what, **more}) + "\n")

    def run(self) -> None:
        self.tell("ready", parameters=sum(one.numel() for one in self.model.parameters()))
        while not Path(self.given.folder, f"go-{self.name}").exists():
            time.sleep(0.01)
        for step in range(self.given.steps):
            self._step(step)
        self.tell("done")
        self.pool.close()

    def _step(self, step: int) -> None:
        self.tell("asks", stage="generate", step=step)
        with self.pool.generation(step, self.given.batch) as rollout:
            with rollout.turn():
                self.tell("up", stage="generate", step=step, version=self.engine.version)
                answers = self._generate()
            rollout.completed(self.given.batch)
            self.tell("leaves", stage="generate")
        self.tell("down", stage="generate", used=self._used())
        rewards = self._rewards(answers)
        self.tell("asks", stage="train", step=step)
        with self.pool.training():
            self.pool.run(self.engine.expand({0: [0]}))
            self.tell("up", stage="train", step=step, version=self.engine.version)
            self._train(answers, rewards)
            self.engine.publish(step + 1)
            self.tell("leaves", stage="train")
            self.pool.run(self.engine.shrink([0]))
        self.tell("down", stage="train", used=self._used())

    def _used(self) -> int:
        """Of the whole device, by whomever."""
        if self.on.type != "cuda":
            return 0
        free, total = self.torch.cuda.mem_get_info()
        return int(total - free)

    def _generate(self) -> Any:
        prompts = self.torch.randint(5, 32000, (self.given.batch // 8, 16), device=self.on).repeat_interleave(8, 0)
        with self.torch.no_grad():
            whole = self.model.generate(
                prompts,
                attention_mask=self.torch.ones_like(prompts),
                do_sample=True,
                max_new_tokens=self.given.tokens,
                min_new_tokens=self.given.tokens,
                pad_token_id=0,
                eos_token_id=2,
            )
        return whole.cpu()

    def _rewards(self, answers: Any) -> list[float]:
        began = time.time()
        told = [[token % 1000 for token in row[16:]] for row in answers.tolist()]
        found = [-min(_distance(row, one) for one in self.references) / self.given.tokens for row in told]
        self.tell("rewarded", took=time.time() - began)
        return found

    def _batch(self, answers: Any) -> tuple[Any, list[float]]:
        return answers, [random.random() for _ in range(len(answers))]

    def _train(self, answers: Any, rewards: list[float], rate: float = 1.0) -> None:
        torch = self.torch
        scores = torch.tensor(rewards).view(-1, 8)
        advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).view(-1)
        for at in range(0, len(answers), 8):
            rows = answers[at : at + 8].to(self.on)
            logits = self.model(rows).logits[:, 15:-1].float()
            chosen = torch.log_softmax(logits, -1).gather(-1, rows[:, 16:, None])[..., 0]
            loss = -(advantages[at : at + 8].to(self.on)[:, None] * chosen).mean() * rate
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.on.type == "cuda":
            torch.cuda.synchronize()


def _distance(one: list[int], other: list[int]) -> int:
    """Levenshtein's."""
    before = list(range(len(other) + 1))
    for i, x in enumerate(one, 1):
        now = [i]
        for j, y in enumerate(other, 1):
            now.append(min(before[j] + 1, now[-1] + 1, before[j - 1] + (x != y)))
        before = now
    return before[-1]


# Both of them ------------------------------------------------------------------------------------


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    def run(self) -> dict[str, Any]:
        apart = [self._mode([name]) for name in NAMES]
        together = self._mode(list(NAMES))
        alone_s, shared_s = sum(one["took"] for one in apart), together["took"]
        switches = together["switches"]
        runs = (*apart, together)
        return {
            "device": self._device(),
            "parameters": together["parameters"],
            "one after the other s": round(alone_s, 2),
            "shared s": round(shared_s, 2),
            "times as fast": round(alone_s / shared_s, 3),
            "switches": len(switches),
            "switch p50 s": round(statistics.median(switches), 3) if switches else None,
            "switch worst s": round(max(switches), 3) if switches else None,
            "answers from stale weights": sum(one["stale"] for one in runs),
            "left on the device, worst MiB": max(one["left"] for one in runs),
            "reward p50 s": round(statistics.median(t for one in runs for t in one["rewards"]), 2),
            "at best times as fast": self._at_best(together, alone_s),
            "stages p50 s": {stage: round(statistics.median(times), 2) for stage, times in together["stages"].items()},
        }

    def _at_best(self, together: dict[str, Any], alone_s: float) -> float:
        """If changes took no time: the GPU has all stages of both to do, and each pipeline its own one by one."""
        gpu = sum(sum(times) for times in together["stages"].values())
        one = max(gpu, gpu / 2 + sum(together["rewards"]) / 2)
        return round(float(alone_s / one), 3)

    def _device(self) -> str:
        if self.given.tiny:
            return "cpu"
        import torch

        return str(torch.cuda.get_device_name())

    def _mode(self, names: list[str]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="muster-grpo-") as folder:
            plane = _Plane(Path(folder, "home"))
            children = []
            try:
                children = [self._child(name, folder, plane) for name in names]
                logs = {name: Path(folder, f"{name}.log") for name in names}
                _until(lambda: all('"ready"' in _text(log) for log in logs.values()), children, 300)
                for name in names:
                    Path(folder, f"go-{name}").touch()
                _until(lambda: all('"done"' in _text(log) for log in logs.values()), children, 600)
                for child in children:
                    assert child.wait(60) == 0, "a pipeline failed"
                return _read([json.loads(line) for log in logs.values() for line in _text(log).splitlines()])
            finally:
                for child in children:
                    child.kill()
                plane.stop()

    def _child(self, name: str, folder: str, plane: _Plane) -> subprocess.Popen[bytes]:
        given = self.given
        words = ["--child", name, "--folder", folder, "--url", plane.url, "--token", plane.token]
        for option in ("steps", "batch", "tokens", "references"):
            words += [f"--{option}", str(getattr(given, option))]
        return subprocess.Popen([sys.executable, __file__, *words, *(["--tiny"] if given.tiny else [])])


class _Plane:
    """A control plane with one GPU."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        from muster.server.auth import EMBEDDED_FILE

        env = {**os.environ, "MUSTER_GPUS": "1"}
        words = [sys.executable, "-m", "muster.daemon", "--home", str(home)]
        self._process = subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL)
        _until((home / "server.json").exists, [self._process], 60)
        self.url = json.loads((home / "server.json").read_text())["url"]
        self.token = (home / EMBEDDED_FILE).read_text().strip()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def _read(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """What happened, from the pipelines' own logs."""
    entries.sort(key=lambda one: one["at"])
    ran = [one for one in entries if one["what"] not in ("ready",)]
    stages: dict[str, list[float]] = {}
    for up, leaves in _paired(ran):
        stages.setdefault(up["stage"], []).append(leaves["at"] - up["at"])
    alone = max((one["used"] for one in ran if one["what"] == "down"), default=0)
    return {
        "took": ran[-1]["at"] - next(one["at"] for one in ran if one["what"] == "asks"),
        "switches": list(_switches(ran)),
        "stale": sum(one["what"] == "up" and int(one["version"]) != one["step"] for one in ran),
        "rewards": [one["took"] for one in ran if one["what"] == "rewarded"],
        "stages": stages,
        "left": alone >> 20,
        "parameters": entries[0].get("parameters"),
    }


def _paired(ran: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    open_: dict[str, dict[str, Any]] = {}
    found = []
    for one in ran:
        if one["what"] == "up":
            open_[one["who"]] = one
        elif one["what"] == "leaves":
            found.append((open_.pop(one["who"]), one))
    return found


def _switches(ran: list[dict[str, Any]]) -> list[float]:
    """From when one begins to leave, or the next one asks if that is later, until the next one is up."""
    found, last, asked = [], None, {}
    for one in ran:
        if one["what"] == "asks":
            asked[one["who"]] = one["at"]
        elif one["what"] == "leaves":
            last = one
        elif one["what"] == "up" and last is not None and last["who"] != one["who"]:
            found.append(one["at"] - max(last["at"], asked[one["who"]]))
    return found


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _until(look: Any, children: list[subprocess.Popen[bytes]], bound_s: float) -> None:
    end = time.monotonic() + bound_s
    while not look():
        gone = [child for child in children if child.poll() not in (None, 0)]
        if gone or time.monotonic() > end:
            raise SystemExit(f"it failed: {'a process ended' if gone else 'it took too long'}")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, usual in (("steps", 8), ("batch", 32), ("tokens", 128), ("references", 24)):
        parser.add_argument(f"--{option}", type=int, default=usual)
    for option in ("child", "folder", "url", "token"):
        parser.add_argument(f"--{option}", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.child:
        Pipeline(given).run()
        return
    found = Bench(given).run()
    print(json.dumps(found) if given.json else "\n".join(f"{name:<48} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
