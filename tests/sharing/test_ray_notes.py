"""What a scheduler on Ray keeps beside its journal: it is read again, also what one of 0.1.0 left."""

from __future__ import annotations

from muster.sharing import ray_notes
from muster.sharing.ray_notes import Contact, NodeSlot
from muster.types.sharing import Pool
from tests.data import old


def test_what_a_scheduler_on_ray_of_0_1_0_noted_is_read() -> None:
    settings = ray_notes.read_settings(old.RAY / "settings.json")
    assert (settings.pool, settings.journal) == (Pool(8, 4), "/srv/pool/journal")
    assert (settings.hook_timeout_s, settings.min_turn_s, settings.reattach_timeout_s) == (20.0, 1.5, None)
    notes = ray_notes.read_notes(old.RAY / "journal.ray", "session_2026-11-16_01-00-00_000000_1")
    assert notes.pool == Pool(8, 4)
    assert notes.slots == (NodeSlot(0, "node-a", "a" * 56), NodeSlot(1, "node-b"))
    assert notes.contacts == {"p1": Contact("gASVhandle", "b" * 32)}
    assert not ray_notes.read_notes(old.RAY / "journal.ray", "another").contacts, "actors end with their session"
