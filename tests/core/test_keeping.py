"""Which records can be believed?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import keeping

WORKER: dict[str, Any] = {
    "name": "demo-0",
    "uid": "u1",
    "namespace": "default",
    "training": "demo",
    "node": "",
    "startedAt": "2026-01-31T12:00:00+00:00",
    "gpus": [0, 1],
    "endedAt": None,
    "exitCode": None,
    "why": "",
    "lastWords": "",
    "reason": "",
}
TOKEN: dict[str, Any] = {"token": "t" * 32, "marks": {"command": "0123"}}
KEY: dict[str, Any] = {"uid": "u", "name": "demo", "digest": "d", "at": "2026-01-31T12:00:00.000Z"}

FINE: list[tuple[str, str, object]] = [
    ("worker", "u1/demo-0", WORKER),
    ("worker", "u1/demo-0", {**WORKER, "endedAt": "2026-01-31T12:00:01+00:00", "exitCode": 0, "pid": 7, "more": [1]}),
    ("token", "u1", TOKEN),
    ("token", "u1", {"token": "t" * 32}),
    ("run", "u1", {"round": 3}),
    ("mesh", "default/demo", {"namespace": "default", "training": "demo"}),
    ("control", "alive", {"at": "2026-01-31T12:00:00+00:00"}),
    ("idempotency", "default/k", KEY),
    ("of-a-newer-version", "k", {"any": "thing"}),
]
DOUBTFUL: list[tuple[str, str, object]] = [
    ("worker", "boom", {}),
    ("worker", "u1/demo-0", ""),
    ("worker", "u2/demo-0", WORKER),
    ("worker", "u1/demo-0", {**WORKER, "startedAt": "2026-01-31T12:00:00"}),
    ("worker", "u1/demo-0", {**WORKER, "endedAt": "yesterday"}),
    ("worker", "u1/demo-0", {**WORKER, "gpus": "01"}),
    ("worker", "u1/demo-0", {**WORKER, "gpus": 2}),
    ("worker", "u1/demo-0", {**WORKER, "pid": "seven"}),
    ("worker", "u1/demo-0", {**WORKER, "exitCode": "0"}),
    ("token", "u1", {}),
    ("token", "u1", {"token": ""}),
    ("token", "u1", {"token": None}),
    ("token", "u1", {"token": "t" * 32, "marks": ["command"]}),
    ("run", "u1", [["round", 3]]),
    ("mesh", "default/demo", {"namespace": "another", "training": "demo"}),
    ("control", "alive", {"at": 5}),
    ("idempotency", "default/k", {"name": "demo"}),
    ("of-a-newer-version", "k", []),
]


@pytest.mark.parametrize(("kind", "key", "value"), FINE)
def test_a_record_as_muster_writes_it_is_believed(kind: str, key: str, value: object) -> None:
    assert keeping.problem_with(kind, key, value) == ""


@pytest.mark.parametrize(("kind", "key", "value"), DOUBTFUL)
def test_a_record_that_nobody_could_use_is_not_believed(kind: str, key: str, value: object) -> None:
    assert keeping.problem_with(kind, key, value)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from([*WORKER, *TOKEN, *KEY, "at"])


@given(
    st.sampled_from([kind for kind, _, _ in FINE]), st.text(max_size=5), st.dictionaries(fields, anything) | anything
)
def test_whatever_a_record_holds_there_is_an_answer(kind: str, key: str, value: object) -> None:
    assert isinstance(keeping.problem_with(kind, key, value), str)
