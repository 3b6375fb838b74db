"""The warm parent: a process that has imported what ranks need and forks them when a round is released.

It runs as `python -m muster.node.warm CONTROL_FD PLAN_FD PARENT_PID`. It starts no threads and initialises no CUDA.
A rank is a fork that unwinds to the top of this module and runs the script there, so that it ends through the
interpreter's own exit: exit codes, `atexit`, non-daemon threads and tracebacks are those of a fresh interpreter.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

from muster.node import system

MAX_MESSAGE = 1 << 17


class Plan:
    """What to run, fixed when the agent starts."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.mode: str = data["mode"]  # script | module | command
        self.target: str = data["target"]
        self.args: list[str] = data["args"]
        self.warm: bool = data["warm"]  # fork and run, instead of fork and exec
        self.preload: list[str] = data["preload"]
        self.detect_torch: bool = data["detect_torch"]

    @property
    def command(self) -> list[str]:
        """The command line of a fresh process."""
        if self.mode == "command":
            return [self.target, *self.args]
        flag = ["-m"] if self.mode == "module" else []
        return [sys.executable, *interpreter_flags(), *flag, self.target, *self.args]


def interpreter_flags() -> list[str]:
    """The interpreter's own options, so that a child runs under the same ones."""
    import subprocess

    return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    system.die_with_parent(int(sys.argv[3]))
    with open(int(sys.argv[2])) as file:
        plan = Plan(json.load(file))
    _look_fresh(plan)
    parent = _Parent(control, plan)
    parent.warm_up()
    if parent.serve():  # True in a rank
        run(plan)


# The parent --------------------------------------------------------------------------------------


class _Parent:
    def __init__(self, control: socket.socket, plan: Plan) -> None:
        self._control = control
        self._plan = plan
        self._pid = os.getpid()
        self._children: dict[int, str] = {}
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def warm_up(self) -> None:
        """Import what ranks will need. A module that does not import is reported, not fatal: the rank will say more."""
        started = time.monotonic()
        modules = list(self._plan.preload)
        if self._plan.detect_torch:
            from muster.node import imports

            if imports.needs_torch(self._plan.mode, self._plan.target):
                modules.insert(0, "torch")
        problems = []
        for name in modules:
            try:
                __import__(name)
            except Exception as error:  # a user's module may raise anything; the agent passes it on
                problems.append(f"{name}: {type(error).__name__}: {error}")
        gc.collect()
        gc.freeze()
        took = time.monotonic() - started
        self._tell(ready=True, torch="torch" in sys.modules, took_s=round(took, 3), problems=problems)

    def serve(self) -> bool:
        """Fork on request until the agent is gone. Returns True in a forked rank."""
        signal.set_wakeup_fd(self._wake_w)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
                    continue
                if self._obey():
                    return True
            self._report_ends()

    def _obey(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 4)
        if not data:
            self._leave()
        order = json.loads(data)
        match order["do"]:
            case "spawn":
                return self._spawn(order)
            case "store":
                self._start_store(order, fds[0])
            case "signal":
                self._signal(order)
        return False

    def _leave(self) -> NoReturn:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)

    def _spawn(self, order: dict[str, Any]) -> bool:
        pid = os.fork()
        if pid == 0:
            self._become_child()
            _take_streams(order["out"], order["err"])
            os.environ.update(order["env"])
            if not self._plan.warm:
                _execute(self._plan.command)
            return True
        self._children[pid] = order["key"]
        self._tell(spawned=order["key"], pid=pid)
        return False

    def _start_store(self, order: dict[str, Any], listener: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_child()
            if "torch" not in sys.modules:
                os.set_inheritable(listener, True)
                place = [str(listener), order["host"], str(order["port"]), str(self._pid)]
                _execute([sys.executable, *interpreter_flags(), "-m", "muster.node.store", *place])
            from muster.node import store

            system.show_as(["muster", "store", f"{order['host']}:{order['port']}"])
            store.serve(listener, order["host"], order["port"])
            os._exit(0)
        os.close(listener)
        self._children[pid] = order["key"]

    def _become_child(self) -> None:
        """Leave everything of the parent behind: its session, signals, sockets."""
        os.setsid()
        system.die_with_parent(self._pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _signal(self, order: dict[str, Any]) -> None:
        """Only the parent knows that a pid is still its child's, so signals go through it."""
        for pid, key in self._children.items():
            if key not in order["keys"]:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if order.get("group"):
                    os.killpg(pid, order["signal"])
                else:
                    os.kill(pid, order["signal"])

    def _report_ends(self) -> None:
        for pid, status in system.reap():
            key = self._children.pop(pid, None)
            if key is not None:
                self._tell(exited=key, status=status)

    def _tell(self, **message: Any) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._leave()


def _execute(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"muster-node: cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _take_streams(out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, number)
        os.close(fd)


# The rank ----------------------------------------------------------------------------------------


def _look_fresh(plan: Plan) -> None:
    """Put `sys.path` in the state that it would have in the script's own interpreter; imports below depend on it."""
    if not sys.flags.safe_path and sys.path:
        if plan.mode == "script":
            where = os.path.realpath(plan.target)
            sys.path[0] = where if os.path.isdir(where) else os.path.dirname(where)
        else:
            sys.path[0] = os.getcwd()


def run(plan: Plan) -> None:
    """Run the user's program as `__main__`, in the process that was forked for it."""
    sys.orig_argv = plan.command
    system.show_as(plan.command)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if not faulthandler.is_enabled():
        faulthandler.enable()
    gc.unfreeze()
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main_module
    with _as_if_on_top():
        if plan.mode == "module":
            sys.argv = ["-m", *plan.args]
            runpy._run_module_as_main(plan.target)  # type: ignore[attr-defined]
        elif os.path.isdir(plan.target) or plan.target.endswith((".zip", ".pyz")):
            sys.argv = [plan.target, *plan.args]
            sys.path[0] = plan.target
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            _run_script(plan, main_module)


def _run_script(plan: Plan, main_module: types.ModuleType) -> None:
    sys.argv = [plan.target, *plan.args]
    main_module.__dict__.update(
        __file__=plan.target, __cached__=None, __loader__=SourceFileLoader("__main__", plan.target)
    )
    with open(plan.target, "rb") as file:
        source = file.read()
    exec(compile(source, plan.target, "exec", dont_inherit=True), main_module.__dict__)


@contextlib.contextmanager
def _as_if_on_top() -> Iterator[None]:
    """Let errors end the process as they would at the top of an interpreter, without our frames in the traceback."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, contextlib.__file__):
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        sys.excepthook = lambda *_: None
        if isinstance(error, KeyboardInterrupt):
            raise  # the interpreter then ends itself with SIGINT
        sys.exit(1)


if __name__ == "__main__":
    main()
