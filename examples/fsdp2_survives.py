"""A sharded training loses a worker, grows and shrinks, and its loss goes on as if nothing had been: a picture of it.

It runs under your own control plane, and removes its trainings at the end. A second one is left alone, to compare.

    .venv/bin/python examples/fsdp2_survives.py loss.svg
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from survive_kill import holder_of, pid_of, until

import muster
from muster import DistributedTraining, WorldSize

SCRIPT, ENDLESS, PATIENCE_S = Path(__file__).with_name("fsdp2_transformer.py"), 1_000_000, 120.0
Curve = dict[int, float]  # step → loss
Events = list[tuple[int, str]]  # after which step what was done


def main(picture: Path, steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="fsdp2-") as folder, muster.Client() as client:
        disturbed, undisturbed = Path(folder) / "disturbed", Path(folder) / "undisturbed"
        with running(client, disturbed, ENDLESS, spares=1) as training:
            events = disturb(client, training, disturbed, steps)
        curve = read(disturbed)
        with running(client, undisturbed, max(curve), spares=0) as training:
            training.result(timeout=10 * PATIENCE_S)
        alone = read(undisturbed)
    equal = next((step - 1 for step in alone if alone[step] != curve[step]), max(alone))
    apart = max(abs(alone[step] - curve[step]) for step in alone)
    print(f"{len(alone)} steps; equal bit by bit up to step {equal}, never further apart than {apart:.1e}")
    picture.write_text(drawn(alone, curve, events))


@contextlib.contextmanager
def running(client: muster.Client, losses: Path, steps: int, spares: int) -> Iterator[DistributedTraining]:
    world, args = WorldSize(min=1, target=2, max=3), [str(losses), "--steps", str(steps)]
    training = client.train(script=SCRIPT, args=args, world_size=world, spares=spares, max_restarts=0)
    print(f"submitted {training.name}, {losses.name}")
    try:
        yield training
    finally:
        training.delete(timeout=PATIENCE_S)


def disturb(client: muster.Client, training: DistributedTraining, losses: Path, steps: int) -> Events:
    """Each after so many steps more, and as soon as a spare stands by."""
    events: Events = []
    for target in (2, 3, 2):
        until(client, training, lambda: training.training.status.spares.ready == 1 and len(training.ranks) > 1)
        at = reached(losses, steps)
        if not events:
            victim = holder_of(training, rank=1)
            os.kill(pid_of(victim, training), signal.SIGKILL)
            until(client, training, lambda: len(training.ranks) == 2 and training.ranks[0].round > 0)
            events.append((at, "worker killed"))
        else:
            training.scale(target=target)
            training.wait_until_target_world(timeout=PATIENCE_S)
            events.append((at, f"{target} workers"))
        print(f"step {at}: {events[-1][1]}")
    reached(losses, steps)
    print("\n".join(line for line in training.logs() if "starts at" in line))
    return events


def read(losses: Path) -> Curve:
    """A step that was done again is there again; its last word counts."""
    lines = losses.read_text().splitlines(keepends=True) if losses.exists() else []
    whole = [line.split() for line in lines if line.endswith("\n")]
    return dict(sorted({int(step): float(loss) for step, loss, *_ in whole}.items()))


def reached(losses: Path, more: int) -> int:
    """The newest step, when it is so many further than now."""
    wanted = max(read(losses), default=0) + more
    while max(now := read(losses), default=0) < wanted:
        time.sleep(0.02)
    return max(now)


def drawn(alone: Curve, curve: Curve, events: Events) -> str:
    """Loss against step: the undisturbed one broad and pale, the other fine above it."""
    last, top = max(alone), math.ceil(max(alone.values()))
    parts = ['<path d="M60 40V280H680" fill="none" stroke="#888"/>']

    def text(x: float, y: float, words: object, anchor: str = "middle") -> None:
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>')

    for loss in range(top + 1):
        text(52, 284 - 240 * loss / top, loss, "end")
    for at, what in [(0, "2 workers"), *events, (last, "")]:
        x = 60 + 620 * at / last
        parts += [f'<path d="M{x:.1f} 40V280" stroke="#c33" stroke-dasharray="4 3"/>'] * ((at, what) in events)
        text(x, 298, at)
        text(x, 30, what)
    for points, look in ((alone, '"#9cd" stroke-width="7"'), (curve, '"#124" stroke-width="1.5"')):
        line = " ".join(f"{60 + 620 * step / last:.1f},{280 - 240 * points[step] / top:.1f}" for step in alone)
        parts.append(f'<polyline fill="none" stroke={look} points="{line}"/>')
    text(370, 318, "loss at each step: pale, of the run that was left alone; dark, of the one that was disturbed")
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 330" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="720" height="330" fill="#fff"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, nargs="?", default=Path("loss.svg"))
    parser.add_argument("--steps", type=int, default=40, help="before, between and after what disturbs it, at least")
    main(**vars(parser.parse_args()))
