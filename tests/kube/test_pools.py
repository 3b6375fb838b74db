"""Does what a pool knows outlive the control plane that decided it, on Kubernetes?"""

from __future__ import annotations

import asyncio

import pytest

from muster.sharing import Priority
from muster.sharing.remote import connect
from tests.kube.plane import KubePlane
from tests.sharing.room import BOUND_S, INFER, TRAIN, Engine, clusters

pytestmark = pytest.mark.kube


def test_another_replica_goes_on_with_leases_and_demand(kube_plane: KubePlane) -> None:
    kube_plane.env["MUSTER_POOL_GPUS"] = "0,1,2,3"
    kube_plane.crash()
    kube_plane.serve()

    async def story() -> None:
        engine = Engine()
        url = f"http://{kube_plane.proxy.address('api')}"
        async with await connect(url, kube_plane.token) as handle, asyncio.timeout(3 * BOUND_S):
            await handle.register_pipeline("p1", clusters(), engine)
            await handle.admit_pipeline("p1")
            assert await handle.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING) == [0, 1]
            assert await handle.request_gpus("p1", INFER, Priority.GENERATION, 8) == [2, 3]
            before = await handle.snapshot()
            await asyncio.to_thread(kube_plane.crash, "one")
            await asyncio.to_thread(kube_plane.serve, "two")
            found = await handle.snapshot()
            assert found.leases == before.leases and found.open_rollouts == {"p1": 8}
            freed = await handle.notify_release_gpus("p1", TRAIN)
            assert freed.gpus == (0, 1)
            await handle.await_release_gpus("p1")
            assert not engine.awake and (await handle.snapshot()).idle == (0, 1, 2, 3)

    asyncio.run(story())
