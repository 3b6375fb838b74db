from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.sdk.client import Client
from muster.sdk.find import Search
from tests.sdk.scripted import Caller, House, Plane, a_training

STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))


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


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose daemons are ended with the test."""
    made = tmp_path / "home"
    yield made
    for pid in started_in(made):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def started_in(home: Path) -> list[int]:
    path = home / "starts"
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []
