"""Each test gets the tier that its fixtures need."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import tiers
from tests.fleet import Fleet


@pytest.mark.parametrize(
    "command",
    [
        ["/venv/bin/muster", "ps"],
        ["muster-node", "train.py"],
        [sys.executable, "-m", "muster.coordinator"],
        [sys.executable, "-P", "-m", "muster"],
        ["sh", "-c", 'exec "$@"', "sh", "python3", "-m", "muster.daemon"],
        ("torchrun", "train.py"),
    ],
)
def test_a_command_that_starts_muster_is_recognised(command: list[str]) -> None:
    assert tiers.is_of_muster(command)


@pytest.mark.parametrize(
    "command",
    [
        "muster ps",
        ["git", "-m", "musters"],
        [sys.executable, "-c", "import muster"],
        [sys.executable, "-I", "-m", "muster.package_check"],
        [],
    ],
)
def test_other_commands_may_run_in_every_tier(command: list[str]) -> None:
    assert not tiers.is_of_muster(command)


def test_a_test_without_the_mark_cannot_start_muster() -> None:
    with pytest.raises(AssertionError, match="it has to take the fixture `processes`"):
        subprocess.Popen([sys.executable, "-m", "muster.coordinator", "--help"])


@pytest.mark.usefixtures("processes")
def test_a_test_with_the_fixture_may_start_muster(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("process")
    command = [sys.executable, "-m", "muster.coordinator", "--help"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_a_test_with_a_fleet_is_of_the_tier_of_processes(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("process")
    assert fleet.processes == []
