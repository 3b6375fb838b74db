"""Fixtures for tests on a real cluster. A test that asks for one of them gets the mark `kube` (tests/tiers.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube import network
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests of a process, in a network of its own; each test works in a namespace of its own."""
    network.isolate()
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """New for each test, and deleted after it."""
    made = cluster.new_namespace()
    yield made
    cluster.drop_namespace(made)


@pytest.fixture
def kubelet(cluster: Cluster) -> Iterator[TestKubelet]:
    """One node, `node-1`."""
    made = TestKubelet(cluster)
    yield made
    made.close()


@pytest.fixture
def kube_plane(tmp_path: Path, cluster: Cluster, namespace: str, kubelet: TestKubelet) -> Iterator[KubePlane]:
    """A control plane that serves, and a node for its workers."""
    made = KubePlane(tmp_path, cluster, namespace)
    made.serve()
    yield made
    made.close()
    kubelet.no_process_left()
