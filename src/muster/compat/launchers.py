"""Translation of a command that begins with torchrun: the program of each rank, and the options that apply here.

muster starts the ranks itself, so it replaces torchrun and the options that say how nodes meet. Options that have no
counterpart are listed in `dropped`; options that would change what the program computes are refused.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from muster.types.training import WorldSize

Refuse = Callable[[str], NoReturn]

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_TORCHRUN = "torch.distributed.run"
_OTHER_LAUNCHERS = frozenset({"accelerate", "deepspeed", "mpirun", "mpiexec"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash"})
# Programs that start the program which their arguments name.
_WRAPPERS = frozenset(
    {
        "env",
        "exec",
        "ionice",
        "nice",
        "nohup",
        "numactl",
        "setsid",
        "stdbuf",
        "taskset",
        "time",
        "timeout",
        "uv",
        "xargs",
    }
)
_LAUNCH_WORD = re.compile(r"(^|[\s;&|/])(torchrun|accelerate|deepspeed|mpirun)\s|torch\.distributed\.(run|launch)")
_SHELL_VARIABLE = re.compile(r"\$\{?(BASILICA_\w+)")
_FLAGS_WITH_VALUES = ("-W", "-X", "--check-hash-based-pycs")

# muster brings the nodes together itself, so these options are not needed.
_REPLACED = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "node-rank", "master-addr", "master-port", "local-addr")
_VALUED = (
    *_REPLACED,
    "nnodes",
    "nproc-per-node",
    "max-restarts",
    "shutdown-timeout",
    "rdzv-conf",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "log-dir",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "logs-specs",
    "numa-binding",
    "signals-to-handle",
)
_SWITCHES = ("standalone", "no-python", "run-path", "virtual-local-rank")
_USED = {"nnodes", "nproc-per-node", "max-restarts", "shutdown-timeout", "standalone", "no-python", "run-path"}


@dataclass(frozen=True)
class RankProgram:
    """The program of each rank, as arguments of `Client.train`, and the launcher's options as muster applies them."""

    program: dict[str, Any]  # one of `command`, `script` and `module`
    args: tuple[str, ...] = ()
    ranks_each: int = 1
    limits: dict[str, Any] = field(default_factory=dict)  # `max_restarts` and `stop_grace_seconds`, if they were given
    dropped: tuple[str, ...] = ()


def read(command: Sequence[str], *, gpus: int, size: WorldSize, names: Sequence[str], refuse: Refuse) -> RankProgram:
    """Return the program of each rank. `gpus` and `size` are those of the call, `names` its environment's variables.

    `refuse` raises the error for a command that muster cannot run as intended.
    """
    if isinstance(command, str):
        refuse(f"is one text. Give a list of words: {str(command.split())[:200]}")
    words = [str(word) for word in command]
    interpreter, options = _split(words, refuse)
    if options is None:
        _check_program(words, refuse)
        return RankProgram({"command": words})
    parsed = _parse(options, refuse)
    dropped = _dropped(parsed, size)
    dropped += [name for name in names if name.startswith("PET_")]
    kind, program = _program(parsed, interpreter, refuse)
    args = tuple(parsed["args"])
    _check_program([*interpreter, parsed["script"], *args], refuse)
    limits = {
        name: _number(parsed, option, number, refuse)
        for name, option, number in (
            ("max_restarts", "max-restarts", int),
            ("stop_grace_seconds", "shutdown-timeout", float),
        )
        if parsed[option] is not None
    }
    ranks = _ranks(parsed["nproc-per-node"], gpus, refuse)
    return RankProgram({kind: program}, args, ranks, limits, tuple(dropped))


def _split(words: list[str], refuse: Refuse) -> tuple[list[str], list[str] | None]:
    """Return the interpreter with its flags, and torchrun's arguments; None if torchrun does not begin the command."""
    launcher = os.path.basename(words[0]) if words else ""
    if launcher == "torchrun":
        return [], words[1:]
    if launcher in _OTHER_LAUNCHERS:
        refuse(f"begins with {launcher}. Give the program that it would start: muster starts its ranks itself")
    if launcher in _SHELLS and any(_LAUNCH_WORD.search(f"{word} ") for word in words[1:]):
        refuse("has a launcher inside a shell. Give torchrun and its words as a list: muster starts its ranks itself")
    if launcher in _WRAPPERS and (inner := next(filter(_is_launcher, words[1:]), None)) is not None:
        refuse(
            f"starts {os.path.basename(inner)} by {launcher}. Begin the command with torchrun, or with the program: "
            "muster starts its ranks itself. Environment variables go into env"
        )
    if _PYTHON.fullmatch(launcher):
        index = 1
        while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "-c", "-", "--"):
            index += 2 if words[index] in _FLAGS_WITH_VALUES else 1
        if words[index : index + 1] == ["-m"] and index + 1 < len(words):
            if words[index + 1] == _TORCHRUN:
                return words[:index], words[index + 2 :]
            if words[index + 1] == "torch.distributed.launch":
                refuse("begins with torch.distributed.launch. Give torchrun, or the program: muster starts its ranks")
    return [], None


def _is_launcher(word: str) -> bool:
    name = os.path.basename(word)
    return name in _OTHER_LAUNCHERS or name in ("torchrun", _TORCHRUN, "torch.distributed.launch")


def _check_program(words: Sequence[str], refuse: Refuse) -> None:
    for word in words:
        if variable := _SHELL_VARIABLE.search(word):
            refuse(
                f"has ${variable[1]}, and no shell replaces it. Let the program read RANK, LOCAL_RANK and WORLD_SIZE "
                "from its environment: muster starts its ranks itself"
            )


class _Parser(argparse.ArgumentParser):
    refuse: Refuse

    def error(self, message: str) -> NoReturn:
        self.refuse(f"cannot be read as torchrun's: {message}. See torchrun --help")


def _parse(words: Sequence[str], refuse: Refuse) -> dict[str, Any]:
    """Return torchrun's options by their name with dashes. Like torchrun, accept underscores and unique prefixes."""
    parser = _Parser(prog="torchrun", add_help=False)
    parser.refuse = refuse
    for name in _VALUED:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", dest=name)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", dest=name, action="store_true")
    parser.add_argument("-m", "--module", dest="module", action="store_true")
    parser.add_argument("-r", "--redirects", dest="redirects")
    parser.add_argument("-t", "--tee", dest="tee")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return vars(parser.parse_args(list(words)))


def _dropped(parsed: dict[str, Any], size: WorldSize) -> list[str]:
    """Return the options that were given and have no effect here."""
    handled = {*_REPLACED, *_USED, "module", "script", "args", "virtual-local-rank"}
    names = [f"--{name}" for name, value in parsed.items() if value not in (None, False) and name not in handled]
    nodes = parsed["nnodes"]
    same = (f"{size.target}", f"{size.min}:{size.max}")
    if nodes is not None and nodes not in same and not _SHELL_VARIABLE.match(nodes):
        names.append(f"--nnodes={nodes} (world_size says {size.min} to {size.max})")
    return names


def _program(parsed: dict[str, Any], interpreter: list[str], refuse: Refuse) -> tuple[str, str | list[str]]:
    """Return the kind of the program, as `Client.train` names it, and the program with its interpreter."""
    if parsed["virtual-local-rank"]:
        refuse("has --virtual-local-rank, which muster does not know. Let the program choose its device by LOCAL_RANK")
    script: str = parsed["script"]
    if parsed["no-python"]:
        if parsed["module"]:
            refuse("has both --module and --no-python. Leave one of them out")
        return "command", [script]
    if interpreter:
        return "command", [*interpreter, *(["-m"] if parsed["module"] else []), script]
    return "module" if parsed["module"] else "script", script


def _ranks(value: str | None, gpus: int, refuse: Refuse) -> int:
    """Return the number of ranks of each worker. torchrun's default is 1."""
    if value is None:
        return 1
    if value.isascii() and value.isdigit() and int(value) > 0:
        return int(value)
    if re.fullmatch(r"\$\{?BASILICA_GPUS_PER_POD\}?", value):
        return max(1, gpus)
    if value in ("gpu", "auto") and gpus > 0:
        return gpus
    refuse(f"has --nproc-per-node={value}, which depends on the machine. Give a number, or gpu with gpu_count")


def _number(parsed: dict[str, Any], option: str, kind: Callable[[str], Any], refuse: Refuse) -> Any:
    try:
        return kind(parsed[option])
    except ValueError:
        refuse(f"has --{option}={parsed[option]}, which is not a number")
