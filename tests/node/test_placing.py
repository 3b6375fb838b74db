"""Where ranks go: segments, several runs, several ranks per worker, addresses, health, bad workers, output."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from tests.fleet import PROGRAMS, Fleet, eventually


def test_whole_segments_are_active_and_the_rest_are_spares(fleet: Fleet) -> None:
    fleet.coordinator()
    workers = [(domain, index) for domain, count in (("a", 3), ("b", 2), ("c", 1)) for index in range(count)]
    random.Random(5).shuffle(workers)
    options = ("--nnodes", "4:6", "--target", "6", "--segment", "2", "--last-call-s", "3")
    noop = ("--no-python", "sleep", "600")
    for domain, index in workers:
        fleet.node(f"{domain}{index}", *options, "--domain", domain, program=noop)
    view = fleet.training(0, 4)
    fleet.until("all are here", lambda v: len(v["members"]) == 6)
    active = [m["name"] for m in view["members"] if m["role"] == "active"]
    assert active == ["a0", "a1", "b0", "b1"]
    refused = fleet.node("x", *options, program=noop)
    assert refused.wait() == 1 and "has no --domain" in refused.text


def test_two_runs_on_one_coordinator_do_not_meet(fleet: Fleet) -> None:
    fleet.coordinator()
    one = [fleet.node(name, "--nnodes", "2") for name in ("a", "b")]
    fleet.started(0, 2)
    fleet.run_id = "other"
    other = [fleet.node(name, "--nnodes", "2", program=fleet.probe("exit=4")) for name in ("a", "b")]
    other_codes = [fleet_node.wait() for fleet_node in other]
    assert other_codes == [1, 1], "its restarts are spent"
    assert [node.proc.poll() for node in one] == [None, None]
    fleet.run_id = "run"
    fleet.go()
    assert [node.wait() for node in one] == [0, 0]


@pytest.mark.scenario
def test_ranks_are_counted_through_workers_of_different_sizes(fleet: Fleet) -> None:
    fleet.coordinator()
    nodes = [fleet.node(f"w{i}", "--nnodes", "2", "--nproc", str(procs)) for i, procs in enumerate((2, 3))]
    ranks = fleet.started(0, 5)
    assert [(n["RANK"], n["LOCAL_RANK"], n["GROUP_RANK"], n["WORLD_SIZE"]) for n in ranks] == [
        ("0", "0", "0", "5"),
        ("1", "1", "0", "5"),
        ("2", "0", "1", "5"),
        ("3", "1", "1", "5"),
        ("4", "2", "1", "5"),
    ]
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0]


def test_ipv6_loopback_with_a_real_gloo_group(fleet: Fleet) -> None:
    fleet.coordinator(host="::1")
    program = (str(PROGRAMS / "ddp.py"), str(fleet.notes))
    nodes = [fleet.node(name, "--nnodes", "2", program=program) for name in ("a", "b")]
    fleet.started(0, 2)
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0]


def test_a_hundred_megabytes_of_output_stop_nothing(fleet: Fleet) -> None:
    fleet.coordinator()
    loud = "import os, sys\nfor _ in range(1000): os.write(1, (b'x' * 99 + b'\\n') * 1000)\n"
    script = fleet.folder / "loud.py"
    script.write_text(loud + "print('the end')\n")
    node = fleet.node("a", program=(str(script),))
    assert node.wait() == 0
    log = fleet.folder / "logs" / "round-0" / "rank-0.out"
    assert log.stat().st_size == 100_000_000 + len("the end\n")
    assert node.text.endswith("the only rank of round 0 exited 0\n") and "[0] the end" in node.text
    assert node.text.count("[0] xxx") == 1_000_000


def test_a_terminal_that_nobody_reads_does_not_cost_the_lease(fleet: Fleet) -> None:
    import subprocess

    fleet.coordinator()
    script = fleet.folder / "loud.py"
    script.write_text("import os\nfor _ in range(200): os.write(1, b'x' * 65536)\nimport time\ntime.sleep(3)\n")
    command = [sys.executable, "-m", "muster.node.cli", "--coordinator", fleet.address, "--run-id", "run"]
    node = subprocess.Popen(
        [*command, "--name", "a", str(script)], env=fleet.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    fleet.until("it succeeded", lambda v: v["outcome"] and v["outcome"]["state"] == "succeeded")
    assert fleet.view()["round"] == 0  # type: ignore[index]
    assert node.wait(20) == 0
    assert node.stdout is not None
    node.stdout.close()


@pytest.mark.parametrize("moment", ["before joining", "before promotion"])
def test_a_worker_that_is_not_well_is_parked_with_the_reason(fleet: Fleet, moment: str) -> None:
    fleet.coordinator()
    sick = fleet.folder / "sick"
    check = f"sh -c 'test ! -e {sick} || {{ echo the disk is full; exit 7; }}'"
    if moment == "before joining":
        sick.touch()
    spare = fleet.node("z", "--nnodes", "1", "--spares", "1", "--health-check", check)
    fleet.until("z is here", lambda v: v["members"])
    first = fleet.node("a", "--nnodes", "1", "--spares", "1", "--infra-rank", "0")
    if moment == "before promotion":
        view = fleet.training(0, 1)
        taken = {m["rank"]: m["name"] for m in view["members"]}
        if taken.get(0) == "z":
            pytest.fail("a should be chosen before z")
        sick.touch()
        first.kill()
    view = fleet.until("z is parked", lambda v: any(m["role"] == "parked" for m in v["members"]))
    parked = next(m for m in view["members"] if m["name"] == "z")
    assert parked["note"] == "health check failed with 7: the disk is full"
    spare.kill(signal.SIGTERM)
    assert spare.wait() == 143


def test_a_worker_that_fails_first_twice_is_swapped_and_parked(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2", "--spares", "1", "--last-call-s", "60")
    bad = fleet.probe("exit=6@1.0", "exit=6@1.1", "wait")
    nodes = [fleet.node(name, *options, program=bad) for name in ("a", "b", "c")]
    view = fleet.training(2, 2)
    assert [(m["name"], m["role"]) for m in view["members"]] == [("a", "active"), ("c", "active"), ("b", "parked")]
    assert "failed first twice, in rounds 0 and 1" in view["members"][2]["note"]
    fleet.started(2, 2)
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0, 0]


def test_rounds_without_progress_end_the_run_with_93(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--max-restarts", "9", "--no-progress-rounds", "2")
    node = fleet.node("a", *options, program=(str(PROGRAMS / "steps.py"),))
    assert node.wait() == 93
    assert "2 rounds in a row made no progress (highest step 1)" in node.text
    assert not (fleet.folder / "logs" / "round-3").exists()


def test_settings_may_come_from_the_environment_and_torchruns_names_work(fleet: Fleet) -> None:
    fleet.coordinator()
    env = {"MUSTER_COORDINATOR": fleet.address, "MUSTER_RUN_ID": "run", "MUSTER_NPROC": "2", "MUSTER_NNODES": "2"}
    fleet.env |= env
    one = fleet.node("a", join=False)
    for name in env:
        del fleet.env[name]
    other = fleet.node(
        *("b", "--rdzv-endpoint", fleet.address, "--rdzv-id", "run", "--nproc-per-node", "1", "--nnodes=2"), join=False
    )
    assert len(fleet.started(0, 3)) == 3
    fleet.go()
    assert one.wait() == other.wait() == 0


def test_two_signals_end_a_stubborn_script_at_once(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", program=fleet.probe("stubborn", "fork", "sleep"))
    rank = fleet.started(0, 1)[0]
    node.kill(signal.SIGINT)
    node.expect("SIGINT: leaving")
    node.kill(signal.SIGINT)
    assert node.wait(10) == 130
    assert eventually(lambda: not Path(f"/proc/{rank['child']}").exists(), "its child is gone")
    fleet.assert_nothing_left_but(1)


def test_the_command_line_of_a_rank_names_its_script(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a")
    rank = fleet.started(0, 1)[0]
    shown = Path(f"/proc/{rank['pid']}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert shown[0] == os.fsencode(sys.executable) and any(word.endswith(b"probe.py") for word in shown)
    fleet.go()
    assert node.wait() == 0


def test_a_sick_worker_never_gets_a_rank(fleet: Fleet) -> None:
    fleet.coordinator()
    for name in ("b", "c"):
        fleet.node(name, "--nnodes", "2", "--spares", "1")
    fleet.until("two are here", lambda v: len(v["members"]) == 2)
    sick = fleet.node("a", "--nnodes", "2", "--spares", "1", "--health-check", "echo no disk && false")
    fleet.until("a is parked", lambda v: any(m["note"].endswith("no disk") for m in v["members"]))
    assert [note["MUSTER_WORKER"] for note in fleet.started(0, 2)] == ["b", "c"]
    fleet.go()
    assert sick.wait() == 0
    assert not fleet.told("start", 1)


def test_a_health_check_leaves_nothing_behind(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", "--health-check", "sleep 600; true")
    eventually(lambda: any(line.endswith(": sleep 600") for line in fleet.left_over()), "it checks")
    node.kill(signal.SIGTERM)
    assert node.wait(10) == 143
    fleet.assert_nothing_left_but(1)
    node = fleet.node("b", "--health-check", "sleep 600; true")
    eventually(lambda: any(line.endswith(": sleep 600") for line in fleet.left_over()), "it checks")
    node.kill(signal.SIGKILL)
    fleet.assert_nothing_left_but(1)


def test_a_second_shrink_leaves_the_spare_of_the_first_alone(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "1:4", "--target", "3", "--spares", "1")
    nodes = {name: fleet.node(name, *options) for name in ("w0", "w1", "w2")}
    begun = fleet.until("three train", lambda v: v["state"] == "training" and v["world"] == 3)["round"]
    fleet.order("set-target", target=2)
    members = fleet.training(begun + 1, 2)["members"]
    (spare,) = [member["name"] for member in members if member["role"] == "spare"]
    fleet.order("set-target", target=1)
    members = fleet.training(begun + 2, 1)["members"]
    (active,) = [member["name"] for member in members if member["role"] == "active"]
    (leaver,) = nodes.keys() - {spare, active}
    assert nodes[leaver].wait() == 0, "the leaver goes: there is a spare already"
    view = fleet.training(begun + 2, 1)
    assert {member["name"]: member["role"] for member in view["members"]} == {active: "active", spare: "spare"}
    newcomer = fleet.node("w9", *options)
    fleet.until("the newcomer is here", lambda v: len(v["members"]) == 3)
    fleet.go()
    assert [node.wait() for node in (nodes[active], nodes[spare], newcomer)] == [0, 0, 0]


def test_the_reason_of_a_failure_survives_a_reader_that_left(fleet: Fleet) -> None:
    script = fleet.folder / "talk.py"
    script.write_text("for i in range(100000): print(i)\nimport sys\nsys.exit(3)\n")
    command = (
        f"{sys.executable} -m muster.node.cli --standalone --max-restarts 0 {script} 2>{fleet.folder}/err | head -1"
    )
    fleet.start("bash", "-c", command).wait()
    assert "Exit 3" in (fleet.folder / "err").read_text()


def test_a_run_inside_a_rank_is_a_run_of_its_own(fleet: Fleet) -> None:
    inner = f"{sys.executable} -m muster.node.cli --standalone --no-python echo inner"
    node = fleet.node("a", "--standalone", "--no-python", join=False, program=("sh", "-c", inner))
    assert node.wait() == 0
    assert "[0] [0] inner" in node.text
    fleet.assert_nothing_left()


def test_no_progress_goes_before_a_spent_budget(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--max-restarts", "1", "--no-progress-rounds", "1", "--no-requeue-code", "77")
    node = fleet.node("a", *options, program=(str(PROGRAMS / "steps.py"),))
    assert node.wait() == 77


def test_odd_names_are_shown_as_they_are(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("[/red] ² x")
    fleet.started(0, 1)
    world = (sys.executable, "-m", "muster.cli.main", "world", "--coordinator", fleet.address, "--run-id", "run")
    shown = fleet.start(*world, "show")
    assert shown.wait() == 0 and "[/red] ² x" in shown.text
    fleet.go()
    assert node.wait() == 0
    late = fleet.start(*world, "cancel")
    assert late.wait() == 4 and "it cannot be cancelled" in late.text
