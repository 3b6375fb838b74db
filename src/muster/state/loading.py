"""How do kept pieces become the tensors of this rank, in this world, on this device? Each is checked first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from muster.errors import InvalidRequest
from muster.state import content_hash, copying, device, shards
from muster.state.keeper import Damaged, Part
from muster.state.layout import Piece
from muster.state.subjects import Subjects, template_for


class Loader:
    """The state that a world of `ranks` has kept, for one rank of a world of `now` ranks."""

    def __init__(
        self, part_of: Callable[[int], Part], ranks: int, rank: int, subjects: Subjects, now: int | None = None
    ) -> None:
        self._part_of = part_of
        self._ranks = ranks
        self._subjects = subjects
        self._templates = subjects.templates()
        self._parts: dict[int, Part] = {}
        self._named: dict[int, dict[str, Piece]] = {}
        self._upload = device.Upload()
        self._base = self._part(rank if rank < ranks else 0)
        wanted = (piece for piece in self._base.manifest.pieces if self._goes_up(piece))
        self._upload.expect((*self._base.place(piece), piece.length) for piece in wanted)
        self._near = rank * ranks / max(now or ranks, 1)  # whose parts in the world of then are like ours of now

    def _part(self, rank: int) -> Part:
        if rank not in self._parts:
            self._parts[rank] = self._part_of(rank)
        return self._parts[rank]

    def finish(self) -> None:
        """All that is under way has come, and is what it should be."""
        if wrong := self._upload.damaged():
            what, total, length = wrong
            raise Damaged(f"{what} is damaged", total, length)

    def rest(self) -> bytes:
        return bytes(checked(self._base, self._base.manifest.rest).numpy())

    def tensor(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self._base.manifest.pieces):
            raise Damaged(f"step {self._base.manifest.step} names a tensor that it does not have", "", 0)
        piece = self._base.manifest.pieces[index]
        template = template_for(piece.name, self._templates)
        if piece.whole is not None:
            return self._from_parts(piece, piece.whole, template)
        kept_here = self._base.tier != "disk"  # else it is read into memory that is ours already
        if self._goes_up(piece):
            assert template is not None
            like = torch.empty(piece.shape, dtype=dtype_of(piece), device=shards.local(template).device)
            return self._upload.bring(*self._base.place(piece), like, piece.hash, piece.name)
        data = tensor_of(self._base, piece)
        if template is not None and _is_like(template, piece.shape):  # kept whole, and wanted in parts now
            box: shards.Box = (tuple(0 for _ in piece.shape), piece.shape)
            return self._filled(template, piece, iter([(box, lambda: data)]))
        return self._own(piece, data, template, kept_here)

    def _goes_up(self, piece: Piece) -> bool:
        """Whether it goes from kept memory to a GPU, as it is."""
        template = template_for(piece.name, self._templates)
        if template is None or not template.is_cuda or piece.whole is not None or not piece.length:
            return False
        return piece.device == "cuda" and bool(self._base.files) and not _is_like(template, piece.shape)

    def _own(self, piece: Piece, data: torch.Tensor, template: torch.Tensor | None, kept_here: bool) -> torch.Tensor:
        """What is put into an object must not lie in kept memory, which is used again."""
        if (where := _device(piece, template)).type != "cpu":
            return data.to(where, copy=True)
        return data.clone() if kept_here and not self._subjects.copies(piece.name) else data

    def _from_parts(self, piece: Piece, whole: tuple[int, ...], template: torch.Tensor | None) -> torch.Tensor:
        if template is None or not _is_like(template, whole):
            into = torch.empty(whole, dtype=dtype_of(piece), device=_device(piece, template))
            _fill(piece, into, (tuple(0 for _ in whole), whole), self._every_part(piece))
            return into
        if shards.box_of(template) == (piece.begin, piece.shape):
            data = tensor_of(self._base, piece)
            return shards.like(template, data.to(shards.local(template).device, copy=True))
        return self._filled(template, piece, self._every_part(piece))

    def _filled(self, template: torch.Tensor, piece: Piece, parts: shards.Parts) -> torch.Tensor:
        box = shards.box_of(template)
        into = torch.empty(box[1], dtype=dtype_of(piece), device=shards.local(template).device)
        _fill(piece, into, box, parts)
        return shards.like(template, into)

    def _every_part(self, piece: Piece) -> Iterator[tuple[shards.Box, Callable[[], torch.Tensor]]]:
        """From the nearest rank on: its world may have been large, and each part comes from another worker."""
        for rank in sorted(range(self._ranks), key=lambda rank: abs(rank - self._near)):
            part = self._part(rank)
            if rank not in self._named:
                self._named[rank] = {one.name: one for one in part.manifest.pieces}
            one = self._named[rank].get(piece.name)
            if one is None:
                continue
            if (one.dtype, one.whole) != (piece.dtype, piece.whole):
                raise Damaged(f"{piece.name} was kept in other parts by rank {rank}", "", 0)
            yield (one.begin, one.shape), lambda part=part, one=one: tensor_of(part, one)  # type: ignore[misc]


def _fill(piece: Piece, into: torch.Tensor, box: shards.Box, parts: shards.Parts) -> None:
    try:
        shards.fill(into, box, parts)
    except InvalidRequest as error:
        raise Damaged(f"{piece.name}: {error}", "", 0) from None


def _is_like(template: torch.Tensor, whole: tuple[int, ...]) -> bool:
    return shards.is_part(template) and tuple(template.shape) == whole


def _device(piece: Piece, template: torch.Tensor | None) -> torch.device:
    """What was on the CPU stays there: an optimizer counts its steps there, whatever its parameters are on."""
    if piece.device == "cpu":
        return torch.device("cpu")
    if template is not None:
        return shards.local(template).device
    if piece.device == "cuda" and device.in_use():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def dtype_of(piece: Piece) -> torch.dtype:
    found = getattr(torch, piece.dtype, None)
    if not isinstance(found, torch.dtype):
        raise InvalidRequest(f"{piece.name} is of the type {piece.dtype!r}, which torch {torch.__version__} lacks")
    if found.itemsize * math.prod(piece.shape) != piece.length:
        raise Damaged(f"{piece.name} is {piece.length} bytes of {piece.dtype} in the shape {piece.shape}", "", 0)
    return found


def tensor_of(part: Part, piece: Piece) -> torch.Tensor:
    """As the tensor that it is, in kept memory."""
    dtype = dtype_of(piece)
    data = checked(part, piece)
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return copying.view(data, replace(piece, offset=0))


def checked(part: Part, piece: Piece) -> torch.Tensor:
    data = part.data(piece)
    if data.numel() != piece.length or content_hash.of(data) != piece.hash:
        manifest = part.manifest
        where = f"{piece.name or 'its rest'} ({part.tier})"
        raise Damaged(f"step {manifest.step} of rank {manifest.rank} is damaged in {where}", piece.hash, piece.length)
    return data
