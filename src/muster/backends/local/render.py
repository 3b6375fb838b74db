"""What is started for a worker: its command line, environment and folders. Rendered first, then carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from muster.backends import orders
from muster.backends.local import interpreters
from muster.types.training import Training

# A worker inherits what the control plane was started with, but for what is muster's own.
_OWN = "MUSTER_"


@dataclass(frozen=True)
class Order:
    """One worker, ready to be started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    log_dir: Path
    memory_bytes: int | None


def order(
    training: Training,
    name: str,
    *,
    gpus: tuple[str, ...] | None,
    token: str,
    coordinator_file: Path,
    logs: Path,
    inherited: Mapping[str, str],
    mesh_endpoint: str = "",
    log_bytes: int | None = None,
    packages: Path | None = None,
    work: Path | None = None,
    cache: Path | None = None,
    domain: str = "",
    storage: Mapping[str, Path] = MappingProxyType({}),
) -> Order:
    """`gpus` are the devices that the worker may see; None where the machine has none to give. `packages` has
    the code, which it unpacks below `work`; what it can use again is below `cache`. `domain` is where this machine is,
    `storage` says which variable is to name which folder."""
    spec = training.spec
    log_dir = logs / training.uid / name
    argv = [
        *interpreters.program(spec.interpreter),
        "--coordinator-file",
        str(coordinator_file),
        "--run-id",
        training.uid,
        "--name",
        name,
        "--local-addr",
        "127.0.0.1",
        "--nproc",
        str(spec.procs_per_worker),
        "--log-dir",
        str(log_dir),
        "--no-echo",
        *(orders.package(training, str(_kept(packages, training))) if packages is not None else ()),
        *(("--folder", str(work / training.uid / name)) if work is not None and spec.package is not None else ()),
        *(("--cache-dir", str(cache)) if cache is not None and spec.requirements else ()),
        *(["--domain", domain] if spec.segment is not None or spec.topology_key is not None else []),
        *orders.words(spec, log_bytes),
    ]
    env = {key: value for key, value in inherited.items() if not key.startswith(_OWN)}
    env |= {"MUSTER_RUN_TOKEN": token, "MUSTER_TRAINING": training.metadata.name}
    env["MUSTER_NAMESPACE"] = training.metadata.namespace
    env |= {name: str(folder) for name, folder in storage.items()}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    mesh = orders.mesh(training, mesh_endpoint)
    env |= {"NODE_NAME": name, **spec.env, **mesh, **({"NODE_NAME": name} if "MUSTER_MESH_ENDPOINT" in mesh else {})}
    # What is in a package is not here yet.
    cwd = (spec.working_dir if spec.package is None else None) or str(Path.home())
    return Order(tuple(argv), env, cwd, log_dir, spec.resources.memory_bytes)


def _kept(packages: Path, training: Training) -> Path:
    """As `store.packages` keeps it."""
    return packages / training.key.namespace / (training.spec.package or "").removeprefix("sha256:")
