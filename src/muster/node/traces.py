"""What has an import left in its process beside modules? Threads, descriptors, processes, signals, used-up chance.

A fork has none of its parent's threads and shares its descriptors, so a module that leaves such things cannot be
imported in a parent of ranks. Looked at after each module, so that the one that does it is known, not only who asked.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

# Libraries of linear algebra start their threads when they are loaded, and start them again in a fork.
_POOLS = re.compile(r"/[^/\n]*(?:openblas|libblis|libgoto)[^/\n]*$", re.MULTILINE)
_POOL_SIZES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_MIND_FORKS = {"jemalloc_bg_thd"}
_import_system: Any = sys.modules["_frozen_importlib"]
_BLOCKS = 64  # of 624 numbers: nobody draws more while it is imported
_DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd")


class Spoilt(Exception):
    """An import left what a fork cannot share. `names`: what led to it, that of the module itself last."""

    def __init__(self, names: list[str], why: str) -> None:
        super().__init__(f"{names[-1]} {why}")
        self.names = names


class Hangs(BaseException):
    """An import that gets nowhere: no handler of its own may take this for something else."""


class _Traces(NamedTuple):
    descriptors: dict[str, str]
    threads: int
    children: bool
    handlers: list[Any]
    folder: str
    chance: dict[str, Any]

    def since(self, before: _Traces) -> str:
        """What has come to be, in words; nothing if all is as it was."""
        new = [where for number, where in self.descriptors.items() if before.descriptors.get(number) != where]
        if any(where.startswith(_DEVICES) for where in new) or _uses_cuda():
            return "opens a GPU"
        if self.threads > before.threads:
            return "starts a thread"
        if self.children and not before.children:
            return "leaves a process"
        if new:
            return f"leaves {new[0]} open"
        if self.handlers != before.handlers:
            return "takes a signal"
        if self.folder != before.folder:
            return "changes the working directory"
        known = self.chance.keys() & before.chance.keys()
        seeded = [name for name in sorted(known) if not _only_drawn(before.chance[name], self.chance[name])]
        return f"seeds a random generator ({seeded[0]})" if seeded else ""


def _look() -> _Traces:
    return _Traces(
        _descriptors(),
        _threads(),
        _has_children(),
        [signal.getsignal(number) for number in signal.valid_signals()],
        os.getcwd(),
        {name: state() for name, state in _CHANCE.items() if _is_loaded(name)},
    )


def _glance() -> tuple[int, int, bool]:
    """The little of it that can be seen after every single module."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), _has_children()


class Watch:
    """While it is entered every module that is loaded is looked at."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._load: Callable[[Any], Any] = _import_system._load_unlocked
        self._under_way: list[str] = []
        self._suspects: list[str] = []
        self._seen = (0, 0, False)
        self._before: _Traces | None = None
        self._asleep: Any = None

    def __enter__(self) -> Watch:
        loading = _loading(self)
        # Warnings count frames, and leave out those of the import system by the name of their file.
        loading.__code__ = loading.__code__.replace(co_filename=self._load.__code__.co_filename)
        _import_system._load_unlocked = loading
        self._asleep = signal.signal(signal.SIGALRM, _hangs)
        self._before = _look()
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._asleep)
        _import_system._load_unlocked = self._load

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Raises Spoilt if what is done meanwhile leaves a trace, fails or hangs."""
        assert self._before is not None
        self._suspects, self._under_way, self._seen = [], [], _glance()
        why = ""
        try:
            signal.setitimer(signal.ITIMER_REAL, self._patience_s)
            yield
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Hangs:
            why = f"has got nowhere for {self._patience_s:g} s"
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's module may raise anything
            why = f"cannot be imported ahead: {type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        now = _look()
        if why := why or now.since(self._before):
            raise Spoilt([what, *self._suspects], why)
        self._before = now

    def begins(self, name: str) -> None:
        self._under_way.append(name)

    def ends(self, name: str) -> None:
        """Called for the innermost module first."""
        signal.setitimer(signal.ITIMER_REAL, self._patience_s)
        if not self._suspects and _glance() != self._seen:
            self._seen = _glance()
            if _look().since(self._before or _look()):
                self._suspects = list(self._under_way)
        if name in _CHANCE and self._before is not None:
            self._before.chance.setdefault(name, _CHANCE[name]())  # what comes now is no longer its own beginning
        self._under_way.pop()


def _loading(watch: Watch) -> Any:
    load = watch._load

    def loading(spec: Any) -> Any:
        watch.begins(spec.name)
        try:
            return load(spec)
        finally:
            watch.ends(spec.name)

    return loading


def _hangs(number: int, frame: FrameType | None) -> None:
    raise Hangs


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _threads() -> int:
    """Without those that start again by themselves after a fork."""
    tasks = os.listdir("/proc/self/task")
    if len(tasks) == 1:
        return 1
    python = len(sys._current_frames())
    names = [_name_of(task) for task in tasks]
    main = _name_of(str(os.getpid()))
    nameless = sum(name == main for name in names)
    own = sum(name not in _MIND_FORKS for name in names) - nameless
    return own + max(python, nameless - _pool_threads())


def _name_of(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""  # it has ended


def _pool_threads() -> int:
    with open("/proc/self/maps") as file:
        libraries = set(_POOLS.findall(file.read()))
    sizes = [os.environ.get(name, "") for name in _POOL_SIZES]
    size = next((int(text) for text in sizes if text.isdigit() and int(text)), len(os.sched_getaffinity(0)))
    return len(libraries) * (size - 1)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return bool(getattr(getattr(torch, "cuda", None), "is_initialized", bool)())


def _only_drawn(before: Any, after: Any) -> bool:
    """Numbers may be drawn: ranks get generators of their own. What a module seeds has to be so in ranks, too."""
    if before == after or not isinstance(after, random.Random):
        return bool(before == after)
    trial, keys = random.Random(), after.getstate()[1][:-1]
    trial.setstate(before.getstate())
    for _ in range(_BLOCKS):
        if trial.getstate()[1][:-1] == keys:
            return True
        trial.getrandbits(32 * len(keys))
    return False


def _generator(keys: Any, position: int) -> random.Random:
    copied = random.Random()
    copied.setstate((3, (*map(int, keys), int(position)), None))
    return copied


_CHANCE: dict[str, Callable[[], Any]] = {
    "random": lambda: _generator((state := random.getstate()[1])[:-1], state[-1]),
    "numpy.random": lambda: _generator(*sys.modules["numpy.random"].get_state()[1:3]),
    "torch": lambda: sys.modules["torch"].initial_seed(),
}
