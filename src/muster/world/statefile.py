"""What a stand-alone coordinator keeps on disk: the last record of each run, so that its own death loses nothing.

A record is replaced as a whole. Outcomes are forced to the disk before anyone is told; the rest only has to
outlive the process, because agents bring it back too.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, TypedDict

from muster.core.world import records
from muster.files import write_private
from muster.types.frames import RunRecord
from muster.types.world import RunId

log = logging.getLogger("muster.coordinator")


class _SavedRun(TypedDict):
    at: float
    record: dict[str, Any]


class StateFileBusy(Exception):
    """Another coordinator holds this file."""


class StateFile:
    def __init__(self, path: Path, *, keep_s: float) -> None:
        self.path = path
        self._keep_s = keep_s
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StateFileBusy(f"{path} is in use by another coordinator") from None
        self._runs = self._read()

    def _read(self) -> dict[str, _SavedRun]:
        """What can be read. The rest is said and left out: agents bring their runs back."""
        oldest = time.time() - self._keep_s
        found: dict[str, _SavedRun] = {}
        try:
            for run_id, kept in json.loads(self.path.read_text())["runs"].items():
                if kept["at"] > oldest or not kept["record"].get("outcome"):
                    found[run_id] = kept
        except FileNotFoundError:
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read in full (%r)", self.path, error)
        return found

    def records(self) -> dict[RunId, dict[str, Any]]:
        return {RunId(run_id): kept["record"] for run_id, kept in self._runs.items()}

    def save(self, run_id: RunId, record: RunRecord) -> None:
        self._runs[run_id] = {"at": time.time(), "record": records.write(record)}
        self._write(durable=record.outcome is not None)

    def forget(self, run_id: RunId) -> None:
        if self._runs.pop(run_id, None) is not None:
            self._write(durable=False)

    def _write(self, *, durable: bool) -> None:
        write_private(self.path, json.dumps({"version": 1, "runs": self._runs}), durable=durable)

    def close(self, *, remove: bool) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
            Path(f"{self.path}.lock").unlink(missing_ok=True)
        os.close(self._lock)
