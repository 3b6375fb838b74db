"""Does the scheduler work on Ray? Its values here; `ray_cases.py` on a real cluster, in a network of its own."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from muster.errors import Conflict
from muster.sharing import Pool, Scheduler
from muster.sharing.ray_notes import (
    Contact,
    Notes,
    Present,
    Seat,
    Settings,
    merged,
    read_notes,
    read_settings,
    seated,
    write_notes,
    write_settings,
)

pytestmark = pytest.mark.xdist_group("ray")

CASES = Path(__file__).with_name("ray_cases.py")
NAMES = [
    node.name
    for node in ast.parse(CASES.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]
# Its own network: only loopback. Its own processes: all of them end with the first.
APART = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
LOOPBACK = ["bash", "-c", 'ip link set lo up; exec "$@"', "lo"]
BOUND_S = 240


# On a real cluster -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each case; "" if all is well."""
    pytest.importorskip("ray")
    if shutil.which("unshare") is None or subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("Ray takes the machine's own address unless it is in a network namespace, and unshare is refused")
    report = tmp_path_factory.mktemp("ray") / "report.xml"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))}
    inner = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*APART, *LOOPBACK, *inner, str(CASES)],
        cwd=CASES.parents[2],
        env={**own, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
    )
    assert report.exists(), done.stdout[-4000:]
    return {case.attrib["name"]: _told(case) for case in xml.parse(report).iter("testcase")}


def _told(case: xml.Element) -> str:
    return "\n".join(found.text or found.attrib.get("message", "") for found in case if found.tag != "system-out")


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cluster(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, "it did not run") == "", outcomes.get(name)


# Handle ------------------------------------------------------------------------------------------


def test_the_handle_has_the_schedulers_operations_with_the_same_parameters() -> None:
    pytest.importorskip("ray")
    from muster.sharing.ray import SchedulerHandle

    inside = {"shares", "hooks_of", "called", "call_failed", "lose_node", "restore_node"}
    for name, operation in inspect.getmembers(Scheduler, inspect.isfunction):
        if not name.startswith("_") and name not in inside:
            found = inspect.signature(getattr(SchedulerHandle, name)).parameters
            expected = inspect.signature(operation).parameters
            assert [(one.name, one.default, one.kind) for one in found.values()] == [
                (one.name, one.default, one.kind) for one in expected.values()
            ], name


# Seats -------------------------------------------------------------------------------------------


def test_nodes_are_seated_in_the_order_of_their_names() -> None:
    assert seated((), [Present("b", "2"), Present("a", "1")], 2) == (Seat(0, "a", "1"), Seat(1, "b", "2"))


def test_a_node_that_returns_has_its_old_seat_under_a_new_id() -> None:
    before = (Seat(0, "a", "1"), Seat(1, "b", "2"))
    away = seated(before, [Present("b", "2")], 2)
    assert away == (Seat(0, "a"), Seat(1, "b", "2"))
    assert seated(away, [Present("b", "2"), Present("a", "9")], 2) == (Seat(0, "a", "9"), Seat(1, "b", "2"))


def test_a_name_that_was_never_seen_does_not_take_the_seat_of_one_that_is_away() -> None:
    away = (Seat(0, "a"), Seat(1, "b", "2"))
    assert seated(away, [Present("b", "2"), Present("c", "3")], 2) == away
    assert seated(away, [Present("b", "2"), Present("c", "3")], 3) == (*away, Seat(2, "c", "3"))


def test_nodes_of_one_name_have_a_seat_each() -> None:
    both = seated((), [Present("a", "1"), Present("a", "2")], 2)
    assert both == (Seat(0, "a", "1"), Seat(1, "a", "2"))
    assert seated(both, [Present("a", "2"), Present("a", "3")], 2) == (Seat(0, "a", "3"), Seat(1, "a", "2"))


# Files -------------------------------------------------------------------------------------------


def test_what_a_scheduler_was_made_with_stays_and_contradicting_it_is_refused() -> None:
    before = Settings(Pool(4, 2), "/journal", hook_timeout_s=5)
    assert merged(before, Settings(hook_timeout_s=9, min_turn_s=1)) == Settings(Pool(4, 2), "/journal", 5, 1)
    assert merged(Settings(), before) == before
    with pytest.raises(Conflict, match="pool"):
        merged(before, Settings(Pool(8, 2)))
    with pytest.raises(Conflict, match="journal"):
        merged(before, Settings(journal="/other"))


def test_settings_and_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    settings = Settings(Pool(4, 2), "/journal", min_turn_s=0.5)
    write_settings(tmp_path / "new" / "settings.json", settings)
    assert read_settings(tmp_path / "new" / "settings.json") == settings
    assert read_settings(tmp_path / "none.json") == Settings()
    notes = Notes("session", Pool(4, 2), (Seat(0, "a", "1"), Seat(1, "b")), {"p1": Contact("handle", "process")})
    write_notes(tmp_path / "notes.json", notes)
    assert read_notes(tmp_path / "notes.json", "session") == notes


def test_a_new_ray_cluster_keeps_seats_and_forgets_actors(tmp_path: Path) -> None:
    write_notes(tmp_path / "notes.json", Notes("old", Pool(4, 2), (Seat(0, "a", "1"),), {"p1": Contact("handle")}))
    assert read_notes(tmp_path / "notes.json", "new") == Notes("new", Pool(4, 2), (Seat(0, "a", "1"),))
