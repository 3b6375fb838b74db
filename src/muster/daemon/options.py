"""How is a control plane started? Its command line, and what is wrong with it."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn
from urllib.parse import urlsplit

from muster import trimming
from muster.backends.local import gpus
from muster.server.audit import AuditSize
from muster.server.auth import check_listen
from muster.store.entries import Keep
from muster.world import wire

ETCD_PORT = 2379
LEAST_EVENTS = 100
API_PORT, COORDINATOR_PORT, MESH_PORT = 8470, 8471, 8472  # in a cluster
WORKER_USER = "65532"


@dataclass(frozen=True)
class Options:
    home: Path
    listen: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    ready_fd: int | None = None
    forget: bool = False
    etcd: str | None = None
    log_bytes: str = ""
    events: int = Keep.all
    events_per_training: int = Keep.each
    reconcile_delay_s: float = 0.0
    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    store: Literal["sqlite", "kube"] = "sqlite"
    backend: Literal["local", "kube"] = "local"
    namespace: str | None = None
    identity: str | None = None
    address: str | None = None
    advertise: str | None = None
    image: str = ""
    agent_image: str = ""
    worker_user: str = WORKER_USER
    coordinator_port: int = COORDINATOR_PORT
    mesh_port: int = MESH_PORT

    @property
    def journal(self) -> Keep:
        return Keep(self.events_per_training, self.events)

    @property
    def log_limit(self) -> int | None:
        """What is kept of each rank's logs; None where nobody said. ValueError for what is no size."""
        return trimming.read_limit(self.log_bytes) if self.log_bytes else None


class _DaemonParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage: whoever started this knows other options, or has set a variable."""
        self.exit(2, f"muster server: {message}\n")


def read(words: list[str] | None = None) -> Options:
    parser = _DaemonParser(prog="python -m muster.daemon", description="muster's control plane")
    parser.add_argument("--home", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where the HTTP API listens (a loopback port)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE")
    parser.add_argument("--tls-key", type=Path, metavar="FILE")
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback without TLS")
    parser.add_argument("--forget", action="store_true", help="start though workers run that it does not know")
    parser.add_argument("--etcd", metavar="URL", help="keep the mesh's keys there (http://HOST:2379), not here")
    parser.add_argument(
        "--log-bytes",
        default=os.environ.get("MUSTER_LOG_BYTES", ""),
        metavar="N",
        help="kept of a rank's output, and of its errors, for trainings that name no size; 0: everything (1Gi)",
    )
    for name, usual, what in (
        ("events", Keep.all, "in all"),
        ("events-per-training", Keep.each, "of each training"),
    ):
        told = os.environ.get(f"MUSTER_{name.upper().replace('-', '_')}") or usual
        about = f"entries of the journal that are kept {what}; 0: all ({usual})"
        parser.add_argument(f"--{name}", type=_count, default=str(told), metavar="N", help=about)
    parser.add_argument("--ready-fd", type=int, help="write the URL there once it serves")
    parser.add_argument("--reconcile-delay-s", type=float, default=0.0, help="for tests: look at everything that late")
    parser.add_argument(
        "--synchronous", choices=["FULL", "NORMAL"], default="FULL", help="how a commit reaches the disk"
    )
    cluster = parser.add_argument_group("in a Kubernetes cluster")
    cluster.add_argument("--store", choices=["sqlite", "kube"], default="sqlite", help="who keeps the objects")
    cluster.add_argument("--backend", choices=["local", "kube"], default="local", help="who runs the workers")
    cluster.add_argument("--namespace", metavar="NS", help="its own namespace, for the Lease and the journal")
    cluster.add_argument("--identity", metavar="NAME", help="its name among its replicas (the Pod's)")
    cluster.add_argument("--address", metavar="IP", help="where the Service finds it while it leads (the Pod's)")
    cluster.add_argument("--advertise", metavar="HOST", help="the name under which workers reach whoever leads")
    cluster.add_argument(
        "--agent-image", default="", metavar="IMAGE", help="an image with muster, from which other images get the agent"
    )
    cluster.add_argument("--image", default="", metavar="IMAGE", help="for trainings that name none")
    cluster.add_argument("--worker-user", default=WORKER_USER, metavar="UID|image", help="who workers run as")
    cluster.add_argument("--coordinator-port", type=int, default=COORDINATOR_PORT, metavar="PORT")
    cluster.add_argument("--mesh-port", type=int, default=MESH_PORT, metavar="PORT")
    return Options(**vars(parser.parse_args(words)))


def _count(text: str) -> int:
    if not text.isdecimal() or 0 < int(text) < LEAST_EVENTS:
        raise argparse.ArgumentTypeError(f"must be a number from {LEAST_EVENTS} on, or 0, not {text!r}")
    return int(text)


def check(options: Options) -> None:
    """Raises ValueError for what cannot work, before anything is started."""
    local = options.backend == "local"
    devices = gpus.visible(os.environ) if local else gpus.counted(os.environ) or gpus.pooled(os.environ)
    if devices:
        gpus_per_node(os.environ, len(devices))
    AuditSize.told(os.environ)
    try:
        _ = options.log_limit
    except ValueError as error:
        raise ValueError(f"--log-bytes (or MUSTER_LOG_BYTES): {error}") from None
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ValueError("--tls-cert and --tls-key belong together: give both")
    for path in (options.tls_cert, options.tls_key):
        if path is not None and not os.access(path, os.R_OK):
            raise ValueError(f"{path} cannot be read")
    if options.etcd is not None:
        etcd_address(options.etcd)
    if (options.store == "kube") != (options.backend == "kube"):
        raise ValueError("--store kube and --backend kube belong together: Pods are owned by the objects")
    worker_user(options.worker_user)
    if options.listen is not None:
        host, _ = wire.parse_address(options.listen)
        check_listen(host, tls=options.tls_cert is not None, insecure=options.insecure)


def identity_of(options: Options) -> str:
    return options.identity or socket.gethostname()


def worker_user(text: str) -> int | None:
    """A number; None for the image's own user."""
    if text != "image" and not (text.isascii() and text.isdigit() and int(text) < 2**31):
        raise ValueError(f"--worker-user must be a number of a user, or 'image', not {text!r}")
    return None if text == "image" else int(text)


def gpus_per_node(env: Mapping[str, str], count: int) -> int:
    told = env.get("MUSTER_POOL_GPUS_PER_NODE", "").strip() or str(count)
    if not told.isdigit() or not 1 <= int(told) <= count:
        raise ValueError(f"MUSTER_POOL_GPUS_PER_NODE must be a number from 1 to {count}, not {told!r}")
    return int(told)


def etcd_address(url: str) -> str:
    """HOST:PORT of an etcd. Workers that wait for their mesh speak to it in clear and without a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
        plain = parts.scheme == "http" and parts.hostname and "@" not in parts.netloc and parts.path in ("", "/")
    except ValueError:  # a port that is none
        plain = False
    if not plain or parts.query or parts.fragment or port == 0:
        shown = f"…{url[url.rindex('@') :]}" if "@" in url else url  # without its password
        raise ValueError(f"--etcd {shown!r} is not http://HOST:PORT, which is how workers ask it")
    return wire.show_address(str(parts.hostname), port or ETCD_PORT)
