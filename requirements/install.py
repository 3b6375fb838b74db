"""Installation of locked packages into the environment of the running Python, with their size announced first.

`python requirements/install.py requirements/demo.lock --torch` installs the packages of a lock and the locked torch.
Only the standard library and pip are needed. pip checks the hash of each file and shows its own progress.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
CPU, CUDA = HERE / "torch-cpu.lock", HERE / "torch-cuda.lock"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
_LOCKED = (*_PIP, "--require-hashes", "--no-deps", "--only-binary", ":all:")
_PINNED = re.compile(r"(?m)^# (\d+) bytes\n([-a-z0-9]+)==(\S+)")


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    fetched_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("locks", nargs="*", type=Path, metavar="LOCK")
    parser.add_argument("--torch", action="store_true", help="install the locked torch too")
    options = parser.parse_args()
    try:
        install(options.locks)
        if options.torch:
            install_torch()
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)} failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    return 0


def install(locks: Iterable[Path]) -> None:
    """Install the packages of all locks, and say first how much pip will fetch for those that are missing."""
    for lock in locks:
        missing = [package for package in packages(lock) if installed_version(package.name) != package.version]
        if missing:
            say(f"Installing {len(missing)} packages of {lock.name}. pip fetches {size(missing)}.")
            pip("--requirement", str(lock), command=_LOCKED)


def install_torch() -> None:
    """Install torch without CUDA where pip finds the locked file, otherwise the build with CUDA and its libraries."""
    (cpu,), (cuda,) = packages(CPU), packages(CUDA)
    if installed_version("torch") == cpu.version:
        return
    if installed_version("torch") != cuda.version and offers(cpu):
        say(f"Installing torch {cpu.version}, which has no CUDA. pip fetches {size([cpu])}.")
        if subprocess.run([*_LOCKED, "--requirement", str(CPU)], check=False).returncode == 0:
            return
        print("The file that pip found is not the locked one. The build with CUDA follows.", file=sys.stderr)
    if installed_version("torch") != cuda.version:
        say(
            f"Installing torch {cuda.version} with CUDA. pip fetches {size([cuda])}, NVIDIA's libraries included. "
            f"With PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu it may find the build without CUDA: "
            f"{size([cpu])}."
        )
        pip("--requirement", str(CUDA), command=_LOCKED)
    pip("--constraint", str(HERE / "constraints.txt"), f"torch=={cuda.version}")


def packages(lock: Path) -> list[Package]:
    return [Package(name, version, int(count)) for count, name, version in _PINNED.findall(lock.read_text())]


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def offers(package: Package) -> bool:
    """Ask pip whether an index or a folder of its configuration has this version. Nothing is installed."""
    wanted = f"{package.name}=={package.version}"
    asked = [*_PIP, "--quiet", "--dry-run", "--no-deps", "--only-binary", ":all:", wanted]
    return subprocess.run(asked, check=False, capture_output=True).returncode == 0


def size(missing: Iterable[Package]) -> str:
    """Return the sum of the sizes for a reader: each lock has the size of the file that suits x86_64."""
    megabytes = sum(package.fetched_bytes for package in missing) / 1e6
    return f"about {megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"about {max(1, round(megabytes))} MB"


def pip(*words: str, command: tuple[str, ...] = _PIP) -> None:
    subprocess.run([*command, *words], check=True)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
