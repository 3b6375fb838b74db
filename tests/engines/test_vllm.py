"""A real vLLM, on a CPU: does it do what our engine believes of it, and is what it only says found out?

`make test-engines` installs it, in an environment of its own. Its build for CPUs has no memory to give back: it answers
`/sleep` with 200, says that it sleeps, and keeps everything. Nobody has to imitate that lie.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.sharing import ClusterSpec, PipelineQuarantined
from muster.sharing.engines import LogprobProof, MemoryNotFree, StaleWeights, VllmEngine
from muster.sharing.engines.server import EngineServer
from muster.sharing.engines.vllm import reload_weights
from tests.fleet import Fleet, Process, eventually, family, free_port, kill_all
from tests.sharing.scripted import a_scheduler, generating

pytestmark = pytest.mark.engines

PYTHON = Path(sys.prefix) / "engines" / "bin" / "python"
TINY_LLAMA = Path(__file__).with_name("tiny_llama.py")
PROMPT = (5, 6, 7)
MIB = 1 << 20
STARTS_S = 240.0


@dataclass
class Vllm:
    """A server, and the folder that it reads its weights from."""

    url: str
    model: Path
    process: Process

    def used(self, gpus: Sequence[int], /) -> dict[int, int]:
        """Memory of all its processes, in the place of a GPU's."""
        page = os.sysconf("SC_PAGE_SIZE")
        return dict.fromkeys(gpus, page * sum(_resident(pid) for pid in family(self.process.pid)))

    def engine(self) -> VllmEngine:
        return VllmEngine(self.url, gpus=[0], meter=self, may_keep=64 * MIB, free_within_s=1.0)

    def new_weights(self, seed: int) -> LogprobProof:
        """Other weights where it finds them, and what they answer, by another implementation of the model."""
        token, logprob = tiny_llama(self.model, seed)
        return LogprobProof(PROMPT, token, logprob)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def tiny_llama(folder: Path, seed: int) -> tuple[int, float]:
    made = subprocess.run([PYTHON, TINY_LLAMA, folder, str(seed)], capture_output=True, text=True, timeout=STARTS_S)
    assert made.returncode == 0, made.stderr
    token, logprob = json.loads(made.stdout.splitlines()[-1])
    return token, logprob


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("vllm"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def vllm(fleet: Fleet) -> Vllm:
    if not PYTHON.exists():
        pytest.skip("no vLLM here: make test-engines installs it")
    model, port = fleet.folder / "model", free_port()
    tiny_llama(model, 1)
    command = (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager")
    where = ("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "64", "--dtype", "float32")
    dev = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = fleet.start(*command, *where, **dev)
    url = f"http://127.0.0.1:{port}"
    eventually(lambda: process.proc.poll() is not None or answers(url), "it serves", STARTS_S)
    assert process.proc.poll() is None, process.text[-4000:]
    return Vllm(url, model, process)


def test_it_wakes_and_proves_the_weights_that_were_published(vllm: Vllm) -> None:
    async def story() -> None:
        engine = vllm.engine()
        await engine.expand({0: [0]})
        assert engine.awake == {0}, "with what it was started with"
        engine.publish("2", reload_weights, proof=vllm.new_weights(2))
        assert engine.awake == frozenset(), "no work for old weights"
        await engine.refresh()
        assert engine.awake == {0}
        await engine.expand({0: [0]})  # again, which is no harm

    asyncio.run(story())


def test_a_label_without_the_weights_is_found_out(vllm: Vllm) -> None:
    async def labels(server: EngineServer, version: str) -> None:
        await server.post("/update_weight_version", {"new_version": version})

    async def story() -> None:
        engine, proof = vllm.engine(), vllm.new_weights(3)
        await engine.expand({0: [0]})
        engine.publish("3", labels, proof=proof)
        with pytest.raises(StaleWeights, match="calls its weights '3', but answers token"):
            await engine.refresh()
        assert engine.awake == frozenset()
        engine.publish("4", reload_weights, proof=proof)
        await engine.refresh()
        assert engine.awake == {0}

    asyncio.run(story())


def test_a_sleep_that_frees_nothing_is_found_out_and_it_wakes_again(vllm: Vllm) -> None:
    async def story() -> None:
        engine = vllm.engine()
        await engine.expand({0: [0]})
        with pytest.raises(MemoryNotFree, match=r"says that it sleeps, but after 1 s GPU 0 has .* GiB in use"):
            await engine.shrink([0])
        assert engine.awake == frozenset() and not await engine.vacated([0])
        await engine.expand({0: [0]})
        assert engine.awake == {0}

    asyncio.run(story())


def test_under_a_scheduler_that_quarantines_its_pipeline_by_name(vllm: Vllm) -> None:
    async def story() -> None:
        async with a_scheduler(hook_timeout_s=60.0) as sched:
            await sched.register_pipeline("p1", clusters={"actor_infer": ClusterSpec(gpus=[0])}, hooks=vllm.engine())
            await sched.admit_pipeline("p1")
            assert await generating(sched, "p1") == [0]
            with pytest.raises(PipelineQuarantined, match="shrink raised MemoryNotFree: vLLM of rank 0 says"):
                await sched.await_release_gpus("p1")
            assert set(sched.snapshot().quarantined) == {"p1"}

    asyncio.run(story())


def test_one_that_is_killed_whole_has_left_its_memory(vllm: Vllm) -> None:
    """The last one: nothing of it is left."""

    async def story() -> None:
        engine = vllm.engine()
        await engine.expand({0: [0]})
        kill_all(family(vllm.process.pid))
        vllm.process.wait()
        await engine.shrink([0])
        assert await engine.vacated([0])

    asyncio.run(story())
