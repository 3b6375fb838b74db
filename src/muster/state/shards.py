"""How does a tensor that was kept in parts by one world come to the ranks of another?

A part is a box in the whole: where it begins and how long it is in each direction. What a rank needs now is another
box; it is filled from all kept boxes that overlap with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from muster.errors import InvalidRequest

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and how long it is
Parts = Iterable[tuple[Box, Callable[[], torch.Tensor]]]  # what is in a box is fetched only if it is wanted


def is_part(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def local(tensor: Any) -> torch.Tensor:
    """This rank's own memory of a tensor."""
    return tensor._local_tensor if is_part(tensor) else tensor  # type: ignore[no-any-return]


def check(tensor: Any) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise InvalidRequest(
            f"a DTensor with {tensor.placements} cannot be kept: its ranks have summands, not parts",
            hint="redistribute it to Replicate() or Shard() first",
        )


def box_of(tensor: Any) -> Box:
    """Which part of the whole this rank has."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    own = tuple(local(tensor).shape)
    shape, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if math.prod(own) == 0:
        return tuple(min(*one) for one in zip(begin, tensor.shape, strict=True)), own
    if tuple(shape) != own or not _is_box(tensor):
        raise InvalidRequest(
            f"a DTensor with {tensor.placements} has {own} of {tuple(tensor.shape)} here: no box of it"
        )
    return tuple(begin), own


def _is_box(tensor: Any) -> bool:
    """What FSDP2 makes of a tensor that is spread in another way already may be rows from here and there."""
    rows: dict[int, list[int]] = {}
    if not any(type(placement).__name__ == "_StridedShard" for placement in tensor.placements):
        return True
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        before = rows.get(placement.dim, list(range(tensor.shape[placement.dim])))
        size, at = tensor.device_mesh.size(mesh_dim), tensor.device_mesh.get_local_rank(mesh_dim)
        rows[placement.dim] = _taken(before, size, at, getattr(placement, "split_factor", 1))
    return all(one == list(range(one[0], one[0] + len(one))) for one in rows.values() if one)


def _taken(rows: list[int], size: int, at: int, split_factor: int) -> list[int]:
    """Rows are split in so many, each of these over the ranks, as torch does it: earlier ones get more."""
    found: list[int] = []
    for part in _chunks(rows, split_factor):
        found += _chunks(part, size)[at] if at < len(_chunks(part, size)) else []
    return found


def _chunks(rows: list[int], count: int) -> list[list[int]]:
    each = max(1, -(-len(rows) // count))
    return [rows[begin : begin + each] for begin in range(0, len(rows), each)]


def like(template: Any, part: torch.Tensor) -> torch.Tensor:
    """A tensor that is spread over the world as the template is, with this part of it here."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, template.device_mesh, template.placements, run_check=False, shape=template.shape, stride=template.stride()
    )


def overlap(one: Box, other: Box) -> Box | None:
    begin = tuple(map(max, one[0], other[0]))
    end = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    if any(stop <= start for start, stop in zip(begin, end, strict=True)):
        return None
    return begin, tuple(stop - start for start, stop in zip(begin, end, strict=True))


def _slices(within: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(b - a, b - a + n) for a, b, n in zip(within[0], box[0], box[1], strict=True))


def fill(into: torch.Tensor, wanted: Box, parts: Parts) -> None:
    """Fill one box from kept ones, of which no more are asked for than are needed.

    InvalidRequest if they leave a hole in it, or contradict each other.
    """
    missing = into.numel()
    filled: list[Box] = []
    boxes: set[Box] = set()
    for box, data in parts if missing else ():
        if box in boxes or (shared := overlap(wanted, box)) is None:  # kept by several, or elsewhere
            continue
        if any(overlap(shared, before) for before in filled):
            raise InvalidRequest(f"parts of a tensor that overlap were kept: one of them is {box}")
        boxes.add(box)
        filled.append(shared)
        into[_slices(wanted, shared)] = data()[_slices(box, shared)].to(into.device)
        missing -= math.prod(shared[1])
        if not missing:
            return
    if missing:
        raise InvalidRequest(f"{missing} of {into.numel()} elements of a tensor in parts were kept by nobody")
