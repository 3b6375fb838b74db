"""What may be given to a State, and does it all come back, bit by bit, to objects that nothing else touches?"""

from __future__ import annotations

import collections
import copy
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import muster
from muster.errors import InvalidRequest
from tests.state.kept import ALWAYS, commit, keep, restored

DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
DTYPES = [one for one in DTYPES if not re.fullmatch(r"torch\.(u?int[1-7]|bits.*|qu?int.*)", str(one))]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def of_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all: NaNs with a payload, zeros below zero."""
    made = torch.empty(shape, dtype=dtype)
    if made.numel():
        made.view(-1).view(torch.uint8).random_(0, 2 if dtype == torch.bool else 256)
    return made


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_comes_back_bit_by_bit_in_every_shape(tmp_path: Path) -> None:
    kept = {str(dtype): [of_bits(dtype, 5), of_bits(dtype), of_bits(dtype, 0, 3)] for dtype in DTYPES}
    keep(tmp_path, things=kept)
    got: dict[str, Any] = {}
    restored(tmp_path, things=got)
    assert len(DTYPES) > 20
    for name, tensors in kept.items():
        for one, other in zip(tensors, got[name], strict=True):
            assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other)), name


def test_tensors_come_back_as_what_they_are(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    pictures = base.view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    complex_ = torch.tensor([1 + 2j])
    kept: dict[str, Any] = {
        "view": base[2:5],
        "every other": base[::2],
        "turned": base.view(4, 6).T,
        "pictures": pictures,
        "spread": torch.ones(1).expand(5),
        "conj": complex_.conj(),
        "complex": complex_,
        "leaf": torch.ones(2, requires_grad=True),
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "twice": (base, base),
    }
    keep(tmp_path, things=kept)
    got: dict[str, Any] = {}
    restored(tmp_path, things=got)
    for name in kept.keys() - {"twice"}:
        assert torch.equal(kept[name], got[name]), name
    assert got["pictures"].stride() == pictures.stride(), "fused optimizers want the order of their parameters"
    assert got["turned"].stride() == kept["turned"].stride()
    assert got["leaf"].requires_grad and got["leaf"].is_leaf
    assert type(got["parameter"]) is nn.Parameter and got["parameter"].requires_grad
    assert type(got["frozen"]) is nn.Parameter and not got["frozen"].requires_grad
    assert got["twice"][0].data_ptr() == got["twice"][1].data_ptr()


def test_what_is_there_is_filled_in_place(tmp_path: Path) -> None:
    class Place:
        def __init__(self, at: int) -> None:
            self.at = at

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def things(value: float) -> dict[str, Any]:
        return {
            "tensor": torch.full((2,), value),
            "table": {"a": torch.full((2,), value), "more": [torch.full((2,), value), value]},
            "pair": (torch.full((2,), value), value),
            "loaders": [Place(int(value)), Place(int(value) + 1)],
            "value": value,
        }

    keep(tmp_path, **things(7))
    now = things(0)
    held = [now["tensor"], now["table"]["a"], now["table"]["more"][0], now["pair"][0]]
    state = restored(tmp_path, **now)
    assert [one.tolist() for one in held] == [[7.0, 7.0]] * 4
    assert now["table"]["more"][1] == 7
    assert [one.at for one in now["loaders"]] == [7, 8]
    assert state["value"] == 7
    assert state["pair"][1] == 7
    state["value"] = 8
    with pytest.raises(KeyError, match="in place"):
        state["table"] = {}


SCHEDULERS = [
    lambda opt: lr_scheduler.StepLR(opt, 1),
    lambda opt: lr_scheduler.MultiStepLR(opt, [1, 2]),
    lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
    lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10),
    lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    lambda opt: lr_scheduler.ReduceLROnPlateau(opt),
    lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
]
OPTIMIZERS = [
    lambda groups: torch.optim.Adam(groups, foreach=True),
    lambda groups: torch.optim.AdamW(groups, fused=True, amsgrad=True),
    lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01)),
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    lambda groups: torch.optim.Adafactor(groups),
    lambda groups: torch.optim.RMSprop(groups, centered=True),
]


class Training:
    """A small one with most of what there is: tied weights, a norm with buffers, two groups, a scheduler, a scaler."""

    def __init__(self, optimizer: Any = OPTIMIZERS[0], scheduler: Any = SCHEDULERS[0]) -> None:
        torch.manual_seed(0)
        tied = nn.Linear(4, 4)
        self.model = nn.Sequential(tied, nn.BatchNorm1d(4), nn.ReLU(), tied, nn.Dropout(0.5), nn.Linear(4, 1))
        tied_params = list(tied.parameters())
        others = [one for one in self.model.parameters() if all(one is not other for other in tied_params)]
        self.optimizer = optimizer([{"params": tied_params}, {"params": others, "weight_decay": 0.1}])
        self.scheduler = scheduler(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.ema = copy.deepcopy(self.model)

    @property
    def named(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ema": self.ema,
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 4)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(*([loss.detach()] if plateau else []))
        with torch.no_grad():
            for one, other in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                one.lerp_(other, 0.1)

    def bits(self) -> bytes:
        tensors = [*self.model.state_dict().values(), *self.ema.state_dict().values()]
        for one in self.optimizer.state.values():
            tensors += [value for value in one.values() if isinstance(value, torch.Tensor)]
        return b"".join(map(bits, tensors))


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(one, SCHEDULERS[0]) for one in OPTIMIZERS] + [(OPTIMIZERS[0], one) for one in SCHEDULERS[1:]],
)
def test_a_training_that_goes_on_ends_bit_by_bit_as_one_that_was_not_stopped(
    tmp_path: Path, optimizer: Any, scheduler: Any
) -> None:
    first = Training(optimizer, scheduler)
    state = muster.State(durable=tmp_path, durable_every=ALWAYS, **first.named)
    for _ in range(3):
        first.step()
    commit(state, 3)
    for _ in range(3):
        first.step()
    second = Training(optimizer, scheduler)
    state = muster.State(durable=tmp_path, **second.named)
    assert state.restore() == 3
    for _ in range(3):
        second.step()
    assert second.bits() == first.bits()


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw(*own: Any) -> list[Any]:
        mine = [torch.rand(1, generator=own[0]).item(), own[1].random(), own[2].random()]
        return [random.random(), numpy.random.random(), torch.rand(1).item(), *mine]

    def generators() -> dict[str, Any]:
        return {"a": torch.Generator(), "b": random.Random(), "c": numpy.random.default_rng()}

    used, fresh = generators(), generators()
    keep(tmp_path, **used)
    expected = draw(*used.values())
    restored(tmp_path, **fresh)
    assert draw(*fresh.values()) == expected
    state = muster.State(durable=tmp_path, random=False, **fresh)
    random.seed(5)
    assert state.restore() == 1
    assert random.random() == random.Random(5).random()


def test_nothing_that_was_given_back_lies_where_it_was_kept(tmp_path: Path) -> None:
    """Two who were given the same do not change each other, nor what is kept."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.extra = torch.zeros(2)

        def get_extra_state(self) -> torch.Tensor:
            return self.extra

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.extra = state

    from muster.state import alone, disk, leaves, loading
    from muster.state.keeper import Part
    from muster.state.subjects import Subjects

    def things() -> dict[str, Any]:
        module = Holds()
        optimizer = torch.optim.Adam(module.parameters())
        return {"module": module, "optimizer": optimizer, "table": {}, "value": None, "plain": nn.Linear(2, 2)}

    made = things()
    made["module"].weight.grad = torch.ones(2)
    made["optimizer"].step()
    made["table"]["x"] = torch.ones(3)
    made["value"] = [torch.ones(3)]
    keep(tmp_path, **made)
    [paths] = disk.steps(tmp_path).values()
    from_disk = alone.Parts(paths)(0)
    memories = [from_disk.data(piece).clone() for piece in from_disk.manifest.every]
    in_memory = Part(from_disk.manifest, memories, "own", [0] * len(memories))
    now = things()
    subjects = Subjects(now)
    loader = loading.Loader(lambda _: in_memory, 1, 0, subjects)
    assert subjects.put(leaves.put_together(loader.rest(), loader.tensor)["subjects"]) == []
    before = torch.optim.Adam.state_dict(now["optimizer"])
    kept = copy.deepcopy([before, subjects.take()])
    for memory in memories:
        memory.fill_(255)
    assert str([before, subjects.take()]) == str(kept)


def test_what_cannot_be_kept_is_refused_with_a_reason(tmp_path: Path) -> None:
    for odd, why in (
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (lambda: None, "cannot keep"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            keep(tmp_path, thing={"x": odd})
    with pytest.raises(InvalidRequest, match="dot"):
        keep(tmp_path, **{"a.b": 1})


def test_one_who_does_not_take_its_state_back_is_named(tmp_path: Path) -> None:
    keep(tmp_path, model=nn.Linear(2, 2), table={"x": torch.ones(3)})
    with pytest.raises(InvalidRequest, match=r"'model' does not take its state back: RuntimeError: .*\s+size mismatch"):
        restored(tmp_path, model=nn.Linear(3, 2))
    with pytest.raises(InvalidRequest, match=r"table\.x was kept in the shape \(3,\) and is \(1,\) now"):
        restored(tmp_path, table={"x": torch.ones(1)})


def test_names_that_are_new_or_gone_are_told(tmp_path: Path) -> None:
    keep(tmp_path, old=1, same=2)
    with pytest.warns(UserWarning) as told:
        state = restored(tmp_path, new=3, same=0)
    assert state["new"] == 3 and state["same"] == 2
    assert {str(one.message) for one in told} == {
        "muster.State: new was not kept before, and stays as it is",
        "muster.State: old was kept before, and nobody wants it now",
    }


def test_two_tensors_of_one_name_are_both_kept(tmp_path: Path) -> None:
    keep(tmp_path, a={"b.c": torch.zeros(1), "b": {"c": torch.ones(1)}}, muster={"rest": torch.ones(2)})
    a: dict[str, Any] = {}
    restored(tmp_path, a=a, muster={})
    assert a["b.c"].item() == 0 and a["b"]["c"].item() == 1


def test_plain_python_comes_back_from_disk(tmp_path: Path) -> None:
    kept = {
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], maxlen=2),
        "default": collections.defaultdict(list, {1: [2]}),
        "array": numpy.arange(6).reshape(2, 3)[:, ::2],
        "scalar": numpy.float32(1.5),
        "big": 1 << 200,
        "set": {1, 2},
        "bytes": bytearray(b"x"),
        "slice": slice(1, None),
    }
    keep(tmp_path, kept=kept)
    got: dict[str, Any] = {}
    restored(tmp_path, kept=got)
    assert (got.pop("array") == kept.pop("array")).all()
    assert got == kept and got["deque"].maxlen == 2 and got["default"].default_factory is list


def test_a_wrapped_model_is_kept_as_it_is(tmp_path: Path) -> None:
    """Names are those of its state_dict: whoever wraps it later has other names, and hears of it."""
    keep(tmp_path, model=nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(InvalidRequest, match="Missing key"):
        restored(tmp_path, model=nn.Sequential(collections.OrderedDict(module=nn.Linear(2, 2))))


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_a_commit_says_how_many_steps_are_done(step: Any) -> None:
    with pytest.raises(InvalidRequest, match="how many steps are done"):
        muster.State(value=1).commit(step)
