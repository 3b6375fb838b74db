"""Does a tensor in parts come back whole to a world of another size, another mesh, or none?

Ranks one after the other: what a rank keeps and takes of a tensor needs no word from the others, so that torch's
process group without processes is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, debug
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import muster
from muster.errors import InvalidRequest
from muster.state import alone, shards
from tests.state.kept import ALWAYS, commit

pytestmark = pytest.mark.torches


def _clear_sharding_cache() -> None:
    """Let torch forget the mesh of the previous rank. Releases before 2.10 have no function for it."""
    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    else:
        cached: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        cached.cache.cache_clear()


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[pytest.MonkeyPatch]:
    _clear_sharding_cache()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("RANK", str(rank))
            patched.setenv("WORLD_SIZE", str(ranks))
            patched.setattr(alone.Keeping, "wants", _always)
            yield patched
    finally:
        dist.destroy_process_group()


def _always(keeping: Any, step: int) -> bool:
    keeping._attempt = "test"
    return True


def keep_as(folder: Path, step: int, **named: Any) -> None:
    commit(muster.State(durable=folder, durable_every=ALWAYS, random=False, **named), step)


def restored_as(folder: Path, step: int, **named: Any) -> None:
    assert muster.State(durable=folder, random=False, **named).restore() == step


def spread(whole: torch.Tensor, mesh: Sequence[int], placements: Sequence[Placement]) -> DTensor:
    """This rank's part of it; torch's own way asks the other ranks."""
    names = tuple("abc"[: len(mesh)])
    made = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names)
    empty = DTensor.from_local(
        torch.empty(0), made, [Replicate()] * len(mesh), run_check=False, shape=whole.shape, stride=whole.stride()
    )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, begin = compute_local_shape_and_global_offset(empty.shape, made, placements)
    part = whole[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))].clone()
    return DTensor.from_local(part, made, placements, run_check=False, shape=whole.shape, stride=whole.stride())


WHOLE = torch.arange(7 * 5.0).view(7, 5)
WORLDS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (Shard(0),)),
    ((4,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 3), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Shard(0))),
    ((9,), (Shard(0),)),  # some have nothing
    ((3,), (Replicate(),)),
    ((2,), (Shard(0),)),
]


def test_from_world_to_world_and_home_again(tmp_path: Path) -> None:
    for step, (mesh, placements) in enumerate(WORLDS):
        ranks = math.prod(mesh)
        for rank in range(ranks):
            with as_rank(rank, ranks):
                have = spread(WHOLE, mesh, placements)
                expected = have.to_local().clone()
                table = {"x": have, "step": step}
                if step:
                    have.to_local().zero_()
                    restored_as(tmp_path, step, table=table)
                    assert torch.equal(have.to_local(), expected), (step, rank)
                    assert table["step"] == step - 1
                    table["step"] = step
                keep_as(tmp_path, step + 1, table=table)
    alone_now = {"x": torch.zeros(7, 5)}
    restored_as(tmp_path, len(WORLDS), table=alone_now)
    assert torch.equal(alone_now["x"], WHOLE)
    nothing: dict[str, Any] = {}
    restored_as(tmp_path, len(WORLDS), table=nothing)
    assert torch.equal(nothing["x"], WHOLE), "whole, where nobody wants it in parts"


class Sharded:
    """A model under FSDP2 with its optimizer, whose weights of one attempt are known as a whole."""

    def __init__(self, *, trained: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7))
        whole = [torch.full(one.shape, float(index)) for index, one in enumerate(self.model.parameters())]
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        if trained:
            for one, number in zip(self.model.parameters(), whole, strict=True):
                one.grad = shards.like(one, _part(one, torch.arange(number.numel()).view(number.shape) + number + 1.0))
            self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        found = [shards.local(one) for one in self.model.parameters()]
        for each in self.optimizer.state.values():
            found += [shards.local(one) for one in each.values()]
        return found


def _part(like: Any, whole: torch.Tensor) -> torch.Tensor:
    begin, shape = shards.box_of(like)
    return whole[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]


def test_a_sharded_model_and_its_optimizer_go_on_in_a_world_of_another_size(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, 2):
            made = Sharded(trained=True)
            keep_as(tmp_path, 1, model=made.model, optimizer=made.optimizer)
    for ranks in (4, 3, 2):
        for rank in range(ranks):
            with as_rank(rank, ranks):
                now, expected = Sharded(trained=False), Sharded(trained=True)
                assert not now.optimizer.state
                restored_as(tmp_path, 1, model=now.model, optimizer=now.optimizer)
                for one, other in itertools.zip_longest(now.tensors(), expected.tensors()):
                    assert torch.equal(one, other)
                for one in now.optimizer.state.values():
                    assert isinstance(one["exp_avg"], DTensor) and not isinstance(one["step"], DTensor)
                now.optimizer.step()  # they fit together


def test_a_model_that_is_sharded_twice_is_kept_as_boxes_or_refused() -> None:
    """FSDP2 over tensor parallelism: torch shards the first way last, so that a rank may have several pieces."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    found = []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            part = DTensor.from_local(
                torch.ones(2, 5), mesh, placements, run_check=False, shape=torch.Size((8, 5)), stride=(5, 1)
            )
            found.append(shards.box_of(part))
            odd = DTensor.from_local(
                torch.ones(4, 5),
                mesh,
                [placements[0], Replicate()],
                run_check=False,
                shape=torch.Size((8, 5)),
                stride=(5, 1),
            )
            with pytest.raises(InvalidRequest, match="no box"):
                shards.box_of(odd)
    assert found == [((0, 0), (2, 5)), ((4, 0), (2, 5)), ((2, 0), (2, 5)), ((6, 0), (2, 5))]


def test_summands_are_refused() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        summand = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(InvalidRequest, match="summands, not parts"):
            muster.State(durable="nowhere", x={"y": summand}).commit(1)


# Boxes, as pure functions

cuts = st.lists(st.integers(0, 6), max_size=3)


def boxes(shape: Sequence[int], at: Sequence[Sequence[int]]) -> list[shards.Box]:
    """The whole, cut at these places in each direction."""
    sides = []
    for size, places in zip(shape, at, strict=True):
        edges = sorted({0, size, *(place % (size + 1) for place in places)})
        sides.append(list(itertools.pairwise(edges)))
    return [
        (tuple(begin for begin, _ in one), tuple(end - begin for begin, end in one))
        for one in itertools.product(*sides)
    ]


def of(box: shards.Box, whole: torch.Tensor) -> torch.Tensor:
    return whole[tuple(slice(b, b + n) for b, n in zip(*box, strict=True))]


@given(
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=3),
    then=st.tuples(cuts, cuts, cuts),
    now=st.tuples(cuts, cuts, cuts),
    order=st.randoms(),
    lost=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_boxes_are_filled_from_any_others_or_a_hole_is_seen(
    shape: list[int], then: Any, now: Any, order: Any, lost: bool
) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    kept = boxes(shape, then[: len(shape)])
    if lost:
        kept.remove(gone := order.choice(kept))
    kept += order.choices(kept, k=2) if kept else []  # kept by several
    order.shuffle(kept)
    for box in boxes(shape, now[: len(shape)]):
        into = torch.full(box[1], -1)
        parts = [(one, lambda one=one: of(one, whole)) for one in kept]
        if lost and shards.overlap(box, gone) is not None:
            with pytest.raises(InvalidRequest, match="kept by nobody"):
                shards.fill(into, box, parts)
        else:
            shards.fill(into, box, parts)
            assert torch.equal(into, of(box, whole))


def test_parts_that_overlap_are_never_taken_for_the_whole() -> None:
    whole = torch.arange(4)
    parts = [(((0,), (3,)), lambda: whole[:3]), (((1,), (1,)), lambda: whole[1:2])]
    with pytest.raises(InvalidRequest, match="overlap"):
        shards.fill(torch.empty(4), ((0,), (4,)), parts)
