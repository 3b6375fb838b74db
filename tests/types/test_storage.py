"""What storage a training may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from muster.types import storage
from muster.types.codec import Invalid, from_wire, to_wire
from muster.types.storage import Storage


def a_storage(name: str = "ckpt", mount: str = "/ckpt", **more: Any) -> Storage:
    return Storage(name, mount, **({"size": "1Gi"} if "claim" not in more else {}) | more)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            [a_storage(claim="a", size="1Gi")],
            "[ckpt]: needs either the claim that it is or the size that it is to have",
        ),
        ([a_storage(size=None)], "[ckpt]: needs either the claim that it is or the size that it is to have"),
        ([a_storage(claim="a", class_="fast")], "[ckpt].class: is of no use with a claim that is there"),
        ([a_storage(claim="a", keep=False)], "[ckpt].keep: a claim that muster did not make is not removed"),
        ([a_storage(mount="ckpt")], "[ckpt].mount: 'ckpt' is not an absolute path below /"),
        ([a_storage(mount="/")], "[ckpt].mount: '/' is not an absolute path below /"),
        ([a_storage(mount="//")], "[ckpt].mount: '//' is not an absolute path below /"),
        ([a_storage(mount="/a/../b")], "[ckpt].mount: '/a/../b' is not an absolute path below /"),
        ([a_storage(mount="/home/worker/")], "[ckpt].mount: /home/worker is the home of the worker's user"),
        ([a_storage(mount="/dev/shm")], "[ckpt].mount: /dev/shm is shared memory, which nothing outlives"),
        ([a_storage(), a_storage(mount="/b")], "[ckpt]: is given twice"),
        ([a_storage(), a_storage("b", "/ckpt/")], "[b].mount: /ckpt is the mount of another one, too"),
    ],
)
def test_what_cannot_be_is_named(asked: list[Storage], said: str) -> None:
    assert [f"{one.field}: {one.message}" for one in storage.problems(asked)] == [f"spec.storage{said}"]


def test_what_can_be_is_passed_on_and_spelled_as_kubernetes_does() -> None:
    asked = (a_storage(class_="fast", keep=False, access="ReadWriteOnce"), a_storage("data", "/data", claim="there.1"))
    assert storage.problems(asked) == []
    assert to_wire(asked[0])["class"] == "fast" and from_wire(Storage, to_wire(asked[0])) == asked[0]
    assert asked[0].variable == "MUSTER_STORAGE_CKPT" and a_storage("a-b").variable == "MUSTER_STORAGE_A_B"


@pytest.mark.parametrize("field", [{"name": "A"}, {"size": "lots"}, {"size": "0"}, {"access": "None"}, {"claim": "-"}])
def test_single_fields_have_their_limits(field: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as raised:
        from_wire(Storage, {"name": "a", "mount": "/a", **field})
    assert [one.field for one in raised.value.problems] == list(field)
