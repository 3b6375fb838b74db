"""What is ordered of the cluster for a worker, or why could it never start?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muster.backends import orders
from muster.backends.kube import render
from muster.backends.kube.priorities import PriorityClasses
from muster.backends.kube.render import Json
from muster.backends.kube.template import worker_of
from muster.backends.kube.workloads import Place
from muster.kube.client import KubeApi
from muster.ports import Clock
from muster.types.training import Training, Uid


class PodOrders:
    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        *,
        coordinator: str,
        mesh_endpoint: str = "",
        image: str = "",
        agent_image: str = "",
        user: int | None = render.USER,
        home: str = "",
        api_url: str = "",
    ) -> None:
        """`home` is the control plane's own namespace, `api_url` where workers find its API."""
        self._classes = PriorityClasses(api, clock)
        self._coordinator = coordinator
        self.mesh_endpoint = mesh_endpoint
        self._image = image
        self._agent_image = agent_image
        self._user = user
        self._home = home
        self.api_url = api_url
        self.place: Callable[[Uid], Place | None] = lambda uid: None  # what a queue says of where they run

    async def order(self, training: Training, name: str) -> Json:
        """The template's own class goes first."""
        asked = (training.spec.template or {}).get("spec") or {}
        named = asked.get("priorityClassName")
        return self._render(training, name, "" if named else await self._classes.of(training.spec.priority))

    def plan(self, training: Training) -> Mapping[str, Any]:
        """For a dry run, which asks no cluster."""
        shown = self.pod(training)
        worker = worker_of(shown)
        claims = render.claims(orders.shown(training))
        return {
            "workers": training.spec.world_size.target + training.spec.spares,
            "command": worker["command"],
            "workingDir": training.spec.working_dir or "",
            "image": worker["image"],
            "gpusPerWorker": training.spec.resources.gpus,
            "pod": shown,
            **({"claims": claims} if claims else {}),
        }

    def pod(self, training: Training) -> Json:
        """Of a worker, as others may see it."""
        return self._render(orders.shown(training), f"{training.metadata.name}-0")

    def _render(self, training: Training, name: str, priority_class: str = "") -> Json:
        rendered = render.pod(
            training,
            name,
            coordinator=self._coordinator,
            mesh_endpoint=self.mesh_endpoint,
            image=self._image,
            agent_image=self._agent_image,
            user=self._user,
            priority_class=priority_class,
            api_url=self.api_url,
        )
        place = self.place(training.uid)
        return place.applied(rendered) if place is not None else rendered

    def impossible(self, training: Training, order: Json) -> str:
        """Why a Pod could never start, though the cluster would take it."""
        worker, spec = worker_of(order), training.spec
        folder = worker.get("workingDir", "/")
        if not worker["image"]:
            return "spec.image is needed: there is no default image"
        if not folder.startswith("/"):
            return f"spec.workingDir must be absolute in a container, not {folder!r}"
        if training.metadata.namespace == self._home and (spec.template or spec.storage):
            # There a Pod could be given the control plane's own account, and its Secrets.
            field = "template" if spec.template else "storage"
            return f"spec.{field} is not taken in the control plane's own namespace: choose another one"
        return ""
