"""Modules that are imported ahead make no difference to a rank but the time that they take."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from textwrap import dedent

import pytest

from tests.fleet import Fleet, eventually, family
from tests.node.test_faults import command_of
from tests.node.test_warm import Parent, Ran, by_muster_node, three_ways, written

TELLS = "import os\nimported_by = os.getpid()\n"


@pytest.fixture
def installed(fleet: Fleet) -> Path:
    """Where other people's modules are."""
    folder = fleet.folder / "site-packages"
    folder.mkdir()
    fleet.env["PYTHONPATH"] = str(folder)
    return folder


def install(installed: Path, **modules: str) -> None:
    for name, text in modules.items():
        (installed / f"{name}.py").write_text(TELLS + dedent(text))


def ahead(*names: str) -> str:
    """A line of a script that tells which modules were imported by another process."""
    return f"print(json.dumps({{m.__name__: m.imported_by != os.getpid() for m in ({', '.join(names)},)}}))\n"


LOUD = """\
    import logging, random, sys, warnings
    print("loud")
    print("louder", file=sys.stderr)
    warnings.warn("old", DeprecationWarning, stacklevel=2)
    warnings.warn("odd")
    logging.basicConfig(level="INFO")
    logging.info("told")
    os.environ["BY_LOUD"] = os.environ.get("X", "none")
    sys.path.append("/nowhere")
"""
LOOKS = """\
    import os
    os.environ["X"] = "1"
    import loud
    import package.inner as inner
    from lazy import thing
    import atexit, gc, json, locale, logging, random, signal, sys, threading, warnings

    def status(name):
        return next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]

    print(json.dumps({
        "environment": sorted(os.environ.items()),
        "path": sys.path,
        "argv": sys.argv,
        "folder": os.getcwd(),
        "descriptors": [os.readlink(f"/proc/self/fd/{n}") for n in sorted(os.listdir("/proc/self/fd"))[:1]],
        "count": len(os.listdir("/proc/self/fd")),
        "handlers": [repr(signal.getsignal(n)).partition(" at ")[0] for n in sorted(signal.valid_signals())],
        "signals": [status("SigBlk"), status("SigIgn"), status("SigCgt"), signal.getitimer(signal.ITIMER_REAL)],
        "threads": [status("Threads"), threading.active_count()],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "warnings": repr(warnings.filters),
        "log": [repr(logging.root), [type(h).__name__ for h in logging.root.handlers]],
        "locale": [locale.setlocale(locale.LC_ALL), os.nice(0), oct(os.umask(0o22))],
        "import system": [sys.modules["_frozen_importlib"]._load_unlocked.__module__, len(sys.path_hooks)],
    }))
    print(thing, inner.__name__, random.getstate()[1][-1])
    1 / 0
"""


def test_a_rank_finds_the_same_after_its_imports_as_a_fresh_interpreter(fleet: Fleet, installed: Path) -> None:
    install(installed, loud=LOUD, lazy="def __getattr__(name):\n    import found\n    return name * 2\n", found="")
    (installed / "package").mkdir()
    (installed / "package" / "__init__.py").write_text("import atexit\natexit.register(print, 'the end')\n")
    (installed / "package" / "inner.py").write_text(TELLS)
    script = written(fleet, "script.py", LOOKS)
    plain, fresh, forked = three_ways(fleet, script, "one", RANK="0")
    assert forked == fresh == plain
    assert plain.end == "Exit 1" and plain.out.startswith("loud\n") and plain.out.endswith("624\nthe end\n")
    assert "script.py:3: DeprecationWarning: old\n  import loud" in plain.err and "INFO:root:told" in plain.err
    says = "import loud, lazy, package.inner\nfrom lazy import thing\nimport found\nimport json, os\n"
    written(fleet, "script.py", says + ahead("loud", "lazy", "package.inner", "found"))
    parent = Parent(fleet, "forked", script)
    parent.spawn(0)
    assert parent.ends(1) == {0: "Exit 0"}
    parent.leave()
    last = (parent.logs / "rank-0.out").read_text().splitlines()[-2]
    assert json.loads(last) == {"loud": True, "lazy": True, "package.inner": True, "found": True}


UNFIT = {
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    "fails": "if 'RANK' not in os.environ:\n    raise RuntimeError('no rank')\n",
    "seeds": "import random\nrandom.seed(7)\n",
    "leaves": "import atexit, subprocess\natexit.register(subprocess.Popen(['sleep', '600']).kill)\n",
    "opens": "file = open(__file__)\n",
    "listens": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
    "hangs": "import time\nwhile 'RANK' not in os.environ:\n    time.sleep(1)\n",
    "quits": "if 'RANK' not in os.environ:\n    raise SystemExit\n",
}


def test_what_leaves_more_than_modules_is_left_to_ranks(fleet: Fleet, installed: Path) -> None:
    install(
        installed,
        good="import random\nrandom.random()\nrandom.getrandbits(99999)\n",
        needs="import threads\n",
        better="",
        **UNFIT,
    )
    names = ["good", *UNFIT, "needs", "better"]
    lines = f"import {', '.join(names)}\nimport json, os, random, signal, threading\n"
    does = "print(random.random(), signal.getsignal(15).name, threading.active_count())\n"
    script = written(fleet, "script.py", lines + ahead(*names) + does)
    parent = Parent(fleet, "forked", script, patience_s=0.5)
    said = [parent.hear("unfit") for _ in range(len(UNFIT) + 1)]
    parent.spawn(0)
    assert parent.ends(1) == {0: "Exit 0"}
    parent.leave()
    found, state = (parent.logs / "rank-0.out").read_text().splitlines()
    assert json.loads(found) == {name: name in ("good", "better") for name in names}
    assert state == "0.32383276483316237 SIG_IGN 2"
    why = {news["unfit"][-1]: news["why"] for news in said}
    assert why["threads"] == "threads starts a thread" and why["leaves"] == "leaves leaves a process"
    assert why["hangs"] == "hangs has got nowhere for 0.5 s" and "RuntimeError: no rank" in why["fails"]
    assert {"needs", "threads"} < {name for news in said for name in news["unfit"]}


def test_a_variable_that_a_script_sets_before_its_imports_holds(fleet: Fleet, installed: Path) -> None:
    install(installed, reads="seen = os.environ.get('OMP_NUM_THREADS')\n")
    ends = "import reads\nimport json\n" + ahead("reads") + "print(reads.seen, os.environ['OMP_NUM_THREADS'])\n"
    for value, is_ahead in (("'3'", True), ("str(1 + 2)", False)):
        written(fleet, "script.py", f"import os\nos.environ['OMP_NUM_THREADS'] = {value}\n{ends}")
        (rank,) = by_muster_node(fleet, "--preload auto", "script.py", OMP_NUM_THREADS="1")
        assert rank == Ran("Exit 0", f'{{"reads": {str(is_ahead).lower()}}}\n3 3\n', "")


@pytest.mark.parametrize(
    "how", ["--warm never", "--preload none", pytest.param("--preload reads,other", marks=pytest.mark.scenario)]
)
def test_what_is_imported_ahead_can_be_chosen(fleet: Fleet, installed: Path, how: str) -> None:
    install(installed, reads="", other="")
    script = written(fleet, "script.py", "import reads, json, os\n" + ahead("reads"))
    (rank,) = by_muster_node(fleet, how, script)
    assert json.loads(rank.out) == {"reads": "reads" in how}


# What ranks import later -------------------------------------------------------------------------

LATE = """\
    import json, os, sys, time
    from pathlib import Path

    notes, rank, number = Path(sys.argv[1]), os.environ["RANK"], os.environ["MUSTER_ROUND"]
    found = [name for name in ("late", "spins", "mine") if name in sys.modules]

    def main():
        try:
            import wanting
        except ImportError:
            import late, mine, missing_one

    try:
        main()
    except ImportError:
        import spins
    alike = [sorted(os.listdir("/proc/self/fd")), os.nice(0), open("/proc/self/oom_score_adj").read()]
    here = dict(os.environ, found=found, alike=alike)
    (notes / "draft").with_suffix(f".{rank}.{number}").write_text(json.dumps(here))
    (notes / "draft").with_suffix(f".{rank}.{number}").rename(notes / f"start-{number}-{rank}-{os.getpid()}.json")
    while not (notes / "go").exists():
        time.sleep(0.01)
"""


def test_a_spare_that_takes_a_rank_has_what_others_imported_late(fleet: Fleet, installed: Path) -> None:
    """It has never run the script. A module that starts a thread is left to it all the same."""
    install(installed, wanting="raise ImportError('there is no winreg')\n")
    spins = UNFIT["threads"] + "open(os.environ['NOTES'] + f'/spins-{os.getpid()}', 'w').close()\n"
    install(installed, late="open(os.environ['NOTES'] + f'/late-{os.getpid()}', 'w').close()\n", spins=spins)
    written(fleet, "mine.py", TELLS)
    script = written(fleet, "script.py", LATE)
    fleet.coordinator()
    options = ("--nnodes", "2:3", "--spares", "1", "--lease-s", "30")
    program = (script, str(fleet.notes))
    nodes = [fleet.node(name, *options, program=program, NOTES=str(fleet.notes)) for name in "abc"]
    first = fleet.started(0, 2)
    assert [one["found"] for one in first] == [[], []]
    names = [one["MUSTER_WORKER"] for one in first]
    (spare,) = (node for name, node in zip("abc", nodes, strict=True) if name not in names)
    lost = nodes["abc".index(names[1])]

    def heir() -> int | None:
        """The spare's only warm parent, if it has imported what ranks import late."""
        warm = [pid for pid in family(spare.pid) if "muster.node.warm" in command_of(pid)]
        return warm[0] if len(warm) == 1 and (fleet.notes / f"late-{warm[0]}").exists() else None

    eventually(heir, "the spare is prepared")
    assert (fleet.notes / f"spins-{heir()}").exists(), "it was tried"
    os.kill(lost.pid, signal.SIGKILL)
    second = {one["MUSTER_WORKER"]: one for one in fleet.started(1, 2)}
    name = next(name for name in second if name not in names)
    assert second[name]["found"] == ["late"], "neither the script's own, nor the one with a thread"
    assert second[name]["alike"] == first[0]["alike"]
    fleet.go()
    assert [node.wait() for node in nodes if node is not lost] == [0, 0]
    assert "left to ranks, not preloaded: spins starts a thread" in spare.text
    assert "wanting" not in spare.text, "ranks do without it, too: that is no reason to begin anew"


def test_an_heir_that_dies_is_missed_by_nobody(fleet: Fleet, installed: Path) -> None:
    tells = "open(os.environ['NOTES'] + f'/tried-{os.getpid()}', 'w').close()\n"
    dies = tells + "if 'RANK' not in os.environ:\n    os.kill(os.getpid(), 9)\n"
    install(installed, late=dies, spins="")
    written(fleet, "mine.py", TELLS)
    script = written(fleet, "script.py", LATE)
    fleet.coordinator()
    node = fleet.node("a", program=(script, str(fleet.notes)), NOTES=str(fleet.notes))
    (rank,) = fleet.started(0, 1)
    eventually(lambda: len(list(fleet.notes.glob("tried-*"))) >= 3, "the rank imported it, and two heirs tried")
    fleet.go()
    assert node.wait() == 0
    assert fleet.told("start", "*") == [rank] and "died" not in node.text
