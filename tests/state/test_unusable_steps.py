"""Unusable steps in a durable folder: when they are set aside, when a start is refused, and what is removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import muster
from muster.core.world import last_words
from muster.dcp import Reader, Writer
from muster.errors import StateUnusable
from muster.state import alone, disk, layout, leaves
from muster.state.keeper import Offer
from muster.state.layout import Manifest
from tests.state.kept import ALWAYS, commit, keep


def kept(folder: Path, *steps: int) -> None:
    state = muster.State(durable=folder, durable_every=ALWAYS, value=0)
    for step in steps:
        state["value"] = step
        commit(state, step)


def folder_of(folder: Path, step: int) -> Path:
    return disk.steps(folder)[step][0].parent


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Beginning again ---------------------------------------------------------------------------------


def flip_all(folder: Path) -> None:
    for paths in disk.steps(folder).values():
        flip(paths[0])


def lose_files(folder: Path) -> None:
    """Remove the file of one rank from every step, as after an interrupted copy."""
    for where in folder.glob("step-*"):
        (where / disk.file_name(0, 1)).rename(where / disk.file_name(0, 2))


def tear_all(folder: Path) -> None:
    for paths in disk.steps(folder).values():
        os.truncate(paths[0], 100)


def set_all_aside(folder: Path) -> None:
    for paths in disk.steps(folder).values():
        disk.set_aside(paths[0].parent, "damaged")


@pytest.mark.parametrize("harm", [flip_all, lose_files, tear_all, set_all_aside])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_folder_whose_steps_are_all_unusable_is_refused_until_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    kept(tmp_path, 1, 2, 3)
    harm(tmp_path)
    steps = sorted(tmp_path.glob("step-*"))
    for _ in range(2):
        with pytest.raises(StateUnusable, match=r"no step in .* can be used.* set MUSTER_STATE_START_OVER=1"):
            muster.State(durable=tmp_path, value=0).restore()
    before = content(tmp_path)
    state = muster.State(durable=tmp_path, start_over=True, value=0)
    with pytest.warns(UserWarning, match="training begins at step 0"):
        assert state.restore() == 0
    monkeypatch.setenv(alone.START_OVER, "1")
    state = muster.State(durable=tmp_path, durable_every=ALWAYS, value=0)
    assert state.restore() == 0
    commit(state, 1)
    after = content(tmp_path)
    assert {name: after.get(name) for name in before} == before, "the next durable write removes nothing of them"
    assert set(steps) < set(tmp_path.glob("step-*"))


def test_a_write_that_was_killed_before_any_file_was_whole_is_no_step(tmp_path: Path) -> None:
    where = tmp_path / "step-000000000003-abc"
    where.mkdir()
    (where / f".{disk.file_name(0, 1)}.123").write_bytes(b"half")
    assert muster.State(durable=tmp_path, value=0).restore() == 0


def test_a_reader_of_distributed_checkpoints_refuses_it_too(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"a": torch.ones(2)}, storage_writer=Writer(3, tmp_path), no_dist=True)
    [[file]] = disk.steps(tmp_path, disk.DCP).values()
    file.rename(file.with_name(disk.file_name(0, 2)))
    with pytest.raises(StateUnusable, match="it has 1 of its 2 files"):
        Reader(tmp_path)
    assert Reader(tmp_path, start_over=True).step is None


# What sets a step aside, and what does not -------------------------------------------------------


class Settings:
    pass


def test_a_class_that_is_not_allowed_refuses_the_start_and_sets_nothing_aside(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="could not be read again"):
        keep(tmp_path, thing=Settings())
    before = content(tmp_path)
    with pytest.raises(StateUnusable, match=r"is whole, but this program cannot use it: .*add_safe_globals"):
        muster.State(durable=tmp_path, thing=None).restore()
    assert content(tmp_path) == before
    with torch.serialization.safe_globals([Settings]):
        assert muster.State(durable=tmp_path, thing=None).restore() == 1


def test_a_step_of_another_version_refuses_the_start_and_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(layout, "FORMAT", layout.FORMAT + 1)
        kept(tmp_path, 1, 2)
    before = content(tmp_path)
    with pytest.raises(StateUnusable, match=rf"it has format {layout.FORMAT + 1}, and this version"):
        muster.State(durable=tmp_path, value=0).restore()
    assert content(tmp_path) == before


def test_a_type_of_numbers_that_this_torch_lacks_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, weights=torch.ones(3, dtype=torch.bfloat16))
    before = content(tmp_path)
    with monkeypatch.context() as older:
        older.delattr(torch, "bfloat16")
        with pytest.raises(muster.InvalidRequest, match=r"'bfloat16', which torch .* lacks"):
            muster.State(durable=tmp_path, weights=torch.ones(3)).restore()
    assert content(tmp_path) == before


def test_the_newest_step_that_lacks_a_file_is_told_of(tmp_path: Path) -> None:
    kept(tmp_path, 1, 2)
    newest = folder_of(tmp_path, 2)
    (newest / disk.file_name(0, 1)).rename(newest / disk.file_name(1, 2))
    with pytest.warns(UserWarning, match="goes on from step 1, because .* cannot be used: it has 1 of its 2 files"):
        assert muster.State(durable=tmp_path, value=0).restore() == 1


def test_a_step_that_a_full_disk_cannot_describe_is_set_aside_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path, 1, 2)
    newest = folder_of(tmp_path, 2)
    flip(newest / disk.file_name(0, 1))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "replace_text", full)
    with pytest.warns(UserWarning, match="The step is set aside"):
        assert muster.State(durable=tmp_path, value=0).restore() == 1
    assert list(disk.steps(tmp_path)) == [1]


def test_a_rank_without_the_folder_does_not_begin_where_others_go_on_from_disk(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        muster.State(value=0)._from_disk(Offer(5))
    assert "goes on from step 5 on disk, but this rank has no durable folder" in capsys.readouterr().err


@pytest.mark.parametrize("is_there", [True, False], ids=["an empty folder", "no folder"])
def test_a_folder_without_the_steps_that_the_run_wrote_is_refused_until_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    folder = tmp_path / "kept"
    if is_there:
        folder.mkdir()
    offer = Offer(None, durable_step=73)
    with pytest.raises(StateUnusable, match=r"kept has no steps, but this run has written step 73") as refused:
        muster.State(durable=folder, value=0)._from_disk(offer)
    assert alone.START_OVER in str(refused.value)[: last_words.LONGEST - 40]
    assert folder.exists() == is_there
    with pytest.warns(UserWarning, match="training begins at step 0"):
        assert muster.State(durable=folder, start_over=True, value=0)._from_disk(offer) == 0
    monkeypatch.setenv(alone.START_OVER, "1")
    with pytest.warns(UserWarning, match="training begins at step 0"):
        assert muster.State(durable=folder, value=0)._from_disk(offer) == 0


def test_an_older_step_is_used_although_the_run_has_written_a_newer_step(tmp_path: Path) -> None:
    kept(tmp_path, 1)
    assert muster.State(durable=tmp_path, value=0)._from_disk(Offer(None, durable_step=73)) == 1


# What is removed ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_that_was_set_aside_is_neither_removed_nor_counted(tmp_path: Path) -> None:
    kept(tmp_path, 1, 2, 3)
    aside = folder_of(tmp_path, 3)
    flip(aside / disk.file_name(0, 1))
    state = muster.State(durable=tmp_path, durable_every=ALWAYS, value=0)
    assert state.restore() == 2
    for step in (3, 4, 5, 6):
        commit(state, step)
        assert list(disk.steps(tmp_path)) == [step, step - 1]
        assert {path.name for path in aside.iterdir()} == {"damaged.txt", "index.json", disk.file_name(0, 1)}


def write(folder: Path, step: int, rank: int, ranks: int, attempt: str) -> None:
    rest = leaves.take_apart({"subjects": {}})[0]
    manifest = Manifest(rank, ranks, 0, step, *layout.placed([], len(rest)), attempt=attempt)
    disk.write(folder, manifest, memoryview(rest))


def test_a_step_that_lacks_files_stays_until_two_whole_ones_are_newer(tmp_path: Path) -> None:
    """A file that another machine wrote a moment ago may be missing in this machine's view of the folder."""
    write(tmp_path, 5, 0, 2, "before")
    for step in (4, 5, 6):
        write(tmp_path, step, 0, 1, "now")
        disk.drop_old(tmp_path, "now")
        assert (tmp_path / "step-000000000005-before").exists()
    write(tmp_path, 7, 0, 1, "now")
    disk.drop_old(tmp_path, "now")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000006-now", "step-000000000007-now"]


def test_attempts_that_never_finish_a_step_do_not_fill_the_disk(tmp_path: Path) -> None:
    for number in range(9):
        write(tmp_path, 5 + number, 0, 2, f"a{number}")
        disk.drop_old(tmp_path, f"a{number}")
    assert len(list(tmp_path.iterdir())) <= 2 * disk.KEEP


def test_a_step_that_was_just_written_stays_beside_newer_ones(tmp_path: Path) -> None:
    for step, attempt in ((100, "dcpa"), (200, "dcpb"), (50, "dcpc")):
        write(tmp_path, step, 0, 1, attempt)
        disk.drop_old(tmp_path, attempt)
    assert list(disk.steps(tmp_path, disk.DCP)) == [200, 100, 50]


def test_nothing_is_removed_from_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, 0, 1, "now")
    real, before = os.listdir, content(tmp_path)

    def stale(path: Path) -> list[str]:
        if "4-now" in str(path):
            raise OSError(116, "Stale file handle")
        return real(path)

    monkeypatch.setattr(os, "listdir", stale)
    with pytest.raises(OSError, match="Stale"):
        disk.drop_old(tmp_path, "now")
    monkeypatch.undo()
    assert content(tmp_path) == before


def test_a_link_to_a_disk_that_is_not_mounted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "PAUSES_S", ())
    (tmp_path / "mount").symlink_to("nowhere")
    with pytest.raises(StateUnusable, match="The target of this link does not exist"):
        muster.State(durable=tmp_path / "mount" / "kept", value=0).restore()
    assert muster.State(durable=tmp_path / "new" / "kept", value=0).restore() == 0


def test_a_disk_that_fails_for_a_moment_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, 1)
    monkeypatch.setattr(alone, "PAUSES_S", (0.0, 0.0))
    real, failures = os.preadv, [5, 116]

    def flaky(*args: Any) -> int:
        if failures:
            raise OSError(failures.pop(), "for a moment")
        return real(*args)

    monkeypatch.setattr(os, "preadv", flaky)
    with pytest.warns(UserWarning, match="cannot be read now; trying again"):
        assert muster.State(durable=tmp_path, value=0).restore() == 1


def test_what_to_do_stands_within_the_part_of_a_message_that_a_run_shows(tmp_path: Path) -> None:
    folder = tmp_path / ("f" * 60)
    unusable = {folder / f"step-{number:012d}-abc": "torn " * 30 for number in range(9)}
    with pytest.raises(StateUnusable) as refused:
        alone.check_beginning(folder, unusable, start_over=False)
    assert alone.START_OVER in str(refused.value)[: last_words.LONGEST - 40]
    told = str(alone.unreadable(folder, OSError(5, "Input/output error", str(folder / "step-000000000001-abc" / "x"))))
    assert "Start again" in told[: last_words.LONGEST - 40] and "step-000000000001-abc" in told
