"""Who may have GPUs: never more than there are, in order, and always with a reason."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.training.admission import Claim, Grant, admit, backend_of
from muster.types.training import Key, Spec, Uid

START = datetime(2026, 1, 1, tzinfo=UTC)


def a_claim(name: str, need: int = 1, *, gpus: int = 1, age: int = 0, **known: object) -> Claim:
    values: dict[str, object] = {"min": need, "wanted": need, "gpus_each": gpus} | known
    return Claim(Key("default", name), Uid(name), START - timedelta(seconds=age), **values)  # type: ignore[arg-type]


def granted(claims: list[Claim], gpus: int) -> dict[str, Grant]:
    return {str(uid): grant for uid, grant in admit(claims, gpus).items()}


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Claim], int]:
    total = draw(st.integers(0, 8))
    claims, free = [], total
    for index in range(draw(st.integers(0, 6))):
        each, least = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        admitted = draw(st.booleans())
        room = free // each if each else 3
        have = draw(st.integers(0, min(room, least + 2))) if admitted else 0
        free -= have * each
        more = {"wanted": least + draw(st.integers(0, 2)), "have": have, "admitted": admitted}
        priority = draw(st.integers(-1, 1))
        claims.append(a_claim(f"t{index}", least, gpus=each, age=draw(st.integers(0, 3)), priority=priority, **more))
    return claims, total


@given(crowds())
def test_no_gpu_is_given_twice_and_nobody_loses_what_it_holds(crowd: tuple[list[Claim], int]) -> None:
    claims, total = crowd
    grants = granted(claims, total)
    assert set(grants) == {str(claim.uid) for claim in claims}
    given_away = sum(max(grants[claim.uid].workers, claim.have) * claim.gpus_each for claim in claims)
    assert given_away <= total
    for claim in claims:
        grant = grants[claim.uid]
        assert grant.workers >= claim.have or claim.gpus_each == 0
        assert grant.message
        if claim.admitted or claim.gpus_each == 0:
            assert grant.admitted
        if grant.admitted and not claim.admitted and claim.gpus_each:
            assert grant.workers >= claim.min


@given(crowds())
def test_nobody_new_passes_one_that_could_fit_and_is_before_it(crowd: tuple[list[Claim], int]) -> None:
    claims, total = crowd
    grants = granted(claims, total)
    ordered = sorted(claims, key=lambda claim: (-claim.priority, claim.created_at, str(claim.key)))
    waits = False
    for claim in ordered:
        if claim.gpus_each == 0 or claim.admitted:
            continue
        if not grants[claim.uid].admitted and claim.min * claim.gpus_each <= total:
            waits = True
        elif grants[claim.uid].admitted:
            assert not waits, f"{claim.key} passed one that waits"


def test_a_refusal_names_what_is_missing_and_who_holds_it() -> None:
    grants = granted([a_claim("holder", have=3, wanted=3, admitted=True, age=5), a_claim("new", 2)], 4)
    assert not grants["new"].admitted
    assert grants["new"].message == "needs 2 GPUs (2 workers × 1), 1 of 4 free; held by default/holder (3)"


def test_what_can_never_fit_holds_nobody_back() -> None:
    grants = granted([a_claim("huge", 9, age=5), a_claim("small", 1)], 4)
    assert not grants["huge"].admitted and "can never start" in grants["huge"].message
    assert grants["small"].admitted


def test_a_lost_worker_is_replaced_before_anyone_new_comes_in() -> None:
    hurt = a_claim("hurt", 2, have=1, admitted=True, priority=-5)
    grants = granted([a_claim("new", 1, priority=5), hurt], 2)
    assert grants["hurt"].workers == 2 and not grants["new"].admitted


@pytest.mark.parametrize(
    ("named", "served", "meant"),
    [
        ("local", ["local"], "local"),
        ("local", ["kube"], "kube"),
        ("local", ["kube", "local"], "local"),
        ("local", ["kube", "moon"], "local"),
        ("moon", ["kube"], "moon"),
        ("local", [], "local"),
    ],
)
def test_who_did_not_choose_a_backend_means_the_only_one(named: str, served: list[str], meant: str) -> None:
    assert backend_of(Spec(backend=named), served) == meant
