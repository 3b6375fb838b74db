"""The claims that a training's storage is to be made of: are they there, and whose are they?

One that is kept outlives its training and is taken over by the next one of that name. Somebody else's is left alone.
"""

from __future__ import annotations

import functools

from muster import errors
from muster.backends.kube import render
from muster.backends.kube.creating import NameTaken, create
from muster.backends.kube.render import Json
from muster.kube.client import KubeApi, again
from muster.types.training import KIND, Training

KIND_OF_CLAIMS = "persistentvolumeclaims"


async def provide(api: KubeApi, training: Training) -> None:
    for claim in render.claims(training):
        try:
            await create(api, KIND_OF_CLAIMS, claim)
        except errors.AlreadyExists:
            path = f"/api/v1/namespaces/{training.key.namespace}/{KIND_OF_CLAIMS}/{claim['metadata']['name']}"
            found = await again(functools.partial(api.request, "GET", path))
            if why := refusal(found, training):
                raise NameTaken(why) from None


def refusal(found: Json, training: Training) -> str:
    """Why a claim of that name that is there cannot be this training's; "" if it can."""
    about = found["metadata"]
    labels = about.get("labels") or {}
    if any(labels.get(name) != value for name, value in (*render.OURS.items(), (render.TRAINING, training.key.name))):
        return (
            f"there is a PersistentVolumeClaim {about['name']} that is not muster's: "
            "name it as the claim of a storage, or rename the storage"
        )
    owners = {one.get("uid") for one in about.get("ownerReferences") or () if one.get("kind") == KIND}
    if about.get("deletionTimestamp") or owners - {training.uid}:
        return f"the PersistentVolumeClaim {about['name']} is being removed with the training that it belonged to"
    return ""
