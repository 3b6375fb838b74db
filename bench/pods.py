"""Plays all nodes of a cluster for Pods that do nothing: each is set running and ready as soon as it is there.

    KUBECONFIG=… python -m bench.pods

In a process of its own, so that it takes nothing from whoever measures. Says `ready N` for every hundred.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from muster import errors
from muster.kube.client import MERGE_PATCH, Json, KubeApi

PODS = "/api/v1/pods"
OURS = {"labelSelector": "app.kubernetes.io/managed-by=muster"}


async def main() -> None:
    api = KubeApi.connect()
    tasks: set[asyncio.Task[None]] = set()
    count = 0

    async def set_ready(pod: Json) -> None:
        nonlocal count
        about = pod["metadata"]
        path = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}/status"
        try:
            await api.request("PATCH", path, body={"status": ready()}, content_type=MERGE_PATCH)
        except errors.NotFound:
            return
        count += 1
        if count % 100 == 0:
            print(f"ready {count}", flush=True)

    items, version = await api.list(PODS, OURS)
    print("following", flush=True)
    for pod in items:
        tasks.add(asyncio.create_task(set_ready(pod)))
    while True:
        async for kind, pod in api.watch(PODS, version, OURS):
            version = pod["metadata"]["resourceVersion"]
            if kind == "ADDED":
                task = asyncio.create_task(set_ready(pod))
                tasks.add(task)
                task.add_done_callback(tasks.discard)


def ready() -> Json:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    container = {"name": "worker", "ready": True, "restartCount": 0, "image": "muster", "imageID": ""}
    return {
        "phase": "Running",
        "startTime": now,
        "podIP": "10.77.0.1",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
        "containerStatuses": [{**container, "state": {"running": {"startedAt": now}}}],
    }


if __name__ == "__main__":
    asyncio.run(main())
