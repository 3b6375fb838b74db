from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mesh import servers
from tests.mesh.servers import Server


@pytest.fixture(scope="session")
def real_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Etcd]:
    """One for all tests of a process; each uses keys of its own."""
    if servers.ETCD is None:
        pytest.skip(servers.NO_ETCD)
    with servers.etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["etcd", "embedded"])
def place(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Where keys live."""
    if request.param == "etcd":
        yield request.getfixturevalue("real_etcd")
    else:
        with servers.embedded() as server:
            yield server
