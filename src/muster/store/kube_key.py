"""Who may seal what an object carries for the journal? Whoever has the key, a Secret beside the journal.

It is made by the first control plane that needs it and is the same for all replicas. Without it nothing is lost but
what a control plane left in an object, between its write and the journal's: that is then set aside, and told.
"""

from __future__ import annotations

import base64
import binascii
import secrets

from muster import errors
from muster.kube.client import Json, KubeApi

NAME = "muster-journal-key"
_BYTES = 32


async def read_key(api: KubeApi, namespace: str) -> bytes:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    try:
        found = await api.request("GET", f"{path}/{NAME}")
    except errors.NotFound:
        try:
            found = await api.request("POST", path, body=_secret(secrets.token_bytes(_BYTES)))
        except errors.AlreadyExists:  # another replica, or we before an answer got lost
            found = await api.request("GET", f"{path}/{NAME}")
    return _key_of(found)


def _secret(key: bytes) -> Json:
    metadata = {"name": NAME, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    data = {"key": base64.b64encode(key).decode()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }


def _key_of(secret: Json) -> bytes:
    try:
        key = base64.b64decode((secret.get("data") or {}).get("key") or "", validate=True)
    except binascii.Error:
        key = b""
    if len(key) < _BYTES:
        raise errors.InvalidRequest(
            f"the Secret {NAME} holds no key of {_BYTES} bytes", hint="delete it: a new one is made at the next start"
        )
    return key
