"""`muster metrics`: a table, JSON, and a file that TensorBoard reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.cli import tensorboard
from muster.types.metrics import Metrics, Series, WorkerMetrics
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training

AT = 1_769_860_800.0
LEARNED = Metrics(
    (
        Series("loss", ((0, AT, 2.0), (1, AT + 1.5, 1.0), (300, AT + 2, 1.25)), not_finite=2),
        Series("train/lr é", ((300, AT + 2, 1e-4),)),
        Series("world_size", ((None, AT, 2.0), (None, AT + 130.7, 3.0))),
    ),
    (WorkerMetrics("demo-0", AT, 93.1, 3 << 30), WorkerMetrics("demo-1", AT, 5.0, 1 << 20, 88.0, 70 << 30)),
)


def test_the_table_has_a_line_for_each_curve_and_each_worker(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    control.metrics = LEARNED
    said = muster("metrics", "demo")
    rows = [line.split() for line in said.out.splitlines()]
    assert said.code == 0
    assert rows[0] == ["CURVE", "LAST", "STEP", "LOWEST", "HIGHEST", "POINTS", "NOTE"]
    assert rows[1] == ["loss", "1.25", "300", "1", "2", "3", "2", "×", "not", "finite"]
    assert rows[3] == ["world_size", "3", "-", "2", "3", "2", "-"]
    assert rows[5] == ["WORKER", "CPU", "MEMORY", "GPU", "GPU-MEMORY"]
    assert rows[6:] == [
        ["demo-0", "93%", "3.0", "GiB", "-", "-"],
        ["demo-1", "5%", "1.0", "MiB", "88%", "70.0", "GiB"],
    ]


def test_nothing_known_is_said_beside_the_data(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    said = muster("metrics", "demo")
    assert (said.code, said.out) == (0, "") and "nothing is known of demo yet" in said.err


def test_programs_get_everything_as_json(muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    control.metrics = LEARNED
    told = json.loads(muster("metrics", "demo", "-o", "json").out)
    assert told["series"][0]["points"][1] == [1, AT + 1.5, 1.0] and told["series"][2]["points"][0][0] is None
    assert told["workers"][1]["gpuMemoryBytes"] == 70 << 30


@pytest.mark.parametrize("words", [("metrics",), ("metrics", "demi"), ("metrics", "demo", "-o", "csv")])
def test_what_is_typed_wrongly_is_one_line(words: tuple[str, ...], muster: Muster, control: StandIn) -> None:
    control.add(a_training())
    said = muster(*words)
    assert said.code != 0 and said.out == "" and said.err


def test_a_folder_that_cannot_be_written_is_said(muster: Muster, control: StandIn, tmp_path: Path) -> None:
    control.add(a_training())
    (tmp_path / "file").touch()
    said = muster("metrics", "demo", "--tensorboard", str(tmp_path / "file"))
    assert said.code == 2 and "--tensorboard" in said.err and "Not a directory" in said.err


# A reader of what TensorBoard reads, by the published format, which shares nothing with the writer.


def records(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        (head,) = struct.unpack("<I", data[8:12])
        body = data[12 : 12 + length]
        (tail,) = struct.unpack("<I", data[12 + length : 16 + length])
        assert (head, tail) == (masked(data[:8]), masked(body))
        yield body
        data = data[16 + length :]


def masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:  # bit by bit: slow, and plainly what it should be
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def message(data: bytes) -> dict[int, object]:
    found: dict[int, object] = {}
    while data:
        tag, data = varint(data)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            found[number], data = varint(data)
        elif kind == 1:
            found[number], data = struct.unpack("<d", data[:8])[0], data[8:]
        elif kind == 5:
            found[number], data = struct.unpack("<f", data[:4])[0], data[4:]
        else:
            assert kind == 2
            size, data = varint(data)
            found[number], data = data[:size], data[size:]
    return found


def varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for count, byte in enumerate(data, 1):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data[count:]
    raise AssertionError("it has no end")


def scalars(data: bytes) -> list[tuple[str, int, float, float]]:
    found = []
    first, *events = [message(one) for one in records(data)]
    assert first[3] == b"brain.Event:2"
    for event in events:
        summary = event[5]
        assert isinstance(summary, bytes)
        inner = message(summary)[1]
        assert isinstance(inner, bytes)
        scalar = message(inner)
        name = scalar[1]
        assert isinstance(name, bytes)
        found.append((name.decode(), event.get(2, 0), event[1], scalar[2]))
    return found  # type: ignore[return-value]


def test_the_file_for_tensorboard_has_every_point(muster: Muster, control: StandIn, tmp_path: Path) -> None:
    control.add(a_training())
    control.metrics = LEARNED
    for _ in range(2):  # written again, it is replaced
        said = muster("metrics", "demo", "--tensorboard", "runs")
        assert said.code == 0 and "tensorboard --logdir runs" in said.err
    [path] = (tmp_path / "runs" / "demo").iterdir()
    assert path.name == tensorboard.FILE
    assert scalars(path.read_bytes()) == [
        ("loss", 0, AT, 2.0),
        ("loss", 1, AT + 1.5, 1.0),
        ("loss", 300, AT + 2, 1.25),
        ("train/lr é", 300, AT + 2, pytest.approx(1e-4)),
        ("world_size", 0, AT, 2.0),
        ("world_size", 130, AT + 130.7, 3.0),
    ]


def test_tensorboard_itself_reads_it(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / tensorboard.FILE).write_bytes(tensorboard.file_of(LEARNED))
    found = reader.EventAccumulator(str(tmp_path))
    found.Reload()
    assert found.Tags()["scalars"] == ["loss", "train/lr é", "world_size"]
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(0, 2.0), (1, 1.0), (300, 1.25)]


def test_the_checksum_is_that_of_castagnoli() -> None:
    assert tensorboard.checksum(b"123456789") == 0xE3069283
