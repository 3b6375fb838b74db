from __future__ import annotations

import csv
import importlib
import io
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from muster.types.bench import Bench
from muster.types.codec import show_time
from muster.types.event import Event
from muster.types.state import KeptState
from muster.types.training import Condition, Outcome, RankExit, RankStatus, Training, WorkerStatus, WorldStatus
from muster.types.usage import Usage
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training


def waiting(name: str = "later") -> Training:
    why = "needs 2 GPUs, 1 is free; default/demo holds 7"
    return a_training(
        name,
        phase="pending",
        round=None,
        world_size=WorldStatus(0, 2, 2, 4),
        conditions=(Condition("Admitted", "False", "NoGpus", why),),
    )


def failed(name: str = "broken") -> Training:
    exit_ = RankExit(1, 137, "OOMKilled", "SIGKILL", "w1", stderr_tail=("loading", "out of memory"))
    stopped = RankExit(0, 143, "Stopped", "SIGTERM", "w0", stderr_tail=("bye",))
    return a_training(
        name,
        phase="failed",
        world_size=WorldStatus(0, 2, 2, 4),
        outcome=Outcome("failed", "RankFailed", str(exit_), exit_),
        rank_exits=(stopped, exit_),
    )


def test_ps_has_a_line_for_each_training_with_its_reason(muster: Muster, control: StandIn) -> None:
    control.add(a_training(), waiting(), failed())
    said = muster("ps")
    title, *rows = said.out.splitlines()

    assert (said.code, said.err) == (0, "")
    assert title.split() == ["NAME", "PHASE", "READY", "SPARES", "ROUND", "RESTARTS", "AGE", "REASON"]
    *cells, age, reason = rows[0].split()
    assert (cells, reason) == (["demo", "ready", "2/2", "1/1", "0", "0"], "-")
    assert age.startswith("2h")  # and the minutes that other tests took
    assert rows[1].split()[:5] == ["later", "pending", "0/2", "1/1", "-"]
    assert rows[1].endswith("needs 2 GPUs, 1 is free; default/demo holds 7")
    assert rows[2].endswith("rank 1: exit_code=137 reason=OOMKilled")


def test_ps_of_nothing_says_so_beside_the_data(muster: Muster, control: StandIn) -> None:
    said = muster("ps")

    assert (said.code, said.out) == (0, "")
    assert said.err == "no trainings in namespace 'default'\n"


@pytest.mark.parametrize("command", [["ps"], ["get", "demo", "broken"]])
def test_several_trainings_are_items_of_one_document(muster: Muster, control: StandIn, command: list[str]) -> None:
    yaml = importlib.import_module("yaml")
    control.add(a_training(), failed())
    wire = {"items": [a_training().to_wire(), failed().to_wire()]}

    assert json.loads(muster(*command, "-o", "json").out) == wire
    assert yaml.safe_load(muster(*command, "-o", "yaml").out) == wire
    assert muster(*command, "-o", "name").out == "demo\nbroken\n"


def test_one_training_is_a_document_of_its_own(muster: Muster, control: StandIn) -> None:
    control.add(a_training())

    assert json.loads(muster("get", "demo", "-o", "json").out) == a_training().to_wire()


def test_ps_filters_by_phase_and_labels(muster: Muster, control: StandIn) -> None:
    control.add(a_training(), waiting())
    said = muster("ps", "--phase", "pending", "-l", "team=vision", "-o", "name")

    assert said.out == "later\n"
    assert control.orders == [("list", "team=vision", "pending")]


def test_ps_of_all_namespaces_names_them(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    said = muster("ps", "-A")

    assert control.orders == [("list all",)]
    assert [line.split()[0] for line in said.out.splitlines()] == ["NAMESPACE", "default"]


@pytest.mark.parametrize(
    "command",
    [
        ["get", "dmeo"],
        ["describe", "dmeo"],
        ["logs", "dmeo"],
        ["events", "dmeo"],
        ["explain", "dmeo"],
        ["scale", "dmeo", "3"],
        ["wait", "dmeo"],
        ["cancel", "dmeo"],
        ["delete", "dmeo"],
    ],
    ids=lambda command: command[0],
)
def test_a_name_that_does_not_exist_is_answered_with_the_nearest(
    muster: Muster, control: StandIn, command: list[str]
) -> None:
    control.add(a_training(), a_training("other"))
    said = muster(*command)

    assert (said.code, said.out) == (3, "")
    assert said.err == "muster: there is no training 'dmeo' in namespace 'default'\nhint: did you mean demo?\n"
    assert control.orders == [("list", None, None)]


def test_describe_tells_all_about_a_training(muster: Muster, control: StandIn) -> None:
    ago = datetime.now(UTC) - timedelta(hours=2, minutes=5)
    control.add(
        a_training(
            conditions=(Condition("TargetReached", "True", "Reached", "2 of 2", ago),),
            ranks=(RankStatus(0, "w0", phase="running", started_at=ago, step=12), RankStatus(1, "w1")),
            spec={"env": {"KEY": "hunter2", "LR": "0.1"}, "secret_env": ("KEY",)},
        )
    )
    control.journal = [Event("WorkerLost", "w1 is gone", "Warning", at=ago)]
    text = muster("describe", "demo").out

    assert "Phase:       ready\n" in text
    assert "Variables:   KEY, LR\n" in text
    assert "TargetReached is True for 2h5m: 2 of 2\n" in text
    assert "rank 0 running for 2h5m on w0, round 0, step 12\n" in text
    assert "! WorkerLost: w1 is gone\n" in text
    assert "Takes:       logs 3.0 MiB, journal 512 bytes\n" in text
    assert "hunter2" not in text
    told = json.loads(muster("describe", "demo", "-o", "json").out)
    assert (told["usage"]["logBytes"], told["usage"]["journalBytes"]) == (3 << 20, 512)
    assert told["training"]["metadata"]["name"] == "demo" and told["events"][0]["reason"] == "WorkerLost"


def test_describe_tells_what_was_measured_between_workers(muster: Muster, control: StandIn) -> None:
    control.add(a_training(spec={"bench": True}, bench=Bench(error="torch is not there")), a_training("unasked"))
    assert "Bench:       all-reduce was not measured: torch is not there\n" in muster("describe", "demo").out
    assert "Bench:" not in muster("describe", "unasked").out
    control.add(a_training(spec={"bench": True}))
    assert "Bench:       not measured yet\n" in muster("describe", "demo").out
    control.add(a_training(spec={"bench": True}, phase="cancelled"))
    assert "Bench:" not in muster("describe", "demo").out


def test_describe_names_a_spare_by_whether_it_was_there_when_the_round_formed(muster: Muster, control: StandIn) -> None:
    formed = datetime.now(UTC) - timedelta(minutes=5)
    workers = (
        WorkerStatus("w0", "active", "here", "0", formed),
        WorkerStatus("w1", "spare", "here", since=formed - timedelta(minutes=1)),
        WorkerStatus("w2", "spare", "here", since=formed),
        WorkerStatus("w3", "spare", "here", since=formed + timedelta(minutes=1)),
        WorkerStatus("w4", "spare", "here"),
    )
    control.add(a_training(workers=workers, ranks=(RankStatus(0, "w0", started_at=formed),)))
    text = muster("describe", "demo").out
    for told in (
        "w0 active for 5m",
        "w1 standby for 6m",
        "w2 standby for 5m",
        "w3 hot spare for 4m",
        "w4 spare on here",
    ):
        assert f"  {told}" in text
    control.add(a_training(workers=workers[1:2]))
    assert "  w1 spare for 6m" in muster("describe", "demo").out, "there is no round yet"


def test_describe_tells_what_of_its_state_is_safe(muster: Muster, control: StandIn) -> None:
    ago = datetime.now(UTC) - timedelta(hours=2, minutes=5)
    kept = KeptState(
        step=8,
        survives="ranks",
        safe_at=ago,
        newest_step=9,
        durable_step=5,
        where="2 of 2 ranks in the memory of their own worker",
        bytes=3 << 20,
        memory_bytes=6 << 20,
        worker_memory_bytes=3 << 20,
        every=4,
        commit_seconds=0.02,
        step_seconds=0.5,
        overhead=0.01,
        loss="the loss of w1 now costs 4 steps (2 s): it goes on from step 5 on disk",
    )
    control.add(a_training(kept_state=kept), a_training("plain"))
    text = muster("describe", "demo").out
    lines = text[text.index("State:") :].split("\n\n")[0].splitlines()
    assert lines[1:] == [
        "  Safe:     step 8 is safe against ranks that fail, not against the loss of a worker, for 2h5m",
        "  Newest:   step 9 is whole in memory",
        "  Where:    2 of 2 ranks in the memory of their own worker",
        "  On disk:  step 5",
        "  Size:     3.0 MiB, each rank once; 6.0 MiB of memory on all workers, at most 3.0 MiB on one",
        "  Copies:   every 4 steps, 20 ms each, 1 % of the time",
        "  Loss:     the loss of w1 now costs 4 steps (2 s): it goes on from step 5 on disk",
    ]
    assert "State" not in muster("describe", "plain").out


def test_describe_shows_how_each_rank_ended_and_what_the_failed_one_said(muster: Muster, control: StandIn) -> None:
    control.add(failed(), a_training("early", phase="cancelled", rank_exits=(), outcome=Outcome("cancelled")))
    text = muster("describe", "broken").out

    assert "  rank 0: exit_code=143 reason=Stopped on w0, round 0\n" in text
    assert "  rank 1: exit_code=137 reason=OOMKilled on w1, round 0\n      loading\n      out of memory\n" in text
    assert "bye" not in text
    assert "none: no rank had started" in muster("describe", "early").out


def test_events_are_told_with_their_actor(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    control.journal = [Event("Scaled", "2 → 3", actor="alice", at=datetime.now(UTC) - timedelta(hours=3), id=5)]

    assert muster("events", "demo").out.splitlines()[1].split() == [
        "3h",
        "Normal",
        "Scaled",
        "-",
        "alice",
        "2",
        "→",
        "3",
    ]
    assert json.loads(muster("events", "demo", "-o", "json").out)["items"][0]["actor"] == "alice"


def test_explain_gives_the_sentence_first(muster: Muster, control: StandIn) -> None:
    control.add(a_training())

    assert muster("explain", "demo").out == (
        "demo is pending: needs 2 GPUs.\n  Admitted is False for 5s: needs 2 GPUs\n"
    )
    assert json.loads(muster("explain", "demo", "-o", "json").out)["summary"] == "demo is pending: needs 2 GPUs."


def test_logs_pass_on_what_was_asked_for(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    control.lines = ["one", "two"]
    said = muster("logs", "demo", "-f", "--rank", "1", "--round", "2", "--tail", "3", "-t")

    assert (said.code, said.out, said.err) == (0, "one\ntwo\n", "")
    asked = {"rank": 1, "round": 2, "follow": True, "tail": 3, "timestamps": True}
    assert control.orders == [("logs", "demo", asked)]


def test_logs_of_a_training_without_output_say_how_to_wait(muster: Muster, control: StandIn) -> None:
    control.add(waiting())
    said = muster("logs", "later")

    assert (said.code, said.out) == (0, "")
    assert said.err == "no output of later (pending) yet; -f waits for it\n"


def test_top_in_a_pipe_is_one_table(muster: Muster, control: StandIn) -> None:
    control.add(failed(), waiting(), a_training(ranks=(RankStatus(0, step=7), RankStatus(1, step=5))))
    title, *rows = muster("top").out.splitlines()

    assert [row.split()[0] for row in rows] == ["demo", "later", "broken"]
    assert rows[0].split()[title.split().index("STEP")] == "5"


# Usage -------------------------------------------------------------------------------------------

USED = [Usage("default", "demo", "u1", 2, 7200.0, 14_400.0, 1), Usage("research", "big", "u2", 1, 3600.0, 0.0)]


def test_usage_is_told_in_hours(muster: Muster, control: StandIn) -> None:
    control.used = USED
    title, first, _ = muster("usage").out.splitlines()

    assert title.split() == ["NAMESPACE", "TRAINING", "WORKERS", "RUNNING", "WORKER-HOURS", "GPU-HOURS"]
    assert first.split() == ["default", "demo", "2", "1", "2.000", "4.000"]


def test_rates_turn_usage_into_cost(muster: Muster, control: StandIn, tmp_path: Path) -> None:
    control.used = USED
    (tmp_path / "rates.json").write_text('{"currency": "EUR", "workerHour": 0.5, "gpuHour": 2}')
    rows = list(csv.DictReader(io.StringIO(muster("usage", "--rates", "rates.json", "-o", "csv").out)))

    assert [(row["training"], float(row["cost"]), row["currency"]) for row in rows] == [
        ("demo", 9.0, "EUR"),
        ("big", 0.5, "EUR"),
    ]
    assert "COST EUR" in muster("usage", "--rates", "rates.json").out


def test_rates_that_cannot_be_read_are_named(muster: Muster, control: StandIn, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text('{"gpuHour": -1}')
    wrong, missing = muster("usage", "--rates", "rates.json"), muster("usage", "--rates", "nowhere.json")

    assert (wrong.code, missing.code) == (2, 2)
    assert "gpuHour: must be at least 0" in wrong.err
    assert "nowhere.json cannot be read: No such file or directory" in missing.err


def test_usage_asks_for_a_span_a_sum_and_a_namespace(muster: Muster, control: StandIn) -> None:
    control.used = USED
    said = muster("usage", "--since", "2026-01-01T00:00:00Z", "--by", "namespace", "-n", "research", "-o", "json")
    [(_, since, by)] = control.orders

    assert (show_time(since), by) == ("2026-01-01T00:00:00.000Z", "namespace")
    assert [one["training"] for one in json.loads(said.out)["items"]] == ["big"]


def test_trainings_are_listed_newest_first_or_as_asked(muster: Muster, control: StandIn) -> None:
    for days, (name, phase) in enumerate([("b", "failed"), ("c", "ready"), ("a", "pending")]):
        made = a_training(name, phase=phase)
        born = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=days)
        control.add(replace(made, metadata=replace(made.metadata, creation_timestamp=born)))

    assert muster("ps", "-o", "name").out.split() == ["a", "c", "b"]
    assert muster("ps", "-o", "name", "--sort", "age").out.split() == ["a", "c", "b"]
    assert muster("ps", "-o", "name", "--sort", "name").out.split() == ["a", "b", "c"]
    assert muster("ps", "-o", "name", "--sort", "phase").out.split() == ["c", "a", "b"]


def test_events_without_a_name_are_those_of_all_trainings(muster: Muster, control: StandIn) -> None:
    control.journal = [Event("Scaled", namespace="lab", training="one"), Event("Lost", namespace="lab", training="two")]

    rows = [line.split() for line in muster("events").out.splitlines()]
    assert rows[0][:3] == ["AGE", "NAME", "TYPE"] and [row[1] for row in rows[1:]] == ["one", "two"]
    rows = [line.split() for line in muster("events", "-A").out.splitlines()]
    assert rows[0][:3] == ["AGE", "NAMESPACE", "NAME"] and rows[1][1:3] == ["lab", "one"]
    assert control.orders == [("events", False), ("events", True)]
    assert muster("events", "-o", "png").code == 2
    assert muster("events", "demo", "-A").code == 2
