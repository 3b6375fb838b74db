"""A rank that tells where it stands and then does what the test asks, one word at a time.

usage: probe.py DIR WORD…    words: wait (until DIR/go exists), exit=N, exit=N@RANK.ROUND, sleep, stubborn, fork
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

folder, words = Path(sys.argv[1]), sys.argv[2:]
rank, number = int(os.environ["RANK"]), int(os.environ["MUSTER_ROUND"])
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MUSTER_ROUND", "MUSTER_WORKER", "MUSTER_RUN_ID")
told = {key: os.environ[key] for key in keys} | {"pid": os.getpid(), "at": time.monotonic()}


def note(kind: str, **more: object) -> None:
    path = folder / f"{kind}-{number}-{rank}-{os.getpid()}.json"
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(told | more))
    draft.rename(path)


if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "fork" in words:
    child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
    told["child"] = child.pid
note("start")
for word in words:
    if word == "wait":
        while not (folder / "go").exists():
            time.sleep(0.01)
    elif word == "sleep":
        time.sleep(600)
    elif word.startswith("exit="):
        code, _, where = word.removeprefix("exit=").partition("@")
        if not where or where == f"{rank}.{number}" or where == f"{rank}.*":
            print(f"rank {rank} gives up", file=sys.stderr)
            sys.exit(int(code))
note("done")
