"""What measured times say, and what is believed of them."""

from __future__ import annotations

import math

import pytest

from muster.types import bench
from muster.types.bench import Bench, BenchSize

SMALL, LARGE = BenchSize(1024, 50, 0.001, 0.002, 0.004), BenchSize(1_000_000, 5, 0.01, 0.02, 0.04)


def test_the_smallest_size_tells_of_latency_and_the_largest_of_bandwidth() -> None:
    found = bench.summed_up(0, "gloo", 2, 4, (LARGE, SMALL))
    assert (found.latency_seconds, found.error) == (0.002, "")
    assert found.bytes_per_second == pytest.approx(2 * 3 / 4 * 1_000_000 / 0.02)
    assert str(found) == ("all-reduce between 4 ranks on 2 workers over gloo: 2 ms for 1024 bytes, 75 MB/s for 1000000")


@pytest.mark.parametrize("seconds", [0.0, math.nan, math.inf, -1.0])
def test_times_that_cannot_be_true_are_none(seconds: float) -> None:
    impossible = BenchSize(1 << 20, 5, 0.01, seconds, 0.04)
    assert bench.summed_up(0, "gloo", 2, 2, (SMALL, impossible)).sizes == (SMALL,)
    assert bench.summed_up(0, "gloo", 2, 2, (impossible,)).error


def test_so_short_a_time_that_nothing_can_be_divided_by_it_is_none() -> None:
    """What is not finite could not be read again, by a browser or after a restart."""
    told = Bench(0, None, "gloo", 2, 2, 1.0, 1.0, (BenchSize(1 << 40, 1, 5e-324, 5e-324, 5e-324),))
    assert bench.believable(told) == Bench(0, error="no time that was measured can be true")


def test_a_worker_s_own_sums_are_made_again_from_its_times() -> None:
    told = Bench(0, None, "gloo\x1b[31m", 2, 2, 1e-9, 1e30, (SMALL, LARGE))
    found = bench.believable(told)
    assert found.bytes_per_second == pytest.approx(1_000_000 / 0.02) and found.latency_seconds == 0.002
    assert found.via == "gloo [31m"


def test_what_was_not_measured_says_why_and_nothing_else() -> None:
    found = bench.believable(Bench(0, None, "gloo", 2, 2, 1.0, 1.0, (SMALL,), error="no\x07 torch"))
    assert found == Bench(0, error="no  torch")
    assert str(found) == "all-reduce was not measured: no  torch"
