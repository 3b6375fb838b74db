"""What is started for a worker: its command line, environment and folders. Rendered first, then carried out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.types.training import Spec, Training

# A worker inherits what the control plane was started with, but for what is muster's own.
_OWN = "MUSTER_"
_MESH_MARGIN_S = 10.0  # beyond the gate's own timeout, so that a rank sees that it opened degraded


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
) -> Order:
    """`gpus` are the devices that the worker may see; None where the machine has none to give."""
    spec = training.spec
    log_dir = logs / training.uid / name
    argv = [
        *program(),
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
        *(["--probe-addr", spec.mesh.probe_address] if spec.mesh.required and spec.mesh.probe_address else []),
        *_what(spec),
    ]
    env = {key: value for key, value in inherited.items() if not key.startswith(_OWN)}
    env |= {"MUSTER_RUN_TOKEN": token, "MUSTER_TRAINING": training.metadata.name}
    env["MUSTER_NAMESPACE"] = training.metadata.namespace
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    env |= {"NODE_NAME": name, **spec.env, **_mesh(training, name, mesh_endpoint)}
    return Order(tuple(argv), env, spec.working_dir or str(Path.home()), log_dir, spec.resources.memory_bytes)


def _mesh(training: Training, name: str, endpoint: str) -> dict[str, str]:
    """Where ranks learn how their mesh is. Without a gate there is nothing to wait for, so they are told of nowhere."""
    own = {"MUSTER_MESH_PREFIX": training.key.mesh_prefix}
    if not training.spec.mesh.required or not endpoint:
        return own
    patience = training.spec.mesh.timeout_seconds + _MESH_MARGIN_S
    return own | {"NODE_NAME": name, "MUSTER_MESH_ENDPOINT": endpoint, "MUSTER_MESH_TIMEOUT_S": f"{patience:g}"}


def program() -> list[str]:
    """`muster-node` beside the interpreter that runs us."""
    beside = Path(sys.executable).parent / "muster-node"
    return [str(beside)] if os.access(beside, os.X_OK) else [sys.executable, "-m", "muster.node.cli"]


def _what(spec: Spec) -> list[str]:
    """What each rank runs. Everything is an argument of its own: no shell ever reads it."""
    if spec.command is not None:
        return ["--no-python", "--", *spec.command, *spec.args]
    if spec.module is not None:
        return ["-m", "--", spec.module, *spec.args]
    assert spec.script is not None
    return ["--", spec.script, *spec.args]
