"""Are engines behind HTTP believed when they lie? A real server that speaks both contracts, and says what is not so."""

from __future__ import annotations

import asyncio
import random
import sys
import types
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.errors import InvalidRequest, PipelineQuarantined
from muster.sharing import ClusterSpec
from muster.sharing.engines import (
    EngineFault,
    EngineGarbled,
    EngineRanks,
    EngineServer,
    EngineUnreachable,
    LogprobProof,
    MemoryNotFree,
    NvmlMeter,
    SglangEngine,
    SmiMeter,
    StaleWeights,
    Unproven,
    VllmEngine,
    meters,
)
from muster.sharing.engines.http_engine import HttpEngine
from muster.sharing.engines.vllm import reload_weights
from tests.sharing.lying_server import CONTEXT, GIB, TOKEN, GpuMeter, LyingServer, logprob, lying_server
from tests.sharing.scripted import a_scheduler, generating

BOUND_S = 20.0
SHORT: dict[str, Any] = {"free_within_s": 0.2, "request_s": 0.5, "poll_s": 0.005}


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await story()

    asyncio.run(bounded())


@pytest.fixture
def server() -> Iterator[LyingServer]:
    with lying_server() as one:
        yield one
        assert one.broken == []


def vllm(server: LyingServer, **options: Any) -> VllmEngine:
    return VllmEngine(server.url, **{"gpus": [0], "meter": GpuMeter(server), **SHORT, **options})


def sglang(server: LyingServer, **options: Any) -> SglangEngine:
    return SglangEngine(server.url, **{"gpus": [0], "meter": GpuMeter(server), **SHORT, **options})


def publish(engine: HttpEngine, server: LyingServer, version: str, proof: bool = False) -> None:
    server.on_disk = version
    proved = LogprobProof([1, 2], TOKEN, logprob(version)) if proof else None
    engine.publish(version, reload_weights if isinstance(engine, VllmEngine) else f"/weights/{version}", proof=proved)


each_kind = pytest.mark.parametrize("kind", [vllm, sglang])
SLEEP = {vllm: "/sleep", sglang: "/release_memory_occupation"}
WAKE = {vllm: "/wake_up", sglang: "/resume_memory_occupation"}
UPDATE = {vllm: "/collective_rpc", sglang: "/update_weights_from_disk"}
PROBE = {vllm: "/v1/completions", sglang: "/generate"}


def test_vllm_is_put_to_sleep_and_woken_in_the_published_order(server: LyingServer) -> None:
    async def story() -> None:
        engine = vllm(server)
        publish(engine, server, "1")
        await engine.shrink([0])
        assert server.asleep
        assert server.calls == [
            "GET /is_sleeping",
            "POST /pause?mode=abort",
            "POST /sleep?level=1&mode=abort",
            "GET /is_sleeping",
        ]
        server.calls.clear()
        await engine.expand({0: [0]})
        assert server.calls == [
            "POST /wake_up?tags=weights",
            "POST /collective_rpc",
            "POST /update_weight_version",
            "POST /wake_up?tags=kv_cache",
            "POST /reset_prefix_cache",
            "POST /resume",
            "GET /is_sleeping",
            "GET /v1/models",
            "POST /v1/completions",
            "GET /weight_info",
        ]
        assert (server.generated, set(engine.awake)) == (["1"], {0})

    run(story)


def test_sglang_is_put_to_sleep_and_woken_in_the_published_order(server: LyingServer) -> None:
    async def story() -> None:
        engine = sglang(server)
        publish(engine, server, "1")
        await engine.shrink([0])
        assert server.calls == ["POST /pause_generation", "POST /release_memory_occupation"]
        server.calls.clear()
        await engine.expand({0: [0]})
        assert server.calls == [
            "POST /resume_memory_occupation",
            "POST /update_weights_from_disk",
            "POST /resume_memory_occupation",
            "POST /flush_cache",
            "POST /continue_generation",
            "POST /generate",
        ]
        assert (server.generated, set(engine.awake)) == (["1"], {0})

    run(story)


# Lies about memory ----------------------------------------------------------------------------------


@each_kind
def test_a_server_that_says_200_and_frees_nothing_is_found(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server)
        server.lies[SLEEP[kind]] = "frees nothing"
        with pytest.raises(MemoryNotFree, match=r"says that it sleeps, but after 0\.2 s GPU 0 has 61 GiB in use"):
            await engine.shrink([0])

    run(story)


def test_a_small_server_that_frees_nothing_is_found_as_well(server: LyingServer) -> None:
    async def story() -> None:
        server.lies["/sleep"] = "frees nothing"
        with pytest.raises(MemoryNotFree, match="as much as while awake"):
            await vllm(server, may_keep=100 * GIB).shrink([0])

    run(story)


@each_kind
def test_a_server_that_answers_before_it_is_done_is_waited_for(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server, free_within_s=10.0)
        server.lies[SLEEP[kind]] = "frees late"
        await engine.shrink([0])
        assert server.late == 0 and server.used() == CONTEXT

    run(story)


def test_a_server_that_frees_its_memory_and_says_that_it_is_awake_is_not_believed(server: LyingServer) -> None:
    async def story() -> None:
        server.lies["/is_sleeping"] = "says not"
        with pytest.raises(MemoryNotFree, match="answered /sleep with 200, and says that it is awake"):
            await vllm(server).shrink([0])

    run(story)


def test_a_server_that_says_200_and_does_not_wake_is_found(server: LyingServer) -> None:
    async def story() -> None:
        engine = vllm(server)
        await engine.shrink([0])
        server.lies["/wake_up"] = "wakes nothing"
        with pytest.raises(EngineFault, match="answered /wake_up with 200, and says that it sleeps"):
            await engine.expand({0: [0]})
        assert engine.awake == frozenset()

    run(story)


@each_kind
def test_gpus_that_were_not_named_are_looked_at_when_the_scheduler_names_them(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server, gpus=None)
        server.lies[SLEEP[kind]] = "frees nothing"
        await engine.shrink([0])
        assert not await engine.vacated([0])
        with pytest.raises(MemoryNotFree, match="61 GiB"):
            while not await engine.vacated([0]):
                await asyncio.sleep(0.01)

    run(story)


@each_kind
def test_what_somebody_else_has_on_its_gpus_is_not_held_against_one_that_sleeps(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        meter = GpuMeter(server)
        engine = kind(server, meter=meter)
        await engine.shrink([0])
        meter.others[0] = 80 * GIB
        await engine.shrink([0])
        assert await engine.vacated([0])

    run(story)


@each_kind
def test_a_dead_server_whose_memory_is_gone_has_shrunk_and_cannot_expand(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server)
        publish(engine, server, "1")
        await engine.expand({0: [0]})
        server.die()
        await asyncio.to_thread(server.closed.wait)
        await engine.shrink([0])
        with pytest.raises(EngineUnreachable, match="nobody listens there"):
            await engine.expand({0: [0]})

    run(story)


# Lies about weights ---------------------------------------------------------------------------------


@each_kind
def test_stale_weights_after_waking_are_found(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server)
        publish(engine, server, "1")
        await engine.shrink([0])
        server.lies[UPDATE[kind]] = server.lies["/update_weight_version"] = "stale"
        with pytest.raises(StaleWeights, match="answers with weights 'default', and '1' were published"):
            await engine.expand({0: [0]})
        assert engine.awake == frozenset()
        server.lies.clear()
        await engine.expand({0: [0]})
        assert engine.awake == {0}

    run(story)


@each_kind
def test_a_new_label_on_old_weights_is_found_by_what_they_answer(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server)
        await engine.shrink([0])
        publish(engine, server, "2", proof=True)
        server.lies[UPDATE[kind]] = "new label, old weights"
        with pytest.raises(StaleWeights, match="calls its weights '2', but answers token 7"):
            await engine.expand({0: [0]})
        server.lies.clear()
        await engine.expand({0: [0]})
        assert engine.awake == {0} and server.generated[-1] == "2"

    run(story)


@each_kind
def test_what_cannot_be_proved_is_said(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        server.lies |= {"/weight_info": "absent", "/generate": "tells no version"}
        engine = kind(server)
        publish(engine, server, "1")
        with pytest.raises(Unproven, match="does not say which weights it has"):
            await engine.expand({0: [0]})
        publish(engine, server, "1", proof=True)
        await engine.expand({0: [0]})
        assert engine.awake == {0}, "its answer proves it"

    run(story)


@pytest.mark.parametrize("kind", [sglang, lambda server: vllm(server, level=2)])
def test_dropped_weights_are_brought_at_each_wake(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server)
        await engine.shrink([0])
        with pytest.raises(Unproven, match="keeps no weights over a sleep, and none were published"):
            await engine.expand({0: [0]})
        publish(engine, server, "1")
        for _ in range(2):
            await engine.expand({0: [0]})
            assert server.weights == "1"
            await engine.shrink([0])
            assert server.weights == "lost"

    run(story)


def test_weights_that_are_kept_are_not_brought_again(server: LyingServer) -> None:
    async def story() -> None:
        engine = vllm(server)
        publish(engine, server, "1")
        for _ in range(2):
            await engine.expand({0: [0]})
            await engine.shrink([0])
        assert server.calls.count("POST /collective_rpc") == 1
        server.label = "default"  # it was started anew behind our back
        await engine.expand({0: [0]})
        assert server.calls.count("POST /collective_rpc") == 2

    run(story)


@each_kind
def test_weights_published_while_it_is_awake_take_it_out_of_work_until_refreshed(
    kind: Any, server: LyingServer
) -> None:
    async def story() -> None:
        engine = kind(server)
        publish(engine, server, "1")
        await engine.expand({0: [0]})
        publish(engine, server, "2")
        assert engine.awake == frozenset()
        await engine.refresh()
        assert (set(engine.awake), engine.version, server.weights) == ({0}, "2", "2")

    run(story)


def test_weights_that_come_while_it_wakes_are_brought_before_it_takes_work(server: LyingServer) -> None:
    async def story() -> None:
        engine = vllm(server)

        async def slow(one: EngineServer, version: str) -> None:
            publish(engine, server, "2")
            server.on_disk = "1"
            await reload_weights(one, version)
            server.on_disk = "2"

        engine.publish("1", slow)
        await engine.expand({0: [0]})
        assert (set(engine.awake), server.label, server.weights) == ({0}, "2", "2")

    run(story)


# Servers that misbehave -----------------------------------------------------------------------------

MISBEHAVES = [
    ("hangs", EngineUnreachable, "no answer within 0.5 s"),
    ("drips", EngineUnreachable, "no answer within 0.5 s"),
    ("dies", EngineUnreachable, "it broke off in the middle"),
    ("garbage", EngineGarbled, "answers garbage: '<html>"),
    ("redirects", EngineGarbled, "redirects to 'http://elsewhere.example/sleep'"),
    ("endless", EngineGarbled, "answers with more than 1048576 bytes"),
    ("500", EngineGarbled, "answers 500: .*illegal memory access"),
    ("absent", EngineGarbled, "answers 404"),
]


@each_kind
@pytest.mark.parametrize(("lie", "error", "told"), MISBEHAVES, ids=[row[0] for row in MISBEHAVES])
def test_a_server_that_misbehaves_is_named_with_what_it_did(
    kind: Any, lie: str, error: type[EngineFault], told: str, server: LyingServer
) -> None:
    async def story() -> None:
        engine = kind(server)
        publish(engine, server, "1")
        server.lies[SLEEP[kind]] = lie
        with pytest.raises(error, match=rf"{server.url}: POST {SLEEP[kind]}.*: {told}"):
            await engine.shrink([0])

    run(story)


@each_kind
@pytest.mark.parametrize(("lie", "error", "told"), MISBEHAVES, ids=[row[0] for row in MISBEHAVES])
def test_a_probe_that_is_not_answered_as_it_should_be_wakes_nobody(
    kind: Any, lie: str, error: type[EngineFault], told: str, server: LyingServer
) -> None:
    async def story() -> None:
        engine = kind(server)
        publish(engine, server, "1")
        server.lies[PROBE[kind]] = lie
        with pytest.raises(error, match=told):
            await engine.expand({0: [0]})
        assert engine.awake == frozenset()

    run(story)


@each_kind
@pytest.mark.parametrize("lie", ["another shape", "aborts"])
def test_an_answer_of_another_shape_is_no_answer(kind: Any, lie: str, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server)
        publish(engine, server, "1")
        server.lies[PROBE[kind]] = lie
        with pytest.raises(EngineGarbled, match="the probe"):
            await engine.expand({0: [0]})

    run(story)


@pytest.mark.parametrize("path", ["/is_sleeping", "/v1/models"])
def test_an_answer_of_another_shape_on_the_way_is_found(path: str, server: LyingServer) -> None:
    async def story() -> None:
        server.lies[path] = "another shape"
        with pytest.raises(EngineGarbled, match=path):
            await vllm(server).expand({0: [0]})

    run(story)


def test_an_update_that_was_refused_with_200_is_found(server: LyingServer) -> None:
    async def story() -> None:
        engine = sglang(server)
        publish(engine, server, "1")
        server.lies["/update_weights_from_disk"] = "refuses"
        with pytest.raises(EngineGarbled, match="no such folder"):
            await engine.expand({0: [0]})

    run(story)


# Under a scheduler ----------------------------------------------------------------------------------

ONE = {"actor_infer": ClusterSpec(gpus=[0])}
TWO = {"actor_infer": ClusterSpec(gpus=[0, 1])}
LIES = [
    ("frees nothing", "shrink raised MemoryNotFree: .* says that it sleeps, but after 0.2 s GPU 0 has 61 GiB in use"),
    ("hangs", "shrink raised EngineUnreachable: .* no answer within 0.5 s"),
    ("garbage", "shrink raised EngineGarbled: .* answers garbage"),
]


@each_kind
@pytest.mark.parametrize(("lie", "told"), LIES, ids=[row[0] for row in LIES])
def test_a_lie_quarantines_its_pipeline_by_name_and_the_other_goes_on(
    kind: Any, lie: str, told: str, server: LyingServer
) -> None:
    async def story() -> None:
        with lying_server([1]) as other:
            meter = GpuMeter(server, other)
            async with a_scheduler() as sched:
                liar, honest = kind(server, meter=meter), kind(other, meter=meter, gpus=[1])
                publish(liar, server, "1")
                publish(honest, other, "1")
                await sched.register_pipeline("liar", clusters=ONE, hooks=liar)
                await sched.register_pipeline("honest", clusters={"actor_infer": ClusterSpec(gpus=[1])}, hooks=honest)
                for name in ("liar", "honest"):
                    await sched.admit_pipeline(name)
                    await generating(sched, name)
                server.lies[SLEEP[kind]] = lie
                with pytest.raises(PipelineQuarantined, match=told):
                    await sched.await_release_gpus("liar")
                assert set(sched.snapshot().quarantined) == {"liar"}
                await sched.await_release_gpus("honest")
                assert await generating(sched, "honest") == [1]
                server.lies.clear()
                server.let_go.set()
                await sched.register_pipeline("liar", clusters=ONE, hooks=liar)
                assert await generating(sched, "liar") == [0], "once it tells the truth it is let back in"

    run(story)


@each_kind
def test_stale_weights_quarantine_under_a_scheduler(kind: Any, server: LyingServer) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            engine = kind(server)
            publish(engine, server, "1")
            server.lies[UPDATE[kind]] = server.lies["/update_weight_version"] = "stale"
            await sched.register_pipeline("p1", clusters=ONE, hooks=engine)
            await sched.admit_pipeline("p1")
            with pytest.raises(PipelineQuarantined, match=r"expand raised StaleWeights: .*'default', and '1' were pub"):
                await generating(sched, "p1")

    run(story)


def test_two_pipelines_take_turns_on_a_gpu_and_never_have_it_both(server: LyingServer) -> None:
    async def story() -> None:
        with lying_server() as other:
            meter = GpuMeter(server, other)
            async with a_scheduler() as sched:
                for name, one in (("p1", server), ("p2", other)):
                    engine = vllm(one, meter=meter)
                    one.held.clear()
                    await sched.register_pipeline(name, clusters=ONE, hooks=engine)
                    await sched.admit_pipeline(name)
                for name, one in [("p1", server), ("p2", other)] * 2:
                    assert await generating(sched, name) == [0]
                    assert not one.asleep and meter.used([0])[0] < 70 * GIB
                    await sched.await_release_gpus(name)

    run(story)


def test_each_rank_has_its_server_and_a_rank_without_one_is_refused(server: LyingServer) -> None:
    async def story() -> None:
        with lying_server([1]) as second:
            meter = GpuMeter(server, second)
            engine = VllmEngine({0: server.url, 1: second.url}, gpus={0: [0], 1: [1]}, meter=meter, **SHORT)
            async with a_scheduler() as sched:
                await sched.register_pipeline("p1", clusters=TWO, hooks=engine)
                await sched.admit_pipeline("p1")
                assert await generating(sched, "p1") == [0, 1]
                assert engine.awake == {0, 1}
                second.lies["/sleep"] = "500"
                with pytest.raises(PipelineQuarantined, match="500"):
                    await sched.await_release_gpus("p1")
                assert server.asleep, "the others were let go of all the same"
            with pytest.raises(InvalidRequest, match="no vLLM server for rank 2"):
                await engine.shrink([2])

    run(story)


def test_engines_of_one_rank_each_are_asked_about_the_gpus_that_the_scheduler_names(server: LyingServer) -> None:
    async def story() -> None:
        with lying_server([1]) as second:
            meter = GpuMeter(server, second)
            ranks = EngineRanks({0: vllm(server, meter=meter, gpus=None), 1: vllm(second, meter=meter, gpus=None)})
            second.lies["/sleep"] = "frees nothing"
            await ranks.shrink([0, 1])
            assert await ranks.vacated([0])
            assert not await ranks.vacated([1])

    run(story)


# Cancelled, and made again --------------------------------------------------------------------------


@each_kind
def test_a_cancelled_shrink_can_be_made_again_and_the_first_request_is_waited_for(
    kind: Any, server: LyingServer
) -> None:
    async def story() -> None:
        engine = kind(server, request_s=10.0)
        server.lies[SLEEP[kind]] = "hangs, then does it"
        first = asyncio.create_task(engine.shrink([0]))
        await asyncio.to_thread(server.hanging.wait)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.create_task(engine.shrink([0]))
        await asyncio.sleep(0)
        server.let_go.set()
        await again
        assert server.asleep

    run(story)


@each_kind
@pytest.mark.parametrize("path", [WAKE, UPDATE, PROBE], ids=["wake", "update", "probe"])
def test_a_cancelled_expand_can_be_made_again(kind: Any, path: Any, server: LyingServer) -> None:
    async def story() -> None:
        engine = kind(server, request_s=10.0)
        publish(engine, server, "1")
        await engine.shrink([0])
        server.lies[path[kind]] = "hangs, then does it"
        first = asyncio.create_task(engine.expand({0: [0]}))
        await asyncio.to_thread(server.hanging.wait)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert engine.awake == frozenset()
        server.let_go.set()
        await engine.expand({0: [0]})
        assert engine.awake == {0} and server.generated[-1] == "1"

    run(story)


@each_kind
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_only_who_has_the_newest_weights_is_called_awake(
    kind: Any, seed: int, server: LyingServer
) -> None:
    dice = random.Random(seed)

    async def story() -> None:
        engine = kind(server)
        published = 1
        publish(engine, server, "1")
        for _ in range(60):
            choice = dice.choice(["shrink", "expand", "publish", "refresh", "cancel", "cancel"])
            if choice == "publish":
                published += 1
                publish(engine, server, str(published))
                assert engine.awake == frozenset()
            elif choice == "cancel":
                call = asyncio.create_task(engine.shrink([0]) if dice.random() < 0.5 else engine.expand({0: [0]}))
                await asyncio.sleep(dice.choice([0, 0.001, 0.003, 0.01]))
                call.cancel()
                await asyncio.wait({call})
            else:
                await {"shrink": lambda: engine.shrink([0]), "refresh": engine.refresh}.get(
                    choice, lambda: engine.expand({0: [0]})
                )()
                if choice == "shrink":
                    assert server.asleep and server.used() == CONTEXT
            if engine.awake:
                assert not server.asleep and not server.paused
                assert server.weights == str(published)
        assert "lost" not in server.generated

    run(story)


# Meters ---------------------------------------------------------------------------------------------


def test_without_a_meter_an_engine_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InvalidRequest, match="cannot verify that memory is free"):
        VllmEngine("http://127.0.0.1:1")


def test_nvidia_smi_is_read_where_nvml_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aa, 1024'\necho '1, GPU-bb, 3'\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    meter = meters.default()
    assert isinstance(meter, SmiMeter)
    assert meter.used([0, 1]) == {0: 1 << 30, 1: 3 << 20}
    assert SmiMeter({5: "GPU-bb"}).used([5]) == {5: 3 << 20}
    with pytest.raises(EngineFault, match="does not list GPU 2"):
        meter.used([2])


def test_nvml_counts_a_gpu_or_only_the_processes_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=100 + handle)
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        types.SimpleNamespace(pid=7, usedGpuMemory=40),
        types.SimpleNamespace(pid=8, usedGpuMemory=50),
    ]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert meters.default().used([0, 3]) == {0: 100, 3: 103}
    assert NvmlMeter(pids=lambda: [7]).used([0]) == {0: 40}

    def fails() -> None:
        raise nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlInit = fails
    with pytest.raises(InvalidRequest, match=r"cannot verify.*Driver Not Loaded"):
        meters.default()


def test_a_meter_that_fails_is_told_as_such(server: LyingServer) -> None:
    class Broken:
        def used(self, gpus: Any, /) -> dict[int, int]:
            return {}

    async def story() -> None:
        with pytest.raises(EngineFault, match="cannot read the memory of GPUs"):
            await vllm(server, meter=Broken()).shrink([0])

    run(story)


def test_weights_that_cannot_be_brought_are_refused_when_they_are_published(server: LyingServer) -> None:
    with pytest.raises(InvalidRequest, match="by a function of yours"):
        vllm(server).publish("1", "/weights/1")
    with pytest.raises(InvalidRequest, match="from a folder"):
        sglang(server).publish("1")
