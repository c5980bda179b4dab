"""A folder for temporary files that is not on a network: Unix sockets do not work on one, and locks and renames may not."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ResourceError

NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "glusterfs",
    "pvfs2",
    "virtiofs",
    "fuse",
}
"""File systems whose files are on another machine or may be; so is every `fuse.NAME` but those of LOCAL_FUSE."""
LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.overlayfs", "fuse.ntfs-3g", "fuse.lxcfs"}
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
MOUNTS = Path("/proc/self/mountinfo")


def network_mount(folder: Path, mounts: str) -> str | None:
    """The type of the file system that a folder is on if that is a network's, else None. `mounts`: the text of mountinfo."""
    best, kind = -1, ""
    path = folder.resolve()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if len(before.split()) < 5 or not after.split():
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        # Of two mounts at one place the later one is on top.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    network = kind in NETWORK or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)
    return kind if network else None


def local_folder(current: Path, mounts: str | None = None, places: Sequence[str] = PLACES) -> tuple[Path, str | None]:
    """`current` if it is local, else the first of `places` that is and can be written to, with the type of the network mount.

    Raises ResourceError if there is none.
    """
    mounts = MOUNTS.read_text(errors="replace") if mounts is None else mounts
    kind = network_mount(current, mounts)
    if kind is None:
        return current, None
    for place in map(Path, places):
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK) and network_mount(place, mounts) is None:
            return place, kind
    raise ResourceError(
        f"temporary files would be in {current}, on a network mount ({kind}); none of {', '.join(places)} is local: set TMPDIR"
    )
