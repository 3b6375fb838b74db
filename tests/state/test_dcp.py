"""torch's distributed checkpoint with our reader and writer: is what is loaded what was saved, in any world?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

import muster
from muster.dcp import Reader, Writer
from muster.errors import InvalidRequest
from muster.state import dcp_metadata, disk
from tests.state.kept import keep

_isolate = vars(torch._C._distributed_c10d)["_set_thread_isolation_mode"]
pytestmark = [pytest.mark.torches, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def things(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return {
        "model": model.state_dict(),
        "odd": [torch.full((2,), value, dtype=torch.bfloat16), {"deep": torch.tensor(value)}],
        "empty": torch.empty(0, 3),
        "number": value,
        "text": {"a": f"{value}"},
    }


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    assert Reader(tmp_path).step is None
    for step in (3, 5, 7):
        save(things(step), storage_writer=Writer(step, tmp_path), no_dist=True)
    assert list(disk.steps(tmp_path, disk.DCP)) == [7, 5], "two are kept"
    for reader, value in ((Reader(tmp_path), 7), (Reader(tmp_path, step=5), 5)):
        now = things(0)
        load(now, storage_reader=reader, no_dist=True)
        assert reader.step == value
        assert str(now) == str(things(value))


def test_nothing_that_is_damaged_is_loaded(tmp_path: Path) -> None:
    save(things(3), storage_writer=Writer(3, tmp_path), no_dist=True)
    [[file]] = disk.steps(tmp_path, disk.DCP).values()
    good = file.read_bytes()
    for place in range(0, len(good), 97):
        file.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(CheckpointException):  # torch wraps what a rank raises
            load(things(0), storage_reader=Reader(tmp_path), no_dist=True)


def test_state_and_distributed_checkpoints_can_share_a_folder(tmp_path: Path) -> None:
    save(things(3), storage_writer=Writer(9, tmp_path), no_dist=True)
    keep(tmp_path, 1, a=1)
    assert muster.State(durable=tmp_path, a=0).restore() == 1
    assert Reader(tmp_path).step == 9


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a folder has to be named"):
        Writer(3)
    with pytest.raises(InvalidRequest, match="named by its number"):
        save({"a": 1}, checkpoint_id=tmp_path, storage_writer=Writer(3, tmp_path), no_dist=True)
    with pytest.raises(CheckpointException, match="no step was kept"):
        load({"a": 1}, storage_reader=Reader(tmp_path), no_dist=True)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"dcp":2}', b"[" * 100_000, b'{"dcp":1,"planner":1,"where":[],"state":{}}']
)
def test_what_is_no_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        dcp_metadata.read(data)


class Ranks:
    """A world whose ranks are threads."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def run(self, work: Callable[[int], None]) -> None:
        wrong: list[BaseException] = []
        _isolate(True)
        _install_threaded_pg()  # type: ignore[no-untyped-call]
        store = HashStore()

        def one(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=self._ranks, store=store)
                work(rank)
                dist.destroy_process_group()
            except BaseException as error:  # noqa: BLE001  # told below
                wrong.append(error)

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self._ranks)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60 if not wrong else 1)
        finally:
            _uninstall_threaded_pg()  # type: ignore[no-untyped-call]
            _isolate(False)
        if wrong:
            raise wrong[0]
        assert not any(thread.is_alive() for thread in threads)


WHOLE = torch.arange(7 * 4.0).view(7, 4)


def test_torchs_planners_bring_parts_to_a_world_of_another_size(tmp_path: Path) -> None:
    def spread(rank: int, ranks: int, value: torch.Tensor) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (ranks,))
        rows = value.chunk(ranks)
        part = rows[rank].clone() if rank < len(rows) else value[:0].clone()
        sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
        same = DTensor.from_local(value.clone(), mesh, [Replicate()], run_check=False)
        return {"table": {"x": sharded, "same": same}, "step": int(value[0, 1])}

    def kept(rank: int) -> None:
        save(spread(rank, 2, WHOLE), storage_writer=Writer(3, tmp_path))

    def loaded(ranks: int) -> Callable[[int], None]:
        def work(rank: int) -> None:
            now, expected = spread(rank, ranks, WHOLE * 0), spread(rank, ranks, WHOLE)
            load(now, storage_reader=Reader(tmp_path))
            assert torch.equal(now["table"]["x"].to_local(), expected["table"]["x"].to_local())
            assert torch.equal(now["table"]["same"].to_local(), WHOLE)
            assert now["step"] == 1

        return work

    Ranks(2).run(kept)
    for ranks in (3, 4, 1):
        Ranks(ranks).run(loaded(ranks))
