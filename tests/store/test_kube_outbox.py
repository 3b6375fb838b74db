"""What an object carries for the journal: which of it may be taken? Whoever writes the object may write anything."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.ports import Record, Write
from muster.store.kube_outbox import LARGEST, OUTBOX, STATUS_OUTBOX, FoundOutbox, Outbox, Owner, Seal, outboxes, strange
from muster.types.codec import to_wire
from muster.types.event import Event
from muster.types.training import REQUEST, Key

Json = dict[str, Any]
KEY = Key("research", "demo")
SEAL, ANOTHER = Seal(b"k" * 32), Seal(b"o" * 32)
KEPT = Record("idempotency", "research/k", {"uid": "r1", "name": "demo", "digest": "d", "at": "2026-01-31T12:00:00Z"})
BOX = Outbox("m1", Write(events=(Event("Created", "ann submitted it", actor="ann"),), records=(KEPT,)))


def an_object(
    annotation: str = "", status: str = "", *, name: str = "demo", uid: str = "u1", request: str = ""
) -> Json:
    notes = ({OUTBOX: annotation} if annotation else {}) | ({REQUEST: request} if request else {})
    about = {"namespace": "research", "name": name, "uid": uid, "annotations": notes or None}
    return {"metadata": about, "status": {STATUS_OUTBOX: status} if status else None}


def found(item: Json, seal: Seal = SEAL) -> FoundOutbox:
    (only,) = outboxes(item, seal)
    return only


def sealed(box: Outbox = BOX, seal: Seal = SEAL, **owner: str) -> str:
    return seal.close(box, Owner(KEY, **(owner or {"uid": "u1"})))


def test_what_was_sealed_for_an_object_is_taken_from_it() -> None:
    for item in (an_object(sealed()), an_object(status=sealed()), an_object(sealed(request="r1"), request="r1")):
        assert found(item).wrong == "" and found(item).outbox == BOX
    assert len(list(outboxes(an_object(sealed(), sealed()), SEAL))) == 2
    assert not list(outboxes(an_object(), SEAL))


# As it was written before there was a record of it.
LITERAL = (
    "b54b46d568a9cffd54e7bf5dbd3b6bc081fc39dcf1cd17f45e661abf4538b175."
    '{"mark":"m1","events":[{"reason":"Created","message":"ann submitted it","type":"Normal","actor":"ann","data":{},'
    '"namespace":"","training":"","uid":"","id":0}],"records":[["idempotency","research/k",{"uid":"r1","name":"demo",'
    '"digest":"d","at":"2026-01-31T12:00:00Z"}],["idempotency","research/old",null]]}'
)


def test_it_is_written_and_read_as_it_always_was() -> None:
    box = replace(BOX, write=replace(BOX.write, records=(KEPT, Record("idempotency", "research/old", None))))
    assert sealed(box) == LITERAL
    assert found(an_object(LITERAL)).outbox == box and found(an_object(LITERAL)).wrong == ""


def test_a_seal_is_for_one_object_one_key_and_these_words() -> None:
    text = sealed()
    for wrong in (
        found(an_object(text, uid="u2")),
        found(an_object(text, name="another")),
        found(an_object(text), ANOTHER),
        found(an_object(text.replace("ann", "bob"))),
        found(an_object(text[:-1])),
        found(an_object(text[65:])),
        found(an_object(text[1:])),
        found(an_object(sealed(request="r1"), request="r2")),
        found(an_object(sealed(request="r1"))),
        found(an_object(sealed(request="r1"), uid="r1")),
        found(an_object("é" * 64 + text[64:])),
    ):
        assert wrong.wrong == "it does not carry this control plane's seal"


def test_what_has_no_owner_is_not_sealed() -> None:
    assert SEAL.close(BOX, Owner(KEY)) == "" and SEAL.close(None, Owner(KEY, "u1")) == ""
    assert not SEAL.is_on(f"{SEAL._mac('{}', Owner(KEY))}.{{}}", Owner(KEY))


def test_more_than_an_object_should_carry_is_neither_sealed_nor_looked_at() -> None:
    large = Outbox("m1", Write(events=(Event("Created", "x" * LARGEST),)))
    assert sealed(large) == ""
    assert "characters" in found(an_object("x" * (LARGEST + 100))).wrong


FORGED: list[str] = [
    "}{",
    "[]",
    "null",
    '"text"',
    "0",
    "[" * 30_000,
    '{"mark":' * 8_000,
    "1" * 60_000,
    '{"mark": 1, "events": {}, "records": {}}',
    '{"mark": "m", "events": [5], "records": []}',
    '{"mark": "m", "events": [{"reason": "Created", "at": "0000"}], "records": []}',
    '{"mark": "m", "events": [], "records": [5]}',
    '{"mark": "m", "events": [], "records": [[["a"], {}, 5]]}',
    '{"mark": "\\ud800", "events": [{"reason": "\\ud800"}], "records": []}',
    '{"mark": "m", "events": [], "records": [["worker", "boom", {}]]}',
    "0" * 64 + "." + '{"mark": "m", "events": [], "records": []}',
    "." * 65,
    "\u2028💥",
]


@pytest.mark.parametrize("text", FORGED, ids=range(len(FORGED)))
def test_what_was_made_up_is_set_aside(text: str) -> None:
    for item in (an_object(text), an_object(status=text)):
        assert found(item).wrong
        assert (
            found(item).mark == found(item).mark != found({**item, "metadata": {**item["metadata"], "uid": "u2"}}).mark
        )


@given(st.text(max_size=200))
def test_whatever_stands_there_it_is_not_taken(text: str) -> None:
    assert all(one.wrong for one in outboxes(an_object(text, text), SEAL))


def test_what_was_sealed_and_cannot_be_read_is_set_aside() -> None:
    for text in ("[" * 30_000, "{}", '{"mark": "m"}'):
        carried = f"{SEAL._mac(text, Owner(KEY, 'u1'))}.{text}"
        assert found(an_object(carried)).wrong == "it cannot be read"


# Beyond the seal ---------------------------------------------------------------------------------

OWNER = Owner(KEY, "u1")


def test_entries_of_ones_own_may_travel() -> None:
    own = Event("Edited", namespace="research", training="demo", uid="u1")
    assert strange(Write(events=(own, Event("Edited")), records=(KEPT, replace(KEPT, value=None))), OWNER) == ""


@pytest.mark.parametrize(
    "write",
    [
        Write(events=(Event("Edited", namespace="another"),)),
        Write(events=(Event("Edited", training="another"),)),
        Write(events=(Event("Edited", uid="another"),)),
        Write(events=(Event("WorkerStarted", data={"worker": "demo-0", "gpus": 8}),)),
        Write(events=(Event("WorkerExited", data={"worker": "demo-0", "gpus": 8}),)),
        Write(events=(Event("JournalTrimmed", data={"entries": 1, "workers": 1, "workerSeconds": 1e9}),)),
        Write(records=(Record("token", "u1", {"token": "t" * 32}),)),
        Write(records=(Record("worker", "u1/demo-0", None),)),
        Write(records=(Record("run", "u1", {}),)),
        Write(records=(Record("idempotency", "another/k", KEPT.value),)),
        Write(records=(Record("idempotency", "research/k", {}),)),
    ],
    ids=str,
)
def test_all_else_never_travels(write: Write) -> None:
    assert strange(write, OWNER)
    told: Json = {"mark": "m", "events": [to_wire(one) for one in write.events]}
    told["records"] = [[one.kind, one.key, one.value] for one in write.records]
    text = json.dumps(told)
    assert found(an_object(f"{SEAL._mac(text, OWNER)}.{text}")).wrong, "even with a seal"


def test_what_never_travels_is_left_out_before_it_is_sealed() -> None:
    swept = Record("idempotency", "another/k", None)
    box = found(an_object(sealed(replace(BOX, write=replace(BOX.write, records=(swept, KEPT)))))).outbox
    assert box is not None and box.write.records == (KEPT,)
