"""Does the scheduler work on Ray? Its values here; `ray_cases.py` on a real cluster, in a network of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from muster.errors import Conflict
from muster.sharing import Pool
from muster.sharing.ray_notes import (
    Contact,
    LivingNode,
    NodeSlot,
    Notes,
    RaySettings,
    merged,
    placed,
    read_notes,
    read_settings,
    write_notes,
    write_settings,
)
from tests.sharing.ray_fixture import CASES

pytestmark = pytest.mark.xdist_group("ray")

NAMES = [
    node.name
    for node in ast.parse(CASES.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.args.args[-1].arg != "story"
]


# On a real cluster -------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.parametrize("name", NAMES)
def test_on_a_cluster(name: str, ray_outcomes: dict[str, str]) -> None:
    assert ray_outcomes.get(name, "it did not run") == "", ray_outcomes.get(name)


# Seats -------------------------------------------------------------------------------------------


def test_nodes_are_placed_in_the_order_of_their_names() -> None:
    assert placed((), [LivingNode("b", "2"), LivingNode("a", "1")], 2) == (NodeSlot(0, "a", "1"), NodeSlot(1, "b", "2"))


def test_a_node_that_returns_has_its_old_slot_under_a_new_id() -> None:
    before = (NodeSlot(0, "a", "1"), NodeSlot(1, "b", "2"))
    away = placed(before, [LivingNode("b", "2")], 2)
    assert away == (NodeSlot(0, "a"), NodeSlot(1, "b", "2"))
    assert placed(away, [LivingNode("b", "2"), LivingNode("a", "9")], 2) == (
        NodeSlot(0, "a", "9"),
        NodeSlot(1, "b", "2"),
    )


def test_a_name_that_was_never_seen_does_not_take_the_slot_of_one_that_is_away() -> None:
    away = (NodeSlot(0, "a"), NodeSlot(1, "b", "2"))
    assert placed(away, [LivingNode("b", "2"), LivingNode("c", "3")], 2) == away
    assert placed(away, [LivingNode("b", "2"), LivingNode("c", "3")], 3) == (*away, NodeSlot(2, "c", "3"))


def test_nodes_of_one_name_have_a_slot_each() -> None:
    both = placed((), [LivingNode("a", "1"), LivingNode("a", "2")], 2)
    assert both == (NodeSlot(0, "a", "1"), NodeSlot(1, "a", "2"))
    assert placed(both, [LivingNode("a", "2"), LivingNode("a", "3")], 2) == (
        NodeSlot(0, "a", "3"),
        NodeSlot(1, "a", "2"),
    )


# Files -------------------------------------------------------------------------------------------


def test_what_a_scheduler_was_made_with_stays_and_contradicting_it_is_refused() -> None:
    before = RaySettings(Pool(4, 2), "/journal", hook_timeout_s=5)
    assert merged(before, RaySettings(hook_timeout_s=9, min_turn_s=1)) == RaySettings(Pool(4, 2), "/journal", 5, 1)
    assert merged(RaySettings(), before) == before
    with pytest.raises(Conflict, match="pool"):
        merged(before, RaySettings(Pool(8, 2)))
    with pytest.raises(Conflict, match="journal"):
        merged(before, RaySettings(journal="/other"))


def test_settings_and_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    settings = RaySettings(Pool(4, 2), "/journal", min_turn_s=0.5)
    write_settings(tmp_path / "new" / "settings.json", settings)
    assert read_settings(tmp_path / "new" / "settings.json") == settings
    assert read_settings(tmp_path / "none.json") == RaySettings()
    notes = Notes(
        "session", Pool(4, 2), (NodeSlot(0, "a", "1"), NodeSlot(1, "b")), {"p1": Contact("handle", "process")}
    )
    write_notes(tmp_path / "notes.json", notes)
    assert read_notes(tmp_path / "notes.json", "session") == notes


def test_a_new_ray_cluster_keeps_slots_and_forgets_actors(tmp_path: Path) -> None:
    write_notes(tmp_path / "notes.json", Notes("old", Pool(4, 2), (NodeSlot(0, "a", "1"),), {"p1": Contact("handle")}))
    assert read_notes(tmp_path / "notes.json", "new") == Notes("new", Pool(4, 2), (NodeSlot(0, "a", "1"),))
