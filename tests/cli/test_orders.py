from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest

from muster.errors import TrainingFailed, WaitTimeout
from muster.types.training import Outcome, RankExit, WorldStatus
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, StandInHandle, a_training

SUCCEEDED = a_training(phase="succeeded", outcome=Outcome("succeeded"), rank_exits=(RankExit(0, 0),))


def test_scale_records_the_order_and_comes_back(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    said = muster("scale", "demo", "3")

    assert (said.code, said.out) == (0, "")
    assert control.orders == [("scale", "demo", 3)]
    assert said.err.splitlines() == ["demo: 3 workers asked for, 2 ready", "muster wait demo --for=target waits for it"]


def test_scale_says_where_the_number_stands_to_who_knows_kubectl(muster: Muster, control: StandIn) -> None:
    said = muster("scale", "demo", "--replicas=3")

    assert (said.code, control.orders) == (2, [])
    assert "hint: the number stands behind the name: muster scale NAME N" in said.err


def test_scale_can_wait(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    control.answer = a_training(world_size=WorldStatus(3, 3, 2, 4))
    said = muster("scale", "demo", "3", "--wait", "--timeout", "1h30m")

    assert control.orders == [("scale", "demo", 3), ("wait", "target", 5400.0)]
    assert (said.code, said.err.splitlines()[-1]) == (0, "demo: 3 of 3 workers ready")


@pytest.mark.parametrize("goal", ["complete", "target", "min"])
def test_wait_waits_for_what_was_asked(muster: Muster, control: StandIn, goal: str) -> None:
    control.add(a_training())
    control.answer = SUCCEEDED
    said = muster("wait", "demo", f"--for={goal}", "--timeout", "90")

    assert said.code == 0
    assert control.orders == [("wait", goal, 90.0)]
    assert "demo succeeded" in said.err


def test_wait_for_a_training_that_failed_names_its_ranks(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    control.answer = TrainingFailed("training default/demo failed: rank 1: exit_code=137 reason=OOMKilled")
    said = muster("wait", "demo")

    assert (said.code, said.out) == (100, "")
    assert said.err.startswith("muster: training default/demo failed: rank 1: exit_code=137 reason=OOMKilled\n")
    assert control.orders == [("wait", "complete", None)]


def test_wait_that_takes_too_long_exits_124(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    control.answer = WaitTimeout("1 of 2 workers after 5 s", ready=1, required_min=2, timeout=5)

    assert muster("wait", "demo", "--for=min", "--timeout", "5s").code == 124


def test_cancel_orders_each_and_leaves_what_has_ended(muster: Muster, control: StandIn) -> None:
    control.add(a_training(), a_training("done", phase="failed"))
    said = muster("cancel", "demo", "done", "--grace", "10s")

    assert said.code == 0
    assert control.orders == [("cancel", "demo", 10.0)]
    assert said.err.splitlines() == ["demo: cancel was requested", "done has already ended: failed"]


def test_trainings_are_suspended_and_resumed(muster: Muster, control: StandIn) -> None:
    control.add(a_training(), a_training("other"))
    assert muster("suspend", "demo", "othre").code == 3
    control.orders.clear()
    assert muster("suspend", "demo", "other").code == 0
    said = muster("resume", "demo")
    assert control.orders == [("suspend", "demo"), ("suspend", "other"), ("resume", "demo")]
    assert said.err.splitlines() == ["demo: resumed"]


@pytest.mark.parametrize("verb", ["delete", "cancel", "suspend", "resume"])
def test_an_unknown_name_is_reported_and_the_others_are_acted_on(muster: Muster, control: StandIn, verb: str) -> None:
    control.add(a_training(), a_training("other"))
    answer = muster(verb, "demo", "nosuch", "other", "demo")

    assert answer.code == 3
    assert [order[:2] for order in control.orders if order[0] == verb] == [(verb, "demo"), (verb, "other")]
    assert "there is no training 'nosuch'" in answer.err


@pytest.mark.parametrize(
    "words", [["wait", "demo"], ["wait", "demo", "--for=min"], ["scale", "demo", "3", "--wait"], ["logs", "demo", "-f"]]
)
def test_ctrl_c_prints_what_goes_on_and_how_to_come_back(
    muster: Muster, control: StandIn, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    control.add(a_training())
    for method in ("_wait", "logs"):
        monkeypatch.setattr(StandInHandle, method, interrupt)
    answer = muster(*words, "-n", "research")

    assert (answer.code, answer.out) == (130, "")
    assert "detached; demo goes on. To come back:\n  muster logs -f demo -n research\n" in answer.err
    assert ("the order stands: demo goes to 3 workers" in answer.err) == (words[0] == "scale")


def test_one_worker_is_counted_in_the_singular(muster: Muster, control: StandIn) -> None:
    control.add(a_training(world_size=WorldStatus(1, 1, 1, 4)))
    control.answer = a_training(world_size=WorldStatus(1, 1, 1, 4))

    assert (
        muster("scale", "demo", "1", "--wait").err == "demo: 1 worker asked for, 1 ready\ndemo: 1 of 1 worker ready\n"
    )


# Apply -------------------------------------------------------------------------------------------

MANIFEST = {"kind": "Training", "metadata": {"name": "demo"}, "spec": {"script": "t.py", "spares": 1}}
YAML = "kind: Training\nmetadata: {name: demo}\nspec:\n  script: t.py\n  spares: 1\n"


@pytest.mark.parametrize("text", [json.dumps(MANIFEST), YAML, json.dumps({"items": [MANIFEST]}), f"---\n{YAML}---\n"])
def test_apply_reads_json_and_yaml(muster: Muster, control: StandIn, tmp_path: Path, text: str) -> None:
    (tmp_path / "one").write_text(text)
    said = muster("apply", "-f", "one", "-o", "name")

    assert (said.code, said.out) == (0, "demo\n")
    assert control.orders == [("apply", MANIFEST)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is neither JSON nor YAML"),
        ("", "is empty"),
        ("just words", "holds no training"),
        ("kind: Pod", "holds a Pod"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_training_is_refused(
    muster: Muster, control: StandIn, tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "one").write_text(text)
    said = muster("apply", "-f", "one")

    assert said.code == 2
    assert words in said.err
    assert control.orders == []
