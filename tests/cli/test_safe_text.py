"""Words of others cannot steer a terminal: every verb is played against a control plane that lies in every text."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import errors, files
from muster.cli import board, follow, main, safe_text, world
from muster.cli.board import Board
from muster.cli.output import write_data, write_table
from muster.core.training.explain import Explanation
from muster.sdk.effects import Response
from muster.server.audit import Audit
from muster.types.audit import AuditEntry
from muster.types.codec import Problem
from muster.types.event import Event
from muster.types.metrics import Metrics, Series, WorkerMetrics
from muster.types.training import Condition, Outcome, RankExit, RankStatus, Training
from muster.types.usage import Usage
from tests.cli.conftest import Muster, Said
from tests.cli.stand_in import StandIn, StandInHandle, a_training
from tests.cli.test_board import a_pool

# The title of the window, a cleared screen, a sequence of one byte, the direction of writing, a line of its own, …
EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\ttab\x08\x7f\x00\u2028\ud800\r\nFORGED: all is well\n\x1b[1Ay"
PIPE: dict[str, Any] = {"id": EVIL, "state": EVIL, "admitted": True, "weight": 1.0, "held": [0], "quarantine": EVIL}
ABOUT: dict[str, Any] = {"at": EVIL, "kind": EVIL, "pipeline": EVIL, "cluster": EVIL, "gpus": [0], "text": EVIL}
POOL = a_pool(
    name=EVIL,
    leases={"0": {"pipeline": EVIL, "cluster": "actor_infer", "rank": EVIL, "state": EVIL}},
    pipelines=[{**PIPE, "remaining": EVIL, "target": EVIL}],
    pending=[{"pipeline": EVIL, "cluster": EVIL, "priority": EVIL, "reason": EVIL}],
    quarantined={EVIL: EVIL},
    workers={"3": {"training": EVIL, "state": EVIL}},
    holders=[
        {"gpu": 0, "device": EVIL, "state": EVIL, "pipeline": EVIL, "cluster": EVIL, "rank": 0, "reason": EVIL},
        {"gpu": 1, "state": EVIL, "training": EVIL, "worker": EVIL, "lentBy": f"{EVIL}/{EVIL}", "lentWorker": EVIL},
    ],
    waiting=[
        {"pipeline": EVIL, "cluster": EVIL, "priority": EVIL, "reason": EVIL},
        {"training": EVIL, "state": EVIL, "workers": 1, "wanted": 2, "reason": EVIL},
    ],
    waitingCount=2,
    usage=[{"kind": "pipeline", "name": EVIL, "gpuSeconds": 1.0, "gpus": 1}],
)


def a_liar(phase: Any = "ready", **status: Any) -> Training:
    told = {
        "conditions": (Condition("Resizing", "True", EVIL, EVIL), Condition(EVIL, "False", EVIL, EVIL)),
        "ranks": (RankStatus(0, worker=EVIL, node=EVIL, phase="running"),),
        **status,
    }
    spec = {
        "script": None,
        "command": (EVIL, EVIL),
        "args": (EVIL,),
        "working_dir": EVIL,
        "env": {EVIL: EVIL},
        "elasticity": "lend",
    }
    made = a_training("demo", phase=phase, spec=spec, **told)
    return replace(made, metadata=replace(made.metadata, name=EVIL, namespace=EVIL, labels={EVIL: EVIL}))


ENDED = a_liar(
    "failed",
    outcome=Outcome("failed", EVIL, EVIL),
    rank_exits=(RankExit(0, 1, EVIL, EVIL, worker=EVIL, stderr_tail=(EVIL, EVIL)),),
)


class Liar(StandIn):
    """Every text that a control plane can say is the same lie."""

    def __init__(self) -> None:
        super().__init__(lines=[f"[0] MUSTER-BENCH {EVIL}"], pools=(POOL,), history=[a_liar(), ENDED])
        self.url = EVIL
        self.namespace = EVIL
        self.trainings = {"demo": a_liar(), "ended": ENDED}
        self.journal = [Event(EVIL, EVIL, "Warning", EVIL, at=datetime.now(UTC))]
        self.used = [Usage(EVIL, EVIL, EVIL, 1, 2.0, 3.0)]
        self.metrics = Metrics((Series(EVIL, ((1, 2.0, 3.0),)),), (WorkerMetrics(EVIL, 1.0, 2.0, 3),))

    def run(self, flow: Any) -> Any:
        if flow.__name__ == "call":
            return Response(200, json.dumps({**POOL, "items": [ABOUT], "text": EVIL}).encode())
        return EVIL if flow.__name__ == "sign_in_code" else super().run(flow)

    def train(self, **fields: Any) -> StandInHandle:
        return StandInHandle(self, a_liar())

    def apply(self, manifest: Any, *, force: bool = False) -> StandInHandle:
        return StandInHandle(self, a_liar())

    def explain(self, name: str) -> Explanation:
        return Explanation(EVIL, (EVIL, EVIL))


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Liar:
    made = Liar()
    monkeypatch.setattr("muster.cli.session.open_client", lambda url, token, namespace: made)
    monkeypatch.setattr(StandInHandle, "name", property(lambda self: self.training.metadata.name))
    return made


FORMS = ("json", "yaml")
# Each verb, as it is called with everything that it could show.
CALLS: dict[str, Sequence[Sequence[str]]] = {
    "run": [["--command", "--", "x"], ["-d", "--command", "--", "x"]],
    "ps": [[], ["-A"], ["-o", "name"], *(["-o", form] for form in FORMS)],
    "get": [["demo"], ["demo", "ended"], ["demo", "-o", "name"], *(["ended", "-o", form] for form in FORMS)],
    "describe": [["demo"], ["ended"]],
    "shell": [["demo", "0"], ["demo", "0", "--", "env"], ["demo", "0", "--dry-run"], ["demo", "7"], ["ended", "0"]],
    "events": [["demo"], [], ["-A"], *(["demo", "-o", form] for form in FORMS)],
    "explain": [["demo"], *(["demo", "-o", form] for form in FORMS)],
    "scale": [["demo", "3"], ["demo", "3", "--wait"], ["ended", "3", "--wait"]],
    "wait": [["ended"], ["demo", "--for", "min"], ["ended", "--for", "target"]],
    "cancel": [["demo", "ended"]],
    "kill": [["demo", "0", "--yes"], ["demo", "0", "--worker", "--yes"]],
    "suspend": [["demo"]],
    "resume": [["demo"]],
    "delete": [["demo", "ended"]],
    "apply": [["-f", "t.json"], *(["-f", "t.json", "-o", form] for form in FORMS)],
    "top": [[]],
    "metrics": [["demo"], *(["demo", "-o", form] for form in FORMS)],
    "dashboard": [["--no-browser"]],
    "audit": [[], *(["-o", form] for form in FORMS)],
    "pool": [[], *(["-o", form] for form in FORMS)],
    "usage": [[], ["-o", "csv"], *(["-o", form] for form in FORMS)],
    "share status": [[], *(["-o", form] for form in FORMS)],
    "share pipelines": [[], *(["-o", form] for form in FORMS)],
    "share events": [[], *(["-o", form] for form in FORMS)],
    "share unregister": [["p1"], *(["p1", "-o", form] for form in FORMS)],
    "share kill": [["p1"], ["p1", "--force"], *(["p1", "-o", form] for form in FORMS)],
    "bench net": [["--name", "demo"]],
    "doctor": [[], *(["-o", form] for form in FORMS)],
}
# What shows nothing that a control plane said, or is played below or elsewhere.
NOT_HERE = {
    *("logs", "completion", "coordinator", "world show", "world set-target", "world cancel"),
    *("share demo", "share simulate", "share trace", "kube install", "kube uninstall", "mesh publish"),
}


def leaves() -> list[str]:
    group: Any = main.Verbs()
    inner = [f"{name} {verb}" for name in main.GROUPS for verb in group.get_command(None, name).commands]
    return [*main.VERBS, *inner]


def an_evil_audit(home: Path) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    word = EVIL.replace("\ud800", "")  # which no address holds
    texts: dict[str, Any] = dict.fromkeys(
        ("who", "role", "from_", "forwarded_for", "method", "path", "about", "code"), word
    )
    audit = Audit(home)
    audit.note(AuditEntry(datetime.now(UTC), "refused", **texts))
    audit.stop()


def is_harmless(said: Said) -> bool:
    text = said.out + said.err
    lines = text.split("\n")
    return all(line.isprintable() for line in lines) and not any(line.startswith("FORGED") for line in lines)


def test_every_verb_is_played() -> None:
    """A verb that is missing: say in CALLS how it is called, so that it is played, too."""
    ours = {leaf for leaf in leaves() if leaf.partition(" ")[0] not in ("server", "token")}
    assert ours - NOT_HERE == set(CALLS) & ours


@pytest.mark.parametrize(("verb", "args"), [(verb, args) for verb, calls in CALLS.items() for args in calls])
def test_no_verb_lets_words_of_others_steer_the_terminal(
    muster: Muster, liar: Liar, tmp_path: Path, verb: str, args: Sequence[str]
) -> None:
    (tmp_path / "t.json").write_text('{"metadata": {"name": "demo"}, "spec": {}}')
    if verb == "audit":
        an_evil_audit(files.home())
    said = muster(*verb.split(), *args)

    assert is_harmless(said)
    assert verb in ("doctor", "bench net", "scale", "wait", "run", "shell") or said.code == 0


@pytest.mark.parametrize("verb", ["describe demo", "events demo", "explain demo", "ps", "wait demo", "scale demo 2"])
def test_an_error_does_not_steer_the_terminal_either(
    muster: Muster, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def refuse(*_: object) -> None:
        raise errors.InvalidRequest(EVIL, hint=EVIL, problems=(Problem(EVIL, EVIL), Problem("spec", "x" + EVIL)))

    monkeypatch.setattr("muster.cli.session.open_client", refuse)
    assert is_harmless(muster(*verb.split()))
    monkeypatch.setenv("MUSTER_DEBUG", "1")
    assert all(line.isprintable() for line in muster(*verb.split()).err.split("\n"))


def test_a_verb_that_forgets_it_is_caught_at_the_door(muster: Muster, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(*_: object) -> None:
        import typer

        print(EVIL)
        print(EVIL, file=sys.stderr)
        typer.echo(EVIL)
        sys.stdout.write(EVIL)

    monkeypatch.setattr("muster.cli.session.open_client", careless)
    said = muster("ps")
    assert all(line.isprintable() for line in (said.out + said.err).split("\n"))
    assert "owned" in said.out and "owned" in said.err
    assert not isinstance(sys.stdout, safe_text.Guarded)


def test_what_ranks_wrote_is_printed_as_it_is(muster: Muster, liar: Liar) -> None:
    liar.lines = ["[0] \x1b[32m50%\r100%\x1b[0m"]
    assert muster("logs", "demo").out == "[0] \x1b[32m50%\r100%\x1b[0m\n"


# Forms for programs ------------------------------------------------------------------------------


@given(st.recursive(st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_says_the_same_and_nothing_that_a_terminal_obeys(value: Any) -> None:
    text = safe_text.json_of({"value": value, EVIL: EVIL})
    assert json.loads(text) == {"value": value, EVIL: EVIL}
    assert all(line.isprintable() for line in text.split("\n"))


def test_json_and_yaml_of_a_training_are_exact(muster: Muster, liar: Liar) -> None:
    assert json.loads(muster("get", "ended", "-o", "json").out) == json.loads(json.dumps(ENDED.to_wire()))


# On a terminal -----------------------------------------------------------------------------------


def test_the_panel_and_the_board_show_it_as_text() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(follow.panel_of(follow.view_of(a_liar())))
    assert isinstance(console.file, io.StringIO)
    assert all(line.isprintable() for line in console.file.getvalue().split("\n"))
    now = Board((a_liar(), ENDED), (POOL,), EVIL, EVIL, EVIL)
    for width in (40, 80, 200):
        lines = board.lines(now, datetime.now(UTC), width, 50)
        assert all(span.text.isprintable() for line in lines for span in line)


def test_a_coordinator_cannot_steer_it_either(capsys: pytest.CaptureFixture[str]) -> None:
    member = dict.fromkeys(("name", "role", "rank", "ranks_state", "addr", "domain", "note"), EVIL)
    numbers = {"round": 1, "world": 1, "target": 1, "min": 1, "max": 1, "restarts_used": 0, "max_restarts": 0}
    world._print({"run_id": EVIL, "state": EVIL, "reason": EVIL, "members": [member], **numbers}, world.ShowAs.TABLE)
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


# Parts -------------------------------------------------------------------------------------------


@given(st.text())
def test_a_line_is_one_line_of_what_can_be_seen_and_as_long_as_it_was(text: str) -> None:
    assert safe_text.line(text).isprintable()
    assert len(safe_text.line(text)) == len(text)
    assert safe_text.line(text) == text or not text.isprintable()
    assert safe_text.shown(text).isprintable()


def test_what_is_very_long_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(("A", "B"), [("x" * 10**6, "y"), *(("z", "y") for _ in range(100))])
    assert len(capsys.readouterr().out) < 102 * (safe_text.MOST + 10)
    write_data({"a": "x" * 10**5}, "json")
    assert len(capsys.readouterr().out) > 10**5  # programs get all of it


def test_an_encoding_that_does_not_have_it_is_no_reason_to_fail() -> None:
    code = "from muster.cli import main; import muster.cli.exits as e; e.say('ü \\ud800 \\u202e')"
    wrapped = f"from muster.cli import safe_text\nwith safe_text.guarded():\n    {code}"
    said = subprocess.run([sys.executable, "-c", wrapped], capture_output=True, env={"PYTHONIOENCODING": "ascii"})
    assert (said.returncode, said.stderr) == (0, b"muster: \\xfc \\ufffd \\ufffd\n")
