"""Are muster's own files where they should be, whole, and nobody else's to read?"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from muster import files


def test_the_home_may_be_written_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.home({}) == tmp_path / ".muster"
    assert files.home({"MUSTER_HOME": "~/elsewhere"}) == tmp_path / "elsewhere"
    assert files.home({"MUSTER_HOME": "here"}) == Path.cwd() / "here"


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole_and_is_its_owners_alone(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "new" / "token"
    for text in ("one", "another"):
        files.write_private(path, text, durable=durable)
        assert path.read_text() == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["token"]


def test_a_home_that_is_a_link_can_be_written_durably(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    files.write_private(tmp_path / "home" / "token", "one", durable=True)
    assert (tmp_path / "disk" / "token").read_text() == "one"


def test_what_cannot_be_written_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "token"
    files.write_private(path, "one")
    with pytest.raises(UnicodeEncodeError):
        files.write_private(path, "\udc80" * 10)
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["token"]
