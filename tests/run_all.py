"""All test targets of CI, one after another, with one summary at the end.

`python -m tests.run_all TARGET…` calls `make TARGET` for each name, and continues after a failure. It prints the
time of each target, the slowest tests, the failed tests and the counts. It fails if a target fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from dataclasses import dataclass, field
from pathlib import Path

SLOWEST = 10


@dataclass(frozen=True)
class Part:
    """One target: its exit code, its wall time and its tests."""

    target: str
    code: int
    seconds: float
    times: dict[str, float] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    skipped: int = 0


def parse_report(text: str) -> tuple[dict[str, float], tuple[str, ...], int]:
    """Return the time of each test, the failed tests and the number of skipped ones from a report of pytest."""
    times: dict[str, float] = {}
    failed: list[str] = []
    skipped = 0
    for case in xml.fromstring(text).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        times[name] = times.get(name, 0.0) + float(case.get("time", "0"))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif case.find("skipped") is not None:
            skipped += 1
    return times, tuple(dict.fromkeys(failed)), skipped


def summary(parts: list[Part]) -> str:
    """Return the lines that end a run; the last one has the counts."""
    times = [(seconds, name) for part in parts for name, seconds in part.times.items()]
    lines = ["", "Time of each part:"]
    lines += [f"  {part.seconds:7.1f} s  make {part.target}{'' if part.code == 0 else '  FAILED'}" for part in parts]
    lines += [f"  {sum(part.seconds for part in parts):7.1f} s  in all", "", "Slowest tests:"]
    lines += [f"  {seconds:7.1f} s  {name}" for seconds, name in sorted(times, reverse=True)[:SLOWEST]]
    failed = [name for part in parts for name in part.failed]
    lines += ["", "Failed tests:", *(f"  {name}" for name in failed)] if failed else []
    skipped = sum(part.skipped for part in parts)
    lines += ["", f"{len(times) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped"]
    return "\n".join(lines)


def run_part(target: str, report: Path) -> Part:
    """Run `make TARGET`, whose pytest writes its report into that file."""
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report} -o junit_duration_report=total"
    start = time.monotonic()
    code = subprocess.run(["make", target], env={**os.environ, "PYTEST_ADDOPTS": options.strip()}).returncode
    seconds = time.monotonic() - start
    if not report.exists():  # the target ended before its tests did, or it has none
        return Part(target, code, seconds)
    return Part(target, code, seconds, *parse_report(report.read_text()))


def main(targets: list[str]) -> int:
    parts: list[Part] = []
    with tempfile.TemporaryDirectory() as folder:
        for target in targets:
            print(f"make {target}", flush=True)
            parts.append(run_part(target, Path(folder) / f"{target}.xml"))
    print(summary(parts))
    return int(any(part.code for part in parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
