"""Are muster's own files where they should be, whole, and nobody else's to read?"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster import files
from tests.strangers import NOBODY, shared_place, stranger, two_users


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


# Places that all users share


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    with shared_place() as path:
        monkeypatch.setattr("tempfile.tempdir", str(path))
        yield path


def usual(place: Path) -> Path:
    return place / f"muster-{os.getuid()}"


def test_our_folder_there_is_ours_alone(place: Path) -> None:
    assert files.scratch("logs", "demo") == usual(place) / "logs" / "demo"
    folders = (usual(place), usual(place) / "logs", usual(place) / "logs" / "demo")
    assert [stat.S_IMODE(one.stat().st_mode) for one in folders] == [0o700] * 3
    assert files.scratch("logs") == usual(place) / "logs", "and is used again"


def test_one_that_was_left_open_is_closed(place: Path) -> None:
    usual(place).mkdir()
    usual(place).chmod(0o777)
    assert files.scratch() == usual(place)
    assert stat.S_IMODE(usual(place).stat().st_mode) == 0o700


ATTACKS = {
    "a folder with a link in it": "os.mkdir(name); os.symlink(secret, name + '/logs')",
    "an open folder with folders in it": "os.makedirs(name + '/logs/demo')",
    "a link": "os.symlink(secret, name)",
    "a link to nowhere": "os.symlink(secret + '/new', name)",
    "a link to itself": "os.symlink(name, name)",
    "a file": "open(name, 'w').close()",
    "a pipe": "os.mkfifo(name)",
}


@two_users
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_name_that_another_user_took_first_is_not_used(place: Path, tmp_path: Path, attack: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    done = stranger(f"_, name, secret = sys.argv; {attack}", usual(place), secret)
    assert done.returncode == 0, done.stderr
    ours = files.scratch("logs", "demo")
    assert ours.is_relative_to(place) and not ours.is_relative_to(usual(place))
    assert ours.relative_to(place).parts[0].startswith(f"muster-{os.getuid()}-"), "another, that nobody can guess"
    assert ours.stat().st_uid == os.getuid() and not list(secret.iterdir())


@two_users
@pytest.mark.parametrize("attack", ["os.symlink(secret, name)", "os.mkdir(name)"], ids=["link", "folder"])
def test_nor_is_what_another_user_put_into_ours_when_it_was_open(place: Path, tmp_path: Path, attack: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    usual(place).mkdir()
    usual(place).chmod(0o777)
    assert stranger(f"_, name, secret = sys.argv; {attack}", usual(place) / "logs", secret).returncode == 0
    assert not files.scratch("logs", "demo").is_relative_to(usual(place))
    assert not list(secret.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_where_others_may_rename_what_we_make_we_make_nothing(place: Path, tmp_path: Path, mode: int) -> None:
    place.chmod(mode)
    os.chown(place, -1, os.getgid() + 1) if os.geteuid() == 0 else None
    if mode == 0o775 and os.geteuid() != 0:
        pytest.skip("only root can give a folder to a group of others")
    assert files.scratch("logs") == tmp_path / "home" / "scratch" / f"muster-{os.getuid()}" / "logs"
    assert files.temporary().startswith(str(tmp_path / "home" / "scratch"))
    assert list(place.iterdir()) == []


def test_a_container_with_one_open_volume_and_no_home_has_that(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.chmod(0o777)
    (tmp_path / "file").touch()
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "file" / "home"))
    assert files.scratch("logs") == usual(place) / "logs"


@two_users
def test_a_temporary_folder_of_another_user_is_not_trusted(place: Path, tmp_path: Path) -> None:
    os.chown(place, NOBODY, NOBODY)
    assert files.scratch() == tmp_path / "home" / "scratch" / "muster-0"


# The home, where what is written is believed


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_home_that_others_could_write_is_closed_to_them(tmp_path: Path, mode: int) -> None:
    (home := tmp_path / "home").mkdir()
    home.chmod(mode)
    files.own_folder(home)
    assert not home.stat().st_mode & 0o022


@two_users
@pytest.mark.parametrize("name", ["tokens.json", "muster.db", "logs"])
def test_what_another_user_has_put_into_a_home_is_not_believed_now_or_later(name: str) -> None:
    with shared_place() as home:
        assert stranger("os.mkdir(sys.argv[1])", home / name).returncode == 0
        for _ in range(2):
            with pytest.raises(PermissionError, match=f"not yours.*{name}"):
                files.own_folder(home)


@two_users
def test_a_home_of_another_user_or_one_of_roots_that_all_can_write_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_place() as home:
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        with pytest.raises(PermissionError, match="may be written by others; choose a folder in it"):
            files.own_folder(home)
        monkeypatch.undo()
        os.chown(home, NOBODY, -1)
        with pytest.raises(PermissionError, match="belongs to another user"):
            files.own_folder(home)


def test_a_pipe_in_the_place_of_a_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PermissionError, match="not a regular file"):
        files.read_text(tmp_path / "pipe")
    (tmp_path / "file").write_text("words")
    (tmp_path / "link").symlink_to("file")
    assert files.read_text(tmp_path / "link") == "words"
