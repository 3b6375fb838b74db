"""However much is logged, a curve stays small, evenly thinned, and true at both of its ends."""

from __future__ import annotations

import json
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import keeping
from muster.core.curves import (
    MOST_BYTES,
    MOST_POINTS,
    Curve,
    KeptCurves,
    Point,
    Thinned,
    TrainingCurves,
    WorkerReading,
    fewest,
    shown,
    used,
)
from muster.types.codec import from_wire, to_wire
from muster.types.measured import WorkerUse
from muster.types.numbers import DERIVED, MAX_NAMES

NOON = 1_769_860_800.0


def a_curve(values: list[float], number: int = 0, first: int = 0) -> Curve:
    curve = Curve()
    for step, value in enumerate(values, first):
        curve.log(Point(step, NOON + step, value), number)
    return curve


def steps(curve: Curve) -> list[int | None]:
    return [point.step for point in curve.points]


@given(st.integers(2, 40), st.integers(1, 500))
def test_a_list_keeps_its_first_and_its_newest_and_even_distances_between(most: int, count: int) -> None:
    kept: Thinned[int] = Thinned(most)
    for item in range(count):
        kept.add(item)
        assert kept.items[0] == 0 and kept.items[-1] == item
        assert len(kept.items) <= most
        gaps = [after - before for before, after in zip(kept.items, kept.items[1:], strict=False)]
        assert not gaps or (len(set(gaps[:-1])) <= 1 and gaps[-1] <= max(gaps))
    assert len(kept.items) >= min(count, most // 2)


def test_less_room_thins_what_is_there() -> None:
    kept: Thinned[int] = Thinned(100)
    for item in range(100):
        kept.add(item)
    kept.thin(10)
    assert len(kept.items) <= 10 and kept.items[0] == 0 and kept.items[-1] == 99
    for item in range(100, 1000):
        kept.add(item)
    assert len(kept.items) <= 10 and kept.items[-1] == 999


def test_steps_that_are_done_again_after_a_heal_replace_those_before() -> None:
    curve = a_curve([1.0] * 10)
    curve.log(Point(6, NOON + 20, 2.0), 1)
    curve.log(Point(7, NOON + 21, 2.0), 1)
    assert steps(curve) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [point.value for point in curve.points] == [1.0] * 6 + [2.0] * 2


def test_steps_that_begin_anew_in_the_same_round_are_kept_beside_the_others() -> None:
    curve = a_curve([1.0] * 3)
    for step in range(3):
        curve.log(Point(step, NOON + 10 + step, 2.0), 0)
    assert steps(curve) == [0, 1, 2, 0, 1, 2]


def test_a_level_needs_two_points_however_long_it_stays() -> None:
    curve = Curve()
    for second in range(100):
        curve.hold(Point(None, NOON + second, 2.0 if second < 50 else 3.0))
    assert [(point.at - NOON, point.value) for point in curve.points] == [(0, 2), (49, 2), (50, 2), (50, 3), (99, 3)]


def test_what_was_told_before_is_not_taken_again() -> None:
    curves = TrainingCurves()
    told = [(0, seq, "loss", Point(seq, NOON + seq, 1.0 / seq)) for seq in range(1, 11)]
    assert all(curves.log(*one) for one in told)
    assert not any(curves.log(*one) for one in told)
    assert curves.log(0, 11, "loss", Point(11, NOON + 11, 0.01))
    assert not curves.log(-1, 99, "loss", Point(99, NOON, 0.0)), "of a round before"
    assert steps(curves.curves["loss"]) == list(range(1, 12))


def test_what_is_not_finite_is_counted_and_not_drawn() -> None:
    curves = TrainingCurves()
    curves.log(0, 1, "loss", Point(1, NOON, 1.0))
    curves.log(0, 2, "loss", None)
    [series] = shown(curves.curves)
    assert series == {"name": "loss", "points": [[1, NOON, 1.0]], "notFinite": 1}
    assert TrainingCurves.restored(curves.kept(NOON)).curves["loss"].not_finite == 1


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", "a\0b", "\ud800", *DERIVED])
def test_a_name_that_cannot_be_one_is_not_kept(name: str) -> None:
    curves = TrainingCurves()
    assert not curves.log(0, 1, name, Point(1, NOON, 1.0))
    assert not curves.curves


def test_only_so_many_names_are_kept() -> None:
    curves = TrainingCurves()
    for seq in range(1, 200):
        curves.log(0, seq, f"n{seq}", Point(seq, NOON, 1.0))
    assert len(curves.curves) == MAX_NAMES
    assert curves.reached(0, 0, 5, 1.0, NOON), "those of every training have their own room"


def test_speed_is_of_two_looks_at_the_same_rank_of_the_same_round() -> None:
    curves = TrainingCurves()
    assert curves.reached(0, 0, 10, 100.0, NOON)
    assert not curves.reached(0, 0, 10, 100.0, NOON + 1), "nothing new"
    assert curves.reached(0, 0, 20, 104.0, NOON + 2)
    assert curves.last("steps_per_second") == 2.5 and curves.last("step") == 20
    assert curves.reached(1, 0, 15, 110.0, NOON + 3)
    assert len(curves.curves["steps_per_second"].points) == 1, "after a heal nobody knows how fast it was"
    assert curves.last("step") == 15


def test_a_record_holds_all_curves_and_is_small_whatever_is_logged() -> None:
    rng, curves = Random(1), TrainingCurves()
    for seq in range(1, 64 * 300):
        step = rng.randrange(-(1 << 53) + 1, 1 << 53)
        curves.log(0, seq, f"{'n' * 60}{seq % 64}", Point(step, NOON + rng.uniform(0, 1e8), rng.uniform(-1e38, 1e38)))
    kept = to_wire(curves.kept(NOON))
    assert sum(map(len, kept["curves"].values())) <= MOST_BYTES
    assert len(json.dumps(kept)) < 2 * MOST_BYTES
    assert keeping.problem_with(keeping.CURVES, "uid", json.loads(json.dumps(kept))) == ""


def test_what_was_written_down_is_the_same_afterwards() -> None:
    curves = TrainingCurves()
    for step in range(500):
        curves.log(3, step + 1, "loss", Point(step, NOON + step / 4, math.exp(-step / 100)))
    curves.log(3, 501, "stepless", Point(None, NOON, -1e-12))
    curves.sized(2, NOON)
    data = json.loads(json.dumps(to_wire(curves.kept(NOON + 500))))
    again = TrainingCurves.restored(from_wire(KeptCurves, data, strict=False))
    for name, curve in curves.curves.items():
        for before, after in zip(curve.points, again.curves[name].points, strict=True):
            assert after.step == before.step and after.at == pytest.approx(before.at, abs=0.01)
            assert after.value == pytest.approx(before.value, rel=1e-5)
    assert not again.log(3, 501, "loss", Point(1, NOON, 1.0)), "it knows what it has been told"
    assert len(json.dumps(data)) < 12_000


@pytest.mark.parametrize("packed", ["", "%%%", "AAAA", "eJwDAAAAAAE=", "x" * 1000])
def test_a_curve_that_cannot_be_read_is_left_out(packed: str) -> None:
    read = TrainingCurves.restored(KeptCurves({"loss": packed, "bad\nname": packed}))
    assert list(read.curves) == ["loss"] and not read.curves["loss"].points


def test_many_trainings_have_less_room_each() -> None:
    curves = TrainingCurves()
    for seq in range(1, 1001):
        curves.log(0, seq, "loss", Point(seq, NOON + seq, 1.0))
    assert len(curves.curves["loss"].points) == MOST_POINTS
    curves.make_room(150)
    assert len(curves.curves["loss"].points) <= 150 and curves.last("loss") == 1.0


def test_a_burst_is_thinned_by_name_and_keeps_the_newest_of_each() -> None:
    came = [(name, count) for count in range(1000) for name in ("loss", "lr")] + [("rare", 0)]
    kept = fewest(came, 100, lambda one: one[0])
    assert len(kept) <= 103 and kept == sorted(kept, key=came.index)
    assert {("loss", 999), ("lr", 999), ("rare", 0)} <= set(kept)
    assert fewest(came[:50], 100, lambda one: one[0]) == came[:50]


def test_only_the_curves_and_points_that_were_asked_for_are_shown() -> None:
    curves = {"loss": a_curve([1.0, 2.0]), "acc": a_curve([3.0]), "step": a_curve([0.0])}
    assert [one["name"] for one in shown(curves)] == ["acc", "loss", "step"]
    assert shown(curves, ["loss"], after=NOON) == [{"name": "loss", "points": [[1, NOON + 1, 2.0]]}]


def test_a_worker_is_shown_with_what_is_not_known_of_it() -> None:
    reading = WorkerReading()
    reading.take(WorkerUse(cpu_percent=50.0), NOON)
    reading.take(WorkerUse(cpu_percent=93.1, memory_bytes=123), NOON + 5)
    [told] = used({"demo-0": reading})
    assert told["recent"] == [[NOON, 50.0, None, None, None], [NOON + 5, 93.1, 123, None, None]]
    del told["recent"]
    assert told == {
        "name": "demo-0",
        "cpuPercent": 93.1,
        "memoryBytes": 123,
        "gpuPercent": None,
        "gpuMemoryBytes": None,
        "at": NOON + 5,
    }
