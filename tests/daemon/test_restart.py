"""A control plane that is lost comes back without anybody's command, unless somebody wants it to stay away."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.sdk import home as homes
from muster.sdk import launch_record
from tests.fleet import eventually, family
from tests.plane import Plane


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Plane]:
    """A home without a control plane yet."""
    plane = Plane(tmp_path)
    yield plane
    launch_record.remove(plane.home)
    plane.muster("server", "stop").wait()
    plane.close()


def control_plane(shell: Plane) -> int:
    """Return the pid of the control plane that runs."""
    running = eventually(lambda: homes.running(shell.home), "a control plane runs")
    return running.pid


def begin(shell: Plane, workers: int = 2, **env: str) -> None:
    submitted = shell.muster(
        "run", "-d", "--name", "demo", "--workers", f"1:{workers}:4", "--command", "--", "sleep", "600", **env
    )
    assert submitted.wait() == 0, submitted.text
    assert shell.muster("wait", "demo", "--for=target", "--timeout", "60s").wait() == 0


def lose(shell: Plane) -> int:
    """Kill the control plane and wait until the kernel has freed its lock."""
    pid = control_plane(shell)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: homes.process_of(pid) is None, "the control plane is dead")
    return pid


def events(shell: Plane) -> str:
    told = shell.muster("events", "demo")
    assert told.wait() == 0, told.text
    return told.text


def agent_log(shell: Plane) -> str:
    return "".join(path.read_text() for path in shell.home.glob("logs/*/*/worker.log"))


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_a_worker_that_is_lost_after_the_control_plane_is_replaced_without_any_command(shell: Plane) -> None:
    begin(shell, MUSTER_LOG_BYTES="1234567")
    url, before = shell.url, control_plane(shell)
    record = json.loads((shell.home / "launch.json").read_text())
    assert (shell.home / "launch.json").stat().st_mode & 0o777 == 0o600
    lose(shell)
    for pid in family(shell.worker_pids()["demo-0"]):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: {"demo-1", "demo-2"} <= shell.worker_pids().keys(), "demo-0 is replaced")
    after = control_plane(shell)
    assert after != before and shell.url == url
    told = dict(item.partition("=")[::2] for item in Path(f"/proc/{after}/environ").read_text().split("\0") if item)
    assert told == record["env"] and told["MUSTER_LOG_BYTES"] == "1234567"
    parents = [pid for pid in shell.worker_pids().values() if after in family(pid)]
    assert not parents, "it is no descendant of the agent that started it"
    assert shell.muster("wait", "demo", "--for=target", "--timeout", "60s").wait() == 0
    assert agent_log(shell).count("ended without being stopped: started again") == 1, "one of many agents succeeds"


def lose_and_await_recovery(shell: Plane, losses: int) -> None:
    """Kill the control plane for the `losses`th time, and wait until the round goes on."""
    before = lose(shell)
    eventually(lambda: homes.running(shell.home) and control_plane(shell) != before, "it is back")
    eventually(lambda: agent_log(shell).count("started again") == losses, f"{losses} starts are recorded")
    eventually(lambda: events(shell).count("RoundRecovered") == losses, "the round goes on")


@pytest.mark.usefixtures("processes")
def test_of_many_agents_one_starts_it_and_ranks_go_on(shell: Plane) -> None:
    begin(shell, 4)
    agents = shell.worker_pids()
    for losses in (1, 2):
        lose_and_await_recovery(shell, losses)
    assert shell.worker_pids() == agents
    assert "(2 in a row)" in agent_log(shell), "starts in a row are counted by all agents together"


@pytest.mark.parametrize("how", ["server stop", "mark and kill"])
@pytest.mark.usefixtures("processes")
def test_after_server_stop_it_stays_away_until_a_command_starts_it(shell: Plane, how: str) -> None:
    """The second way is that of `server stop` with a control plane that hangs, and of `kill -9` after it."""
    begin(shell)
    if how == "server stop":
        assert shell.muster("server", "stop").wait() == 0
    else:
        homes.mark_stopped(shell.home, True)
        lose(shell)
    names = shell.worker_pids().keys()
    refusals = "is not started here: it was stopped on purpose"
    eventually(lambda: agent_log(shell).count(refusals) == len(names), "every agent leaves it alone")
    assert not homes.is_locked(shell.home)
    assert shell.muster("ps").wait() == 0
    assert not homes.was_stopped(shell.home)
    lose(shell)
    eventually(lambda: homes.running(shell.home), "an agent starts it once the mark is gone")


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no memory group can be made here")
def test_its_memory_is_not_that_of_the_worker_whose_agent_starts_it(shell: Plane) -> None:
    shell.muster("server", "start").wait()
    training = shell.train("demo", command=["sleep", "600"], world=(1, 1, 2), resources={"memory": "300Mi"})
    training.wait_until_target_world(timeout=60)
    agent = shell.worker_pids()["demo-0"]
    assert "/muster/" in Path(f"/proc/{agent}/cgroup").read_text()
    before = lose(shell)
    eventually(lambda: homes.running(shell.home) and control_plane(shell) != before, "it is back")
    assert "/muster/" not in Path(f"/proc/{control_plane(shell)}/cgroup").read_text()


@pytest.mark.usefixtures("processes")
def test_one_in_the_foreground_is_left_to_its_supervisor(shell: Plane) -> None:
    shell.serve()
    begin(shell)
    assert not (shell.home / "launch.json").exists()
    shell.crash()
    eventually(lambda: "is not started here: it was not started by a command" in agent_log(shell), "an agent looks")
    assert not homes.is_locked(shell.home)


@pytest.mark.usefixtures("processes")
def test_one_that_is_asked_to_end_by_a_signal_stays_away(shell: Plane) -> None:
    begin(shell)
    os.kill(control_plane(shell), signal.SIGTERM)
    eventually(lambda: "is not started here: it was not started by a command" in agent_log(shell), "an agent looks")
    assert not homes.is_locked(shell.home)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("change", ["mode", "link", "folder", "words", "place"])
def test_a_record_that_somebody_else_may_have_written_is_not_carried_out(shell: Plane, change: str) -> None:
    begin(shell)
    path, trap = shell.home / "launch.json", shell.folder / "trap"
    record = json.loads(path.read_text()) | {"argv": [sys.executable, "-c", f"open({str(trap)!r}, 'w')"]}
    record |= {"argv": [["no", "word"]]} if change == "words" else {"place": "elsewhere"} if change == "place" else {}
    path.write_text(json.dumps(record))
    if change == "mode":
        path.chmod(0o666)
    elif change == "link":
        path.rename(shell.folder / "elsewhere.json")
        path.symlink_to(shell.folder / "elsewhere.json")
    elif change == "folder":
        shell.home.chmod(0o777)
    lose(shell)
    eventually(lambda: "how it was started cannot be used" in agent_log(shell), "an agent refuses")
    assert not trap.exists() and not homes.is_locked(shell.home)
    shell.home.chmod(0o700)
