from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import prepared
from tests.fleet import Fleet
from tests.kube.fixtures import cluster, kube_plane, kubelet, namespace  # noqa: F401
from tests.kube.mallory import mallory  # noqa: F401
from tests.plane import Plane
from tests.sharing.ray_fixture import ray_outcomes  # noqa: F401
from tests.tiers import check_commands, processes, pytest_collection_modifyitems, pytest_runtest_protocol  # noqa: F401

check_commands()
prepared.install()

# A script's background job starts with SIGINT ignored, and what is ignored stays so in every process below it.
_PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}
for _number in signal.valid_signals() - _PYTHONS_OWN:
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# Other tests run beside: how long an example takes says nothing.
settings.register_profile("muster", deadline=None)
settings.load_profile("muster")


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    _close(made, request)


def _close(made: Fleet, request: pytest.FixtureRequest) -> None:
    """Of a test that failed, what its processes said is the first thing to look at."""
    made.close()
    if request.node.stash.get(_FAILED, False):
        print(made.last_words())


@pytest.fixture(scope="session")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    made = Plane(tmp_path_factory.mktemp("resident"))
    yield made
    made.close()


@pytest.fixture
def plane(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plane]:
    """A control plane that serves.

    With `@pytest.mark.shared` it is the one of all tests that leave it as they found it, but for their trainings; with
    `@pytest.mark.times(STALL_S="9")` it has other times than its own.
    """
    if request.node.get_closest_marker("shared"):
        shared: Plane = request.getfixturevalue("resident")
        shared.receive()
        yield shared
        if request.node.stash.get(_FAILED, False):
            print(shared.last_words())
        shared.tidy()
        return
    made = Plane(tmp_path)
    marked = request.node.get_closest_marker("times")
    made.serve(**(marked.kwargs if marked else {}))
    yield made
    _close(made, request)
