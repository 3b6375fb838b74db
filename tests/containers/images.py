"""Which images does the lab run, and how do its nodes get them without a registry? `python -m tests.containers.images`.

Three: muster's own, as `make image` builds it; the same with this environment's torch, for workers; and one that does
nothing, for what holds a Pod's network. They are imported once into a template of containerd's folder. A node starts
with a copy of that which shares all files but the two databases, and so is there at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tests.kube import binaries

MUSTER = "localhost/muster:lab"
TORCH = "localhost/muster-torch:lab"
PAUSE = "localhost/pause:lab"

_BASE = "localhost/muster-base:latest"
_PROGRAMS = Path(__file__).with_name("programs")
_ROOT = Path(__file__).parents[2]
_DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")
# What torch imports here; its CUDA and its compilers are not there.
_TORCH_NEEDS = (
    *("torch", "numpy", "typing_extensions", "filelock", "fsspec", "jinja2", "MarkupSafe", "networkx"),
    *("sympy", "mpmath"),
)


def cache() -> Path:
    """Beside the programs of Kubernetes, where `deploy/image.sh` keeps its own."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muster/containers"


def template() -> Path:
    """Containerd's folder with all images; raises NotFound."""
    place = cache() / "template"
    if not (place / "images.json").is_file():
        raise binaries.NotFound(f"no images in {place}: make test-containers makes them")
    return place


def copy_template(target: Path) -> None:
    """For one node. Layers are only ever read: they are shared. The databases are written: they are copied."""
    made = template() / "root"
    subprocess.run(["cp", "-al", str(made), str(target)], check=True)
    for name in _DATABASES:
        (target / name).unlink()
        shutil.copy2(made / name, target / name)


def ensure() -> None:
    """Builds what has changed. Two that want them at once build them once."""
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / ".lab-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["bash", str(_ROOT / "deploy/image.sh"), MUSTER], check=True, stdout=subprocess.DEVNULL)
        _build_torch()
        _build_pause()
        _import()


# Building ----------------------------------------------------------------------------------------


def _buildah(*words: str) -> str:
    store = [
        "--root",
        str(cache() / "storage"),
        "--runroot",
        str(cache() / "storage-run"),
        "--storage-driver",
        "overlay",
    ]
    done = subprocess.run(["buildah", *store, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"buildah {' '.join(words)}: {done.stderr}")
    return done.stdout.strip()


def _has(image: str) -> bool:
    return image in json.dumps([one["names"] for one in json.loads(_buildah("images", "--json") or "[]") or []])


def _identity(image: str) -> str:
    """Of what is in it."""
    return _buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", image)


def _key(*below: str) -> str:
    """Of what is made of these images and the programs."""
    parts = [_identity(one) for one in below] + [one.read_text() for one in sorted(_PROGRAMS.glob("*.py"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _build_torch() -> None:
    """muster on top, because it changes: what is below is made once for each version of torch."""
    below = f"localhost/torch-base:{metadata.version('torch').replace('+', '-')}-{_identity(_BASE)[:12]}"
    if not _has(below):
        print("copying torch into an image once", file=sys.stderr)
        with _container(_BASE, below) as container:
            for name in _TORCH_NEEDS:
                for top in _tops(name):
                    _buildah("copy", "--quiet", container, str(top), f"/opt/torch/{top.name}")
    kept = f"{TORCH}-{_key(below, MUSTER)}"
    if not _has(kept):
        with _container(below, kept) as container:
            _buildah("copy", "--quiet", "--from", MUSTER, container, "/opt/muster", "/opt/muster")
            _buildah("copy", "--quiet", "--from", MUSTER, container, "/src/examples", "/src/examples")
            _buildah("copy", "--quiet", container, str(_PROGRAMS), "/src/programs")
            env = ("PATH=/opt/muster/bin:/usr/bin:/bin", "PYTHONUNBUFFERED=1", "PYTHONPATH=/opt/torch")
            _buildah("config", *(word for one in env for word in ("--env", one)), container)
            _buildah("config", "--user", "65532:65532", "--workingdir", "/tmp", container)
    _buildah("tag", kept, TORCH)


def _build_pause() -> None:
    kept = f"{PAUSE}-{_identity(_BASE)[:12]}"
    if not _has(kept):
        with _container(_BASE, kept) as container:
            _buildah("config", "--entrypoint", '["sleep", "infinity"]', container)
    _buildah("tag", kept, PAUSE)


@contextlib.contextmanager
def _container(below: str, image: str) -> Iterator[str]:
    """What is done to it becomes `image`."""
    made = _buildah("from", "--pull-never", below)
    try:
        yield made
        _buildah("commit", "--quiet", made, image)
    finally:
        _buildah("rm", made)


def _tops(name: str) -> list[Path]:
    """The folders and files that a distribution has in site-packages."""
    found = metadata.distribution(name)
    names = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    return sorted(Path(str(found.locate_file(name))) for name in names)


# Importing ---------------------------------------------------------------------------------------


def _import() -> None:
    """Into the template, where it is not there already by its digest."""
    place = cache() / "template"
    wanted = {name: _identity(name) for name in ALL}
    noted = place / "images.json"
    known: dict[str, str] = json.loads(noted.read_text()) if noted.is_file() else {}
    if known == wanted:
        return
    noted.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as folder, _containerd(place, Path(folder)) as ctr:
        for name in ALL:
            if known.get(name) != wanted[name]:
                print(f"importing {name}", file=sys.stderr)
                archive = Path(folder) / "image.tar"
                _buildah("push", "--quiet", name, f"docker-archive:{archive}:{name}")
                subprocess.run([*ctr, "images", "import", str(archive)], check=True, stdout=subprocess.DEVNULL)
                archive.unlink()
    noted.write_text(json.dumps(wanted))


@contextlib.contextmanager
def _containerd(place: Path, scratch: Path) -> Iterator[list[str]]:
    """One that runs no container; how to speak with it."""
    config, socket = scratch / "config.toml", scratch / "sock"
    config.write_text(
        f'version = 2\nroot = "{place}/root"\nstate = "{scratch}/state"\n'
        f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\n  address = "{socket}"\n'
    )
    ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]
    with open(scratch / "log", "wb") as log:
        server = subprocess.Popen(["containerd", "--config", str(config)], stdout=log, stderr=log)
    try:
        while subprocess.run([*ctr, "version"], capture_output=True).returncode:
            if server.poll() is not None:
                raise SystemExit((scratch / "log").read_text())
        yield ctr
    finally:
        server.terminate()
        server.wait(30)


ALL = (PAUSE, MUSTER, TORCH)


if __name__ == "__main__":
    if os.geteuid():
        sys.exit("building images needs root")
    ensure()
