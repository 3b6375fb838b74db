"""The command line against a real control plane that it starts by itself."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import PROBE, PROGRAMS, eventually, family, kill_all
from tests.plane import Plane

STEPPER = str(PROGRAMS / "stepper.py")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Plane]:
    """No control plane yet."""
    made = Plane(tmp_path)
    yield made
    made.muster("server", "stop").wait()
    made.close()


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_run_starts_everything_and_says_one_line_per_change_when_piped(shell: Plane) -> None:
    run = shell.muster("run", PROBE, "--name", "demo", "--workers", "2", "--", str(shell.notes), "exit=0")
    assert run.wait() == 0, run.text
    assert "succeeded" in run.text
    lines = [line for line in run.text.splitlines() if line]
    assert len(lines) == len(set(lines)), f"a change is told once:\n{run.text}"
    status = shell.muster("server", "status", "-o", "json")
    assert status.wait() == 0
    shown = json.loads(status.text)
    assert set(shown) >= {"pid", "url", "version", "startedAt"}
    stop = shell.muster("server", "stop")
    assert stop.wait() == 0
    assert shell.muster("server", "status").wait() == 7
    shell.assert_nothing_left()


@pytest.mark.usefixtures("processes")
def test_exit_codes_tell_how_it_ended(shell: Plane) -> None:
    failed = shell.muster("run", PROBE, "--name", "bad", "--max-restarts", "0", "--", str(shell.notes), "exit=3")
    assert failed.wait() == 100 and "rank 0: exit_code=3" in failed.text
    assert shell.muster("wait", "bad").wait() == 100
    detached = shell.muster("run", PROBE, "--name", "slow", "-d", "--", str(shell.notes), "sleep")
    assert detached.wait() == 0
    assert shell.muster("wait", "slow", "--for=target", "--timeout", "30s").wait() == 0
    assert shell.muster("wait", "slow", "--for=complete", "--timeout", "0.2s").wait() == 124
    assert shell.muster("cancel", "slow", "--grace", "0.5s").wait() == 0
    assert shell.muster("wait", "slow").wait() == 103
    assert shell.muster("scale", "slow", "2").wait() == 4
    missing = shell.muster("get", "slwo")
    assert missing.wait() == 3 and "slow" in missing.text
    assert shell.muster("get", "slow", MUSTER_TOKEN="wrong", MUSTER_URL=shell.url).wait() == 5
    assert shell.muster("run", "nowhere.py").wait() == 2
    assert shell.muster("ps", MUSTER_URL="http://127.0.0.1:9").wait() == 7


@pytest.mark.usefixtures("processes")
def test_a_control_plane_that_is_stopped_is_not_started_again_by_who_follows(shell: Plane) -> None:
    run = shell.muster("run", PROBE, "--name", "demo", "--workers", "1:1:2", "--", str(shell.notes), "wait")
    run.expect("demo  ready")
    assert shell.muster("server", "stop").wait() == 0
    assert shell.muster("server", "status").wait() == 7
    assert run.proc.poll() is None, "it waits for it to come back"
    assert shell.muster("server", "status").wait() == 7
    assert shell.muster("server", "start").wait() == 0
    assert shell.muster("scale", "demo", "2").wait() == 0
    run.expect("2/2 workers")
    stop = shell.muster("server", "stop", "--cancel")
    assert stop.wait() == 0, stop.text
    assert run.wait() == 103, run.text
    assert shell.muster("server", "status").wait() == 7


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_ctrl_c_detaches_and_says_how_to_come_back(shell: Plane) -> None:
    run = shell.muster("run", PROBE, "--name", "demo", "--", str(shell.notes), "wait")
    run.expect("demo  ready")
    run.kill(signal.SIGINT)
    assert run.wait() == 130
    assert "muster logs -f demo" in run.text and "muster cancel demo" in run.text
    assert shell.client.get("demo").phase == "ready", "it goes on"
    shell.go()
    assert shell.muster("wait", "demo").wait() == 0


@pytest.mark.usefixtures("processes")
def test_a_heal_is_told_where_people_look(shell: Plane) -> None:
    """Every process of one worker dies in an instant; its rank, and what it did, are back before anyone asks."""
    run = shell.muster("run", STEPPER, "--name", "demo", "--workers", "2", "--spares", "1", "--", "0.02")
    run.expect("demo  ready  2/2 workers")
    eventually(lambda: shell.client.get("demo").training.status.spares.ready == 1, "the spare is there", 30)
    logs = shell.muster("logs", "-f", "demo")
    top = shell.muster("top", "-f")
    top.expect("demo  ready")
    logs.expect("step 20 ")
    training = shell.client.get("demo").training
    lost = next(rank.worker for rank in training.status.ranks if rank.rank == 0)
    (spare,) = [one.name for one in training.status.workers if one.role == "spare"]
    described = shell.muster("describe", "demo")
    assert described.wait() == 0
    assert re.search(rf"^  {lost} active for \S+ on \S+, rank 0$", described.text, re.MULTILINE), described.text
    assert re.search(rf"^  {spare} (standby|hot spare) for \S+ on \S+", described.text, re.MULTILINE), described.text
    kill_all(family(shell.worker_pids()[lost]))
    times = r"ranks run after \S+ m?s, next step after \S+ m?s"
    told = rf"demo  healed: {lost} lost; {spare} has rank 0; {times}; back at step 0, (\d+) steps redone"
    for one in (run, logs, top):
        redone = int(one.expect(told).group(1))
        assert redone > 20, "what was done before is done again"
    (entry,) = [event for event in shell.client.get("demo").events() if event.reason == "Healed"]
    assert (entry.data["redone"], entry.data["step"]) == (redone, 0) and entry.data["nextStepSeconds"] < 20
    assert shell.muster("cancel", "demo").wait() == 0
    assert run.wait() == 103 and logs.wait() == 0
    top.kill()
    top.wait()


@pytest.mark.usefixtures("processes")
def test_many_clients_that_start_at_once_start_one_control_plane(shell: Plane) -> None:
    many = [shell.muster("ps", "-o", "json") for _ in range(5)]
    assert [one.wait() for one in many] == [0] * 5, [one.text for one in many]
    daemons = [line for line in shell.left_over() if "muster.daemon" in line]
    assert len(daemons) == 1, daemons


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_a_stopped_control_plane_leaves_trainings_running_and_the_next_adopts_them(shell: Plane) -> None:
    assert shell.muster("run", PROBE, "--name", "demo", "-d", "--", str(shell.notes), "wait").wait() == 0
    assert shell.muster("wait", "demo", "--for=min").wait() == 0
    stop = shell.muster("server", "stop")
    assert stop.wait() == 0 and "demo" in stop.text
    assert len(shell.worker_pids()) == 1
    shell.go()
    assert shell.muster("wait", "demo", "--timeout", "30s").wait() == 0
    eventually(lambda: not shell.worker_pids(), "its worker has left")


@pytest.mark.usefixtures("processes")
def test_apply_get_and_usage_agree(shell: Plane, tmp_path: Path) -> None:
    manifest = tmp_path / "training.yaml"
    manifest.write_text(
        "metadata:\n  name: demo\n  labels: {team: a}\nspec:\n"
        f"  command: [{sys.executable}, {PROBE}, {shell.notes}, exit=0]\n  worldSize: {{min: 1, target: 1, max: 2}}\n"
    )
    assert shell.muster("apply", "-f", str(manifest)).wait() == 0
    assert shell.muster("wait", "demo", "--timeout", "30s").wait() == 0
    got = shell.muster("get", "demo", "-o", "json")
    assert got.wait() == 0 and json.loads(got.text)["metadata"]["labels"] == {"team": "a"}
    usage = shell.muster("usage", "-o", "json")
    assert usage.wait() == 0
    (used,) = json.loads(usage.text)["items"]
    assert used["training"] == "demo" and used["workerSeconds"] > 0
    described = shell.muster("describe", "demo")
    assert described.wait() == 0 and "Succeeded" in described.text


@pytest.mark.usefixtures("processes")
def test_events_outlive_a_training_that_was_deleted(shell: Plane) -> None:
    assert shell.muster("run", PROBE, "--name", "demo", "--", str(shell.notes), "exit=0").wait() == 0
    assert shell.muster("delete", "demo").wait() == 0
    told = shell.muster("events", "demo")
    assert told.wait() == 0 and "Succeeded" in told.text and "Deleted" in told.text
    assert shell.muster("events", "nobody").wait() == 3


@pytest.mark.usefixtures("processes")
def test_a_control_plane_with_tls_is_trusted_by_clients_of_the_same_home(shell: Plane) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("a certificate cannot be made here without openssl")
    made = [str(shell.folder / "key.pem"), str(shell.folder / "cert.pem")]
    options = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        made[0],
        "-out",
        made[1],
        *options,
    ]
    subprocess.run(command, check=True, capture_output=True)
    refused = shell.muster("server", "start", "--listen", "0.0.0.0:0")
    assert refused.wait() == 2 and "without TLS" in refused.text
    begun = shell.muster("server", "start", "--listen", "0.0.0.0:0", "--tls-key", made[0], "--tls-cert", made[1])
    assert begun.wait() == 0 and "https://localhost" in begun.text, begun.text
    assert shell.muster("run", PROBE, "--name", "demo", "--", str(shell.notes), "exit=0").wait() == 0
    doctor = shell.muster("doctor")
    doctor.wait()
    assert "answers at https://localhost" in doctor.text
