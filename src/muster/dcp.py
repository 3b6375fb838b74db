"""torch's distributed checkpoint over muster's storage.

    dcp.save(state_dict, storage_writer=muster.dcp.Writer(step))
    reader = muster.dcp.Reader()
    if reader.step is not None:
        dcp.load(state_dict, storage_reader=reader)

Under muster a step lies in the memory of the worker's agent, as that of `muster.State` does; with `folder`, and outside
muster, in files. Which part goes to which rank is decided by torch's planners, also in a world of another size.
"""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from muster.errors import InvalidRequest, NotFound
from muster.state import alone, content_hash, copying, dcp_metadata, disk, layout
from muster.state.keeper import AgentKeeping, Damaged, Line, Part
from muster.state.layout import Manifest, Piece
from muster.state.loading import tensor_of
from muster.state.talk import SOCKET_VARIABLE

TRIES = 3  # places that a piece is looked for in


@dataclass(frozen=True)
class _Place:
    """What the coordinator tells each rank."""

    rank: int
    ranks: int
    attempt: str


@dataclass(frozen=True)
class _Item:
    piece: Piece
    data: torch.Tensor


class Writer(StorageWriter):
    """Keeps one step. Other ranks write theirs first, and the coordinator last: then it counts."""

    def __init__(self, step: int, folder: str | os.PathLike[str] | None = None) -> None:
        self._step = step
        self._folder = Path(folder).absolute() if folder is not None else None
        self._line = _line()
        if self._line is None and self._folder is None:
            raise InvalidRequest("outside muster a folder has to be named: Writer(step, folder=…)")
        self._is_coordinator = False
        self._held: tuple[_Place, list[_Item]] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise InvalidRequest("a step is named by its number: Writer(step), without checkpoint_id")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise InvalidRequest("ranks have to write a step together: use_collectives=False cannot be used here")
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        attempt = disk.DCP + os.urandom(6).hex()
        return [replace(plan, storage_data=_Place(rank, len(plans), attempt)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        place: _Place = plan.storage_data
        items = [_item(one, planner.resolve_data(one)) for one in plan.items]
        if self._is_coordinator:
            self._held = place, items  # what all have written is known in the end
        else:
            self._write(place, items, b"")
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(one.index, item.piece.length, (place.rank, index))
                for index, (one, item) in enumerate(zip(plan.items, items, strict=True))
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._held is not None
        metadata.storage_data = {one.index: one.storage_data for each in results for one in each}
        place, items = self._held
        self._held = None
        self._write(place, items, dcp_metadata.write(metadata))
        if self._folder is not None:
            try:
                disk.drop_old(self._folder, place.attempt)
            except OSError as error:  # the step itself is written
                warnings.warn(f"muster.dcp: old steps in {self._folder} cannot be removed: {error}", stacklevel=2)

    def _write(self, place: _Place, items: list[_Item], rest: bytes) -> None:
        number = int(os.environ.get("MUSTER_ROUND", "0"))
        pieces, last = layout.placed([item.piece for item in items], len(rest))
        manifest = Manifest(place.rank, place.ranks, number, self._step, pieces, last, place.attempt)
        slot = None
        if self._line is not None:
            slot = _keeping(self._line).take(manifest.room)
            if slot is None and self._folder is None:
                raise NotFound("there is no memory for this step, and no folder is named")
        memory = slot.memory if slot is not None else torch.empty(manifest.room, dtype=torch.uint8)
        for piece, item in zip(pieces, items, strict=True):
            copying.view(memory, piece).copy_(item.data)
        copying.raw(memory, last)[:] = torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else torch.empty(0)
        sealed = manifest.with_hashes([content_hash.of(copying.raw(memory, piece)) for piece in manifest.every])
        if self._folder is not None:
            disk.write(self._folder, sealed, content_hash.memory_of(memory))
        if slot is not None:
            slot.seal(sealed)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _item(item: WriteItem, data: Any) -> _Item:
    """A piece has the place of a shard in its whole, so that others can read the file."""
    if item.type == WriteItemType.BYTE_IO:
        flat = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8) if data.getbuffer().nbytes else None
        tensor = flat if flat is not None else torch.empty(0, dtype=torch.uint8)
        return _Item(copying.piece_of(item.index.fqn, tensor), tensor)
    tensor = data.detach().resolve_conj().resolve_neg()
    piece = copying.piece_of(item.index.fqn, tensor)
    told = item.tensor_data
    if told is not None and item.type == WriteItemType.SHARD:
        begin = tuple(told.chunk.offsets)
        name = f"{item.index.fqn}@{','.join(map(str, begin))}"
        piece = replace(piece, name=name, whole=tuple(told.size), begin=begin)
    return _Item(piece, tensor)


class Reader(StorageReader):
    """The newest step that all ranks can have, or the one that is named. `step` is None if there is none.

    Raises StateUnusable if the folder cannot be read, or if it has steps and none is whole; `start_over` allows that.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, step: int | None = None, *, start_over: bool = False
    ) -> None:
        self._start_over = start_over
        self._line = _line()
        self._parts: dict[int, Part] = {}
        self._part_of, self.step = self._found(Path(folder).absolute() if folder is not None else None, step)

    def _found(self, folder: Path | None, wanted: int | None) -> tuple[Callable[[int], Part], int | None]:
        if self._line is not None:
            offer = self._line.offer(folder, 0.0)
            if offer.step and offer.ranks and wanted in (None, offer.step):
                return self._line.part, offer.step
        if folder is None:
            return _nothing, None
        listing = alone.read_patiently(folder, lambda: disk.look(folder, disk.DCP))
        for step, paths in listing.usable.items():
            if wanted in (None, step):
                return alone.Parts(paths), step
        if wanted is None:
            alone.check_beginning(folder, listing.unusable, self._start_over)
        return _nothing, None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise InvalidRequest("a step is named by its number: Reader(step=…), without checkpoint_id")

    def read_metadata(self, *args: Any, **more: Any) -> Metadata:  # were it called kwargs, torch would ask twice
        part = self._part(0)
        rank = next(
            (one for one in range(part.manifest.ranks) if self._part(one).manifest.rest.length), None
        )  # the coordinator's, nearly always rank 0's
        if rank is None:
            raise Damaged(f"step {self.step} has no metadata", "", 0)
        part = self._part(rank)
        return dcp_metadata.read(bytes(content_hash.memory_of(tensor_of(part, part.manifest.rest))))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._where: dict[MetadataIndex, tuple[int, int]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        at, data = (-1, -1), torch.empty(0)
        for item in sorted(plan.items, key=lambda item: self._where[item.storage_index]):
            if self._where[item.storage_index] != at:  # of each piece once
                at = self._where[item.storage_index]
                data = self._data(*at)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(bytes(content_hash.memory_of(data))))
                continue
            part = data[tuple(slice(b, b + n) for b, n in zip(item.storage_offsets, item.lengths, strict=True))]
            target = planner.resolve_tensor(item).detach()
            if target.shape != part.shape:
                raise InvalidRequest(
                    f"{item.storage_index.fqn}: {tuple(part.shape)} is kept, {tuple(target.shape)} wanted"
                )
            target.copy_(part)
            planner.commit_tensor(item, target)
        if self._line is not None:
            self._line.ask(do="restored", step=self.step)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _data(self, rank: int, index: int) -> torch.Tensor:
        """A damaged piece may be had from another worker: the agent knows."""
        for _ in range(TRIES - 1):
            try:
                return self._piece(rank, index)
            except Damaged as error:
                if self._line is None or not self._line.damaged(error):
                    raise
                del self._parts[rank]
        return self._piece(rank, index)

    def _piece(self, rank: int, index: int) -> torch.Tensor:
        part = self._part(rank)
        if not 0 <= index < len(part.manifest.pieces):
            raise Damaged(f"step {self.step} names a piece that rank {rank} does not have", "", 0)
        return tensor_of(part, part.manifest.pieces[index])

    def _part(self, rank: int) -> Part:
        if rank not in self._parts:
            self._parts[rank] = self._part_of(rank)
        return self._parts[rank]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _nothing(rank: int) -> Part:
    raise NotFound("no step was kept by muster.dcp.Writer: look at Reader().step first")


def _line() -> Line | None:
    path = os.environ.get(SOCKET_VARIABLE)
    return _connected(path, int(os.environ["RANK"]), int(os.environ["MUSTER_ROUND"])) if path else None


@functools.cache
def _connected(path: str, rank: int, number: int) -> Line:
    return Line(path, rank, number)


@functools.cache
def _keeping(line: Line) -> AgentKeeping:
    """Memory is mapped once for all steps."""
    return AgentKeeping(line)
