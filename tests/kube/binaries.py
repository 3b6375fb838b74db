"""Where are the programs of a real cluster? `python -m tests.kube.binaries` builds or installs what is missing.

`python -m tests.kube.binaries kubelet …` does so for those names too; `make test-kube` asks for none.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VERSION = "1.20.2"
BUILT = ("kube-apiserver", "kube-controller-manager")
DEBIAN = {"etcd": "etcd-server", "kubectl": "kubernetes-client"}


class NotFound(Exception):
    """Says what is missing and what to do about it."""


@dataclass(frozen=True)
class Binaries:
    etcd: str
    apiserver: str
    controllers: str
    kubectl: str


def folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where the two servers are, or would be built."""
    if given := env.get("MUSTER_KUBE_BIN"):
        return Path(given)
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "muster" / f"kube-{VERSION}"


def find(env: Mapping[str, str] = os.environ) -> Binaries:
    """Raises NotFound. What lies in MUSTER_KUBE_BIN comes before what is installed."""
    where = folder(env)
    if lacking := [name for name in BUILT if not _runs(where / name)]:
        remedy = "MUSTER_KUBE_BIN names that folder" if env.get("MUSTER_KUBE_BIN") else "make test-kube builds them"
        raise NotFound(f"no {' and no '.join(lacking)} in {where}: {remedy}")
    path = f"{where}{os.pathsep}{env.get('PATH', os.defpath)}"
    tools = {name: shutil.which(name, path=path) for name in DEBIAN}
    for name, found in tools.items():
        if found is None:
            raise NotFound(f"{name} is not installed (Debian: {DEBIAN[name]})")
    return Binaries(str(tools["etcd"]), str(where / BUILT[0]), str(where / BUILT[1]), str(tools["kubectl"]))


def no_insecure_port(program: str) -> list[str]:
    """Return the flag that keeps an old server from a port without TLS. Kubernetes 1.24 has neither port nor flag."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    number = re.search(r"v(\d+)\.(\d+)", told)
    if number is None:
        raise NotFound(f"{program} --version does not say a version: {told.strip()[:100]!r}")
    return ["--port=0"] if (int(number[1]), int(number[2])) < (1, 24) else []


def built(name: str, env: Mapping[str, str] = os.environ) -> str:
    """One of the other programs that Kubernetes has; raises NotFound."""
    where = folder(env) / name
    if not _runs(where):
        raise NotFound(f"no {name} in {where.parent}: make test-containers builds it")
    return str(where)


def ensure(env: Mapping[str, str] = os.environ, more: Sequence[str] = ()) -> Binaries:
    """Two that want them at once build them once."""
    where = folder(env)
    if not env.get("MUSTER_KUBE_BIN"):
        where.mkdir(parents=True, exist_ok=True)
        with open(where / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if lacking := [name for name in (*BUILT, *more) if not _runs(where / name)]:
                subprocess.run(["bash", str(Path(__file__).with_name("build.sh")), str(where), *lacking], check=True)
    path = f"{where}{os.pathsep}{env.get('PATH', os.defpath)}"
    _install([package for name, package in DEBIAN.items() if shutil.which(name, path=path) is None])
    return find(env)


def _install(packages: list[str]) -> None:
    if packages and shutil.which("apt-get") and os.geteuid() == 0:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        print(f"installing {' '.join(packages)}", file=sys.stderr)
        subprocess.run(["apt-get", "update", "-qq"], env=quiet, stdout=subprocess.DEVNULL)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        subprocess.run(install, env=quiet, stdout=subprocess.DEVNULL, check=True)


def _runs(file: Path) -> bool:
    return file.is_file() and os.access(file, os.X_OK)


if __name__ == "__main__":
    try:
        ensure(more=sys.argv[1:])
        for name in sys.argv[1:]:
            built(name)
    except (NotFound, subprocess.CalledProcessError) as problem:
        sys.exit(str(problem))
