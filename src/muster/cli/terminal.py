"""How does a command have a whole terminal for a while, and give it back as it was?

Frames are written in one piece over the last one, so nothing flickers. Whatever ends it, a key, a signal or an error,
the cursor, the keys and what stood on the screen come back.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from muster.cli.safe_text import raw

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_BASIC = {"bold": 1, "dim": 2, "reverse": 7}
_COLOURS = {"red": 31, "green": 32, "yellow": 33, "magenta": 35}


def coloured(text: str, style: str) -> str:
    """As the user wants it: NO_COLOR leaves bold and dim."""
    codes = _BASIC if os.environ.get("NO_COLOR") else _BASIC | _COLOURS
    return f"\x1b[{codes[style]}m{text}\x1b[0m" if style in codes and text else text


class Screen:
    """The terminal, ours while the context lasts."""

    def __init__(self) -> None:
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._last = ""
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    @property
    def size(self) -> tuple[int, int]:
        found = shutil.get_terminal_size()
        return found.columns, found.lines

    def draw(self, lines: Sequence[str]) -> None:
        """The whole screen; a line that is too long would break it, so they must fit."""
        frame = _HOME + "\n".join(f"{line}{_END_OF_LINE}" for line in lines) + _BELOW
        if frame != self._last:
            self._last = frame
            _write(frame)

    def wake(self) -> None:
        """From any thread or signal handler: `key` returns."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def key(self, timeout_s: float) -> str:
        """What was typed, or nothing when woken or when the time is over."""
        sources = [self._wakes] if self._keys is None else [self._wakes, self._keys]
        ready, _, _ = select.select(sources, [], [], timeout_s)
        if self._wakes in ready:
            os.read(self._wakes, 4096)
        if self._keys in ready and self._keys is not None:
            typed = os.read(self._keys, 64)
            if not typed:
                raise SystemExit(128 + signal.SIGHUP)  # the terminal has gone
            return typed.decode(errors="replace")
        return ""

    # Having it

    def __enter__(self) -> Screen:
        self._handlers = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, _end),
            signal.SIGHUP: signal.signal(signal.SIGHUP, _end),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._stand_still),
            signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda *_: self._forget()),
        }
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _take(self) -> None:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        _write(_ENTER)
        self._forget()

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # a terminal that has gone needs nothing
            _write(_LEAVE)
        if self._keys is not None and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSANOW, self._before)

    def _stand_still(self, *_: object) -> None:
        """Ctrl-Z: the shell gets its terminal, and we take it again when we are continued."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _forget(self) -> None:
        self._last = ""
        self.wake()


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _write(text: str) -> None:
    out = raw(sys.stdout)
    out.write(text)
    out.flush()


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """What is typed meanwhile, such as Ctrl-C, does not write itself into what stands on the screen."""
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    if keys is None:
        yield
        return
    before = termios.tcgetattr(keys)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(keys, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSANOW, before)
