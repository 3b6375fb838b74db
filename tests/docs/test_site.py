"""Does the documentation become a site that needs nobody else, with every page in reach?"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def pages_of(entries: Any) -> Iterator[str]:
    for entry in entries:
        for page in entry.values():
            if isinstance(page, str):
                yield page
            else:
                yield from pages_of(page)


def navigation() -> list[str]:
    """Return the pages that the navigation lists, in its order."""
    return list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a link or an anchor that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation_and_none_is_made_up() -> None:
    listed = navigation()
    written = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == written


def test_every_page_and_decision_becomes_a_page_that_the_others_lead_to(site: Path) -> None:
    made = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    wanted = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert wanted <= made
    index = (site / "index.html").read_text()
    assert {page for page in wanted - {"index.html"} if f'href="{page}"' not in index} == set()


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source)[^>]+src=\"(//|https?:)|<link[^>]+href=\"(//|https?:)")
    styled = re.compile(r"url\(['\"]?(//|https?:)|@import")
    foreign = [path.name for path in site.rglob("*.html") if loads.search(path.read_text())]
    foreign += [path.name for path in site.rglob("*.css") if styled.search(path.read_text())]
    assert foreign == []


def test_lists_code_and_tables_look_as_they_do_elsewhere(site: Path) -> None:
    scaling = (site / "scaling.html").read_text()
    assert re.search(r"<li><strong>target</strong> workers train together", scaling)
    assert "def survive(" in (site / "examples.html").read_text()
    assert "<table" in (site / "comparison.html").read_text()
