from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.sdk.client import Client
from muster.sdk.find import Search
from tests.sdk.scripted import Caller, House, Plane, a_training


@pytest.fixture(params=["sync", "async"])
def caller(request: pytest.FixtureRequest) -> Caller:
    return Caller(request.param)


@pytest.fixture
def plane() -> Plane:
    made = Plane()
    made.put(a_training())
    return made


@pytest.fixture
def house(plane: Plane, tmp_path: Path) -> Iterator[House]:
    made = House(plane, tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(house: House, tmp_path: Path) -> Iterator[Client]:
    """It finds the house by its context file; there is nothing that it could start."""
    with Client(search=Search(tmp_path, daemon=("/bin/false",))) as made:
        yield made
