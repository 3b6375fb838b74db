"""A rank forked from the warm parent is like one of a fresh interpreter, and like `python script.py`.

Every program runs three ways: plainly, as a fresh interpreter below the warm parent (`--warm never`), and forked from
it. What it says about itself, what it writes and how it ends must be the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import re
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from muster.node import program as programs
from muster.node import warm
from muster.node.program import Program
from muster.types.world import RankEnd
from muster.world import lifeline
from tests.fleet import Fleet, eventually, gone

LIKE_A_RANK = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Ran:
    """What one rank wrote and how it ended."""

    end: str
    out: str
    err: str

    @classmethod
    def read(cls, end: str, folder: Path, rank: int) -> Ran:
        out, err = ((folder / f"rank-{rank}.{ending}").read_text() for ending in ("out", "err"))
        return cls(end, out, re.sub("0x[0-9a-f]+", "0x…", err))


def plainly(fleet: Fleet, *program: str, **env: str) -> Ran:
    """As `python script.py`."""
    command = [sys.executable, *programs.interpreter_flags(), *program]
    with open(fleet.folder / "rank-0.out", "wb") as out, open(fleet.folder / "rank-0.err", "wb") as err:
        env = fleet.env | LIKE_A_RANK | env
        done = subprocess.run(command, cwd=fleet.folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    return Ran.read(RankEnd.from_status(0, done.returncode).reason, fleet.folder, 0)


class Parent:
    """A warm parent that the test itself leads, so that each rank ends on its own."""

    def __init__(self, fleet: Fleet, how: str, *program: str, patience_s: float = 60.0, **env: str) -> None:
        mode, (target, *args) = ("module", program[1:]) if program[0] == "-m" else ("script", program)
        plan = os.memfd_create("plan")
        forked = how == "forked"
        wire = Program(mode, target, tuple(args), forked, (), auto=forked, patience_s=patience_s)._asdict()
        os.pwrite(plan, json.dumps(wire).encode(), 0)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        given = [str(theirs.fileno()), str(plan), str(os.getpid()), "." * 400]
        self.process = subprocess.Popen(
            [sys.executable, *programs.interpreter_flags(), "-m", "muster.node.warm", *given],
            cwd=fleet.folder,
            env=fleet.env | LIKE_A_RANK | env,
            pass_fds=(theirs.fileno(), plan),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        os.close(plan)
        self.logs = Path(tempfile.mkdtemp(dir=fleet.folder))

    def spawn(self, rank: int) -> None:
        out, err = (self.logs / f"rank-{rank}.{ending}" for ending in ("out", "err"))
        out.touch()
        self.order(do="spawn", key=str(rank), env={"RANK": str(rank)}, out=str(out), err=str(err))

    def order(self, **order: Any) -> None:
        self.socket.send(json.dumps(order).encode())

    def hear(self, what: str) -> dict[str, Any]:
        """The next news of that kind."""
        while True:
            news: dict[str, Any] = json.loads(self.socket.recv(warm.MAX_MESSAGE))
            if what in news:
                return news

    def ends(self, count: int) -> dict[int, str]:
        ended = [self.hear("exited") for _ in range(count)]
        return {int(news["exited"]): RankEnd.from_status(0, news["status"]).reason for news in ended}

    def leave(self) -> None:
        self.socket.close()
        assert self.process.wait(PATIENCE_S) == 0


def by_a_parent(fleet: Fleet, how: str, *program: str, count: int = 1, **env: str) -> list[Ran]:
    """As ranks below a warm parent: `how` is fresh or forked."""
    parent = Parent(fleet, how, *program, patience_s=60.0, **env)
    for rank in range(count):
        parent.spawn(rank)
    ends = parent.ends(count)
    parent.leave()
    return [Ran.read(ends[rank], parent.logs, rank) for rank in range(count)]


def by_muster_node(fleet: Fleet, how: str, *program: str, count: int = 1, **env: str) -> list[Ran]:
    """As ranks of a whole muster-node, with these options."""
    logs = Path(tempfile.mkdtemp(dir=fleet.folder))
    options = ("--standalone", "--run-id", "run", "--max-restarts", "0", "--blame-s", "0", "--nproc", str(count))
    node = fleet.node("w", *options, "--log-dir", str(logs), *how.split(), join=False, program=program, **env)
    code = node.wait()
    failed = {int(rank): reason for rank, reason in re.findall(r"\[w\] rank (\d+): (.+)", node.text)}
    assert (code != 0) == bool(failed), node.text
    return [Ran.read(failed.get(rank, "Exit 0"), logs / "round-0", rank) for rank in range(count)]


def three_ways(fleet: Fleet, *program: str, **env: str) -> tuple[Ran, Ran, Ran]:
    fresh, forked = (by_a_parent(fleet, how, *program, count=1, **env)[0] for how in ("fresh", "forked"))
    return plainly(fleet, *program, **env), fresh, forked


def written(fleet: Fleet, name: str, text: str) -> str:
    path = fleet.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return name


# What a rank finds -------------------------------------------------------------------------------

# The first lines look before anything is imported that would change what there is to see.
FACTS = """\
found = sorted(globals())
import sys
modules = "torch" in sys.modules
import os
descriptors = sorted(os.listdir("/proc/self/fd"), key=int)
import gc, inspect, json, signal, threading, warnings

def stream(it):
    raw = getattr(it.buffer, "raw", it.buffer)
    return [
        it.name, it.mode, it.encoding, it.errors, it.line_buffering, it.write_through, it.fileno(), it.isatty(),
        type(it.buffer).__name__, raw.mode, raw.closefd,
    ]

def status(name):
    return next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]

def here():
    return "its own source"

main = sys.modules["__main__"]
package = sys.modules.get(__spec__.parent) if __spec__ and __spec__.parent else None
print(json.dumps({
    "globals": found,
    "__main__ is this": vars(main) is globals(),
    "__file__": __file__,
    "__spec__": __spec__ and [__spec__.name, __spec__.origin, __spec__.parent, __spec__.cached],
    "__loader__": [type(__loader__).__name__, getattr(__loader__, "name", ""), getattr(__loader__, "path", "")],
    "other dunders": repr([__name__, __doc__, __package__, __builtins__, __annotations__, __cached__]),
    "package imported here": package and package.imported_by == os.getpid(),
    "source": inspect.getsource(here),
    "code file": here.__code__.co_filename,
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "command line": open("/proc/self/cmdline").read(),
    "process name": status("Name"),
    "path": sys.path,
    "flags": repr([sys.flags, sys.warnoptions, sys._xoptions]),
    "cwd": os.getcwd(),
    "umask": status("Umask"),
    "descriptors": descriptors,
    "stdin is": os.readlink("/proc/self/fd/0"),
    "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
    "original streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    "handlers": [repr(signal.getsignal(number)).partition(" at ")[0] for number in sorted(signal.valid_signals())],
    "signals": [status("SigBlk"), status("SigIgn"), status("SigCgt"), signal.set_wakeup_fd(-1)],
    "threads": [
        status("Threads"), threading.active_count(), threading.current_thread() is threading.main_thread(),
        threading.main_thread().name, threading.main_thread().native_id == os.getpid(),
    ],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
    "warnings": repr(warnings.filters),
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), os.nice(0)],
    "tracing": [sys.gettrace(), sys.getprofile()],
    "torch": modules,
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "environment": dict(os.environ),
}))
"""

PROGRAMS: dict[str, tuple[str, ...]] = {
    "a script": ("script.py",),
    "a script by a winding path": ("./folder/../script.py",),
    "a script by its whole path": ("{folder}/script.py",),
    "a link to a script": ("folder/link.py",),
    "a compiled script": ("compiled.pyc",),
    "a directory": ("./app",),
    "the working directory": (".",),
    "an archive": ("app.archive",),
    "a package": ("-m", "package"),
    "a module of a package": ("-m", "package.module"),
}


def put_everywhere(fleet: Fleet, text: str) -> None:
    for name in ("script.py", "__main__.py", "app/__main__.py", "package/__main__.py", "package/module.py"):
        written(fleet, name, text)
    written(fleet, "package/__init__.py", "import os\n\nimported_by = os.getpid()\n")
    (fleet.folder / "folder").mkdir()
    (fleet.folder / "folder" / "link.py").symlink_to("../script.py")
    py_compile.compile(str(fleet.folder / "script.py"), cfile=str(fleet.folder / "compiled.pyc"))
    with zipfile.ZipFile(fleet.folder / "app.archive", "w") as archive:
        archive.writestr("__main__.py", text)


@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=[pytest.mark.scenario] * (name == "a script")) for name in PROGRAMS]
)
def test_a_rank_finds_what_a_fresh_interpreter_finds_in(fleet: Fleet, what: str) -> None:
    put_everywhere(fleet, FACTS)
    program = [word.format(folder=fleet.folder) for word in PROGRAMS[what]]
    plain, fresh, forked = (told(ran) for ran in three_ways(fleet, *program, "one", "--two", "th ree", RANK="0"))
    assert forked == fresh
    del forked["session"], plain["session"]
    assert forked == plain
    assert forked["descriptors"] == ["0", "1", "2", "3"], "the fourth is that of the listing itself"


@pytest.mark.parametrize("program", [("script.py",), ("-m", "package.module")], ids=["script", "module"])
def test_so_do_ranks_of_muster_node_from_a(fleet: Fleet, program: tuple[str, ...]) -> None:
    put_everywhere(fleet, FACTS)
    program = (*program, "one", "two")
    fresh, forked = (told(by_muster_node(fleet, f"--warm {how}", *program)[0]) for how in ("never", "auto"))
    for facts in (fresh, forked):
        environment = facts["environment"]
        files = ("MUSTER_LEASE_FILE", "MUSTER_NUMBERS_FILE", "MUSTER_PROGRESS_FILE", "MUSTER_STATE_SOCKET")
        assert all(environment.pop(name) for name in ("MASTER_PORT", "MUSTER_RUN_TOKEN", *files))
    assert forked == fresh


@pytest.mark.parametrize("what", ["a script", "a directory", "a module of a package"])
def test_a_safe_path_is_kept_for(fleet: Fleet, what: str) -> None:
    put_everywhere(fleet, FACTS)
    env = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(fleet.folder)}
    plain, fresh, forked = (told(ran) for ran in three_ways(fleet, *PROGRAMS[what], RANK="0", **env))
    assert forked == fresh
    assert forked["path"] == plain["path"]


def told(ran: Ran) -> dict[str, Any]:
    assert (ran.end, ran.err) == ("Exit 0", "")
    facts: dict[str, Any] = json.loads(ran.out)
    return facts


SEEDS = """\
    import sys
    loaded = [name for name in ("torch", "numpy.random") if name in sys.modules]
    import json, os, random, uuid

    def draw():
        import numpy
        import torch

        assert (torch.ones(256, 256) @ torch.ones(256, 256)).sum() == 256**3
        assert (numpy.ones((256, 256)) @ numpy.ones((256, 256))).sum() == 256**3
        seeds = [random.random(), uuid.uuid4().hex, uuid.uuid1().hex, numpy.random.rand(), torch.initial_seed()]
        return [*seeds, torch.rand(1).item()]

    descriptors = sorted(os.listdir("/proc/self/fd"), key=int)
    print(json.dumps({"loaded": loaded, "draws": draw(), "descriptors": descriptors}))
"""


def test_ranks_of_one_warm_parent_draw_different_random_numbers(fleet: Fleet) -> None:
    script = written(fleet, "seeds.py", SEEDS)
    ranks = by_muster_node(fleet, "--warm auto --preload numpy.random", script, count=2)
    first, second = (json.loads(ran.out) for ran in ranks)
    assert first["loaded"] == ["torch", "numpy.random"], "auto saw that the script needs torch"
    assert first["descriptors"] == second["descriptors"] == ["0", "1", "2", "3", str(lifeline.NUMBER)]
    assert all(a != b for a, b in zip(first["draws"], second["draws"], strict=True))
    assert [ran.err for ran in ranks] == ["", ""]


# What a rank writes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("unbuffered", "order"), [("1", "abcde"), ("", "bdace")], ids=["unbuffered", "buffered"])
def test_output_comes_in_the_same_order(fleet: Fleet, unbuffered: str, order: str) -> None:
    script = written(
        fleet,
        "script.py",
        """\
        import os, sys
        print("a", end="")
        os.write(1, b"b")
        sys.stdout.write("c")
        os.write(1, b"d")
        print("e", end="")
        print("\\N{SNOWMAN}", file=sys.stderr)
        os.write(2, b"last")
        """,
    )
    plain, fresh, forked = three_ways(fleet, script, PYTHONUNBUFFERED=unbuffered)
    assert forked == fresh == plain == Ran("Exit 0", order, "\N{SNOWMAN}\nlast")


def test_what_preloading_prints_and_breaks_is_not_the_ranks(fleet: Fleet) -> None:
    written(fleet, "noisy.py", "import ctypes\nprint('loud')\nctypes.CDLL(None).printf(b'louder')\n")
    written(fleet, "quits.py", "import sys\nsys.exit('no')\n")
    script = written(fleet, "script.py", "print('quiet')\n")
    preload = "--preload noisy --preload quits --preload missing"
    (rank,) = by_muster_node(fleet, f"--warm auto {preload}", script, PYTHONUNBUFFERED="")
    assert rank == Ran("Exit 0", "quiet\n", "")
    said = fleet.processes[-1].text
    assert "could not preload quits: SystemExit: no" in said
    assert "could not preload missing: ModuleNotFoundError" in said


@pytest.mark.parametrize(
    "text",
    [
        "def broken(:\n    pass\n",
        "print('caf\xe9')\n",
        "x = 1\0\n",
        "if True:\nprint()\n",
        "x = '\\d' is 'd'\nprint(x)\n",
    ],
    ids=["wrong syntax", "bytes that are no text", "a null byte", "wrong indentation", "doubtful syntax"],
)
def test_a_script_is_judged_alike_with(fleet: Fleet, text: str) -> None:
    (fleet.folder / "script.py").write_bytes(text.encode("latin-1"))
    plain, fresh, forked = three_ways(fleet, "script.py")
    assert forked == fresh == plain
    assert "Syntax" in plain.err or "Indentation" in plain.err


# How a rank ends ---------------------------------------------------------------------------------

ENDINGS = {
    "it returns": "print('done', end='')",
    "it exits with nothing": "sys.exit()",
    "it exits with a number": "sys.exit(3)",
    "it exits with a number beyond a byte": "sys.exit(300)",
    "it exits with a text": "sys.exit('sorry')",
    "it exits with an object": "sys.exit(['some', 'thing'])",
    "it exits from deep inside": """\
        def inner():
            try:
                raise SystemExit(5)
            finally:
                print("cleaned up")
        inner()
        """,
    "it exits at once": "atexit.register(print, 'never'); os._exit(9)",
    "it raises": """\
        def inner(number):
            return 1 / number
        inner(0)
        """,
    "it raises one error from another": """\
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("it was not there") from error
        """,
    "it raises while it handles an error": """\
        try:
            {}["key"]
        except KeyError:
            open("/nowhere")
        """,
    "it raises several errors": """\
        error = ExceptionGroup("both", [ValueError(1), TypeError(2)])
        error.add_note("a note")
        raise error
        """,
    "it raises through a library": "json.loads('{')",
    "it compiles what is wrong": "compile('1 +', 'made up', 'exec')",
    "it imports what is missing": "import nothing_of_that_name",
    "it raises in a thread": """\
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start()
        thread.join()
        """,
    "it warns": "warnings.warn('old', DeprecationWarning, stacklevel=1)",
    "it is interrupted": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "it raises KeyboardInterrupt": "atexit.register(print, 'bye'); raise KeyboardInterrupt('enough')",
    "it is terminated": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "it has a hook for errors": """\
        def hook(kind, error, trace):
            print(kind, error, [frame.name for frame in traceback.extract_tb(trace)], sys.exc_info())
        sys.excepthook = hook
        1 / 0
        """,
    "its hook for errors fails": """\
        def hook(kind, error, trace):
            raise TypeError("in the hook")
        sys.excepthook = hook
        1 / 0
        """,
    "its hook for errors exits": """\
        sys.excepthook = lambda *_: sys.exit(7)
        1 / 0
        """,
    "it looks back at its error": """\
        def look():
            frames = [frame.name for frame in traceback.extract_tb(sys.last_traceback)]
            print(sys.last_type, repr(sys.last_value), frames, sys.last_value.__traceback__ is sys.last_traceback)
        atexit.register(look)
        1 / 0
        """,
    "its thread outlives it": """\
        ended = threading.Event()
        def work():
            threading.main_thread().join()
            print("still here")
        atexit.register(print, "after the thread")
        threading.Thread(target=work).start()
        print("main is done")
        sys.exit(4)
        """,
    "its daemon thread does not outlive it": """\
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        print("main is done")
        """,
    "it has work for the exit": """\
        atexit.register(print, "second")
        atexit.register(lambda: 1 / 0)
        atexit.register(print, "first")
        """,
    "its objects go last": """\
        class Thing:
            def __del__(self):
                print("gone", os.path.basename(__name__), sorted(vars(self)))
        global thing
        thing = Thing()
        thing.cycle = thing
        atexit.register(print, "before objects")
        """,
    "it closes its output": "print('said'); sys.stdout.close()",
}

ENDINGS_START = "import atexit, json, os, signal, sys, threading, time, traceback, warnings\n"


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, list[Ran], list[Ran]]]:
    """All the endings, each by a rank of its own."""
    with contextlib.closing(Fleet(tmp_path_factory.mktemp("endings"))) as fleet:
        cases = [f"def case():\n{indent(dedent(text), '    ')}\n" for text in ENDINGS.values()]
        chosen = "".join(f"if os.environ['RANK'] == '{i}':\n{indent(case, '    ')}\n" for i, case in enumerate(cases))
        (fleet.folder / "ends.py").write_text(f"{ENDINGS_START}\n{chosen}\ncase()\n")
        fresh, forked = (by_a_parent(fleet, how, "ends.py", count=len(cases)) for how in ("fresh", "forked"))
        yield fleet, fresh, forked


@pytest.mark.parametrize("case", ENDINGS)
@pytest.mark.usefixtures("processes")
def test_it_ends_alike_when(endings: tuple[Fleet, list[Ran], list[Ran]], case: str) -> None:
    fleet, fresh, forked = endings
    rank = list(ENDINGS).index(case)
    plain = plainly(fleet, "ends.py", RANK=str(rank))
    assert forked[rank] == fresh[rank] == plain


def test_errors_of_a_module_show_no_frame_of_ours(fleet: Fleet) -> None:
    put_everywhere(fleet, "def inner():\n    return 1 / 0\n\ninner()\n")
    (fleet.folder / "empty").mkdir()
    for program in (("-m", "package.module"), ("-m", "package.missing"), ("app",), ("empty",)):
        plain, fresh, forked = three_ways(fleet, *program)
        assert forked == fresh == plain and plain.end == "Exit 1"


def test_an_interrupted_module_ends_by_the_signal(fleet: Fleet) -> None:
    put_everywhere(fleet, "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    plain, fresh, forked = three_ways(fleet, "-m", "package")
    assert forked == fresh == plain and plain.end == "Signal SIGINT"


def test_a_crash_is_a_signal_with_the_stack_in_the_log(fleet: Fleet) -> None:
    script = written(fleet, "script.py", "import ctypes\n\ndef crash():\n    ctypes.string_at(0)\n\ncrash()\n")
    for ran in (*three_ways(fleet, script), *by_muster_node(fleet, "--warm auto", script)):
        assert ran.end == "Signal SIGSEGV"
        assert "Fatal Python error: Segmentation fault" in ran.err and "line 4 in crash" in ran.err


# What a rank starts ------------------------------------------------------------------------------

CHILDREN = """\
    from __future__ import annotations

    import multiprocessing, os, pickle, subprocess, sys
    from dataclasses import KW_ONLY, dataclass, fields

    print("run as", __name__, sys.argv[1:], flush=True)

    @dataclass
    class Parcel:
        number: int
        _: KW_ONLY
        label: str = "none"

    def open_parcel(parcel, answers):
        ours = "RANK" in os.environ, os.getcwd() == sys.argv[1], sorted(os.listdir("/proc/self/fd"))[:3]
        answers.put((type(parcel).__module__ == Parcel.__module__, parcel.number + 1, ours))

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            answers = context.SimpleQueue()
            child = context.Process(target=open_parcel, args=(Parcel(1, label=method), answers))
            child.start()
            print(method, answers.get(), child.join(), child.exitcode, flush=True)
        copy = pickle.loads(pickle.dumps(Parcel(7)))
        print(copy, type(copy) is Parcel, [field.name for field in fields(Parcel)], Parcel.__module__, flush=True)
        subprocess.run([sys.executable, "-c", "import sys; print(sys.orig_argv[1:], sys.stdin.read())"])
        broken = multiprocessing.get_context("spawn").Process(target=len)
        broken.start()
        broken.join()
        print(broken.exitcode)
"""


def test_children_of_a_rank_are_the_same(fleet: Fleet) -> None:
    script = written(fleet, "script.py", CHILDREN)
    plain, fresh, forked = three_ways(fleet, script, str(fleet.folder), RANK="0")
    assert forked == fresh == plain
    assert plain.end == "Exit 0" and plain.out.count("run as __mp_main__") == 3


def test_a_command_starts_with_the_signals_of_a_shell(fleet: Fleet) -> None:
    command = ("grep", "^Sig[^Q]", "/proc/self/status")  # the queue is the user's, not the process's
    plain = subprocess.run(command, env=fleet.env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    (rank,) = by_muster_node(fleet, "--no-python", *command)
    assert rank.out == plain.stdout


# Who ends a rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fresh", "forked"])
def test_ranks_die_with_their_parent_that_is(fleet: Fleet, how: str) -> None:
    lasting = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    parent = Parent(fleet, how, written(fleet, "script.py", lasting))
    parent.spawn(0)
    rank = int(eventually((parent.logs / "rank-0.out").read_text, "it runs"))
    parent.process.kill()
    parent.process.wait()
    parent.socket.close()
    eventually(lambda: gone(rank), "the rank is gone")


@pytest.mark.parametrize("how", ["fresh", "forked"])
def test_ranks_and_their_group_die_when_the_agent_is_gone_if(fleet: Fleet, how: str) -> None:
    lasting = "import os, subprocess\nprint(os.getpid(), subprocess.Popen(['sleep', '60']).pid)\nos.wait()\n"
    parent = Parent(fleet, how, written(fleet, "script.py", lasting))
    parent.spawn(0)
    told = eventually((parent.logs / "rank-0.out").read_text, "it has a child")
    rank, child = (int(word) for word in told.split())
    parent.leave()
    eventually(lambda: gone(rank) and gone(child), "both are gone")


def test_a_rank_that_was_only_just_forked_can_be_killed(fleet: Fleet) -> None:
    parent = Parent(fleet, "forked", written(fleet, "script.py", "import time\ntime.sleep(60)\n"))
    for rank in range(20):
        parent.spawn(rank)
        parent.order(do="signal", signal=signal.SIGKILL, keys=[str(rank)], group=True)
    assert set(parent.ends(20).values()) == {"Signal SIGKILL"}
    parent.leave()


# What `ps` shows ---------------------------------------------------------------------------------


def test_a_command_line_that_is_too_long_to_show_is_cut() -> None:
    show = "system.show_as(['x' * 10, 'y' * 5000]); print(open('/proc/self/cmdline').read())"
    command = [sys.executable, "-c", f"from muster.node import system; {show}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch("x{10}\0y{50,}\0\n", shown)
