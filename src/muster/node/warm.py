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
import warnings
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

from muster import files
from muster.node import first_bench, store_check, system, torch_import, torch_version, whereabouts
from muster.node.beginning import Beginning
from muster.node.program import Program, interpreter_flags

MAX_MESSAGE = 1 << 17
STORE = "store"
LOOK_SOON_S = 0.003  # killed processes end by then; what has not is an orphan that has yet to be found
LOOK_S = 0.02
ATTEMPTS = 12  # to find out what a parent must not import, before it does without


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    system.adopt_orphans()
    with open(int(sys.argv[2])) as file:
        program = Program(**json.load(file))
    beginning = Beginning.now()
    _look_fresh(program)
    parent = _Parent(control, program, guard=int(sys.argv[3]), beginning=beginning)
    parent.warm_up()
    if parent.serve():  # True in a rank
        run(program)


# The parent --------------------------------------------------------------------------------------


class _Stopping:
    """An order to end everything: the signal to come, what has ended since, and when patience ends."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.ticket: int = order["ticket"]
        self.signal: int = order["signal"] if order["grace_s"] > 0 else 0
        self.strike_at: float = time.monotonic() + order["freeze_s"]
        self.deadline: float = self.strike_at + order["grace_s"]
        self.ends: list[tuple[str, int]] = []


class _Parent:
    def __init__(self, control: socket.socket, program: Program, guard: int, beginning: Beginning) -> None:
        """It was started deaf to what asks to end (`system.deaf_children`), and hears of the guard's death alone."""
        self._beginning = beginning
        self._printed: tuple[bytes, ...] = ()
        self._importing = ""
        self._score = system.go_first() if program.heir else ""  # nobody misses it until it has taken over
        self._control = control
        self._program = program
        self._guard = guard
        self._pid = os.getpid()
        self._children: dict[int, str] = {}
        self._stopping: _Stopping | None = None
        self._lease_s = 0.0  # what the ranks' worker had
        self._deserted = False  # the agent is gone
        self._alone_since = 0.0
        signal.signal(signal.SIGTERM, lambda *_: self._look_up())
        system.die_with_parent(guard, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def warm_up(self) -> None:
        """Import what ranks will need. A module that does not import is reported, not fatal: the rank will say more."""
        self._tell(warming=self._pid)
        started = time.monotonic()
        problems: list[str] = []
        doomed = False
        if self._program.preload or self._program.auto:
            from muster.node import preloading

            try:
                problems, self._printed, doomed = preloading.load(self._program, self._imports)
            except preloading.Spoilt as spoilt:
                self._begin_anew(spoilt.names, str(spoilt))
        system.flush()
        gc.collect()
        gc.freeze()
        took = time.monotonic() - started
        torch = "torch" in sys.modules
        self._tell(ready=True, torch=torch, took_s=round(took, 3), problems=problems, doomed=doomed)

    def _imports(self, module: str) -> None:
        """Whoever waits for ranks is told for what; once for all modules of a package."""
        top = module.partition(".")[0]
        if top != self._importing:
            self._importing = top
            self._tell(importing=top)

    def _begin_anew(self, without: list[str], why: str) -> NoReturn:
        self._tell(unfit=without, why=why)
        if self._deserted:
            self._leave()
        self._take_over()
        program, attempts = self._program, self._program.attempts + 1
        if attempts <= ATTEMPTS:
            program = program._replace(without=(*program.without, *without), attempts=attempts)
        elif program.heir:
            self._leave()
        else:
            program = program._replace(auto=False)
        self._beginning.again(program, self._control.fileno())

    def serve(self) -> bool:
        """Fork on request until the agent is gone. Returns True in a forked rank."""
        signal.set_wakeup_fd(self._wake_w)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self._patience_ms()):
                if fd == self._wake_r:
                    self._drain()
                elif self._obey():
                    return True
            self._take_ends(system.reap()[0])
            self._finish_stopping()
            if self._deserted:
                with contextlib.suppress(KeyError):
                    poll.unregister(self._control)
                self._wait_for_guard()

    def _obey(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 4)
        except ConnectionResetError:
            data = b""  # closed with news of ours unread
        if not data:
            self._desert()
            return False
        order = json.loads(data)
        match order["do"]:
            case "spawn":
                self._take_over()
                return self._spawn(order)
            case "store":
                self._take_over()
                self._start_store(order, fds[0])
            case "signal":
                self._signal(order)
            case "stop":
                self._begin_stopping(order)
            case "compare":
                self._compare(order)
            case "hasten" if self._stopping is not None:
                self._stopping.deadline = min(self._stopping.deadline, time.monotonic() + order["grace_s"])
        return False

    def _compare(self, order: dict[str, Any]) -> None:
        """Which of these modules would a parent have to import that is like this one but for them?"""
        from muster.node import preloading

        self._tell(lacking=preloading.lacking(self._program, tuple(order["modules"])))

    def _look_up(self) -> None:
        """SIGTERM comes from the kernel when the guard has died; from anybody else it is not for us."""
        if os.getppid() != self._guard:
            self._leave()

    def _desert(self) -> None:
        self._deserted, self._alone_since = True, self._alone_since or time.monotonic()

    def _wait_for_guard(self) -> None:
        """The guard ends all of us when the agent is gone; where ranks save, not at once. It must be able to."""
        ranks = any(key != STORE for key in self._children.values())
        over = time.monotonic() >= self._alone_since + self._lease_s
        if not ranks or over or self._stopping is not None or not system.runs(self._guard):
            self._leave()

    def _leave(self) -> NoReturn:
        """Agent or guard are gone: nobody else is left who could end what is below."""
        for pid in self._children:
            _send(pid, signal.SIGKILL, group=True)
        while system.reap()[1]:
            time.sleep(LOOK_SOON_S)
            system.kill_children()
        os._exit(0)

    def _take_over(self) -> None:
        if self._score:
            system.go_first(self._score)
            self._score = ""

    def _spawn(self, order: dict[str, Any]) -> bool:
        self._lease_s = order.get("lease_s", 0.0)
        pid = _fork()
        if pid == 0:
            self._become_child()
            _take_streams(order["out"], order["err"])
            os.environ.update(order["env"])
            whereabouts.tell(order["env"])
            first_bench.measure()
            if not self._program.warm:
                from muster.node import imports

                if imports.needs_torch(self._program.mode, self._program.target):
                    _refuse_old_torch()
                _execute(self._program.command)
            for number, text in enumerate(self._printed, 1):
                os.write(number, text)
            if "torch" in sys.modules:
                _refuse_old_torch()
            else:
                torch_import.watch()
            if order.get("notes"):
                from muster.node import learning

                learning.take_notes(order["notes"])
            return True
        self._children[pid] = order["key"]
        self._tell(spawned=order["key"], pid=pid)
        return False

    def _start_store(self, order: dict[str, Any], listener: int) -> None:
        pid = _fork()
        if pid == 0:
            for number in system.ASK_TO_END:
                signal.signal(number, signal.SIG_IGN)  # ranks that use their grace still need it
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
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, system.ASK_TO_END)
        self._control.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _signal(self, order: dict[str, Any]) -> None:
        """Only the parent knows that a pid is still its child's, so signals go through it."""
        for pid, key in self._children.items():
            if key in order["keys"]:
                _send(pid, order["signal"], group=bool(order.get("group")))

    def _begin_stopping(self, order: dict[str, Any]) -> None:
        """Ask ranks to end; first, if wanted, hold them still so that none sees another end before its own turn."""
        self._stopping = _Stopping(order)
        if order["freeze_s"] > 0:
            self._signal_ranks(signal.SIGSTOP)

    def _signal_ranks(self, *numbers: int) -> None:
        """Only ranks themselves: their helpers may be needed for what they do last."""
        for pid, key in self._children.items():
            if key != STORE:
                for number in numbers:
                    _send(pid, number, group=False)

    def _patience_ms(self) -> float | None:
        if self._deserted:
            return LOOK_S * 1000
        if self._stopping is None:
            return None
        until = self._stopping.strike_at if self._stopping.signal else self._stopping.deadline
        return max(0.0, until - time.monotonic()) * 1000

    def _finish_stopping(self) -> None:
        """When the ranks have ended or their time is up: end all that is left, and say so."""
        stopping, now = self._stopping, time.monotonic()
        if stopping is None:
            return
        if stopping.signal and now >= stopping.strike_at:
            self._signal_ranks(stopping.signal, signal.SIGCONT)
            stopping.signal = 0
            self._tell(signalled=stopping.ticket)
        waiting = any(key != STORE for key in self._children.values())
        if waiting and now < stopping.deadline:
            return
        for pid in self._children:
            _send(pid, signal.SIGKILL, group=True)
        patience_s = LOOK_SOON_S
        while True:
            ended, left = system.reap()
            self._take_ends(ended)
            if not left:
                break
            if not select.select([self._wake_r], [], [], patience_s)[0]:
                system.kill_children()  # orphans that ranks left: they are ours now
                patience_s = LOOK_S
            self._drain()
        self._stopping = None
        self._tell(cleared=stopping.ticket, ends=stopping.ends)

    def _take_ends(self, ended: list[tuple[int, int]]) -> None:
        for pid, status in ended:
            key = self._children.pop(pid, None)
            if key is None:
                continue  # an orphan that a rank left
            if self._stopping is not None:
                self._stopping.ends.append((key, status))
            else:
                self._tell(exited=key, status=status)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)

    def _tell(self, **message: Any) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._desert()


def _fork() -> int:
    """A fork without Python's warning about threads: those that numpy's BLAS started see to themselves.

    In the child SIGTERM stays blocked until `_become_child` has replaced the parent's handler: one that comes before
    would make the child end its siblings, or be lost.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid != 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return pid


def _send(pid: int, number: int, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGABRT:
            return system.signal_main_thread(pid, number)  # it is the main thread's stack that will be looked at
        if group:
            try:
                return os.killpg(pid, number)
            except ProcessLookupError:
                pass  # forked a moment ago: it has no group of its own yet, and no children
        os.kill(pid, number)


def _execute(command: list[str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores these two, and what is ignored stays so in a new program
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"muster-node: cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _refuse_old_torch() -> None:
    """End a rank whose torch cannot use the round's store, with one line on stderr."""
    if refusal := torch_version.refusal():
        os.write(2, f"ImportError: {refusal}\n".encode(errors="replace"))
        os._exit(1)


def _take_streams(out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        with files.appending(path) as opened:
            os.dup2(opened, number)


# The rank ----------------------------------------------------------------------------------------


def _look_fresh(program: Program) -> None:
    """Put `sys.path` in the state that it would have in the script's own interpreter; imports below depend on it."""
    if not sys.flags.safe_path:
        del sys.path[0]
    if program.is_folder:
        sys.path.insert(0, program.path)
    elif not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program.path)) if program.mode == "script" else os.getcwd())


def run(program: Program) -> None:
    """Run the user's program as `__main__`, in the process that was forked for it."""
    sys.orig_argv = program.command
    system.show_as(program.command)
    _renew(sys.modules)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    store_check.install()
    error = _run_main(program)
    if error is not None:
        _report(error)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None
            raise error  # the interpreter then ends itself with SIGINT
        sys.exit(1)


def _renew(modules: dict[str, Any]) -> None:
    """Give the rank its own of what its parent's modules hold once per process. (`random` sees to itself.)"""
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "threading" in modules:
        modules["threading"].main_thread()._set_native_id()


def _run_main(program: Program) -> BaseException | None:
    """What ended the program, if it was an error. A SystemExit is left to the interpreter."""
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    vars(main_module)["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main_module.__annotations__ = {}
    try:
        if program.mode == "module":
            sys.argv = ["-m", *program.args]
            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]
        elif program.is_folder:
            sys.argv = [program.target, *program.args]
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            sys.argv = [program.target, *program.args]
            _run_script(program, main_module)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  the top of the user's program
        return error
    return None


def _run_script(program: Program, main_module: types.ModuleType) -> None:
    try:
        with open(program.path, "rb") as file:
            code = compile(file.read(), program.path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        _execute(program.command)  # a fresh interpreter says best what is wrong with it, or can run it all the same
    loader = SourceFileLoader("__main__", program.path)
    vars(main_module).update(__file__=program.path, __cached__=None, __loader__=loader)
    exec(code, vars(main_module))


def _report(error: BaseException) -> None:
    """What the interpreter does with an error at its top, without our frames in the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as another:  # noqa: BLE001  a user's hook may raise anything
        another.__traceback__ = another.__traceback__ and another.__traceback__.tb_next
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(another), another, another.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)


if __name__ == "__main__":
    main()
