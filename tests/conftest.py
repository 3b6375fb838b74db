from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fleet import Fleet
from tests.kube.fixtures import cluster, kube_plane, kubelet, namespace, pytest_collection_modifyitems  # noqa: F401
from tests.plane import Plane

# Other tests run beside: how long an example takes says nothing.
settings.register_profile("muster", deadline=None)
settings.load_profile("muster")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """A control plane that serves."""
    made = Plane(tmp_path)
    made.serve()
    yield made
    made.close()
