"""Is what the documentation says still so? Commands exist, links lead somewhere, every field has its line."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, NoneType, SimpleNamespace, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest

import muster
from muster import errors
from muster.cli.main import GROUPS, VERBS
from muster.core.training import reconcile
from muster.daemon.options import LEAST_EVENTS
from muster.node.cli import build_parser
from muster.sdk import travelling
from muster.server.app import build
from muster.sharing import pool_state, tenants
from muster.store import kube_log
from muster.store.entries import Keep
from muster.types import frames, training
from muster.types.codec import camel
from muster.types.sharing import MOST_PROCESSES
from muster.types.world import Settings
from muster.world import wire
from tests.docs import cli_page, protocol_page

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")],
    key=lambda page: page.name,
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IN_TEXT = re.compile(r"`(muster [^`\n]+)`")
_AT_PROMPT = re.compile(r"^(?:\$ )?(muster .+)", re.MULTILINE)
_HERE = re.compile(r"/work\b|/root\b|docs-home|/tmp/docs")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def headings(text: str) -> set[str]:
    """Anchors, as they are made of headings."""
    found = re.findall(r"^#+ (.+)$", re.sub(_FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_tree_on_the_page_about_the_architecture_is_the_tree_that_there_is() -> None:
    [tree] = [body for _, body in _FENCE.findall(text_of("docs/architecture.md")) if body.startswith("src/muster/")]
    told = set(re.findall(r"\w+\.py", tree.partition("\ntests/ ")[0]))
    there = {path.name for path in (ROOT / "src/muster").rglob("*.py")}
    assert told - there == set()
    parts = {path.name for path in (ROOT / "src/muster").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert {part for part in parts if f"─ {part}/" not in tree} == set()


@each_page
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    lost = []
    for link in _LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in headings(target.read_text())):
            lost.append(link)
    assert lost == []


@each_page
def test_no_page_names_a_path_of_the_machine_it_was_written_on(page: Path) -> None:
    assert _HERE.findall(page.read_text()) == []


def test_every_file_and_name_in_the_checklists_exists() -> None:
    text = text_of("CONTRIBUTING.md")
    files = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|md))(?:: (\w+))?`", text))
    assert len(files) > 10
    for path, name in files:
        found = [place / path for place in (ROOT, ROOT / "src/muster") if (place / path).is_file()]
        assert found, path
        assert re.search(rf"\b{name}\b", found[0].read_text()), f"{path}: {name}"


# The command line --------------------------------------------------------------------------------


def commands_in(text: str) -> list[list[str]]:
    """Every command line that starts with muster, as words."""
    fenced = "\n".join(body for _, body in _FENCE.findall(text)).replace("\\\n", " ")
    found = [*_IN_TEXT.findall(re.sub(_FENCE, "", text)), *_AT_PROMPT.findall(fenced)]
    return [words_of(line.replace("…", " ")) for line in found]


def words_of(line: str) -> list[str]:
    """The words of a command up to whatever the shell does with it."""
    reading = shlex.shlex(line, posix=True, punctuation_chars=";|>&")
    reading.whitespace_split = True
    return list(itertools.takewhile(lambda word: word.strip(";|>&"), reading))


KNOWN = {path: text for path, _, text in cli_page.commands()}


def problem_with(words: list[str]) -> str | None:
    """What is wrong with a command as written, or None. Options of a group itself stand before its verb."""
    if len(words) < 2 or words[1].startswith("-"):
        return None
    if words[1] not in {*VERBS, *GROUPS}:
        return f"there is no command {words[1]!r}"
    path = f"muster {words[1]}"
    rest = words[2:]
    if words[1] in GROUPS:
        verbs = {known.removeprefix(f"{path} ") for known in KNOWN if known.startswith(f"{path} ")}
        verb = next((word for word in rest if word in verbs), None)
        if verb is None and rest and not rest[0].startswith("-"):  # what follows an option may be its value
            return f"{path} has no {rest[0]!r}"
        help_text = KNOWN[path] + (KNOWN[f"{path} {verb}"] if verb else "")
    else:
        help_text = KNOWN[path]
    given = rest[: rest.index("--")] if "--" in rest else rest
    options = [word.partition("=")[0] for word in given if re.fullmatch(r"--?[A-Za-z][-\w]*(=.*)?", word)]
    odd = [option for option in options if not re.search(rf"(?<![-\w]){re.escape(option)}(?![-\w])", help_text)]
    return f"{path} has no option {odd[0]}" if odd else None


@each_page
def test_every_muster_command_on_the_page_exists_with_its_options(page: Path) -> None:
    wrong = {" ".join(words): why for words in commands_in(page.read_text()) if (why := problem_with(words))}
    assert wrong == {}


def test_a_command_or_option_that_does_not_exist_would_be_found() -> None:
    assert commands_in("```\n$ muster pss -o json\n```\nand `muster ps --colour`") == [
        ["muster", "ps", "--colour"],
        ["muster", "pss", "-o", "json"],
    ]
    assert commands_in("```\nmuster ps -n 'a;b' | head > x  # all\n```") == [["muster", "ps", "-n", "a;b"]]
    assert problem_with(["muster", "pss"]) == "there is no command 'pss'"
    assert problem_with(["muster", "ps", "--colour"]) == "muster ps has no option --colour"
    assert problem_with(["muster", "server", "strat"]) == "muster server has no 'strat'"


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    assert text_of("docs/cli.md") == cli_page.page(), "python -m tests.docs.cli_page > docs/cli.md"


def test_the_page_of_the_protocol_has_every_frame_and_field_of_the_code() -> None:
    told = text_of("docs/protocol.md")
    assert told == protocol_page.page(told), "python -m tests.docs.protocol_page"
    for kind in frames.TYPES.keys() - {""}:
        assert told.count(f"| `{kind}`") + told.count(f"| `{kind} {{") == 1, f"{kind} is in no table"


@each_page
def test_every_option_of_muster_node_that_a_page_uses_exists(page: Path) -> None:
    known = {option for action in build_parser()._actions for option in action.option_strings}
    lines = [line for line in page.read_text().replace("\\\n", " ").splitlines() if line.startswith("muster-node ")]
    used = {word for line in lines for word in line.split(".py")[0].split() if word.startswith("--")}
    assert used - known == set()


# The object, the SDK, the API ---------------------------------------------------------------------


def fields_of(record: type) -> set[str]:
    """Names on the wire of all fields, those of records inside too."""
    found: set[str] = set()
    for name, hint in get_type_hints(record).items():
        found.add(camel(name))
        for part in _parts(hint):
            if dataclasses.is_dataclass(part):
                found |= fields_of(part)  # type: ignore[arg-type]
    return found


def _parts(hint: Any) -> list[Any]:
    if get_origin(hint) is None and not isinstance(hint, UnionType):
        return [] if hint is NoneType else [hint]
    return [found for part in get_args(hint) if part is not Ellipsis for found in _parts(part)]


@pytest.mark.parametrize("record", [training.Metadata, training.Spec, training.Status])
def test_every_field_of_a_training_is_described(record: type) -> None:
    described = set(re.findall(r"[A-Za-z]+", " ".join(re.findall(r"`([^`]+)`", text_of("docs/training.md")))))
    assert fields_of(record) - described == set()


def test_the_defaults_of_a_spec_are_those_in_its_table() -> None:
    rows = dict(re.findall(r"^\| `(\w+)`[ ×]* \| .* \| ([^|]+) \|$", text_of("docs/training.md"), re.MULTILINE))
    spec = training.Spec()
    numbers = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if isinstance(getattr(spec, field.name), int | float)
    }
    assert numbers
    assert {name: rows[camel(name)].strip() for name in numbers} == {
        name: str(value).lower() if isinstance(value, bool) else f"{value:g}" for name, value in numbers.items()
    }


def test_the_numbers_on_the_page_of_limits_are_those_of_the_code() -> None:
    page = " ".join(text_of("docs/limits.md").split())
    keep = Keep()
    promised = [
        f"newest {keep.each:,} entries of each training, and {keep.all:,} in all",
        f"newest {kube_log.KEEP_EVENTS:,} entries of all trainings together",
        f"the smallest number is {LEAST_EVENTS}",
        f"| workers of a training (`worldSize.max`) | {training.MOST_WORKERS:,} |",
        f"| one frame between worker and coordinator | {wire.MAX_FRAME >> 20} MiB |",
        f"| a message of several frames between worker and coordinator | {wire.MAX_WHOLE >> 20} MiB |",
        f"| {tenants.MOST_OF_TOKEN} of one token, {tenants.MOST_OF_NAMESPACE} of all tokens of one namespace;",
        f"the last {pool_state.EVENTS_KEPT:,} |",
        f"for at most {MOST_PROCESSES} processes and",
    ]
    assert [text for text in promised if text not in page] == []


def test_the_leases_and_orphan_times_on_the_pages_are_those_of_the_code() -> None:
    settings = Settings()
    silent_s = settings.lease_s + settings.kill_margin_s
    assumptions, spares = (" ".join(text_of(f"docs/{name}.md").split()) for name in ("assumptions", "hot-spares"))
    assert f"after {silent_s:g} s ({settings.lease_s:g} s and `kill_margin_s`)" in assumptions
    assert f"The {silent_s:g} s are the lease of {settings.lease_s:g} s and half a second" in spares
    assert f"`spare_orphan_s` ({settings.spare_orphan_s:g} s)" in assumptions
    assert (reconcile.ORPHAN.days, reconcile.FAREWELL.days, settings.orphan_s) == (7, 1, 3600)
    assert "After seven days without a control plane" in assumptions
    assert "`orphan_s` (one hour)" in assumptions


def test_every_public_name_of_the_sdk_is_described() -> None:
    page = text_of("docs/sdk.md")
    missing = [name for name in muster.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", page)]
    assert missing == []


def test_every_method_of_a_handle_and_of_a_client_is_described() -> None:
    page = text_of("docs/sdk.md")
    for kind in (muster.DistributedTraining, muster.Client):
        public = [name for name in vars(kind) if not name.startswith("_") and not name.endswith("_async")]
        driving = {"run", "iterate"}  # for the command line, which drives flows of its own
        assert [name for name in public if name not in driving and f"`{name}" not in page] == []


def test_every_code_of_an_error_is_described() -> None:
    page = text_of("docs/api.md")
    coded = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MusterError)]
    sent = {kind.code for kind in coded if "status" in vars(kind)} - {"error", "scale_superseded", "resize_taken_back"}
    sent -= {"rendezvous_unavailable"}  # of waits and workers; no request is answered with it
    sent -= {kind.code for kind in coded if "SharingError" in {base.__name__ for base in kind.__mro__}}
    assert {code for code in sent if f"`{code}`" not in page} == set()


def test_every_route_of_the_api_is_described(tmp_path: Path) -> None:
    page = text_of("docs/api.md")
    tails = {path.rsplit("}", 1)[-1] or "/{name}" for path in _paths(tmp_path)}
    assert {tail for tail in tails if tail not in page} == set()


def _paths(home: Path) -> list[str]:
    from muster.clock import SystemClock
    from muster.server.auth import Tokens
    from muster.server.services import Services
    from tests.memory_store import MemoryStore

    clock = SystemClock()
    services = Services(
        store=MemoryStore(), backends={}, tokens=Tokens(home), clock=clock, version="0", started_at=clock.now()
    )
    return list(build(services).openapi()["paths"])


# Programs ----------------------------------------------------------------------------------------


def test_every_python_example_compiles() -> None:
    examples = [body for page in PAGES for kind, body in _FENCE.findall(page.read_text()) if kind == "python"]
    assert len(examples) >= 4
    for body in examples:
        compile(body, "example", "exec")


def test_nobody_is_told_to_install_a_name_that_stands_on_no_index() -> None:
    places = [*PAGES, *(ROOT / "src/muster").rglob("*.py")]
    assert [str(path) for path in places if re.search(r"install ['\"]?muster-train", path.read_text())] == []


def test_the_programs_on_the_page_about_trackers_continue_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of both libraries record how they are called, once per round."""
    runs: list[dict[str, Any]] = []
    writers: list[tuple[str, int]] = []

    def search_runs(filter_string: str, output_format: str) -> list[Any]:
        assert (filter_string, output_format) == ("tags.muster = 'uid-1'", "list")
        return [SimpleNamespace(info=SimpleNamespace(run_id="r1"))] if runs else []

    mlflow = SimpleNamespace(search_runs=search_runs, start_run=lambda **given: runs.append(given))
    writer = SimpleNamespace(SummaryWriter=lambda folder, purge_step: writers.append((folder, purge_step)))
    monkeypatch.setitem(sys.modules, "mlflow", cast(ModuleType, mlflow))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", cast(ModuleType, writer))
    monkeypatch.setenv("MUSTER_RUN_ID", "uid-1")
    programs = re.findall(r"```python\n(.*?)```", text_of("docs/tracking.md"), re.DOTALL)
    for step in (0, 400):
        for program in programs:
            exec(program, {"step": step})

    assert len(programs) == 2
    assert runs == [{"run_id": None, "tags": {"muster": "uid-1"}}, {"run_id": "r1", "tags": None}]
    assert writers == [("runs/uid-1", 0), ("runs/uid-1", 400)]


def test_the_page_about_trackers_lists_what_travels() -> None:
    page = text_of("docs/tracking.md")
    assert [name for name in travelling.PREFIXES if f"`{name}*`" not in page] == []
    assert [name for name in (*travelling.NAMES, *travelling.KEPT_BACK) if f"`{name}`" not in page] == []
