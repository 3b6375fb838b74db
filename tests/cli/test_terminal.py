"""What stands on a real terminal, and is it given back as it was?"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import eventually
from tests.plane import Plane, fresh

MUSTER = str(Path(sys.executable).parent / "muster")
ENTER, LEAVE, HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"
CODES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


class Terminal:
    """A command on a pseudo terminal, with what it has written."""

    def __init__(self, plane: Plane, *words: str, columns: int = 80, **env: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(columns)
        self._left: list[Any] | None = None  # the state in which it was left
        self.before = self.state
        plain = {key: value for key, value in plane.env.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [MUSTER, *words],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            cwd=plane.folder,
            env=plain | {"TERM": "xterm"} | env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def state(self) -> list[Any]:
        return termios.tcgetattr(self._theirs) if self._left is None else self._left

    @property
    def frame(self) -> list[str]:
        """What `top` has drawn last, without its codes."""
        return CODES.sub("", self.text.rpartition(HOME)[2]).split("\r\n")

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def shows(self, pattern: str) -> None:
        eventually(lambda: re.search(pattern, self.text), f"{pattern!r} in {self.text[-2000:]!r}", 20)

    def ends(self) -> int:
        """Its exit code, when all that it wrote has been read."""
        code = self.process.wait(20)
        if self._left is None:
            self._left = self.state
            os.close(self._theirs)
            self._reader.join(20)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.ends()

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 65536):
                self.text += data.decode(errors="replace")
        except OSError:
            pass  # the other end is closed
        finally:
            os.close(self._ours)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Plane]:
    """One training runs, one can never start; there is a pool of two GPUs."""
    made = Plane(tmp_path)
    made.serve(MUSTER_GPUS="2")
    made.train("demo", world=(1, 1, 2)).wait_until_min_world(timeout=30)
    made.train("large", world=(2, 2, 2), resources={"gpus": 3}, force=True)
    yield made
    made.go()
    made.close()


@pytest.mark.usefixtures("processes")
def test_top_draws_on_a_terminal_of_its_own_and_q_gives_it_back(busy: Plane) -> None:
    terminal = Terminal(busy, "top")
    try:
        terminal.shows("it can never start")
        terminal.shows("POOL")
        frame = terminal.frame
        assert all(len(line) <= 80 for line in frame)
        assert any(re.fullmatch(r"demo +ready +1/1 +0/0 +0 +0 .*", line) for line in frame)
        assert "    needs 6 GPUs (2 workers × 3), there are only 2 here: it can never start" in frame
        assert any(re.fullmatch(r"0-1 +- +- +idle +-", line) for line in frame)
        assert "\x1b[32m" in terminal.text
        terminal.resize(200)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        terminal.shows("REASON")
        terminal.type("q")
        assert terminal.ends() == 0
        assert terminal.state == terminal.before
        assert terminal.text.count(ENTER) == 1 and terminal.text.endswith(LEAVE)
    finally:
        terminal.close()


@pytest.mark.usefixtures("processes")
def test_top_scales_shows_the_log_and_cancels_what_was_chosen(busy: Plane) -> None:
    terminal = Terminal(busy, "top")
    try:
        terminal.shows("POOL")
        terminal.type("j+")
        terminal.shows(r"demo: 2 workers asked for")
        eventually(lambda: busy.client.get("demo").world.target == 2, "it was scaled")
        terminal.type("l")
        terminal.shows("log of demo")
        terminal.type("\x1b")
        eventually(lambda: any(line.startswith("muster top") for line in terminal.frame), "the board is back")
        terminal.type("x")
        terminal.shows(r"cancel demo\? y, or any other key")
        terminal.type("n")
        terminal.shows("not cancelled")
        terminal.type("xy")
        eventually(lambda: busy.client.get("demo").phase == "cancelled", "it was cancelled")
        terminal.type("q")
        assert terminal.ends() == 0
    finally:
        terminal.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_whatever_ends_top_the_terminal_is_given_back(plane: Plane, number: signal.Signals, code: int) -> None:
    terminal = Terminal(plane, "top", NO_COLOR="1")
    try:
        terminal.shows("no trainings here yet")
        assert not re.search(r"\x1b\[3\dm", terminal.text)
        os.kill(terminal.process.pid, number)
        assert terminal.ends() == code
        assert terminal.state == terminal.before
        assert terminal.text.endswith(LEAVE)
    finally:
        terminal.close()


def test_what_is_wrong_from_the_start_is_told_on_the_terminal_as_it_was(plane: Plane) -> None:
    terminal = Terminal(plane, "top", MUSTER_TOKEN="wrong")
    try:
        assert terminal.ends() == 5
        terminal.shows("muster: the token is not known here")
        assert ENTER not in terminal.text
    finally:
        terminal.close()


def test_top_says_when_the_control_plane_is_away_and_goes_on_when_it_is_back(plane: Plane) -> None:
    terminal = Terminal(plane, "top")
    try:
        terminal.shows("no trainings here yet")
        plane.crash()
        terminal.shows("out of date: the control plane does not answer")
        plane.serve()
        eventually(lambda: "out of date" not in "".join(terminal.frame), "it is up to date again", 20)
        terminal.type("q")
        assert terminal.ends() == 0
    finally:
        terminal.close()


@pytest.mark.usefixtures("processes")
def test_a_pipe_gets_everything_once_and_with_follow_a_line_for_each_change(busy: Plane) -> None:
    once = busy.muster("top")
    assert once.wait() == 0
    rows = [line.split()[:2] for line in once.text.splitlines()]
    assert ["demo", "ready"] in rows and ["POOL", "default"] in rows
    follow = busy.muster("top", "-f")
    follow.expect(r"demo  ready  1/1 worker  round 0")
    follow.expect(r"pool default  GPU 0-1  idle")
    busy.client.get("demo").scale(2)
    follow.expect(r"demo  ready  2/2 workers  round 1")
    busy.client.get("large").delete()
    follow.expect(r"large  deleted")
    follow.kill(signal.SIGINT)
    assert follow.wait() == 130
    assert "\x1b" not in once.text + follow.text


@pytest.mark.usefixtures("processes")
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(busy: Plane) -> None:
    terminal = Terminal(busy, "top", TERM="dumb")
    try:
        terminal.shows("demo  ready  1/1 worker")
        terminal.shows("pool default  GPU 0-1  idle")
        terminal.type("\x03")
        assert terminal.ends() == 130
        assert "\x1b" not in terminal.text
    finally:
        terminal.close()


@pytest.mark.usefixtures("processes")
def test_leaving_the_panel_of_a_run_clears_it_and_says_how_to_come_back(busy: Plane) -> None:
    terminal = Terminal(busy, "run", "--command", "--name", "shown", "--gpus", "3", "--force", "--", "true")
    try:
        terminal.shows("╰─")
        terminal.shows("it can never start")
        terminal.type("\x03")
        assert terminal.ends() == 130
        assert terminal.state == terminal.before
        assert "^C" not in terminal.text  # it would push the panel up
        assert "detached; shown goes on. To come back:" in terminal.text
    finally:
        terminal.close()


LABEL = "import sys\ndef loss(label):\n    raise ValueError(f'label {label} is out of range')\nloss(7)\n"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("columns", [100, 80])
def test_ps_shows_the_cause_of_a_failure_on_a_narrow_terminal(tmp_path: Path, columns: int) -> None:
    plane = Plane(tmp_path)
    plane.serve()
    try:
        script = plane.folder / "my_train.py"
        script.write_text(LABEL)
        training = plane.train("f-torchoom", script=str(script), world=(1, 1, 1), max_restarts=0)
        eventually(lambda: fresh(training).is_terminal, "the end", 60)
        terminal = Terminal(plane, "ps", columns=columns)
        assert terminal.ends() == 0
        lines = terminal.text.replace("\r", "").splitlines()
        assert any(line.startswith("  ValueError: label 7 is out of range at my_train.py:3 (rank 0)") for line in lines)
        assert all(len(line) <= columns for line in lines)
    finally:
        plane.close()
