"""How do Python arguments become the request for a training?

Everything that can be wrong with them is found here, all at once, before anything is sent.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from muster.errors import InvalidRequest
from muster.sdk import travelling
from muster.types import codec
from muster.types.codec import Invalid, Problem
from muster.types.storage import Storage
from muster.types.training import DEFAULT_NAMESPACE, Mesh, Resources, Training, WorldSize, problems_of

LONGEST_NAME = 52
_PROGRAMS = ("command", "script", "module")
_LISTS = ("command", "args", "secret_env", "preload", "requirements")


class SubmitOptions(TypedDict, total=False):
    """What `distributed` takes beside the program: the fields of a training's spec, and its metadata.

    `ship`: send the working directory along; by default where the control plane does not see it.
    `force`: also what can never start: a script that is not there, more GPUs than there are, a call without a guard.
    """

    args: Sequence[str]
    name: str | None
    namespace: str | None
    labels: Mapping[str, str] | None
    annotations: Mapping[str, str] | None
    working_dir: str | os.PathLike[str] | None
    interpreter: str | None
    env: Mapping[str, str] | None
    world_size: WorldSize | int | tuple[int, int, int]
    spares: int
    procs_per_worker: int
    resources: Resources | Mapping[str, Any] | None
    max_restarts: int
    lease_seconds: float
    hang_timeout_seconds: float | None
    no_progress_rounds: int | None
    active_deadline_seconds: float | None
    below_minimum_timeout_seconds: float
    stop_grace_seconds: float
    ttl_seconds_after_finished: float | None
    log_bytes: int | None
    warm: Literal["auto", "always", "never"]
    preload: Sequence[str]
    secret_env: Sequence[str]
    priority: int
    backend: str
    image: str | None
    mesh: Mesh | Mapping[str, Any] | None
    package: str | None
    requirements: Sequence[str] | str | os.PathLike[str]
    ship: bool | None
    force: bool
    segment: int | None
    topology_key: str | None
    template: Mapping[str, Any] | None
    storage: Sequence[Storage | Mapping[str, Any]]
    suspend: bool
    elasticity: Literal["fixed", "lend", "fill"]
    bench: bool


def training_of(given: Mapping[str, Any], namespace: str = DEFAULT_NAMESPACE) -> Training:
    """The training that those arguments describe. Raises InvalidRequest, which lists every bad field."""
    values = {name: value for name, value in given.items() if value is not None}
    metadata = {name: values.pop(name) for name in ("name", "namespace", "labels", "annotations") if name in values}
    metadata.setdefault("namespace", namespace)
    metadata.setdefault("name", default_name(values))
    problems: list[Problem] = []
    _place(values)
    wire = {codec.camel(name): _plain(name, value, problems) for name, value in values.items()}
    document = {"metadata": {name: _plain(name, value, problems) for name, value in metadata.items()}, "spec": wire}
    return _read(document, problems)


def with_callers_own(given: Mapping[str, Any], *, far: bool) -> dict[str, Any]:
    """Return the arguments with the caller's variables and interpreter, where the caller gave no others.

    Another machine gets no path of this one. A training with an image or an environment of its own keeps its Python.
    """
    values = dict(given)
    env = given.get("env")
    if env is None or isinstance(env, Mapping):
        values["env"] = travelling.variables(os.environ, far=far or bool(given.get("image"))) | dict(env or {})
    if sends_interpreter(given, far=far):
        values["interpreter"] = os.path.abspath(sys.executable)
    return values


def sends_interpreter(fields: Mapping[str, Any], *, far: bool) -> bool:
    """Return whether the ranks get the Python of this process, because no other Python was given."""
    has_environment = fields.get("image") or fields.get("requirements")
    return bool(sys.executable) and not far and not has_environment and "interpreter" not in fields


def active_environment(environ: Mapping[str, str]) -> str | None:
    """Return the folder of the active Python environment, if this process runs in another environment."""
    folder = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
    if not folder or not os.path.exists(os.path.join(folder, "bin", "python")):
        return None
    prefixes = {os.path.realpath(sys.prefix)}
    if not environ.get("VIRTUAL_ENV"):
        prefixes.add(os.path.realpath(sys.base_prefix))  # a virtual environment of this conda environment runs muster
    return None if os.path.realpath(folder) in prefixes else os.path.abspath(folder)


def missing_script(given: Mapping[str, Any]) -> InvalidRequest | None:
    """What is wrong with a script that is not on this machine; an image or a package may have one of its own."""
    script = given.get("script")
    if not isinstance(script, str | os.PathLike) or given.get("package") or given.get("image"):
        return None
    folder = given.get("working_dir") or "."
    if os.fspath(script) == "" or not isinstance(folder, str | os.PathLike):
        return None  # told with everything else that is wrong
    path = os.path.abspath(os.path.join(folder, script))
    if os.path.isfile(path):
        if not (kind := other_program(path)):
            return None
        problem = Problem("spec.script", f"{path} is {kind}, not a Python script")
        hint = f"command=[{path!r}] runs any program (on the command line: --command); force=True submits it as it is"
        return InvalidRequest(f"the training was not submitted: {problem.message}", problems=(problem,), hint=hint)
    problem = Problem("spec.script", f"there is no file {path}")
    hint = "give the path of a script that is there; with force=True it is submitted all the same"
    return InvalidRequest(f"the training was not submitted: {problem.message}", problems=(problem,), hint=hint)


def other_program(path: str | os.PathLike[str]) -> str:
    """Return what a file is that Python cannot run, or nothing if Python may be able to run it."""
    try:
        with open(path, "rb") as file:
            head = file.read(256)
    except OSError:
        return ""
    line = head.partition(b"\n")[0]
    if head.startswith(b"\x7fELF"):
        return "a compiled program"
    if line.startswith(b"#!") and not re.search(rb"py|\buv\b", line):
        return f"a program for {line[2:].decode(errors='replace').strip()}"
    return "a shell script" if os.fspath(path).endswith((".sh", ".bash", ".zsh")) else ""


def interpreter_words(path: str | os.PathLike[str]) -> list[str]:
    """Return the command that runs a file that may not be executed itself: from its first line, else a shell."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256).decode(errors="replace")
    except OSError:
        return []
    if line.startswith("\x7fELF"):
        return []
    words = line[2:].split() if line.startswith("#!") else []
    return words or ["bash" if os.fspath(path).endswith(".bash") else "sh"]


def default_name(values: Mapping[str, Any]) -> str:
    """A name that tells what runs, and that nobody else has."""
    command = values.get("command")
    program = values.get("script") or values.get("module") or (command[0] if command else "")
    stem = os.path.basename(str(program))
    stem = stem.rpartition(".")[2] if values.get("module") else stem.partition(".")[0]
    return unique_name(stem)


def unique_name(stem: str) -> str:
    suffix = secrets.token_hex(3)
    label = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[: LONGEST_NAME - len(suffix) - 1].strip("-")
    return f"{label or 'training'}-{suffix}"


def _place(values: dict[str, Any]) -> None:
    """Make paths mean the same to the control plane as they do here; those of a package are within it."""
    if "requirements" in values:
        from muster.sdk import shipping

        values["requirements"] = shipping.requirements_of(values["requirements"])
    if "package" in values:
        if not values.get("working_dir"):
            values.pop("working_dir", None)
        return
    script = values.get("script")
    if isinstance(script, str | os.PathLike):
        here = "working_dir" not in values and os.fspath(script) != ""
        values["script"] = os.path.abspath(script) if here else os.fspath(script)
    folder = values.get("working_dir", ".")
    values["working_dir"] = os.path.abspath(folder) if isinstance(folder, str | os.PathLike) else folder


def _plain(name: str, value: Any, problems: list[Problem]) -> Any:
    """An argument as JSON values; whatever is then still wrong, reading it as a record will say."""
    if name == "world_size":
        return _sizes(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return codec.to_wire(value)
    if name in ("resources", "mesh") and isinstance(value, Mapping):
        return {codec.camel(str(key)): item for key, item in value.items()}
    if name == "storage" and isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain("", one, problems) for one in value]
    if name in _LISTS:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            problems.append(Problem(f"spec.{codec.camel(name)}", f"must be a list of texts, not {value!r}"))
            return []
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _sizes(value: Any) -> Any:
    if isinstance(value, WorldSize):
        return codec.to_wire(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, int):
        return {"min": value, "target": value, "max": value}
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        return dict(zip(("min", "target", "max"), value, strict=True))
    return value


def _read(document: dict[str, Any], problems: list[Problem]) -> Training:
    """The record. Fields that cannot be read are left out once noted, so that the rest is checked too."""
    try:
        training = codec.from_wire(Training, document)
    except Invalid as wrong:
        problems += wrong.problems
        bad = {tuple(problem.field.replace("[", ".").split(".")[:2]) for problem in wrong.problems}
        rest = {
            part: {name: value for name, value in fields.items() if (part, name) not in bad}
            for part, fields in document.items()
        }
        rest["metadata"].setdefault("name", "unnamed")
        training = codec.from_wire(Training, rest)
        left_out = any(("spec", name) in bad for name in _PROGRAMS)
        problems += [one for one in problems_of(training) if not (left_out and one.field == "spec")]
    else:
        problems += problems_of(training)
    if problems:
        listed = "; ".join(f"{problem.field}: {problem.message}" for problem in problems)
        raise InvalidRequest(f"the training was not submitted: {listed}", problems=tuple(problems))
    return training
