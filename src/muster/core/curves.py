"""Which points of a training's curves are kept, however long it trains?

A curve has a bounded number of points, evenly spaced over everything that came: when it is full every second one goes,
and from then on only every second one of those that come is taken. The first and the newest are always there. What
is kept of a training fits into one small record.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from muster.types.codec import limited
from muster.types.measured import WorkerUse
from muster.types.numbers import DERIVED, LARGEST, MAX_NAMES, is_name

T = TypeVar("T")

MOST_POINTS = 1_000  # of a curve
MOST_OF_ALL = 11_000  # of all curves of a training
MOST_BYTES = 128 << 10  # of the record of a training
LEAST_POINTS = 16
RECENT, MOST_RECENT = 60, 64  # of what a worker has said of its use; in a larger world only the last is told
_NO_STEP = -(1 << 63)
_TICKS = 100  # a second, of the times that are written down
_POINT = struct.calcsize("<qIf")
_LARGEST = 3.4e38  # that four bytes can say


class Point(NamedTuple):
    step: int | None
    at: float  # seconds since 1970
    value: float


class Thinned(Generic[T]):
    """A list that grows to `most` and no further."""

    def __init__(self, most: int) -> None:
        self.items: list[T] = []
        self.most = most
        self._stride = 1  # every how manieth is taken
        self._since = 0  # how many came after the last that was taken
        self._loose = False  # the last is there only because it is the newest

    def add(self, item: T) -> None:
        if self._loose:
            self.items[-1] = item
        else:
            self.items.append(item)
        self._since = self._since + 1 if len(self.items) > 1 else self._stride
        self._loose = self._since < self._stride
        if not self._loose:
            self._since = 0
        if len(self.items) > self.most:
            self._halve()

    def thin(self, most: int) -> None:
        """Have room for no more than that."""
        self.most = max(most, 2)
        while len(self.items) > self.most:
            self._halve()

    def cut(self, goes: Callable[[T], bool]) -> None:
        """Take away from the end what goes."""
        while self.items and goes(self.items[-1]):
            self.items.pop()
            self._since, self._loose = 0, False

    def _halve(self) -> None:
        taken = self.items[:-1] if self._loose else self.items
        kept, newest = taken[::2], self.items[-1]
        if len(taken) % 2 == 0:  # the last that was taken goes: what came after it counts from the one before
            self._since += self._stride
            self._loose = True
        self.items = [*kept, newest] if self._loose else kept
        self._stride *= 2


class Curve:
    """One number over time."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._points: Thinned[Point] = Thinned(most)
        self.round = -1
        self.not_finite = 0

    @property
    def points(self) -> Sequence[Point]:
        return self._points.items

    @property
    def last(self) -> Point | None:
        return self._points.items[-1] if self._points.items else None

    def log(self, point: Point, number: int) -> None:
        """A number that a rank logged in that round. Steps that are done again replace those of rounds before."""
        if number > self.round:
            self.round, step = number, point.step
            if step is not None:
                self._points.cut(lambda old: old.step is not None and old.step >= step)
        self._points.add(point)

    def add(self, point: Point) -> None:
        self._points.add(point)

    def hold(self, point: Point) -> None:
        """A level: only where it changes is a point needed, and at its end."""
        items = self._points.items
        if items and items[-1].value != point.value:
            self._points.add(Point(None, point.at, items[-1].value))
        if len(items) > 1 and items[-1].value == items[-2].value == point.value:
            items[-1] = point
        else:
            self._points.add(point)

    def thin(self, most: int) -> None:
        self._points.thin(most)


@dataclass(frozen=True)
class KeptCurves:
    """The curves of a training as they are written down."""

    curves: Mapping[str, str] = field(default_factory=dict)
    at: float = 0.0  # when it was written
    base: int = 0  # from when on the times of its points count
    round: int = limited(-1, ge=-1)
    seq: int = limited(0, ge=0)
    not_finite: Mapping[str, int] = field(default_factory=dict)
    ended: bool = False


class WorkerReading:
    """What a worker uses, as it has said lately."""

    def __init__(self) -> None:
        self.use = WorkerUse()
        self.at = 0.0
        self.recent: deque[tuple[float, WorkerUse]] = deque(maxlen=RECENT)

    def take(self, use: WorkerUse, at: float, workers: int = 1) -> None:
        """`workers`: how many there are. Of very many nobody is told what was before, so it is not kept."""
        self.use, self.at = use, at
        if workers > MOST_RECENT:
            self.recent.clear()
        self.recent.append((at, use))


class TrainingCurves:
    """All that one training has logged, and what can be told of it without that."""

    def __init__(self, room: int = MOST_OF_ALL) -> None:
        self.curves: dict[str, Curve] = {}
        self._room = room
        self._heard = (-1, 0)  # the round and the count of the last number that was taken
        self._mark: tuple[int, int, int, float] | None = None  # round, rank, step and time of the last look

    def make_room(self, room: int) -> None:
        if room != self._room:
            self._room = room
            self._share_out()

    def log(self, number: int, seq: int, name: str, point: Point | None) -> bool:
        """Take what a rank logged in that round, unless it was taken before; None for what is not finite.

        A worker that comes back tells all that it still has, so that a control plane that was away misses nothing.
        """
        if (number, seq) <= self._heard or not is_name(name):
            return False
        self._heard = number, seq
        curve = self._curve(name)
        if curve is None:
            return False
        if point is None:
            curve.not_finite += 1
        else:
            curve.log(point, number)
        return True

    def reached(self, number: int, rank: int, step: int, mark_at: float, now: float) -> bool:
        """A rank has got to that step: `mark_at` is when, on the clock that measures; `now` the time of day."""
        before, self._mark = self._mark, (number, rank, step, mark_at)
        if before == self._mark or not abs(step) < LARGEST:
            return False
        self._derived("step").add(Point(step, now, float(step)))
        if before is not None and before[:2] == (number, rank) and mark_at > before[3] and step >= before[2]:
            speed = (step - before[2]) / (mark_at - before[3])
            self._derived("steps_per_second").add(Point(step, now, _short(speed)))
        return True

    def ended(self, step: int | None, now: float) -> None:
        """The last step of all, which the last look may have missed; then nobody trains any more."""
        if step is not None and abs(step) < LARGEST and self.last("step") != step:
            self._derived("step").add(Point(step, now, float(step)))
        self.sized(0, now)

    def sized(self, workers: int, now: float) -> bool:
        curve = self._derived("world_size")
        changed = curve.last is None or curve.last.value != workers
        curve.hold(Point(None, now, float(workers)))
        return changed

    def last(self, name: str) -> float | None:
        curve = self.curves.get(name)
        return curve.last.value if curve is not None and curve.last is not None else None

    def _derived(self, name: str) -> Curve:
        if name not in self.curves:
            self.curves[name] = Curve()
            self._share_out()
        return self.curves[name]

    def _curve(self, name: str) -> Curve | None:
        if name not in self.curves:
            if sum(known not in DERIVED for known in self.curves) == MAX_NAMES:
                return None
            self.curves[name] = Curve()
            self._share_out()
        return self.curves[name]

    def _share_out(self) -> None:
        most = max(LEAST_POINTS, min(MOST_POINTS, self._room // max(1, len(self.curves))))
        for curve in self.curves.values():
            curve.thin(most)

    # Written down

    def kept(self, now: float, *, ended: bool = False, most_bytes: int = MOST_BYTES) -> KeptCurves:
        """What is to be written down, with fewer points if all of them would take too many bytes."""
        most = MOST_POINTS
        while True:
            written = self._written(now, most, ended=ended)
            size = sum(map(len, written.curves.values()))
            if size <= most_bytes or most <= LEAST_POINTS:
                return written
            most //= 2

    def _written(self, now: float, most: int, *, ended: bool) -> KeptCurves:
        firsts = [curve.points[0].at for curve in self.curves.values() if curve.points]
        base = int(min(firsts, default=now)) - 1
        curves = {name: _packed(_few(curve.points, most), base) for name, curve in self.curves.items()}
        odd = {name: curve.not_finite for name, curve in self.curves.items() if curve.not_finite}
        number, seq = self._heard
        return KeptCurves(curves, round(now, 3), base, number, seq, odd, ended)

    @classmethod
    def restored(cls, kept: KeptCurves, room: int = MOST_OF_ALL) -> TrainingCurves:
        """As it was written down. What cannot be read is left out."""
        made = cls(room)
        made._heard = kept.round, kept.seq
        for name, packed in list(kept.curves.items())[: MAX_NAMES + len(DERIVED)]:
            if name in DERIVED or is_name(name):
                made.curves[name] = curve = Curve()
                curve.round = kept.round
                curve.not_finite = kept.not_finite.get(name, 0)
                for point in _unpacked(packed, kept.base):
                    curve.add(point)
        made._share_out()
        return made


def fewest(points: Iterable[T], most: int, name_of: Callable[[T], object]) -> list[T]:
    """At most about that many, evenly of each name, and of each the newest; in order."""
    came = list(points)
    if len(came) <= most:
        return came
    every, left = math.ceil(len(came) / most), dict[object, int]()
    kept = []
    for point in reversed(came):
        count = left[name_of(point)] = left.get(name_of(point), -1) + 1
        if count % every == 0:
            kept.append(point)
    return kept[::-1]


def _few(points: Sequence[Point], most: int) -> Sequence[Point]:
    if len(points) <= most:
        return points
    every = math.ceil(len(points) / most)
    return [*points[:-1:every], points[-1]]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _packed(points: Sequence[Point], base: int) -> str:
    """Columns, so that neighbours are alike: steps and times as differences, values in the precision of a picture."""
    count = len(points)
    steps = [_NO_STEP if point.step is None else point.step for point in points]
    times = [min(max(0, round((point.at - base) * _TICKS)), 0xFFFFFFFF) for point in points]
    values = [max(-_LARGEST, min(_LARGEST, point.value)) for point in points]
    columns = struct.pack(f"<I{count}Q", count, *_differences(steps, 64))
    columns += struct.pack(f"<{count}I{count}f", *_differences(times, 32), *values)
    return base64.b64encode(zlib.compress(columns)).decode()


def _differences(values: Sequence[int], bits: int) -> Iterable[int]:
    return [(value - before) % (1 << bits) for before, value in itertools.pairwise((0, *values))]


def _sums(differences: Sequence[int], bits: int) -> Iterable[int]:
    return (value % (1 << bits) for value in itertools.accumulate(differences))


def _unpacked(packed: str, base: int) -> Iterable[Point]:
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(packed, validate=True), 4 + MOST_POINTS * 2 * _POINT)
        (count,) = struct.unpack_from("<I", raw)
        if count > MOST_POINTS * 2:
            return
        steps = struct.unpack_from(f"<{count}Q", raw, 4)
        times = struct.unpack_from(f"<{count}I", raw, 4 + count * 8)
        values = struct.unpack_from(f"<{count}f", raw, 4 + count * 12)
    except (ValueError, binascii.Error, zlib.error, struct.error):
        return
    for counted, time, value in zip(_sums(steps, 64), _sums(times, 32), values, strict=True):
        step = counted - (1 << 64) if counted >= 1 << 63 else counted
        if math.isfinite(value) and (step == _NO_STEP or abs(step) < LARGEST):
            yield Point(None if step == _NO_STEP else step, base + time / _TICKS, _short(value))


def shown(curves: Mapping[str, Curve], names: Iterable[str] = (), after: float | None = None) -> list[dict[str, Any]]:
    """Series as the API tells them: logged ones first, those of every training last."""
    wanted = set(names)
    order = sorted(curves, key=lambda name: (name in DERIVED, name))
    found = []
    for name in order:
        if wanted and name not in wanted:
            continue
        told = [[one.step, round(one.at, 3), one.value] for one in curves[name].points]
        points = told if after is None else [one for one in told if (one[1] or 0.0) > after]
        series: dict[str, Any] = {"name": name, "points": points}
        if odd := curves[name].not_finite:
            series["notFinite"] = odd
        found.append(series)
    return found


def used(readings: Mapping[str, WorkerReading]) -> list[dict[str, Any]]:
    """Workers as the API tells them; what is not known of one is null."""
    return [
        {
            "name": name,
            "cpuPercent": one.use.cpu_percent,
            "memoryBytes": one.use.memory_bytes,
            "gpuPercent": one.use.gpu_percent,
            "gpuMemoryBytes": one.use.gpu_memory_bytes,
            "at": round(one.at, 3),
            "recent": [
                [round(at, 3), use.cpu_percent, use.memory_bytes, use.gpu_percent, use.gpu_memory_bytes]
                for at, use in one.recent
            ]
            if len(readings) <= MOST_RECENT
            else [],
        }
        for name, one in sorted(readings.items())
    ]
