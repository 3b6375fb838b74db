"""Who types what the pages print? One shell per reader, in a home and a clone of its own, with real processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from tests.docs import blocks
from tests.docs.blocks import GAP, INTERRUPT, ROOT, Block, Command
from tests.fleet import Process, eventually, free_port
from tests.plane import Plane

PATIENCE_S = 120.0
LOOK_AGAIN_S = 30.0
ENVIRONMENT = Path(sys.executable).parents[1]
PAUSE = "time.sleep(0.02)"  # after each step
STEP_S = 0.002
HOME, PROJECT = "/home/me", "/home/me/project"  # of whoever wrote the pages
_LOOK = re.compile(r"muster (ps|events|explain|logs)\b")
_MARK = "typed-"
_PORT = re.compile(r"(?:(?<=127\.0\.0\.1:)|(?<=localhost:)|(?<=[^\d.]0\.0\.0\.0:))\d+")


class Reader:
    """Reads pages from the top and types every block, in one shell."""

    def __init__(self, plane: Plane, **env: str) -> None:
        """`plane` gives the folder and takes everything down; its control plane is started by what is typed."""
        self.plane = plane
        self.patience_s = PATIENCE_S  # of one command
        user = plane.folder / "user"
        user.mkdir()
        plane.home = user / ".muster"
        plane.env |= {"HOME": str(user), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **env}
        plane.env["PIP_DRY_RUN"] = "1"  # an installation that nobody has excepted leaves the tests' environment alone
        del plane.env["MUSTER_HOME"]
        self.clone = plane.folder / "clone"
        shutil.copytree(ROOT / "examples", self.clone / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        (self.clone / ".venv").symlink_to(ENVIRONMENT)
        self._hasten(self.clone / "examples" / "train.py")
        self._ports: dict[str, str] = {}
        self._count = 0
        # Whoever started the tests may ignore SIGINT; a shell hands that down, a terminal does not.
        shell = ["env", "--default-signal=INT", "bash", "--norc"]
        self._shell = Process(shell, plane.env, self.clone, stdin=subprocess.PIPE)
        plane.processes.append(self._shell)

    def _hasten(self, example: Path) -> None:
        """A run that is read to its end need not take the seconds that it takes so that a user sees it run."""
        text = example.read_text()
        assert text.count(PAUSE) == 1
        example.write_text(text.replace(PAUSE, f"time.sleep({STEP_S} if given.steps <= 200 else {STEP_S * 10})"))

    def open(self, page: str) -> None:
        """Begin to read it, in the clone, wherever the page before has led."""
        assert self.obey(Command(f"cd {self.clone}")) == [], page

    def activate(self) -> None:
        """What pages take for granted that do not say it themselves."""
        assert self.obey(Command(". .venv/bin/activate")) == []

    def read(self, block: Block, skip: Collection[str] = ()) -> list[str]:
        """Do what a block says, but for some commands; what was then not as it says."""
        if block.kind in ("yaml", "json"):
            self._keep(block.file, block.body.replace(PROJECT, str(self.clone)))
            return []
        if block.kind == "python":
            return self._program(block)
        assert block.kind == "", f"nobody has said how a block of {block.kind} is read"
        asked = [command for command in blocks.commands(block) if command.text not in skip]
        return [problem for command in asked for problem in self.obey(command)]

    def _program(self, block: Block) -> list[str]:
        """One that has a name of its own is started by what follows."""
        if block.file:
            self._keep(block.file, block.body)
            return []
        self._count += 1
        name = f"example_{self._count}.py"
        self._keep(name, block.body)
        return self.obey(Command(f"python {name}", blocks.printed(block.body)))

    def _keep(self, file: str, text: str) -> None:
        """Where the page says: in the clone, or in the home."""
        assert file, "the page does not say where this belongs"
        place = self.plane.home.parent / file.removeprefix("~/") if file.startswith("~/") else self.clone / file
        place.write_text(text)

    def obey(self, command: Command) -> list[str]:
        """What differs. Who only looks may look again, as a reader does who types faster than things happen."""
        give_up = time.monotonic() + (LOOK_AGAIN_S if _LOOK.match(command.text) else 0.0)
        while (problems := self._once(command)) and time.monotonic() < give_up:
            continue
        return problems

    def _once(self, command: Command) -> list[str]:
        """Type a command and compare; what differs, with all that came."""
        said = command.said if command.said is not None else (GAP,)
        start = len(self._shell.text)
        mark = self._type(command.text)
        if INTERRUPT in said:
            self._await(said[: said.index(INTERRUPT)], start)
            os.kill(self._foreground(), signal.SIGINT)
        code = int(self._shell.expect(rf"{mark} (\d+)\n", self.patience_s)[1])
        if GAP in map(str.strip, said):
            self._await(said, start)  # what runs in the background may answer later
        problems = blocks.differences(said, self._since(start))
        if code != (130 if INTERRUPT in said else 0) and not blocks.may_fail(command):
            problems.append(f"exit code {code}")
        return [f"$ {command.text}", *problems, *(f"  {line}" for line in self._since(start))] if problems else []

    def _type(self, command: str) -> str:
        """Hand it to the shell; the word that the shell says when it is through."""
        self._count += 1
        mark = f"{_MARK}{self._count}"
        text = _PORT.sub(lambda found: self._ports.setdefault(found[0], str(free_port())), command)
        assert self._shell.proc.stdin is not None
        self._shell.proc.stdin.write(f"{{ {text}\n}} </dev/null\nprintf '\\n{mark} %s\\n' $?\n".encode())
        self._shell.proc.stdin.flush()
        return mark

    def _since(self, start: int) -> list[str]:
        text = self._shell.text[start:]
        for printed, real in self._ports.items():
            text = text.replace(f":{real}", f":{printed}")
        text = text.replace(str(self.clone), PROJECT).replace(self.plane.env["HOME"], HOME)
        return [line for line in text.splitlines() if line.strip() and not line.startswith(_MARK)]

    def _await(self, said: tuple[str, ...], start: int) -> None:
        """Until all that was promised has come, or too long."""
        wanted = (*said, GAP)
        with contextlib.suppress(AssertionError):
            eventually(lambda: not blocks.differences(wanted, self._since(start)), "the answer", self.patience_s)

    def _foreground(self) -> int:
        pid = self._shell.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])
