from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from muster import __version__, errors
from muster.cli import exits, main, misuse, session
from muster.types.codec import Invalid, Problem
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training
from tests.fleet import PATIENCE_S
from tests.plane import Plane

LEAVES = [
    *([verb] for verb in main.VERBS),
    *(["server", verb] for verb in ("start", "stop", "status")),
    *(["token", verb] for verb in ("create", "list", "rotate", "revoke")),
]


@pytest.mark.parametrize("path", [[], *LEAVES, ["server"], ["token"], ["world"]], ids=" ".join)
def test_help_of_every_command_has_a_line_about_it_and_an_example(muster: Muster, path: list[str]) -> None:
    said = muster(*path, "--help")

    assert said.code == 0
    usage, _, about, *_ = said.out.splitlines()
    assert usage.startswith(" ".join(["Usage: muster", *path]))
    assert about.startswith("  ")
    assert len(about.split()) > 2
    assert f"Example: {' '.join(['muster', *path])}" in said.out or "example: eval" in said.out.lower()


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_option_is_described(path: list[str]) -> None:
    group: Any = main.Verbs()
    command = group.get_command(None, path[0])
    command = command if len(path) == 1 else command.commands[path[1]]

    assert [param.name for param in command.params if not param.help] == []


def test_without_a_command_the_help_is_shown_as_an_error(muster: Muster) -> None:
    said = muster()

    assert (said.code, said.out) == (2, "")
    assert "Commands:" in said.err


def test_the_version_is_told(muster: Muster) -> None:
    assert muster("--version").out == f"muster {__version__}\n"


def test_a_command_that_does_not_exist_is_answered_with_the_nearest(muster: Muster) -> None:
    said = muster("decsribe", "demo")

    assert said.code == 2
    assert said.err == "muster: there is no command 'decsribe'\nhint: did you mean muster describe?\n"


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (["ls"], ["ps"]),
        (["list", "-o", "name"], ["ps", "-o", "name"]),
        (["status"], ["ps"]),
        (["status", "demo"], ["describe", "demo"]),
        (["help", "scale"], ["scale", "--help"]),
        (["help", "server", "stop"], ["server", "stop", "--help"]),
        (["help"], ["--help"]),
    ],
)
def test_verbs_of_other_tools_do_what_is_meant(
    muster: Muster, control: StandIn, typed: list[str], same: list[str]
) -> None:
    control.add(a_training("demo"))
    said = muster(*typed)
    orders, control.orders = control.orders, []

    assert said == muster(*same)
    assert orders == control.orders
    assert said.code == 0


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["stop", "demo"], "muster cancel demo ends it"),
        (["stop"], "muster suspend NAME lets it wait"),
        (["submit", "train.py"], "muster run -d train.py submits it"),
        (["launch"], "muster run SCRIPT submits it"),
        (["attach", "demo"], "muster logs -f demo"),
        (["rm", "demo"], "muster delete demo"),
        (["down"], "muster delete NAME"),
        (["help", "scael"], "did you mean muster scale?"),
        (["hlep"], "did you mean muster help?"),
        (["server", "strat"], "did you mean muster server start?"),
        (["token", "creat", "ci"], "did you mean muster token create?"),
    ],
)
def test_verbs_that_could_mean_two_things_are_answered_with_ours(
    muster: Muster, control: StandIn, args: list[str], hint: str
) -> None:
    said = muster(*args)

    assert (said.code, said.out, control.orders) == (2, "", [])
    assert hint in said.err


@pytest.mark.usefixtures("processes")
def test_ctrl_c_while_it_is_still_importing_ends_it_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [str(Path(sys.executable).parent / "muster"), "ps"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.usefixtures("processes")
def test_the_package_runs_as_a_module() -> None:
    ended = subprocess.run([sys.executable, "-m", "muster", "hlep"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "did you mean muster help?" in ended.stderr


def _leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    group: Any = main.Verbs() if command is None else command
    if not hasattr(group, "list_commands"):
        yield path, group
        return
    for name in group.list_commands(None):
        yield from _leaves(group.get_command(None, name), (*path, name))


@cache
def _commands() -> dict[tuple[str, ...], Any]:
    """Return all commands by their path."""
    return dict(_leaves(None))


def _paths() -> list[tuple[str, ...]]:
    """Return the path of every group and of every command below it."""
    return sorted({path[:length] for path in _commands() for length in range(1, len(path) + 1)})


def _needs_a_word(path: tuple[str, ...]) -> bool:
    """Return whether a command cannot be called without an argument."""
    command = _commands().get(path)
    return command is None or any(param.required for param in command.params)


@pytest.mark.parametrize("path", _paths(), ids=" ".join)
def test_every_command_and_group_answers_help(muster: Muster, path: tuple[str, ...]) -> None:
    said = muster(*path, "--help")

    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"Usage: muster {' '.join(path)}")


@pytest.mark.parametrize("path", [path for path in _paths() if _needs_a_word(path)], ids=" ".join)
def test_a_command_without_its_argument_names_what_is_missing(
    muster: Muster, control: StandIn, path: tuple[str, ...]
) -> None:
    said = muster(*path)

    assert (said.code, said.out, control.orders) == (2, "", [])
    command = " ".join(["muster", *path])
    missing = rf"muster: \S+ is missing\nhint: {command} --help\n"
    assert re.fullmatch(missing, said.err) or said.err.startswith(f"Usage: {command} ")


# Commands that go on until somebody ends them.
_STAYS = {("coordinator",), ("share", "demo"), ("bench", "net"), ("top",)}
_LONG_S: dict[tuple[str, ...], float] = {("share", "simulate"): 300.0}  # The command takes 14 s of a core.


def test_no_command_without_arguments_prints_a_traceback(plane: Plane) -> None:
    """Each command is a real process. The command that ends the control plane comes last."""
    nowhere = {"KUBECONFIG": "/nonexistent", "BROWSER": "true", "HOME": str(plane.folder)}
    answers = {}
    paths = [path for path in _paths() if not _needs_a_word(path)]
    for path in sorted(paths, key=lambda path: path == ("server", "stop")):
        command = plane.muster(*path, **nowhere)
        if path in _STAYS:
            command.expect(r"\S")
            if command.proc.poll() is None:
                command.kill(signal.SIGINT)
        answers[path] = (command.wait(_LONG_S.get(path, PATIENCE_S)), command.text)
    broken = {path: said for path, said in answers.items() if "Traceback" in said[1] or "Error:" in said[1]}
    assert broken == {}
    assert (answers[("run",)][0], answers[("ps",)][0]) == (2, 0)


def _checked_by_typer() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every option of every command whose value typer reads: numbers, choices, durations, sizes, files."""
    for path, command in _commands().items():
        for param in command.params:
            descriptor = getattr(param, "type_descriptor", None)
            declared = getattr(descriptor, "annotation", str)
            parsed = descriptor is not None and descriptor.parameter_info.parser is not None
            texts = declared in (str, list[str], Path) and not parsed
            if param.param_type_name == "option" and not getattr(param, "is_flag", False) and not texts:
                yield path, misuse.name_of(param)


@pytest.mark.parametrize(("path", "option"), list(_checked_by_typer()), ids=str)
def test_no_words_of_a_library_reach_who_gives_an_option_a_wrong_value(
    muster: Muster, control: StandIn, path: tuple[str, ...], option: str
) -> None:
    group = ("--coordinator", "127.0.0.1:1", "--run-id", "demo") if path[0] == "world" else ()
    said = muster(path[0], *group, *path[1:], option, "no such value")

    assert (said.code, said.out, control.orders) == (2, "", [])
    first = said.err.splitlines()[0]
    assert first.startswith(f"muster: {option}: ") and "no such value" in first
    leaks = ("Input should", "Value error", "Invalid value", "Error:", "parse", "pydantic", "enum", "expected")
    assert not [word for word in leaks if word in said.err]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["get"], "NAME… is missing"),
        (["server", "strat"], "there is no command muster server strat"),
        (["ps", "-o", "xml"], "--output: must be one of table, json, yaml, name, not 'xml'"),
        (["ps", "--phase"], "--phase needs a value"),
        (["ps", "--all-namespaces=3"], "--all-namespaces takes no value"),
        (["ps", "demo"], "more than it takes: demo"),
        (["ps", "--what"], "there is no option --what"),
        (["scale", "demo", "many"], "N: must be a whole number, not 'many'"),
        (["scale", "demo", "0"], "N: must be at least 1, not 0"),
        (["run", "--cpu", "x"], "--cpu: must be a number, not 'x'"),
        (["wait", "demo", "--timeout", "soon"], "--timeout: 'soon' is not a duration"),
        (["wait", "demo", "--for", "ever"], "--for: must be one of complete, target, min, not 'ever'"),
        (["scale", "demo", "3", "--timeout", "5m"], "--timeout needs --wait"),
        (["usage", "--since", "yesterday"], "--since"),
        (["token", "create", "ci"], "--role is missing"),
        (["server", "start", "--tls-cert", __file__], "need each other"),
        (["server", "start", "--listen", "0.0.0.0:8470"], "refusing to listen on 0.0.0.0 without TLS"),
        (["server", "start", "--listen", "nowhere"], "--listen"),
    ],
)
def test_a_wrong_command_line_gets_one_line_and_code_2(
    muster: Muster, control: StandIn, args: list[str], text: str
) -> None:
    said = muster(*args)

    assert (said.code, said.out) == (2, "")
    first, *rest = said.err.splitlines()
    assert first.startswith("muster: ")
    assert text in first
    assert all(line.startswith("hint: ") for line in rest)
    assert control.orders == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.MusterError("m"), 1),
        (errors.InternalError("m"), 1),
        (errors.InvalidRequest("m", problems=(Problem("spec.x", "is wrong"),)), 2),
        (errors.WorldSizeOutOfBounds("m", requested=9, min=1, max=4), 2),
        (Invalid([Problem("m", "m")]), 2),
        (errors.NotFound("m"), 3),
        (errors.Conflict("m"), 4),
        (errors.AlreadyExists("m"), 4),
        (errors.UDTerminalState("m"), 4),
        (errors.ScaleSuperseded("m", requested=1, target=2), 4),
        (errors.Unauthenticated("m"), 5),
        (errors.Forbidden("m"), 5),
        (errors.QuotaExceeded("m"), 6),
        (errors.Unavailable("m"), 7),
        (errors.RendezvousUnavailable("m"), 7),
        (errors.TrainingFailed("m"), 100),
        (errors.TrainingCancelled("m"), 103),
        (errors.WaitTimeout("m"), 124),
        (KeyboardInterrupt(), 130),
        (RuntimeError("m"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_exit_code(
    muster: Muster, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def refuse(*_: object) -> Any:
        raise error

    monkeypatch.setattr(session, "open_client", refuse)
    said = muster("ps")

    assert (said.code, said.out) == (code, "")
    assert "Traceback" not in said.err
    assert said.err.startswith("muster: ") or code == 130


def test_every_bad_field_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    problems = (Problem("spec.spares", "must be at least 0"), Problem("spec.args", "must be a list"))
    exits.report(errors.InvalidRequest("2 fields are wrong", problems=problems))

    assert capsys.readouterr().err.splitlines() == [
        "muster: 2 fields are wrong",
        "  spec.spares: must be at least 0",
        "  spec.args: must be a list",
    ]


def test_a_traceback_is_shown_only_when_asked_for(muster: Muster, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> Any:
        raise RuntimeError("a fault")

    monkeypatch.setattr(session, "open_client", stumble)
    quiet = muster("ps")
    monkeypatch.setenv("MUSTER_DEBUG", "1")

    assert quiet.err == "muster: RuntimeError: a fault\nhint: set MUSTER_DEBUG=1 to see where this happened\n"
    assert "Traceback" in muster("ps").err


def test_where_and_who_come_from_options_and_from_the_environment(
    muster: Muster, control: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.add(a_training())
    for name, value in {"URL": "http://env", "TOKEN": "env-token", "NAMESPACE": "env-space"}.items():
        monkeypatch.setenv(f"MUSTER_{name}", value)
    muster("ps")
    from_environment = control.asked
    muster("ps", "--url", "http://given", "--token", "given-token", "-n", "given-space")

    assert from_environment == {"url": "http://env", "token": "env-token", "namespace": "env-space"}
    assert control.asked == {"url": "http://given", "token": "given-token", "namespace": "given-space"}


def test_ps_imports_nothing_heavy(tmp_path: Path) -> None:
    """Nobody answers at that address, so it goes all the way to a request and an error."""
    code = """if True:
        import sys
        from muster.cli import main
        code = main.call(["ps", "--url", "http://127.0.0.1:1", "-o", "name"])
        print(code, sorted({"rich", "starlette", "uvicorn", "torch", "pydantic", "asyncio"} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"MUSTER_HOME": str(tmp_path)}
    )

    assert done.stdout == "7 []\n", done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(muster: Muster, shell: str) -> None:
    said = muster("completion", shell)

    assert said.code == 0
    assert f"_MUSTER_COMPLETE=complete_{shell}" in said.out


@pytest.mark.parametrize(
    ("words", "url", "offered"),
    [
        ("muster de", "", ["describe", "delete"]),
        ("muster get de", "http://127.0.0.1:1", ["demo", "dev"]),
        ("muster get de", "", []),
    ],
)
def test_the_script_completes_commands_and_names_but_starts_nothing(
    muster: Muster,
    control: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    url: str,
    offered: list[str],
) -> None:
    control.add(a_training(), a_training("dev"), a_training("other"), a_training("de;rm"), a_training("de\x1b[2J"))
    told = {"_MUSTER_COMPLETE": "complete_bash", "COMP_WORDS": words, "MUSTER_URL": url}
    for name, value in (told | {"COMP_CWORD": str(words.count(" "))}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        muster()

    assert left.value.code == 0
    assert capsys.readouterr().out.split() == offered
    assert bool(control.asked) == bool(url)
