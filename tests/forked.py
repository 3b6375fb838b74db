"""A forked process that becomes a program of muster, as if an interpreter had been started for it.

`read_command` decides which calls of `_fork_exec` may be a fork, and `become` runs the program in a forked process.
The process shares no module that a test has changed, because the prepared process (`tests/prepared.py`) runs no test.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import faulthandler
import fcntl
import gc
import io
import logging
import os
import random
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MODULES = {"muster.coordinator", "muster.daemon", "muster.node.bootstrap", "muster.node.cli"}
SCRIPTS = {"muster", "muster-node"}
_HARMLESS_VARIABLES = {b"PYTHONUNBUFFERED", b"PYTHONFAULTHANDLER", b"PYTHONDONTWRITEBYTECODE"}
_FIRST_FREE = 900  # Descriptors are moved here before they get the numbers that the command expects.
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_FLAGS = tuple(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]
_PATH = sys.path[1:]
_libc = ctypes.CDLL(None, use_errno=True)
exec_command: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Command:
    """A command line with everything that the new process inherits."""

    argv: tuple[str, ...]
    env: tuple[str, ...]
    cwd: str
    descriptors: dict[int, int]  # number in the new process → descriptor in this process
    new_session: bool
    umask: int

    @property
    def program(self) -> tuple[str, ...]:
        """Return `-m MODULE WORD…` or `PATH WORD…`, without the interpreter and its flags."""
        if self.argv[0] != sys.executable:
            return self.argv
        flags = len(_FLAGS) if self.argv[1 : len(_FLAGS) + 1] == _FLAGS else 0
        return self.argv[flags + 1 :]

    @property
    def runs_module(self) -> bool:
        return self.program[:1] == ("-m",)

    @property
    def is_of_muster(self) -> bool:
        if self.runs_module:
            return self.program[1] in MODULES
        folder, script = os.path.split(self.argv[0])
        return script in SCRIPTS and folder == os.path.dirname(sys.executable)

    @property
    def words(self) -> tuple[str, ...]:
        """Return the arguments of the program, `sys.argv[1:]`."""
        return self.program[2:] if self.runs_module else self.argv[1:]


def read_command(call: tuple[Any, ...]) -> Command | None:
    """Return the command of a call of `_fork_exec`, or None if it needs an interpreter of its own."""
    argv, programs, close_fds, passed, cwd, env, in_r, in_w, out_r, out_w, err_r, err_w, fail_r, fail_w = call[:14]
    restore_signals, new_session, group, *ids, umask, preexec = call[14:22]
    del in_w, out_r, err_r, fail_r
    argv = tuple(os.fsdecode(word) for word in argv)
    variables = list(env) if env is not None else [name + b"=" + value for name, value in os.environb.items()]
    is_plain = close_fds and restore_signals and group < 0 and preexec is None and ids == [None, None, None]
    is_own = list(programs) == [os.fsencode(argv[0])] and os.path.isdir(cwd or ".")
    if not (is_plain and is_own) or any(_changes_python(variable) for variable in variables):
        return None
    numbers = {number: number for number in passed if number != fail_w}
    for number, (descriptor, inherited) in enumerate([(in_r, 0), (out_w, 1), (err_w, 2)]):
        numbers[number] = descriptor if descriptor >= 0 else inherited
    command = Command(
        argv,
        tuple(map(os.fsdecode, variables)),
        os.fsdecode(cwd) if cwd else os.getcwd(),
        {number: descriptor for number, descriptor in numbers.items() if _is_open(descriptor)},
        bool(new_session),
        umask if umask >= 0 else _read_umask(),
    )
    return command if command.is_of_muster else None


def _changes_python(variable: bytes) -> bool:
    name, _, value = variable.partition(b"=")
    if name == b"PYTHONPATH":
        return bool(value)
    return name.startswith(b"PYTHON") and name not in _HARMLESS_VARIABLES


def _read_umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def fork_command(*call: Any) -> int:
    """Take a call of `_fork_exec` in a forked process, and return the process id of the child."""
    command = read_command(call)
    if command is None:
        return exec_command(*call)
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks in a process with threads.
        pid = os.fork()
    if pid == 0:
        # An object of the parent that is collected here could close a descriptor that the command has taken.
        gc.freeze()
        become(command)
    return pid


def become(command: Command) -> NoReturn:
    """Run the command in this process, which was just forked, and end the process."""
    code = 1
    try:
        _inherit(command)
        code = contextvars.Context().run(_run, command)
    finally:
        if error := sys.exc_info()[1]:
            traceback.print_exception(error)
        os._exit(code)


def _inherit(command: Command) -> None:
    """Take the session, descriptors, variables, signals and streams of the command."""
    if command.new_session:
        os.setsid()
    _take_descriptors(command.descriptors)
    os.chdir(command.cwd)
    os.umask(command.umask)
    _take_variables(command)
    _reset_signals()
    _reset_modules()
    _open_streams()
    subprocess._fork_exec = fork_command  # type: ignore[attr-defined]
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()


def _take_descriptors(descriptors: dict[int, int]) -> None:
    moved = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE) for number, descriptor in descriptors.items()}
    for number in {0, 1, 2} - moved.keys():
        with contextlib.suppress(OSError):
            os.close(number)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number, inheritable=True)
    start = 0
    for number in sorted(descriptors):
        if start < number:  # closerange(0, 0) would close all descriptors.
            os.closerange(start, number)
        start = number + 1
    os.closerange(start, max(os.sysconf("SC_OPEN_MAX"), 65536))


def _take_variables(command: Command) -> None:
    pairs = [pair.partition("=") for pair in command.env]
    os.environ.clear()
    os.environ.update({name: value for name, _, value in pairs})
    sys.argv = [command.argv[0], *command.words]
    sys.orig_argv = list(command.argv)
    first = command.cwd if command.runs_module else os.path.dirname(command.argv[0])
    sys.path[:] = [first, *filter(None, _PATH)]
    _show_in_proc(command)


_retained: list[Any] = []  # Memory that /proc reads, and objects of the parent that must not be collected.


def _show_in_proc(command: Command) -> None:
    """Let /proc show the command line and the variables of the command."""
    fields = [0, 0, 0, 0, *map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:])]
    areas = []
    for parts in (command.argv, command.env):
        text = b"".join(os.fsencode(part) + b"\0" for part in parts)
        memory = ctypes.create_string_buffer(text, len(text) + 1)
        _retained.append(memory)
        areas += [ctypes.addressof(memory), ctypes.addressof(memory) + len(text)]
    _libc.sbrk.restype = ctypes.c_void_p
    layout = struct.pack(
        "=12QIi",
        *(fields[26], fields[27], fields[45], fields[46], fields[47]),
        *(_libc.sbrk(0), fields[28], *areas),
        *(0, 0, -1),
    )
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, len(layout), 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not take another command line")


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _reset_modules() -> None:
    """Drop the registrations of the parent in modules of the standard library."""
    asyncio._set_running_loop(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.set_event_loop_policy(None)
    atexit._clear()
    finalizers = weakref.finalize
    _retained.append(dict(finalizers._registry))  # type: ignore[attr-defined]
    finalizers._registry.clear()  # type: ignore[attr-defined]
    finalizers._registered_with_atexit = False  # type: ignore[attr-defined]
    tempfile.tempdir = None
    random.seed()
    faulthandler.disable()
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            _retained.append(list(logger.handlers))
            logger.handlers.clear()
            logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
            logger.propagate = True


def _open_streams() -> None:
    _retained.append((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    streams: list[Any] = [_open_stream(number, mode, is_unbuffered) for number, mode in enumerate("rww")]
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]


def _open_stream(number: int, mode: str, is_unbuffered: bool) -> io.TextIOWrapper | None:
    if not _is_open(number):
        return None
    raw = io.FileIO(number, mode, closefd=False)
    buffer: Any = io.BufferedReader(raw) if mode == "r" else raw if is_unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=number == 2 or raw.isatty(),
        write_through=is_unbuffered and mode == "w",
    )


def _run(command: Command) -> int:
    """Run the program, and return its exit code."""
    code = 1
    try:
        _run_program(command)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    finally:
        _end_as_python_does()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _run_program(command: Command) -> None:
    if not command.runs_module:
        runpy.run_path(command.argv[0], run_name="__main__")
        return
    module = command.program[1]
    sys.modules.pop(module if module != "muster.daemon" else "muster.daemon.__main__", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_as_python_does() -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
