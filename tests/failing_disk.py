"""A disk that fails in real processes: a preloaded C library replaces some of their system calls."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "programs" / "failing_disk.c"


@dataclass
class FailingDisk:
    """The processes that have `env` see the faults that are set here."""

    library: Path
    control: Path

    @property
    def env(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "FAILING_DISK": str(self.control)}

    def fail(self, call: str, error: str, part_of_path: str) -> None:
        """Let `open`, `opendir`, `readdir`, `read`, `write` or `fsync` fail for paths that contain `part_of_path`."""
        draft = self.control.with_suffix(".new")
        draft.write_text(f"{call} {getattr(errno, error)} {part_of_path}")
        draft.replace(self.control)

    def recover(self) -> None:
        self.control.unlink(missing_ok=True)


def build(folder: Path) -> FailingDisk:
    compiler = shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        pytest.skip("a C compiler builds the library that makes disks fail")
    library = folder / "failing_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return FailingDisk(library, folder / "failing-disk")
