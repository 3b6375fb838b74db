"""Wrong things typed: one clear line, the right exit code, nothing left behind."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from tests.fleet import Fleet, free_port


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--standalone", "missing.py"), "no such script: missing.py"),
        (("--standalone", "--nnodes", "3:2", "PROBE"), "min (3) is greater than max (2)"),
        (("--standalone", "--nnodes", "two", "PROBE"), "--nnodes 'two' is not MIN or MIN:MAX"),
        (("--standalone", "--nnodes", "2:4", "--target", "5", "PROBE"), "target (5) is not between"),
        (("--standalone", "--nnodes", "4", "--segment", "3", "PROBE"), "not a multiple of segment (3)"),
        (("--standalone", "--nproc", "0", "PROBE"), "--nproc must be a positive number"),
        (("--standalone", "--nproc", "gpu", "PROBE"), "this machine shows no GPU"),
        (("--standalone", "--lease-s", "soon", "PROBE"), "lease_s must be a number"),
        (("--standalone", "--lease-s", "0", "PROBE"), "lease_s must be greater than 0"),
        (("--standalone", "--lease-s", "0.01", "PROBE"), "lease_s must be between 0.3 and 3600, not 0.01"),
        (("--standalone", "--lease-s", "86400", "PROBE"), "lease_s must be between 0.3 and 3600, not 86400"),
        (("--standalone", "--lease-s", "nan", "PROBE"), "lease_s must be a finite number"),
        (("--standalone", "-m", "no_such_module"), "no such module: no_such_module"),
        (("--standalone", "--no-python", "no-such-command"), "no such command"),
        (("--coordinator", "127.0.0.1:1", "PROBE"), "needs --run-id"),
        (("--coordinator", "nonsense", "--run-id", "x", "PROBE"), "'nonsense' is not HOST:PORT"),
        (("--standalone", "--coordinator", "127.0.0.1:1", "PROBE"), "give one of them"),
        (("--standalone", "--log-dir", "/proc/nowhere", "PROBE"), "--log-dir /proc/nowhere"),
        (("--standalone", "--health-check", "'open", "PROBE"), '--health-check "\'open": '),
        (("PROBE",), "give --standalone, or --coordinator"),
        (("--standalone",), "required"),
        (("--standalone", "--no-such-option", "PROBE"), "--no-such-option"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(fleet: Fleet, options: tuple[str, ...], says: str) -> None:
    given = [fleet.probe()[0] if word == "PROBE" else word for word in options]
    process = fleet.start(sys.executable, "-m", "muster.node.cli", *given, CUDA_VISIBLE_DEVICES="")
    assert process.wait() == 2
    assert says in process.text and "Traceback" not in process.text and "usage:" not in process.text
    fleet.assert_nothing_left()


def test_a_port_in_use_is_named(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        node = fleet.node("a", "--standalone", "--listen", address, join=False)
        assert node.wait() == 1
        assert f"cannot listen on {address}: " in node.text and "in use" in node.text
        coordinator = fleet.start(sys.executable, "-m", "muster.cli.main", "coordinator", "--listen", address)
        assert coordinator.wait() == 1
        assert f"cannot listen on {address}: " in coordinator.text
    fleet.assert_nothing_left()


def test_an_unreachable_coordinator_is_tried_for_a_while_and_then_named(fleet: Fleet) -> None:
    fleet.port = free_port()
    begun = time.monotonic()
    node = fleet.node("a", "--join-timeout", "2")
    assert node.wait() == 75
    assert time.monotonic() - begun >= 2
    assert "trying for 2 s" in node.text and "gave up after 2 s" in node.text and fleet.address in node.text
    fleet.assert_nothing_left()


def test_a_name_in_use_is_refused_with_both_shown(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "1:2", "--spares", "1", "--last-call-s", "0")
    first = fleet.node("same", *options)
    fleet.started(0, 1)
    second = fleet.node("same", *options)
    assert second.wait() == 1
    assert f"pid {first.pid}" in second.text and f"pid {second.pid}" in second.text
    fleet.go()
    assert first.wait() == 0


def test_the_name_of_a_dead_worker_is_free_at_once(fleet: Fleet) -> None:
    fleet.coordinator()
    first = fleet.node("same")
    fleet.started(0, 1)
    first.kill()
    second = fleet.node("same")
    fleet.started(1, 1)
    fleet.go()
    assert second.wait() == 0


def test_an_infra_rank_in_use_is_refused_with_both_shown(fleet: Fleet) -> None:
    fleet.coordinator()
    first = fleet.node("a", "--nnodes", "2", "--infra-rank", "3")
    fleet.until("a is here", lambda v: v["members"])
    second = fleet.node("b", "--nnodes", "2", "--infra-rank", "3")
    assert second.wait() == 1
    assert f"a ({socket.gethostname()}, pid {first.pid})" in second.text and "infra rank 3" in second.text


def test_other_settings_are_refused_with_both_shown(fleet: Fleet) -> None:
    fleet.coordinator()
    fleet.node("a", "--nnodes", "2")
    fleet.until("a is here", lambda v: v["members"])
    second = fleet.node("b", "--nnodes", "2:3", "--max-restarts", "9")
    assert second.wait() == 1
    assert "max is 2, this member has 3" in second.text and "max_restarts is 3, this member has 9" in second.text


def test_a_script_that_is_missing_on_one_worker_only(fleet: Fleet) -> None:
    fleet.coordinator()
    lost = fleet.node("a", "--nnodes", "2", program=("not-here.py",))
    nodes = [fleet.node(name, "--nnodes", "2") for name in ("b", "c")]
    assert lost.wait() == 2 and "no such script: not-here.py" in lost.text
    fleet.started(0, 2)
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0]


def test_asking_for_a_run_that_does_not_exist(fleet: Fleet) -> None:
    fleet.coordinator()
    world = (sys.executable, "-m", "muster.cli.main", "world", "--coordinator", fleet.address)
    missing = fleet.start(*world, "--run-id", "nope", "show")
    assert missing.wait() == 3 and "no run 'nope' here" in missing.text
    gone = fleet.start(*world[:-1], f"127.0.0.1:{free_port()}", "--run-id", "nope", "show")
    assert gone.wait() == 7 and "is the coordinator running?" in gone.text


def test_a_target_out_of_bounds_changes_nothing(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1:2", "--target", "1", "--last-call-s", "0")
    fleet.started(0, 1)
    world = (sys.executable, "-m", "muster.cli.main", "world", "--coordinator", fleet.address, "--run-id", "run")
    refused = fleet.start(*world, "set-target", "3")
    assert refused.wait() == 2 and "target 3 is not between min 1 and max 2" in refused.text
    shown = fleet.start(*world, "show")
    assert shown.wait() == 0 and "1 of 1 worker " in shown.text
    cancelled = fleet.start(*world, "cancel", "--reason", "enough")
    assert cancelled.wait() == 0
    assert node.wait() == 1 and "cancelled: enough" in node.text
    again = fleet.start(*world, "set-target", "2")
    assert again.wait() == 4
