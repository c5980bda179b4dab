"""Facts about this machine that Ray, NCCL and shared memory depend on. Imports no ray, and torch
only to count GPUs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from agentrl.errors import ResourceError

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "ceph",
        "fuse.sshfs",
        "gpfs",
        "beegfs",
        "glusterfs",
        "9p",
        "afs",
    }
)
LONGEST_RAY_FOLDER = 40
"""Ray puts Unix sockets under its folder; a socket's path has at most 107 bytes, of which Ray needs about 65."""


def usable_gpus() -> int:
    """GPUs that torch can compute on here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def file_system(path: Path) -> str:
    """The type of the file system that holds `path` (as in /proc/mounts); "" if unknown."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return ""
    wanted, best, kind = str(path.resolve()), "", ""
    for line in mounts.read_text().splitlines():
        _, mounted_at, mounted_kind, *_ = line.split()
        inside = wanted == mounted_at or wanted.startswith(mounted_at.rstrip("/") + "/")
        if inside and len(mounted_at) >= len(best):  # of two mounts on one path, the later one hides the other
            best, kind = mounted_at, mounted_kind
    return kind


def ray_folder() -> str | None:
    """A folder for Ray's session files if its own choice would fail or hang; None leaves the choice to Ray.

    Ray follows TMPDIR. On a network file system it can hang, and a long path breaks its sockets.
    """
    if os.environ.get("RAY_TMPDIR"):
        return None
    folder = Path(tempfile.gettempdir())
    if len(str(folder)) <= LONGEST_RAY_FOLDER and file_system(folder) not in NETWORK_FILE_SYSTEMS:
        return None
    return "/tmp/ray"


def check_ray_folder() -> None:
    """Raise ResourceError, with the variable that helps, if a local Ray cannot write the files of its session."""
    key = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")
    folder = Path(ray_folder() or Path(os.environ[key] if key else "/tmp") / "ray")
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        why = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        why = f"{there} belongs to {_owner(there)} and this user cannot write there"
    elif key == "RAY_TMPDIR" and len(os.environ[key]) > LONGEST_RAY_FOLDER:
        why = f"a path of more than {LONGEST_RAY_FOLDER} characters is too long for Ray's sockets"
    else:
        return
    raise ResourceError(
        f"{key or 'RAY_TMPDIR'}: Ray cannot write its files in {folder}: {why}. Set RAY_TMPDIR to a folder of your own on a "
        f"local disk, with a path of at most {LONGEST_RAY_FOLDER} characters (mkdir -p /tmp/$USER; export RAY_TMPDIR=/tmp/$USER)"
    )


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # a user of another machine
        return f"user {path.stat().st_uid}"


def network_interfaces() -> list[str]:
    """Names of the network interfaces."""
    folder = Path("/sys/class/net")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
