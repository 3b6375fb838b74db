"""What is wrong with the GPU map of a pipeline? Each answer names the rule that is broken.

A bundle is moved as one piece, so its shape is checked once, at registration, and never again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from muster.types.codec import MOST, Problem
from muster.types.sharing import CLUSTERS, GENERATION_CLUSTER, ClusterSpec, Gpu, Pool

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
SMALL_SIZES = (1, 2, 4, 8)
WITHOUT_GPUS = "reward"


def problems(pool: Pool, pipeline: str, clusters: Mapping[str, ClusterSpec], weight: float) -> tuple[Problem, ...]:
    """Everything that is wrong with a registration."""
    found = []
    if not isinstance(pipeline, str) or not NAME.fullmatch(pipeline):
        found.append(Problem("pipeline", f"{pipeline!r} is no name: letters, digits and . _ : - are, up to 128"))
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < MOST:
        found.append(Problem("weight", f"must be a number greater than 0, not {weight!r}"))
    if not isinstance(clusters, Mapping):
        return (*found, Problem("clusters", "must map names to specs"))
    if GENERATION_CLUSTER not in clusters:
        found.append(Problem("clusters", f"{GENERATION_CLUSTER} is required: it is the one that grows and shrinks"))
    for name, spec in clusters.items():
        at = f"clusters.{name}"
        if name not in CLUSTERS:
            found.append(Problem(at, f"is not one of {', '.join(CLUSTERS)}"))
        elif not isinstance(spec, ClusterSpec):
            found.append(Problem(at, f"must be a ClusterSpec, not {type(spec).__name__}"))
        else:
            found += [Problem(at, text) for text in map_problems(pool, name, spec)]
    return tuple(found)


def map_problems(pool: Pool, name: str, spec: ClusterSpec) -> list[str]:
    """The rules that one cluster's map breaks. Shape is judged only once the plain facts are right."""
    gpus, size, slots = spec.gpus, spec.tp_size, spec.slots_per_bundle
    if name == WITHOUT_GPUS and gpus:
        return [f"{WITHOUT_GPUS} has no GPUs: give it none"]
    found = []
    if any(isinstance(gpu, bool) or not isinstance(gpu, int) for gpu in gpus):
        return ["GPUs are whole numbers"]
    if not gpus and name != WITHOUT_GPUS:
        found.append(f"needs GPUs: only {WITHOUT_GPUS} has none")
    if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or not 0 < slots < MOST):
        found.append(f"slots_per_bundle is at least 1, not {slots!r}")
    twice = sorted({one for one, other in itertools.pairwise(gpus) if one == other})
    if twice:
        found.append(f"no duplicates: {_named(twice)} is there more than once")
    outside = [gpu for gpu in gpus if not 0 <= gpu < pool.gpus]
    if outside:
        found.append(f"in range: {_named(outside)} is not among GPUs 0 to {pool.gpus - 1}")
    found += _size_problems(pool, len(gpus), size)
    return found or list(_shape_problems(pool, spec))


def _size_problems(pool: Pool, count: int, size: int) -> Iterator[str]:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        yield f"tp_size is at least 1, not {size!r}"
        return
    if size not in SMALL_SIZES and size % pool.gpus_per_node:
        yield f"tp_size is 1, 2, 4, 8 or a multiple of the node size ({pool.gpus_per_node}), not {size}"
    if count % size:
        yield f"divisible by tp_size: {count} GPUs do not make whole bundles of {size}"


def _shape_problems(pool: Pool, spec: ClusterSpec) -> Iterator[str]:
    if spec.tp_size == 1:
        return
    for rank, bundle in enumerate(spec.bundles):
        first, last = bundle[0], bundle[-1]
        if last - first + 1 != len(bundle):
            yield f"contiguous: rank {rank} has {_named(bundle)}"
        elif len(bundle) <= pool.gpus_per_node:
            if pool.node_of(first) != pool.node_of(last):
                yield f"inside one node: rank {rank} has {_named(bundle)}, nodes have {pool.gpus_per_node}"
        elif first % pool.gpus_per_node or (last + 1) % pool.gpus_per_node:
            yield f"on node boundaries: rank {rank} has {_named(bundle)}, nodes have {pool.gpus_per_node}"


def _named(gpus: list[Gpu] | tuple[Gpu, ...]) -> str:
    shown = ", ".join(map(str, gpus[:8]))
    return f"GPU {shown}" + (" and more" if len(gpus) > 8 else "")
