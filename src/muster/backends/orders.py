"""What is every muster-node told, wherever it runs? What its ranks run, and where they learn how their mesh is."""

from __future__ import annotations

from dataclasses import replace

from muster.types.training import Spec, Training

_MESH_MARGIN_S = 10.0  # beyond the gate's own timeout, so that a rank sees that it opened degraded


def words(spec: Spec, log_bytes: int | None = None) -> list[str]:
    """The end of its command line. Everything is an argument of its own: no shell ever reads it.

    `log_bytes` is for those that name none; a muster-node that is told nothing has its own.
    """
    own = ["--probe-addr", spec.mesh.probe_address] if spec.mesh.required and spec.mesh.probe_address else []
    keep = log_bytes if spec.log_bytes is None else spec.log_bytes
    own += [] if keep is None else ["--log-bytes", str(keep)]
    own += [] if spec.warm == "auto" else ["--warm", spec.warm]
    own += ["--preload", ",".join(spec.preload)] if spec.preload else []
    own += [f"--requirement={line}" for line in spec.requirements]
    if spec.command is not None:
        return [*own, "--no-python", "--", *spec.command, *spec.args]
    if spec.module is not None:
        return [*own, "-m", "--", spec.module, *spec.args]
    assert spec.script is not None
    return [*own, "--", spec.script, *spec.args]


def package(training: Training, source: str) -> list[str]:
    """Where a worker finds the code that was sent with its training, and where in it it runs."""
    digest, folder = training.spec.package, training.spec.working_dir
    if digest is None:
        return []
    return ["--package", digest, "--package-from", source] + (["--working-dir", folder] if folder else [])


def shown(training: Training) -> Training:
    """Without its secrets, and with a uid, which it gets when it is submitted."""
    masked = training.masked()
    return masked if masked.uid else replace(masked, metadata=replace(masked.metadata, uid="UID"))


def mesh(training: Training, endpoint: str) -> dict[str, str]:
    """Where ranks learn how their mesh is. Without a gate there is nothing to wait for, so they are told of nowhere."""
    own = {"MUSTER_MESH_PREFIX": training.key.mesh_prefix}
    if not training.spec.mesh.required or not endpoint:
        return own
    patience = training.spec.mesh.timeout_seconds + _MESH_MARGIN_S
    return own | {"MUSTER_MESH_ENDPOINT": endpoint, "MUSTER_MESH_TIMEOUT_S": f"{patience:g}"}
