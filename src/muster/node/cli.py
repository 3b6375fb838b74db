"""`muster-node`: reads the command line and MUSTER_* variables, then becomes the agent. Standard library only."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import NoReturn, TypeVar

from muster import __version__, files, run_token, trimming
from muster.core.member.state import EXIT_COORDINATOR_LOST, EXIT_FAILED
from muster.node import launch
from muster.node.program import Program
from muster.node.standalone import IDLE_S, PRIVATE_IDLE_S, Standalone
from muster.types import address
from muster.types.world import HELD_VARIABLE, MemberId, RunId, Settings
from muster.world import wire
from muster.world.connection import Address
from muster.world.membership import MemberIdentity

EXIT_USAGE = 2
PREPARING_NICE = 10
T = TypeVar("T")

_EXAMPLES = """\
examples:
  muster-node --standalone --nproc 2 train.py --epochs 3
  muster-node --standalone --listen 127.0.0.1:29400 --run-id demo --nnodes 2:3 --spares 1 train.py
  muster-node --coordinator 127.0.0.1:29400 --run-id demo --nnodes 2:3 --spares 1 train.py
  muster-node --shell --rank 0     a shell where rank 0 runs on this machine, with its environment (--shell --help)

Every option can also be given as a MUSTER_ variable (MUSTER_RUN_ID, MUSTER_NNODES, …).
The coordinator's token is found on its own machine; on others set MUSTER_RUN_TOKEN, as its first line says.
exit codes: 0 success or a graceful leave, 1 failed, 2 usage, 75 coordinator lost, 93 no progress, 130/143 signals
"""

# Settings of the run whose option is not simply their name.
_SPECIAL = {"min", "max", "hang_timeout_s"}


class _NodeParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Not below twenty lines of usage."""
        _usage(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _NodeParser(
        prog="muster-node",
        description="Run this machine's part of a distributed training, with hot spares.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"muster-node {__version__}")
    where = parser.add_argument_group("which run")
    where.add_argument("--standalone", action="store_true", help="start a coordinator for this run here")
    where.add_argument("--listen", metavar="HOST:PORT", help="where the --standalone coordinator listens")
    where.add_argument("--coordinator", "--rdzv-endpoint", metavar="HOST:PORT,…", help="join the run at one of these")
    where.add_argument("--coordinator-file", metavar="FILE", help="HOST:PORT lines, read at every (re)connection")
    where.add_argument("--run-id", "--rdzv-id", metavar="ID")
    where.add_argument(
        "--launch-id",
        metavar="ID",
        help="identity shared by the workers of one launch only (default under srun: job, restart count and step)",
    )
    where.add_argument("--join-timeout", type=float, default=60.0, metavar="S", help="how long to try to reach it (60)")
    world = parser.add_argument_group("the world (fixed by the first member of a run)")
    world.add_argument("--nnodes", metavar="MIN[:MAX]", help="how many workers train together")
    world.add_argument("--hang-timeout", dest="hang_timeout_s", metavar="S", help="restart when no rank advances for S")
    for item in dataclasses.fields(Settings):
        if item.name not in _SPECIAL:
            default = "" if item.default is None else f" ({item.default})"
            world.add_argument(f"--{item.name.replace('_', '-')}", metavar="N", help=f"{_HELP[item.name]}{default}")
    worker = parser.add_argument_group("this worker")
    worker.add_argument("--nproc", "--nproc-per-node", default="1", metavar="N|auto|gpu", help="ranks here (1)")
    worker.add_argument("--name", help="unique in the run (host name and process id)")
    worker.add_argument("--infra-rank", type=int, metavar="I", help="orders the first round")
    worker.add_argument("--domain", metavar="D", help="rack or switch; segments stay inside one")
    worker.add_argument("--local-addr", metavar="A", help="the address that others are told")
    worker.add_argument(
        "--probe-addr",
        metavar="A",
        help="where its ranks are reached, if not at that address: HOST[:PORT] or a network",
    )
    worker.add_argument("--health-check", metavar="CMD", help="run before joining and before promotion")
    worker.add_argument("--log-dir", metavar="DIR", help="LOG_DIR/round-N/rank-R.{out,err}")
    worker.add_argument("--log-bytes", default="1Gi", metavar="N", help="kept of each file of a rank; 0: all (1Gi)")
    worker.add_argument(
        "--state-memory", metavar="N", help="for muster.State on this worker, as 64Gi; 0: none (half of what is free)"
    )
    worker.add_argument(
        "--state-rate", metavar="N", help="bytes in a second in which its copies go to other workers (no limit)"
    )
    worker.add_argument(
        "--no-echo", action="store_true", help="no copy of rank output on the terminal; times are noted beside it"
    )
    worker.add_argument("--no-requeue-code", type=int, default=93, metavar="N", help="exit code for no_progress (93)")
    sent = parser.add_argument_group("code and packages that were sent with the training")
    sent.add_argument("--package", metavar="sha256:…", help="unpack this package, and run in it")
    sent.add_argument("--package-from", metavar="URL|FILE", help="where it is")
    sent.add_argument("--folder", metavar="DIR", help="where it is unpacked (a temporary folder)")
    sent.add_argument("--working-dir", metavar="DIR", help="a folder in it to run in (its top)")
    sent.add_argument("--cache-dir", metavar="DIR", help="where environments are kept (~/.cache/muster)")
    sent.add_argument(
        "--requirement", action="append", default=[], metavar="LINE", help="of a requirements file, for an environment"
    )
    sent.add_argument("--prepared", action="store_true", help=argparse.SUPPRESS)  # code and environment are there
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--warm", choices=["auto", "always", "never"], default="auto", help="fork ranks from a warm parent"
    )
    ranks.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="auto|none|MOD",
        help="import this in the warm parent, beside what the program imports (auto); none: nothing at all",
    )
    ranks.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    ranks.add_argument("--no-python", action="store_true", help="the program is a command, run as it is")
    for name, dest in _TORCHRUN_SPELLINGS.items():
        parser.add_argument(f"--{name}", dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    ranks.add_argument("program", metavar="script.py", help="what each rank runs")
    ranks.add_argument("args", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    return parser


# torchrun takes underscores too.
_TORCHRUN_SPELLINGS = {
    "nproc_per_node": "nproc",
    "rdzv_endpoint": "coordinator",
    "rdzv_id": "run_id",
    "max_restarts": "max_restarts",
    "local_addr": "local_addr",
    "log_dir": "log_dir",
}

_HELP = {
    "target": "workers wanted; MAX minus spares by default",
    "spares": "hot spares wanted",
    "segment": "only whole groups of N workers from one domain train",
    "max_restarts": "failures that the run survives",
    "last_call_s": "seconds to wait for more workers",
    "scale_debounce_s": "seconds in which newcomers are gathered",
    "lease_s": "seconds of silence after which a worker is lost",
    "kill_margin_s": "seconds beyond a lease before a lost worker's rank is given away",
    "blame_s": "seconds in which a failure may turn out to be a lost worker's doing",
    "below_min_timeout_s": "seconds below MIN after which the run fails",
    "recovery_s": "seconds that a new coordinator waits for the members of a round",
    "stop_grace_s": "seconds between SIGTERM and SIGKILL when leaving, and when the world is resized",
    "restart_grace_s": "the same when the world forms anew after a loss or a failure",
    "fail_grace_s": "the same when the run has failed",
    "save_grace_s": "seconds that ranks with files open for writing have before SIGTERM",
    "saving_timeout_s": "the same for ranks inside muster.saving()",
    "farewell_s": "seconds to wait for the others at the end",
    "orphan_s": "seconds that ranks go on without a coordinator",
    "spare_orphan_s": "seconds that a worker without a rank searches for a lost coordinator, after its lease",
    "no_progress_rounds": "fail after N rounds in a row without a new highest step",
    "gate_timeout_s": "hold ranks until all workers reach each other, at most so many seconds",
    "store_timeout_s": "seconds that a rank waits for the round's store when it joins its process group",
    "bench_s": "measure all-reduce before the first round's program, for at most so many seconds",
}


def main(argv: list[str] | None = None) -> int:
    _open_standard_streams()
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--shell"]:
        from muster.node import shell

        return shell.main(words[1:])
    parser = build_parser()
    given = parser.parse_args(_with_environment(parser, words))
    if (given.package or given.requirement) and not given.prepared:
        _prepare(given, words)
    try:
        settings = _settings(given)
        program = _program(given)
        procs = _procs(given.nproc)
        log_bytes = _bytes("--log-bytes", given.log_bytes)
        state_memory = None if given.state_memory is None else _bytes("--state-memory", given.state_memory)
        state_rate = 0 if given.state_rate is None else _bytes("--state-rate", given.state_rate)
        _check_health_command(given.health_check)
        if given.probe_addr:
            address.read(given.probe_addr)
        launch_id = launch.identity(given.launch_id, os.environ)
        standalone, addresses = _coordinator(given)
    except ValueError as error:
        _usage(str(error))
    # The agent is imported late so that a mistake on the command line is answered at once.
    from muster.node import agent
    from muster.node.keeping import Means

    run_id = given.run_id or (secrets.token_hex(4) if standalone else None)
    if run_id is None:
        _usage("--coordinator needs --run-id (or MUSTER_RUN_ID)")
    try:
        log_dir = _make_log_dir(Path(given.log_dir).absolute()) if given.log_dir else _default_log_dir(run_id)
    except ValueError as error:
        _usage(str(error))
    keeps_token = run_token.given() is None
    token = _token(standalone, addresses, given.join_timeout)
    member_id = MemberId(secrets.token_hex(6))
    if standalone is not None:
        standalone.beside = member_id
        standalone.begin()  # it starts beside us; the agent waits for it
    if procs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    identity = MemberIdentity(
        addresses=addresses,
        run_id=RunId(run_id),
        member_id=member_id,
        name=given.name or f"{socket.gethostname()}-{os.getpid()}",
        settings=settings,
        procs=procs,
        token=token,
        infra_rank=given.infra_rank,
        domain=given.domain,
        local_addr=given.local_addr,
        probe_addr=given.probe_addr,
        checks_health=given.health_check is not None,
        launch=launch_id,
        is_directed_here=given.coordinator_file is not None,
    )
    config = agent.NodeConfig(
        program=program,
        identity=identity,
        log_dir=log_dir,
        health_check=given.health_check,
        join_timeout_s=given.join_timeout,
        no_requeue_code=given.no_requeue_code,
        echo=not given.no_echo,
        log_bytes=log_bytes,
        state=Means(state_memory, state_rate),
        standalone=standalone,
        keeps_token=keeps_token,
        hold=_held(os.environ),
        home=Path(given.coordinator_file).absolute().parent if given.coordinator_file else None,
    )
    agent.main(config)


def _prepare(given: argparse.Namespace, words: list[str]) -> None:
    """Be where the code is, with what it requires. What fails is told in one line, before any rank is started."""
    from muster import package
    from muster.node import environment, fetching

    try:
        if given.package:
            folder = Path(given.folder).absolute() if given.folder else None
            source, token = given.package_from or "", run_token.given()
            code = _behind_others(lambda: fetching.code(given.package, source, token, folder))
            fetching.enter(fetching.within(code, given.working_dir) if given.working_dir else code)
        if given.requirement:
            cache = Path(given.cache_dir or "~/.cache/muster").expanduser().absolute()
            namespace = os.environ.get("MUSTER_NAMESPACE", "")
            python = _behind_others(lambda: environment.python(given.requirement, cache, namespace))
            os.execv(python, [python, "-m", "muster.node.cli", "--prepared", *words])
    except (package.BadPackage, environment.CannotMake, ValueError) as error:
        print(f"muster-node: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)  # no other worker could do better
    except (fetching.CannotFetch, OSError) as error:
        print(f"muster-node: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _behind_others(work: Callable[[], T]) -> T:
    """On a thread of low priority, which ends with it: many workers may start here at once, beside those that train."""
    from concurrent.futures import ThreadPoolExecutor

    def quietly() -> T:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREPARING_NICE)
        return work()

    with ThreadPoolExecutor(1) as beside:
        return beside.submit(quietly).result()


def _held(env: MutableMapping[str, str]) -> tuple[int, ...]:
    """What our backend wants held. Ranks inherit it and need not know; another file at that number is not meant."""
    number = env.pop(HELD_VARIABLE, "")
    try:
        return (int(number),) if stat.S_ISFIFO(os.fstat(int(number)).st_mode) else ()
    except (ValueError, OSError):
        return ()


def _with_environment(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Options from MUSTER_* variables, placed first so that the command line wins.

    Inside a rank there are none to take: what a rank is told (MUSTER_RUN_ID, …) is not meant for a run of its own.
    """
    if "MUSTER_ROUND" in os.environ:
        return argv
    typed = parser.parse_args(argv)
    skipped = {"help", "version"} | ({"coordinator"} if typed.standalone else set())
    skipped |= {"standalone", "listen"} if typed.coordinator or typed.coordinator_file else set()
    extra = []
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if not names or action.dest in skipped or action.help == argparse.SUPPRESS:
            continue
        value = os.environ.get(f"MUSTER_{action.dest.upper()}")
        if value is None and action.dest.endswith("_s"):
            value = os.environ.get(f"MUSTER_{action.dest.removesuffix('_s').upper()}")
        if not value:
            continue
        if action.nargs == 0:
            extra += [names[0]] if value.lower() in ("1", "true", "yes") else []
        else:
            extra += [f"{names[0]}={value}"]
    return extra + argv


def _settings(given: argparse.Namespace) -> dict[str, object]:
    """Only what the user gave: the first member fixes the rest by default."""
    settings: dict[str, object] = {}
    if given.nnodes is not None:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", given.nnodes)
        if match is None:
            raise ValueError(f"--nnodes {given.nnodes!r} is not MIN or MIN:MAX")
        settings |= {"min": int(match[1]), "max": int(match[2] or match[1])}
    for item in dataclasses.fields(Settings):
        value = getattr(given, item.name, None)
        if value is not None and item.name not in ("min", "max"):
            settings[item.name] = value
    parsed = Settings.parse(settings)
    if problems := parsed.problems():
        raise ValueError("; ".join(problems))
    return {name: getattr(parsed, name) for name in settings}


def _program(given: argparse.Namespace) -> Program:
    if given.module and given.no_python:
        raise ValueError("-m and --no-python exclude each other")
    mode = "module" if given.module else "command" if given.no_python else "script"
    if mode == "script" and not os.path.exists(given.program):
        raise ValueError(f"no such script: {given.program}")
    if mode == "script" and os.path.isdir(given.program) and not os.path.exists(f"{given.program}/__main__.py"):
        raise ValueError(f"a folder without a __main__.py is no script: {given.program}")
    if mode == "command" and shutil.which(given.program) is None:
        there = os.path.isfile(given.program) and os.sep in given.program
        raise ValueError(f"{'permission denied' if there else 'no such command'}: {given.program}")
    if mode == "module":
        _check_module(given.program)
    warm = given.warm != "never" and mode != "command"
    named = [name for words in given.preload for name in words.split(",") if name and name != "auto"]
    nothing = "none" in named
    if nothing and set(named) != {"none"}:
        raise ValueError(f"--preload none excludes others: {','.join(named)}")
    preload = tuple(named) if warm and not nothing else ()
    if warm and given.warm == "always" and not nothing:
        preload = ("torch", *(name for name in preload if name != "torch"))
    return Program(mode, given.program, tuple(given.args), warm, preload, auto=warm and not nothing)


def _check_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        sys.path.pop(0)
    if not found:
        raise ValueError(f"no such module: {name}")


def _check_health_command(command: str | None) -> None:
    if command is None:
        return
    known = subprocess.run(["/bin/sh", "-n", "-c", command], capture_output=True, text=True)
    if known.returncode != 0:
        raise ValueError(f"--health-check {command!r}: {known.stderr.strip()}")


def _make_log_dir(path: Path) -> Path:
    """Found out now, not when a round is released."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ValueError(f"--log-dir {path}: {error.strerror}") from None


def _procs(text: str) -> int:
    gpus = _gpus()
    if text == "gpu":
        if not gpus:
            raise ValueError("--nproc gpu: this machine shows no GPU")
        return gpus
    if text == "auto":
        return gpus or os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--nproc must be a positive number, auto or gpu, not {text!r}")
    return int(text)


def _bytes(option: str, text: str) -> int:
    try:
        return trimming.read_limit(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _gpus() -> int:
    """GPUs that ranks may use, counted without a driver library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    try:
        return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    except OSError:
        return 0


def _coordinator(given: argparse.Namespace) -> tuple[Standalone | None, Callable[[], list[Address]]]:
    if given.standalone and given.coordinator:
        raise ValueError("--standalone starts a coordinator, --coordinator joins one: give one of them")
    if given.coordinator_file:
        return None, _AddressFile(Path(given.coordinator_file))
    if given.coordinator:
        known = [wire.parse_address(part) for part in given.coordinator.split(",")]
        return None, lambda: known
    if not given.standalone:
        raise ValueError("give --standalone, or --coordinator HOST:PORT and --run-id ID")
    host, port = wire.parse_address(given.listen) if given.listen else ("127.0.0.1", 0)
    private = given.listen is None
    idle_s = float(os.environ.get("MUSTER_IDLE_S") or (PRIVATE_IDLE_S if private else IDLE_S))
    started = Standalone.here(host, port, idle_s=idle_s, private=private)
    return started, lambda: started.addresses


def _token(standalone: Standalone | None, addresses: Callable[[], list[Address]], patience_s: float) -> str | None:
    """What the user gave, or what is kept on this machine. Guard and ranks have it from our environment."""
    token = run_token.given() or (standalone.token if standalone is not None else None)
    if token is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            token = run_token.await_found(
                files.home(),
                addresses,
                patience_s,
                lambda why: _tell(f"cannot reach the coordinator ({why}); trying for {patience_s:g} s"),
            )
        except TimeoutError as error:
            _tell(f"no coordinator ({error}); gave up after {patience_s:g} s")
            sys.exit(EXIT_COORDINATOR_LOST)
        except run_token.AnotherUsersPort as error:
            _tell(str(error))
            sys.exit(EXIT_FAILED)
    if token is not None:
        os.environ[run_token.VARIABLE] = token
    return token


def _tell(line: str) -> None:
    print(f"muster-node: {line}", file=sys.stderr, flush=True)


class _AddressFile:
    """Where a coordinator that may move writes where it is. A file that cannot be read leaves the last answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: list[Address] = []
        if not self():
            raise ValueError(f"--coordinator-file {path}: no address in it")

    def __call__(self) -> list[Address]:
        try:
            lines = self._path.read_text().split()
            self._known = [wire.parse_address(line) for line in lines] or self._known
        except (OSError, ValueError):
            return self._known
        return self._known


def _open_standard_streams() -> None:
    """A descriptor that was closed for us would be given to the next file or pipe that is opened."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _default_log_dir(run_id: str) -> Path:
    """One per process: nobody else's output may land in a file that is copied to our own."""
    try:
        made = files.scratch("logs", re.sub(r"[^\w.-]", "_", run_id)[:100] or "_", str(os.getpid()))
    except OSError as error:
        raise ValueError(f"cannot make a folder for logs: {error}; give --log-dir") from None
    if not made.is_relative_to(usual := Path(tempfile.gettempdir()).resolve() / f"muster-{os.getuid()}"):
        _tell(f"others can write {usual}: logs are in {made}")
    return made


def _usage(message: str) -> NoReturn:
    print(f"muster-node: {message}\nmuster-node: see muster-node --help", file=sys.stderr)
    sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    sys.exit(main())
