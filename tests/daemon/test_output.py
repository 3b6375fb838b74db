"""The log of a control plane in the background has a bounded length, and nothing that is said is lost on the way."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

PROGRAM = """if True:
    import sys
    from pathlib import Path
    from muster.daemon import output
    path = Path(sys.argv[1])
    for number in range(100):
        print(f"line {number:03d}", flush=True)
        print(f"warning {number:03d}", file=sys.stderr, flush=True)
        output.keep_short(path, 500)
"""


def test_a_log_goes_on_in_a_new_file_when_it_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    with open(path, "ab") as log:
        subprocess.run([sys.executable, "-c", PROGRAM, path], stdout=log, stderr=log, check=True, timeout=60)
    kept = [path.with_name("daemon.log.1").read_text(), path.read_text()]
    assert all(len(one) < 600 for one in kept)
    lines = "".join(kept).splitlines()
    whole = [word for number in range(100) for word in (f"line {number:03d}", f"warning {number:03d}")]
    assert lines == whole[-len(lines) :] and len(lines) > 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(one.name for one in tmp_path.iterdir()) == ["daemon.log", "daemon.log.1"]


def test_what_goes_elsewhere_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    path.write_text("x" * 1000)
    subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, check=True, timeout=60)
    assert path.read_text() == "x" * 1000
