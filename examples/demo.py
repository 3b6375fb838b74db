"""`make demo`: two workers train, a third stands by. One worker is killed; the spare takes its rank; all exit 0.

Everything is real: separate processes, torch, gloo, SIGKILL. The timeline at the end is the coordinator's own story.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from muster.coordinator.client import Refused, ask
from muster.types.world import RunId

RUN = RunId("demo")
PATIENCE_S = 120.0
TRAIN = str(Path(__file__).with_name("train.py"))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="muster-demo-") as folder, contextlib.ExitStack() as clean_up:
        port = _free_port()
        coordinator = _start(clean_up, "muster.coordinator", "--listen", f"127.0.0.1:{port}", quiet=True)
        workers = {}
        for name in ("ada", "bob", "eve"):
            where = ("--coordinator", f"127.0.0.1:{port}", "--run-id", RUN, "--name", name)
            world = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0", "--log-dir", folder)
            workers[name] = _start(clean_up, "muster.node.cli", *where, *world, TRAIN, f"{folder}/checkpoint.pt")
        _until(port, "both workers train", lambda view: view["steps"].get("1", 0) >= 30)
        _say(f"kill -9 {workers['bob'].pid}   (bob, who has rank 1)")
        workers["bob"].send_signal(signal.SIGKILL)
        view = _until(port, "the spare trains", lambda view: view["round"] == 1 and view["steps"].get("1", 0) > 30)
        heir = next(member["name"] for member in view["members"] if member["rank"] == 1)
        _say(f"{heir} has rank 1 now and goes on at step {view['steps']['1']}")
        codes = {name: worker.wait(PATIENCE_S) for name, worker in workers.items()}
        story = _until(port, "the end", lambda view: view["outcome"] is not None)["story"]
        coordinator.terminate()
        coordinator.wait(PATIENCE_S)
    _say(f"exit codes: {codes}")
    print("\ntimeline (seconds from the first line):")
    for line in story:
        print(f"  {line['at'] - story[0]['at']:8.3f}  {line['kind']:<10} {line['text']}")
    return 0 if codes == {"ada": 0, "bob": -9, "eve": 0} and heir == "eve" else 1


def _start(clean_up: contextlib.ExitStack, module: str, *words: str, quiet: bool = False) -> subprocess.Popen[bytes]:
    output = subprocess.DEVNULL if quiet else None
    env = os.environ | {"MUSTER_HOME": tempfile.gettempdir() + f"/muster-{os.getuid()}"}
    process = subprocess.Popen([sys.executable, "-m", module, *words], stdout=output, env=env)
    clean_up.callback(process.kill)  # does nothing to one that has ended
    return process


def _until(port: int, what: str, look: Any) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError, Refused):
            view = asyncio.run(ask([("127.0.0.1", port)], RUN, "show", token=None, timeout_s=1.0))
            if look(view):
                return view
        time.sleep(0.05)
    raise SystemExit(f"demo: not in {PATIENCE_S:g} s: {what}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(text: str) -> None:
    print(f"\n>>> {text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
