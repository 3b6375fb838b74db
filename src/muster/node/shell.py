"""A shell, or a command, where a rank runs: in its folder and with its environment. `muster-node --shell` is this.

What is started is the user's and no part of the training: nothing waits for it, and nothing ends with it. Variables
by which a process would speak or write as the rank are not handed on. Only the user whose rank it is gets one: even
root would run with what another user has put into the environment. Standard library only: it runs in users' images.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from muster.node import whereabouts
from muster.node.whereabouts import RankHere

ERROR, USAGE, NOT_NOW, NOT_YOURS, CANNOT_RUN, NO_PROGRAM = 1, 2, 4, 5, 126, 127  # as `cli.exits`, and as shells do

PYTHON = "MUSTER_PYTHON"  # the interpreter of the rank, which need not be the first on the PATH
_OWN = "MUSTER_"
_HANDED_ON = ("MUSTER_WORKER", "MUSTER_ROUND", "MUSTER_TRAINING", "MUSTER_NAMESPACE")
_HANDED_ON_FROM = ("MUSTER_MESH_", "MUSTER_STORAGE_")
_OF_THE_TERMINAL = ("TERM", "COLORTERM")
_OF_ANOTHER_SHELL = ("_", "SHLVL", "OLDPWD", "PS1", "PROMPT_COMMAND")
_SHELLS = ("/bin/bash", "/bin/sh")
_UNCHANGED = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}  # so that nothing changes the environment again
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_TERM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


class CannotOpen(Exception):
    """Says in one line why not, and what to type next."""

    def __init__(self, code: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.hint = code, hint


def main(argv: Sequence[str] | None = None) -> int:
    """Becomes what was asked for; returns only if that cannot be."""
    words = sys.argv[1:] if argv is None else list(argv)
    at = words.index("--") if "--" in words else len(words)
    given = _parser().parse_args(words[:at])
    try:
        _open(given, words[at + 1 :])
    except CannotOpen as error:
        print(f"muster: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster-node --shell",
        description="Open a shell where a rank runs on this machine, in its folder and with its environment.",
        usage="%(prog)s --rank R [--run-id ID] [--program SHELL] [-- COMMAND …]",
        allow_abbrev=False,
    )
    parser.add_argument("--rank", type=int, required=True, metavar="R", help="which one")
    parser.add_argument("--run-id", metavar="ID", help="of which run; where only one has it, nobody has to say")
    parser.add_argument("--name", metavar="NAME", help="what to call the run (its training's name, or its id)")
    parser.add_argument("--program", metavar="SHELL", help="which shell ($SHELL, /bin/bash or /bin/sh)")
    parser.add_argument("--term", metavar="TERM", help="of the user's terminal ($TERM)")
    return parser


def _open(given: argparse.Namespace, typed: list[str]) -> NoReturn:
    name = str(given.name or given.run_id or "the run")
    if not typed and not sys.stdin.isatty():
        raise CannotOpen(USAGE, "there is no terminal here for a shell", "give a command instead, behind --")
    terminal = {key: os.environ[key] for key in _OF_THE_TERMINAL if key in os.environ}
    if given.term and _TERM.fullmatch(given.term):
        terminal["TERM"] = given.term
    found = chosen(whereabouts.ranks(), given.run_id, given.rank)
    if found is None:
        raise _missing(given.run_id, given.rank, name)
    _enter(found, name)
    title = title_of(found)
    command = typed or shell(given.program, os.environ.get("SHELL"), _is_program)
    env = environment(found, terminal) | ({"PWD": folder} if (folder := _folder()) else {})
    if not typed:
        env["PS1"] = prompt(f"{title}:{found.rank}", command[0])
        on = f", on {found.worker}" if _PLAIN.fullmatch(found.worker) else ""
        told = f"rank {found.rank} of {title}, round {found.round}{on}"
        print(f"{told}: its process is {found.pid}. exit leaves the shell.", file=sys.stderr)
    become(command, env)


# What is decided -----------------------------------------------------------------------------------------------------


def chosen(here: Sequence[RankHere], run_id: str | None, rank: int) -> RankHere | None:
    """The rank that is meant: of two rounds the later one, for that of the earlier one is about to end."""
    found = [one for one in here if one.rank == rank and run_id in (None, one.run_id)]
    if len(runs := sorted({one.run_id for one in found})) > 1:
        raise CannotOpen(USAGE, f"several runs have a rank {rank} here: {', '.join(runs)}", "give --run-id")
    return max(found, key=lambda one: one.round, default=None)


def environment(rank: RankHere, terminal: Mapping[str, str]) -> dict[str, str]:
    """The rank's, but for what makes a process its hand or its voice; and the terminal is the user's."""
    kept = {name: value for name, value in rank.env.items() if _is_handed_on(name)}
    return kept | dict(terminal) | ({PYTHON: rank.python} if rank.python else {})


def _is_handed_on(name: str) -> bool:
    if name.startswith(_OWN):
        return name in _HANDED_ON or name.startswith(_HANDED_ON_FROM)
    return name not in (*_OF_THE_TERMINAL, *_OF_ANOTHER_SHELL)


def title_of(found: RankHere) -> str:
    """What people call its run. A shell expands what is in a prompt, so only a plain name gets there."""
    names = (found.env.get("MUSTER_TRAINING", ""), found.run_id)
    return next((name for name in names if _PLAIN.fullmatch(name)), "a run")


def prompt(title: str, program: str) -> str:
    where = r" \w\$ " if os.path.basename(program) == "bash" else " $ "
    return f"({title}){where}"


def shell(wanted: str | None, usual: str | None, is_program: Callable[[str], bool]) -> list[str]:
    """The one that is wanted, or else the user's usual one, or one that there is."""
    if wanted and not is_program(wanted):
        raise CannotOpen(USAGE, f"there is no shell {wanted} where the rank runs", "muster shell … --shell /bin/sh")
    program = next((one for one in (wanted, usual, *_SHELLS) if one and is_program(one)), None)
    if program is None:
        raise CannotOpen(ERROR, "there is no shell where the rank runs", "give a command behind --")
    flag = _UNCHANGED.get(os.path.basename(program))
    return [program, flag] if flag else [program]


# What is done --------------------------------------------------------------------------------------------------------


def _missing(run_id: str | None, rank: int, name: str) -> CannotOpen:
    if run_id and (uid := whereabouts.owner(run_id)) is not None:
        user = _name_of(uid)
        hint = f"sudo -u {user} muster shell {name} {rank}"
        told = f"rank {rank} of {name} runs as user {user}: only that user has a shell there"
        return CannotOpen(NOT_YOURS, told, hint)
    why = "its world forms anew, or it has just ended"
    return CannotOpen(NOT_NOW, f"rank {rank} of {name} has no process here now: {why}", f"muster describe {name}")


def _enter(found: RankHere, name: str) -> None:
    try:
        os.chdir(f"/proc/{found.pid}/cwd")
    except (FileNotFoundError, ProcessLookupError):
        raise _missing(None, found.rank, name) from None
    except OSError as error:
        raise CannotOpen(ERROR, f"the folder of rank {found.rank} cannot be entered: {error.strerror}") from None


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was removed


def _is_program(path: str) -> bool:
    return shutil.which(path) is not None


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def become(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """That program, in this process: its terminal, its signals and its exit code are the user's."""
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores these two, and what is ignored stays so
    try:
        os.execvpe(command[0], list(command), dict(env))
    except (OSError, ValueError) as error:
        code = NO_PROGRAM if isinstance(error, FileNotFoundError) else CANNOT_RUN
        raise CannotOpen(code, f"cannot run {command[0]}: {getattr(error, 'strerror', None) or error}") from None


if __name__ == "__main__":
    sys.exit(main())
