"""Pure: what does the lab's DNS answer? No lab is needed for these."""

from __future__ import annotations

import socket
import struct

import pytest

from tests.containers import names
from tests.kube.api import Json

SERVICES: dict[names.Key, Json] = {
    ("muster", "muster"): {"spec": {"clusterIP": "10.96.1.2"}},
    ("t", "demo"): {"spec": {"clusterIP": "None"}},
    ("t", "empty"): {"spec": {"clusterIP": "None"}},
}
ENDPOINTS: dict[names.Key, Json] = {
    ("t", "demo"): {
        "subsets": [
            {
                "addresses": [{"ip": "10.78.1.2", "hostname": "demo-0"}],
                "notReadyAddresses": [{"ip": "10.78.2.2", "hostname": "demo-1"}],
            }
        ]
    }
}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("muster.muster.svc.cluster.local", ["10.96.1.2"]),
        ("MUSTER.muster.svc", ["10.96.1.2"]),
        ("demo.t.svc.cluster.local", ["10.78.1.2", "10.78.2.2"]),
        ("demo-1.demo.t.svc.cluster.local", ["10.78.2.2"]),
        ("demo-9.demo.t.svc.cluster.local", None),
        ("empty.t.svc.cluster.local", None),
        ("muster.muster.svc.t.svc.cluster.local", None),
        ("example.com", None),
    ],
)
def test_names_of_services_and_of_pods_are_found(name: str, found: list[str] | None) -> None:
    assert names.addresses(name, SERVICES, ENDPOINTS) == found


def query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(word)]) + word.encode() for word in name.split("."))
    return b"\x12\x34" + struct.pack("!HHHHH", 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def test_an_answer_repeats_the_question_and_has_one_record_for_each_address() -> None:
    data = query("demo.t.svc")
    name, kind, question = names.asked(data)
    assert (name, kind) == ("demo.t.svc", 1) and data.endswith(question)
    said = names.answer(data, question, ["10.78.1.2", "10.78.2.2"], kind)
    assert said[:2] == b"\x12\x34" and struct.unpack_from("!HHH", said, 2)[2] == 2
    assert said.endswith(socket.inet_aton("10.78.2.2"))


def test_a_name_that_is_not_there_and_a_record_that_is_not_there_are_two_things() -> None:
    data = query("demo.t.svc", kind=28)
    _, kind, question = names.asked(data)
    assert names.answer(data, question, ["10.78.1.2"], kind)[3] & 15 == 0
    assert names.answer(data, question, None, kind)[3] & 15 == 3
