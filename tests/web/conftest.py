"""A real Chromium for tests of the page. Where there is none, they are skipped and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.web.pages import Visitor

CHROMIUM = shutil.which("chromium")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("web"))  # one browser serves them all


@pytest.fixture(scope="module")  # not longer: while it is there, its thread has a running event loop
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """Somebody who looks at the page. At the end nothing may have gone wrong, and nothing foreign been asked for."""
    made = Visitor(browser)
    yield made
    made.leave()
