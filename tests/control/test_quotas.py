"""A quota that is exceeded, as a program sees it: how much there is, how much more was asked for, and the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import muster
from muster.errors import from_wire, to_wire
from tests.plane import Plane


@pytest.fixture
def limited(plane: Plane) -> Iterator[Plane]:
    quotas = plane.home / "quotas.json"
    quotas.write_text(json.dumps({"default": {"trainings": 1, "gpus": 3}}))
    yield plane
    quotas.unlink()


@pytest.mark.shared
@pytest.mark.scenario
def test_a_program_is_told_the_numbers(limited: Plane) -> None:
    training = limited.train(world=(2, 2, 4), resources={"gpus": 1}, suspend=True, force=True)
    with pytest.raises(muster.QuotaExceeded) as caught:
        training.scale(target=4)
    grown = caught.value
    assert (grown.resource, grown.current, grown.requested, grown.limit) == ("gpus", 2, 2, 3)
    with pytest.raises(muster.QuotaExceeded) as caught:
        limited.train("another")
    another = caught.value
    assert (another.resource, another.current, another.requested, another.limit) == ("trainings", 1, 1, 1)


def test_a_server_that_tells_no_numbers_is_understood() -> None:
    body = to_wire(muster.QuotaExceeded("too much"), "")
    body["error"]["details"] = {}
    found = from_wire(403, body)
    assert isinstance(found, muster.QuotaExceeded)
    assert (found.resource, found.current, found.requested, found.limit) == ("", None, None, None)
