"""How busy is the API, and what does the control plane hold? Counted here, shown as Prometheus text."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class Meter:
    """Counts of requests, by route template: a path with a name in it would make a series per training."""

    def __init__(self) -> None:
        self.watchers = 0
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS_S) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def count(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """One answered request; no seconds for one that waits or streams by design."""
        self._requests[method, route, status] += 1
        if seconds is not None:
            self._buckets[route][bisect.bisect_left(BUCKETS_S, seconds)] += 1
            self._seconds[route] += seconds

    def lines(self) -> Iterable[str]:
        yield from family("muster_watchers", "gauge", "Streams of changes that are open.", {(): float(self.watchers)})
        requests: dict[Labels, float] = {
            (("method", method), ("route", route), ("status", str(status))): float(count)
            for (method, route, status), count in sorted(self._requests.items())
        }
        yield from family("muster_http_requests_total", "counter", "Requests that were answered.", requests)
        yield from self._histogram("muster_http_request_seconds")

    def _histogram(self, name: str) -> Iterable[str]:
        yield f"# HELP {name} Time from a request to its answer."
        yield f"# TYPE {name} histogram"
        for route, counts in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
                total += count
                yield _line(f"{name}_bucket", (("route", route), ("le", bound)), total)
            yield _line(f"{name}_sum", (("route", route),), self._seconds[route])
            yield _line(f"{name}_count", (("route", route),), total)


def family(name: str, kind: str, about: str, values: Mapping[Labels, float]) -> Iterable[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values.items():
        yield _line(name, labels, value)


def _line(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{inner}}} {value:.15g}" if inner else f"{name} {value:.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
