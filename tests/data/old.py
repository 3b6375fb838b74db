"""What muster 0.1.0 left behind and said, for tests that the present code goes on with it; see `0.1.0/README.md`."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "0.1.0"
STATE_FILE = FOLDER / "coordinator.json"
RAY = FOLDER / "ray"
VIEWER = "mst_2iUzgTS-9XXpMxjR-oz3RaKspFRa4ITbKSwZb2WykPY"  # the token of "ada", which opens nothing but that home


def a_home(at: Path) -> Path:
    """A home as a control plane left it that was killed while a training ran and pipelines shared GPUs."""
    shutil.copytree(FOLDER / "home", at)
    packed = at / "muster.db.gz"
    (at / "muster.db").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    return at


@dataclass(frozen=True)
class Line:
    """Something that passed between a coordinator and one that was connected to it."""

    at: float
    connection: int
    what: str  # open, sent, received, closed by member, closed by coordinator
    frame: dict[str, Any]

    @property
    def type(self) -> str:
        return str(self.frame.get("type", ""))


def transcript() -> list[Line]:
    told = [json.loads(line) for line in (FOLDER / "frames.jsonl").read_text().splitlines()]
    return [Line(one["at"], one["connection"], one["what"], one.get("frame", {})) for one in told]


def missing(old: Any, new: Any, where: str = "") -> list[str]:
    """What the old value says and the new one does not; more may be said in it."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [one for key, value in old.items() for one in missing(value, new.get(key), f"{where}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [one for n, (a, b) in enumerate(zip(old, new, strict=True)) for one in missing(a, b, f"{where}[{n}]")]
    return [] if old == new else [f"{where}: {old!r} became {new!r}"]
