"""Copy of the agent, for images without muster: `python -m muster.agent_copy FOLDER`.

The init container of a Pod runs this module. The copy is muster without the programs of the control plane. It needs
Python's standard library and, for `muster.State`, the torch of the worker's image.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_LEFT_OUT = frozenset({"cli", "daemon", "demos", "server", "sim"})
_PYTHONS = "python3 python python3.15 python3.14 python3.13 python3.12 python3.11"

# The launcher of a worker prefers the image's own muster-node. It changes PYTHONPATH only if it starts the copy.
LAUNCHER = f"""\
if command -v muster-node >/dev/null 2>&1; then exec muster-node "$@"; fi
for python in {_PYTHONS}; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    export PYTHONPATH="$MUSTER_AGENT${{PYTHONPATH:+:$PYTHONPATH}}"
    exec "$python" -m muster.node.cli "$@"
  fi
done
echo "muster: this image has neither muster-node nor Python 3.11 or newer: name another one in spec.image" >&2
exit 2
"""
VARIABLE = "MUSTER_AGENT"
# Start a second muster-node in a worker's container, for example for `muster shell`.
BESIDE = f'exec $(command -v muster-node || echo "sh ${VARIABLE}/muster-node") "$@"'


def copy(folder: Path) -> None:
    """Copy the package and the launcher into the folder, readable for every user. Replace an earlier copy."""
    source, target = Path(__file__).parent, folder / "muster"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=_ignored, copy_function=shutil.copyfile)
    (folder / "muster-node").write_text(f"#!/bin/sh\n{LAUNCHER}")
    os.chmod(folder / "muster-node", 0o755)
    for path in (target, *target.rglob("*")):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)  # with any umask, and for any user of the worker


def _ignored(folder: str, names: list[str]) -> set[str]:
    left_out = {"__pycache__"} | (_LEFT_OUT if Path(folder) == Path(__file__).parent else frozenset())
    return left_out & set(names)


def main(words: list[str]) -> int:
    if len(words) != 1:
        print("usage: python -m muster.agent_copy FOLDER", file=sys.stderr)
        return 2
    try:
        copy(Path(words[0]))
    except (OSError, shutil.Error) as why:
        print(f"muster: the agent cannot be copied into {words[0]}: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
