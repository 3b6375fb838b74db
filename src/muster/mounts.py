"""Network file systems: which one, if any, a path is on. Standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "panfs"),
    *("orangefs", "pvfs2", "gfs2", "ocfs2", "wekafs", "fuse.glusterfs", "fuse.sshfs", "fuse.ceph", "fuse.ceph-fuse"),
    *("fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "fuse.rclone", "fuse.beegfs", "fuse.quobyte", "fuse.mfs"),
}
_ESCAPED = re.compile(r"\\([0-7]{3})")


def network_type(path: Path) -> str:
    """Return the type of the network file system that a path, or its nearest folder, is on; "" if it is on none."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    wanted, nearest, kind = os.path.realpath(path), "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) < 5 or not after:
            continue
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), words[4])
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(nearest):  # of two on one point the later one hides the earlier one
            nearest, kind = point, after.split()[0]
    return kind if kind in _NETWORK else ""
