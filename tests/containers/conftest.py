"""What do tests in real containers share? `make test-containers` runs them as root; elsewhere they are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.containers import cgroups, lab
from tests.containers.installation import Installation, Trained
from tests.kube import binaries


def why_not() -> str:
    """What the lab lacks here; nothing: it can be started."""
    if os.geteuid():
        return "a lab of real nodes needs root"
    if lacking := [name for name in lab.TOOLS if shutil.which(name) is None]:
        return f"{', '.join(lacking)} not installed: make test-containers does that"
    if lacking := sorted(cgroups.missing()):
        return f"kubelets of this version need control groups of version 1, here without {', '.join(lacking)}"
    return ""


@pytest.fixture(scope="session")
def real() -> Iterator[lab.Lab]:
    """One for all tests: two nodes."""
    if reason := why_not():
        pytest.skip(reason)
    try:
        made = lab.open_lab()
    except binaries.NotFound as problem:
        pytest.skip(str(problem))
    yield made
    made.close()


@pytest.fixture(scope="session")
def installation(real: lab.Lab) -> Installation:
    """Installed once; a test that kills some of it waits until it is whole again."""
    return Installation(real)


@pytest.fixture
def installed(installation: Installation) -> Iterator[Installation]:
    """Whole before and after, with a replica on each node."""
    installation.spread()
    yield installation
    installation.lab.heal()
    installation.until_serving()


@pytest.fixture
def trained(installed: Installation) -> Iterator[Trained]:
    """A training, to be submitted, in a namespace of its own."""
    namespace = installed.lab.new_namespace()
    made = Trained(installed, namespace)
    yield made
    made.lab.heal()
    made.kubectl("delete", "trainings", "--all", "--timeout=90s")
    installed.lab.drop_namespace(namespace)
