"""What does TensorBoard read? A file of records, each an `Event` in protobuf's wire format, with checksums.

Written here as far as scalars need it, so that nobody has to install TensorFlow for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from muster.types.metrics import Metrics

FILE = "events.out.tfevents.1.muster"  # always the same: what is written again replaces it
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # how fields are written
_POLYNOMIAL = 0x82F63B78  # of CRC-32C (Castagnoli)


def file_of(metrics: Metrics) -> bytes:
    """All curves. What has no step, as the size of the world, has the seconds since the first point for its step."""
    times = [at for series in metrics.series for _, at, _ in series.points]
    first = min(times, default=0.0)
    version = _field(1, _DOUBLE, first) + _field(3, _BYTES, b"brain.Event:2")
    return b"".join(map(_record, [version, *_events(metrics, first)]))


def _events(metrics: Metrics, first: float) -> Iterator[bytes]:
    for series in metrics.series:
        for step, at, value in series.points:
            scalar = _field(1, _BYTES, series.name.encode()) + _field(2, _FLOAT, value)
            counted = max(0, int(at - first) if step is None else step)
            summary = _field(1, _BYTES, scalar)
            yield _field(1, _DOUBLE, at) + _field(2, _VARINT, counted) + _field(5, _BYTES, summary)


def _field(number: int, kind: int, value: float | int | bytes) -> bytes:
    tag = _varint(number << 3 | kind)
    if isinstance(value, bytes):
        return tag + _varint(len(value)) + value
    if kind == _VARINT:
        return tag + _varint(int(value))
    if kind == _DOUBLE:
        return tag + struct.pack("<d", value)
    return tag + struct.pack("<f", max(-3.4e38, min(3.4e38, value)))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _table() -> Iterable[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        yield value


_TABLE = tuple(_table())


def checksum(data: bytes) -> int:
    found = 0xFFFFFFFF
    for byte in data:
        found = _TABLE[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    """As the format wants it: a checksum of what holds checksums is worth little."""
    found = checksum(data)
    return ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF
