"""Proofs of the run token: whose they are, for what, and that nothing said once or elsewhere is good again."""

from __future__ import annotations

import pytest

from muster.world import proofs, wire
from muster.world.proofs import Talk

TALK = Talk("run", "agent", "theirs", "ours", proofs.ends(("127.0.0.1", 5), ("127.0.0.1", 6)))


def test_each_side_knows_the_others_proof() -> None:
    for who in ("member", "coordinator"):
        assert proofs.is_proof(proofs.prove("token", who, TALK), "token", who, *TALK)


def test_a_proof_that_is_given_back_to_its_giver_proves_nothing() -> None:
    assert not proofs.is_proof(proofs.prove("token", "member", TALK), "token", "coordinator", *TALK)
    assert not proofs.is_proof(proofs.prove("token", "coordinator", TALK), "token", "member", *TALK)


@pytest.mark.parametrize("field", Talk._fields)
def test_a_proof_of_another_connection_run_or_kind_proves_nothing(field: str) -> None:
    other = TALK._replace(**{field: "another"})
    assert not proofs.is_proof(proofs.prove("token", "coordinator", other), "token", "coordinator", *TALK)


def test_what_is_proved_cannot_be_shifted_from_one_field_into_the_next() -> None:
    one, other = TALK._replace(challenge="a\0b", nonce="c"), TALK._replace(challenge="a", nonce="b\0c")
    assert proofs.prove("token", "member", one) != proofs.prove("token", "member", other)
    one, other = TALK._replace(challenge='a", "b', nonce="c"), TALK._replace(challenge="a", nonce='b", "c')
    assert proofs.prove("token", "member", one) != proofs.prove("token", "member", other)


def test_a_member_of_0_1_cannot_be_asked_for_the_coordinators_proof() -> None:
    """It hashes whatever it is given as a number, so its answer must be good for nothing else."""
    wanted = proofs.prove("token", "coordinator", TALK)
    asked = (
        f'["coordinator", "run", "agent", "theirs", "ours", "{TALK.ends}"]',
        "coordinator\0run\0agent\0theirs\0ours",
    )
    assert wanted not in {wire.proof("token", nonce, "run", "agent") for nonce in asked}
    assert wire.proof("token", "muster mutual proof") != wanted


@pytest.mark.parametrize("token", [None, "", "wrong"])
def test_without_the_token_nothing_is_a_proof(token: str | None) -> None:
    assert not proofs.is_proof(proofs.prove("token", "member", TALK), token or None, "member", *TALK)
    assert not proofs.is_proof("", None, "member", *TALK)
    assert not proofs.is_proof("\udc80", "token", "member", *TALK)
