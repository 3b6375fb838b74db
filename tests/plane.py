"""A real control plane for tests: the daemon as a process, a client, and its workers."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import muster
from muster import DistributedTraining, WorldSize
from tests.fleet import PROBE, PROGRAMS, Fleet, Process, eventually

_TIMES = {"ALIVE_S", "STALL_S", "TIME_SET"}


class Plane(Fleet):
    """Everything of one test lives in one folder and is taken down with it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.home = folder / "home"
        self.daemon: Process | None = None
        self._client: muster.Client | None = None

    def serve(self, *options: str, files: str = "", **env: str) -> Process:
        """Start the control plane, or start it again; returns when it serves.

        `files` is for ulimit. With ALIVE_S, STALL_S or TIME_SET it has that time instead of its own.
        """
        limit = ("/bin/sh", "-c", f'ulimit {files} && exec "$@"', "sh") if files else ()
        program = (str(PROGRAMS / "daemon.py"),) if _TIMES & env.keys() else ("-m", "muster.daemon")
        command = (*limit, sys.executable, *program, "--home", str(self.home), *options)
        self.daemon = self.start(*command, **env)
        self.daemon.expect(r"muster serves on (\S+)")
        return self.daemon

    def receive(self) -> None:
        """Serve the next test, also if the one before has left nothing to serve with."""
        if self.daemon is None or self.daemon.proc.poll() is not None:
            self.serve()

    def tidy(self) -> None:
        """Leave nothing of a test for the next one."""
        for training in self.client.list():
            training.delete()
        self.no_worker_left()
        for note in self.notes.iterdir():
            note.unlink()

    def crash(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    @property
    def url(self) -> str:
        return str(json.loads((self.home / "server.json").read_text())["url"])

    @property
    def api_token(self) -> str:
        return (self.home / "token").read_text().strip()

    @property
    def client(self) -> muster.Client:
        if self._client is None:
            self._client = muster.Client(url=self.url, token=self.api_token)
        return self._client

    def train(
        self,
        name: str = "demo",
        *words: str,
        world: tuple[int, int, int] = (2, 2, 4),
        client: muster.Client | None = None,
        **spec: Any,
    ) -> DistributedTraining:
        """Submit probes that wait until `go`, or do what the words say."""
        if not {"script", "module", "command"} & spec.keys():
            spec |= {"script": PROBE, "args": [str(self.notes), *(words or ("wait",))]}
        spec.setdefault("working_dir", str(self.folder))
        return (client or self.client).train(name=name, world_size=WorldSize(*world), **spec)

    def muster(self, *words: str, **env: str) -> Process:
        """The command line, against this home."""
        return self.start(str(Path(sys.executable).parent / "muster"), *words, **env)

    # Workers

    def worker_pids(self, uid: str = "") -> dict[str, int]:
        """Name → pid of all agents that run now."""
        found = {}
        for line in self.left_over():
            pid, _, command = line.partition(": ")
            words = command.split()
            if "--coordinator-file" in words and (not uid or uid in words):
                found[words[words.index("--name") + 1]] = int(pid)
        return found

    def kill_worker(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.worker_pids()[name], number)

    def no_worker_left(self) -> None:
        eventually(lambda: not self.worker_pids(), f"no worker left, but {self.worker_pids()}", 10)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        super().close()


def fresh(training: DistributedTraining) -> DistributedTraining:
    """The handle, as it is now."""
    training.refresh()
    return training


def reasons(training: DistributedTraining) -> list[str]:
    return [event.reason for event in training.events()]
