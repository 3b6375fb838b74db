"""Does a module that generates in this process really leave its device, and come back with the newest weights?

The device is the CPU: what lies in the engine's host buffers counts as gone, and the tests say what an allocator would.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from muster.errors import InvalidRequest, PipelineQuarantined  # noqa: E402
from muster.sharing import ClusterSpec  # noqa: E402
from muster.sharing.engines import (  # noqa: E402
    Asleep,
    EngineFault,
    EngineRanks,
    MemoryNotFree,
    StaleWeights,
    TorchEngine,
    TurnInterrupted,
    Unproven,
)
from tests.sharing.scripted import a_scheduler, generating  # noqa: E402

BOUND_S = 20.0
ONE = {"actor_infer": ClusterSpec(gpus=[0])}
AWAKE = {0: [0]}


class Tied(nn.Module):
    """Embedding and head share their weights; a buffer that is in no state dict."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(8, 2)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def forward(self, ids: Tensor) -> Any:
        angles: Any = self.angles
        return self.out(self.head(self.embed(ids) + angles))


def weights(value: float) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in Tied(value).state_dict().items()}


def value_of(model: nn.Module) -> str:
    """A probe: which version the parameters are of, all of them."""
    found = {f"{one.flatten()[0].item():g}" for one in model.parameters()}
    return found.pop() if len(found) == 1 else "a mixture"


class Allocator:
    """What somebody else has on the device is `extra`."""

    def __init__(self) -> None:
        self.extra = 0
        self.emptied = 0

    def used(self) -> int:
        return self.extra

    def empty(self) -> None:
        self.emptied += 1

    def settle(self) -> None:
        pass


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await story()

    asyncio.run(bounded())


def test_all_of_it_leaves_the_device_and_comes_back_as_it_was() -> None:
    async def story() -> None:
        model, ids = Tied(), torch.arange(8)
        cache = {"keys": [torch.ones(3, 4), torch.ones(2).expand(5, 2)], "note": "of turn 3"}
        before, same = model(ids), list(model.parameters())
        engine = TorchEngine(model, caches={"kv": cache})
        storages = [one.untyped_storage().data_ptr() for one in model.parameters()]
        await engine.shrink([0])
        assert not any(engine._mover.on_device(one) for one in engine._named().values())
        assert [one.untyped_storage().data_ptr() for one in model.parameters()] != storages
        await engine.expand(AWAKE)
        assert all(engine._mover.on_device(one) for one in engine._named().values())
        assert torch.equal(model(ids), before)
        assert all(one is other for one, other in zip(model.parameters(), same, strict=True))
        assert model.head.weight is model.embed.weight
        assert torch.equal(cache["keys"][0], torch.ones(3, 4))
        assert cache["keys"][1].stride() == (0, 1)

    run(story)


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    async def story() -> None:
        flat = torch.arange(12.0)
        model = nn.Module()
        model.left, model.right = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(3, 2).t())
        engine = TorchEngine(model)
        await engine.shrink([0])
        await engine.expand(AWAKE)
        assert model.left.untyped_storage().data_ptr() == model.right.untyped_storage().data_ptr()
        assert model.left.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
        assert model.right.tolist() == [[6, 8, 10], [7, 9, 11]]

    run(story)


def test_host_buffers_are_used_again() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied())
        await engine.shrink([0])
        where = {name: one.data_ptr() for name, one in engine._mover._host.items()}
        await engine.expand(AWAKE)
        await engine.shrink([0])
        assert where == {name: one.data_ptr() for name, one in engine._mover._host.items()}

    run(story)


def test_the_memory_that_was_left_is_really_given_back() -> None:
    async def story() -> None:
        model = Tied()
        gone = weakref.ref(model.out.weight.untyped_storage())
        engine = TorchEngine(model)
        await engine.shrink([0])
        gc.collect()
        assert gone() is None

    run(story)


def test_a_shrink_that_is_made_twice_does_it_once_and_verifies_again() -> None:
    async def story() -> None:
        memory = Allocator()
        engine = TorchEngine(Tied(), memory=memory, may_keep=10)
        await engine.shrink([0])
        await engine.shrink([0])
        assert memory.emptied == 2, "given back each time"
        memory.extra = 11
        with pytest.raises(MemoryNotFree, match="the model has left cpu, but 11 B are in use, and 10 B may stay"):
            await engine.shrink([0])

    run(story)


def test_a_cache_that_stays_on_the_device_is_told_by_name_and_size() -> None:
    class Growing:
        """A cache that comes anew each time it is looked at."""

        def look(self) -> list[Tensor]:
            return [torch.zeros(256)]

    async def story() -> None:
        engine = TorchEngine(Tied(), caches={"kv": Growing().look})
        with pytest.raises(MemoryNotFree, match=r"still on cpu: kv\[0\] \(1 KiB\)"):
            await engine.shrink([0])

    run(story)


def test_a_tensor_that_nobody_named_is_told_under_a_scheduler_and_the_other_pipeline_goes_on() -> None:
    async def story() -> None:
        memory = Allocator()
        async with a_scheduler() as sched:
            other = {"actor_infer": ClusterSpec(gpus=[1])}
            await sched.register_pipeline("p1", clusters=ONE, hooks=TorchEngine(Tied(), memory=memory, may_keep=0))
            await sched.register_pipeline("p2", clusters=other, hooks=TorchEngine(Tied()))
            for name in ("p1", "p2"):
                await sched.admit_pipeline(name)
                await generating(sched, name)
            memory.extra = 5 << 30
            with pytest.raises(PipelineQuarantined, match=r"shrink raised MemoryNotFree: .* but 5 GiB are in use"):
                await sched.await_release_gpus("p1")
            await sched.await_release_gpus("p2")
            assert await generating(sched, "p2") == [1]

    run(story)


def test_an_optimizer_goes_along_as_a_cache() -> None:
    async def story() -> None:
        model = Tied()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.arange(8)).sum().backward()
        optimizer.step()
        engine = TorchEngine(model, caches=[optimizer])
        named = engine._named()
        assert {"out.weight.grad", "caches[0].state[0]['exp_avg']"} <= {*named}
        await engine.shrink([0])
        assert not any(engine._mover.on_device(one) for one in named.values())
        await engine.expand(AWAKE)
        optimizer.step()

    run(story)


# Weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("given", [weights, lambda value: lambda: weights(value)], ids=["dict", "function"])
def test_weights_published_while_it_sleeps_are_there_when_it_wakes(level: int, given: Any) -> None:
    async def story() -> None:
        model = Tied()
        engine = TorchEngine(model, level=level, probe=value_of)
        engine.publish(1, weights(1))
        await engine.expand(AWAKE)
        await engine.shrink([0])
        engine.publish(2, given(2))
        await engine.expand(AWAKE)
        with engine.turn() as turn:
            assert (turn.version, value_of(model)) == ("2", "2")
        assert dict(model.named_buffers())["angles"].tolist() == [0, 1, 2, 3], (
            "a buffer that is in no state dict is kept"
        )
        assert model.head.weight is model.embed.weight

    run(story)


def test_dropped_parameters_take_no_memory_and_keep_their_shapes() -> None:
    async def story() -> None:
        model = Tied()
        engine = TorchEngine(model, level=2, caches={"kv": (kv := torch.ones(4, 4))})
        engine.publish(1, weights(1))
        await engine.shrink([0])
        assert all(one.untyped_storage().nbytes() == 4 for one in model.parameters())
        assert (model.out.weight.shape, kv.shape) == ((2, 8), (4, 4))
        with pytest.raises(InvalidRequest, match="dropped by another engine"):
            TorchEngine(model)
        with pytest.raises(InvalidRequest, match="dropped: 2 needs weights"):
            engine.publish(2)
        await engine.expand(AWAKE)
        assert value_of(model) == "1" and kv.sum() == 0
        engine.publish(2)

    run(story)


def test_parameters_are_not_dropped_where_they_could_not_be_loaded_again() -> None:
    async def story() -> None:
        engine = TorchEngine(model := Tied(), level=2)
        with pytest.raises(Unproven, match="nothing was published"):
            await engine.shrink([0])
        assert value_of(model) == "1"

    run(story)


def test_a_state_dict_without_the_second_name_of_a_tied_parameter_is_whole() -> None:
    async def story() -> None:
        engine = TorchEngine(model := Tied(), level=2, probe=value_of)
        engine.publish(3, {name: one for name, one in weights(3).items() if name != "head.weight"})
        await engine.shrink([0])
        await engine.expand(AWAKE)
        assert value_of(model) == "3" and model.head.weight is model.embed.weight

    run(story)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda it: it.pop("out.bias"), "out.bias is missing"),
        (lambda it: it.update(more=torch.ones(1)), "more is not of the model"),
        (lambda it: it.update({"out.bias": torch.ones(3)}), r"out.bias is \(3,\), not \(2,\)"),
    ],
)
def test_weights_that_do_not_fit_wake_nobody(change: Any, told: str) -> None:
    async def story() -> None:
        wrong = weights(2)
        change(wrong)
        engine = TorchEngine(Tied())
        await engine.shrink([0])
        engine.publish(2, wrong)
        with pytest.raises(StaleWeights, match=told):
            await engine.expand(AWAKE)
        with pytest.raises(Asleep):
            engine.turn().__enter__()
        engine.publish(3, weights(3))
        await engine.expand(AWAKE)

    run(story)


def test_a_probe_that_answers_with_another_version_wakes_nobody() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied(), probe=lambda _: "1")
        engine.publish(2, weights(2))
        with pytest.raises(StaleWeights, match="the probe answers with weights 1, and 2 were published"):
            await engine.expand(AWAKE)
        assert not engine.awake

    run(story)


def test_weights_published_while_it_is_awake_let_nobody_in_before_they_are_loaded() -> None:
    async def story() -> None:
        engine = TorchEngine(model := Tied(), probe=value_of)
        engine.publish(1, weights(1))
        await engine.expand(AWAKE)
        with pytest.raises(TurnInterrupted), engine.turn():
            engine.publish(2, weights(2))
            assert engine.interrupted()
        with pytest.raises(Asleep, match="weights 2 were published and are not loaded yet"), engine.turn():
            pass
        await engine.refresh()
        with engine.turn() as turn:
            assert (turn.version, value_of(model)) == ("2", "2")

    run(story)


def test_a_module_that_is_trained_in_place_says_so_and_goes_on() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied())
        await engine.expand(AWAKE)
        with pytest.raises(TurnInterrupted), engine.turn():
            engine.publish(2)
        with engine.turn() as turn:
            assert turn.version == "2"
        await engine.shrink([0])
        with pytest.raises(InvalidRequest, match="it sleeps"):
            await engine.refresh()

    run(story)


# The gate -------------------------------------------------------------------------------------------


def test_nobody_generates_before_the_first_lease_nor_asleep() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied())
        with pytest.raises(Asleep, match="no lease yet"), engine.turn():
            pass
        await engine.expand(AWAKE)
        with engine.turn():
            assert not engine.interrupted(torch.ones(1), None)
        await engine.shrink([0])
        with pytest.raises(Asleep, match="told to sleep"):
            async with engine.turn():
                pass

    run(story)


def test_a_turn_in_flight_is_told_to_stop_and_to_be_queued_again() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied())
        await engine.expand(AWAKE)
        inside, steps = threading.Event(), 0

        def generate() -> None:
            nonlocal steps
            with engine.turn():
                inside.set()
                while not engine.interrupted():
                    steps += 1
                assert engine._mover.on_device(next(engine.model.parameters())), "nothing moves below a turn"

        turn = asyncio.create_task(asyncio.to_thread(generate))
        await asyncio.to_thread(inside.wait)
        await engine.shrink([0])
        with pytest.raises(TurnInterrupted, match="queue it again"):
            await turn

    run(story)


def test_a_turn_that_does_not_stop_is_told() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied(), turn_s=0.05)
        await engine.expand(AWAKE)
        with pytest.raises(TurnInterrupted):
            async with engine.turn():
                with pytest.raises(EngineFault, match=r"1 turn\(s\) did not end within 0.05 s"):
                    await engine.shrink([0])
        await engine.shrink([0])

    run(story)


def test_turns_wait_for_the_lease_in_threads_and_on_the_loop() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied())

        def in_a_thread() -> str | None:
            with engine.turn(wait_s=None) as turn:
                return turn.version

        async def on_the_loop() -> str | None:
            async with engine.turn(wait_s=10) as turn:
                return turn.version

        with pytest.raises(Asleep):
            async with engine.turn(wait_s=0.01):
                pass
        waiting = asyncio.gather(asyncio.to_thread(in_a_thread), on_the_loop())
        await asyncio.sleep(0)
        engine.publish(4, weights(4))
        await engine.expand(AWAKE)
        assert [*await waiting] == ["4", "4"]

    run(story)


def test_a_failure_of_an_interrupted_turn_is_an_interruption_and_a_cancel_stays_one() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied())
        await engine.expand(AWAKE)
        with pytest.raises(TurnInterrupted) as told, engine.turn():
            engine._gate.close("it was told to sleep")
            raise RuntimeError("expected all tensors to be on the same device")
        assert isinstance(told.value.__cause__, RuntimeError)
        await engine.expand(AWAKE)
        with pytest.raises(ZeroDivisionError), engine.turn():
            raise ZeroDivisionError
        with pytest.raises(asyncio.CancelledError):
            async with engine.turn():
                engine._gate.close("it was told to sleep")
                raise asyncio.CancelledError

    run(story)


# Cancelled, and made again --------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_a_call_that_is_cancelled_in_the_middle_can_be_made_again(level: int) -> None:
    async def story() -> None:
        entered, go_on = threading.Event(), threading.Event()

        class Slow(Allocator):
            def settle(self) -> None:
                entered.set()
                go_on.wait()

        engine = TorchEngine(model := Tied(), level=level, memory=Slow(), probe=value_of)
        engine.publish(2, weights(2))
        calls: list[Callable[[], Any]] = [lambda: engine.expand(AWAKE), lambda: engine.shrink([0])]
        for call in calls:
            entered.clear()
            go_on.clear()
            first = asyncio.create_task(call())
            await asyncio.to_thread(entered.wait)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert not engine.awake
            again = asyncio.create_task(call())
            go_on.set()
            await again
        await engine.expand(AWAKE)
        assert value_of(model) == "2"

    run(story)


def test_a_shrink_that_comes_while_it_wakes_ends_asleep() -> None:
    async def story() -> None:
        engine = TorchEngine(Tied())
        await engine.shrink([0])
        await asyncio.gather(engine.expand(AWAKE), engine.shrink([0]))
        assert not engine.awake
        assert not any(engine._mover.on_device(one) for one in engine._named().values())
        await engine.expand(AWAKE)
        await engine.shrink([])
        assert engine.awake

    run(story)


def test_the_event_loop_is_not_held_up() -> None:
    async def story() -> None:
        go_on = threading.Event()

        def probe(model: nn.Module) -> None:
            assert go_on.wait(10)

        engine = TorchEngine(Tied(), probe=probe)
        waking = asyncio.create_task(engine.expand(AWAKE))
        await asyncio.sleep(0.01)
        assert not waking.done() and not engine.awake
        go_on.set()
        await waking

    run(story)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_nobody_generates_asleep_or_with_stale_weights(level: int, seed: int) -> None:
    dice = random.Random(seed)
    wrong: list[str] = []
    turns = 0

    async def story() -> None:
        nonlocal turns
        model = Tied()
        engine = TorchEngine(model, level=level, caches={"kv": torch.ones(16)}, probe=value_of)
        published, over = 1, threading.Event()
        engine.publish(1, weights(1))

        def generate() -> None:
            nonlocal turns
            while not over.is_set():
                try:
                    with engine.turn(wait_s=0.001) as turn:
                        newest, answered = engine.version, model(torch.arange(8))[0, 0].item()
                        there = all(engine._mover.on_device(one) for one in model.parameters())
                        if not engine.interrupted() and not (there and newest == turn.version == value_of(model)):
                            wrong.append(f"{turn.version} of {newest}: {value_of(model)}, {there}, {answered}")
                        turns += 1
                except (Asleep, TurnInterrupted):
                    over.wait(0.001)

        generating = asyncio.create_task(asyncio.to_thread(generate))
        for _ in range(30):
            choice = dice.choice(["shrink", "expand", "expand", "publish", "cancel", "cancel"])
            if choice == "publish":
                published += 1
                engine.publish(published, weights(published))
            elif choice == "cancel":
                call = asyncio.create_task(engine.shrink([0]) if dice.random() < 0.5 else engine.expand(AWAKE))
                await asyncio.sleep(dice.choice([0, 0.0005, 0.002]))
                call.cancel()
                await asyncio.wait({call})
            elif choice == "shrink":
                await engine.shrink([0])
                assert not any(engine._mover.on_device(one) for one in engine._named().values())
            else:
                await engine.expand(AWAKE)
                await asyncio.sleep(0.001)
        over.set()
        await generating
        await engine.expand(AWAKE)
        assert value_of(model) == str(published)

    run(story)
    assert wrong == []
    assert turns > 0


# What is refused ------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_at_once() -> None:
    async def probe(model: nn.Module) -> str:
        return "1"

    with pytest.raises(InvalidRequest, match="1 or 2"):
        TorchEngine(Tied(), level=3)
    with pytest.raises(InvalidRequest, match="plain function"):
        TorchEngine(Tied(), probe=probe)
    with pytest.raises(InvalidRequest, match="no parameters"):
        TorchEngine(nn.ReLU())


def test_several_engines_are_the_ranks_of_one_pipeline() -> None:
    async def story() -> None:
        engines = {rank: TorchEngine(Tied()) for rank in range(2)}
        async with a_scheduler() as sched:
            hooks = EngineRanks(engines)
            await sched.register_pipeline("p1", clusters={"actor_infer": ClusterSpec(gpus=[0, 1])}, hooks=hooks)
            await sched.admit_pipeline("p1")
            assert await generating(sched, "p1") == [0, 1]
            assert all(engine.awake for engine in engines.values())
            await sched.await_release_gpus("p1")
            assert not any(engine.awake for engine in engines.values())
        with pytest.raises(InvalidRequest, match="no engine for rank 2"):
            await hooks.shrink([2])
        with pytest.raises(InvalidRequest, match="EngineRanks takes several"):
            await engines[0].shrink([1])

    run(story)
