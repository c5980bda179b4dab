"""Temporary files that would be on a network mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.contrib.gpu_tests import run
from agentrl.contrib.gpu_tests.declare import local_folder, network_mount
from agentrl.contrib.gpu_tests.report import Lines
from agentrl.utils.errors import ResourceError

MOUNTS = """22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /home rw,relatime shared:7 - nfs4 server:/export/home rw,vers=4.2
31 30 0:41 / /home/scratch rw,relatime - xfs /dev/nvme0n1 rw
32 22 0:42 / /mnt/my\\040data rw - fuse.sshfs me@host: rw
33 22 0:43 / /mnt/layers rw - fuse.fuse-overlayfs fuse-overlayfs rw
34 22 0:44 / /windows rw - cifs //server/share rw
35 22 0:45 / /over rw - nfs server:/a rw
36 22 0:46 / /over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/tmp", None), ("/home/me/tmp", "nfs4"), ("/home/scratch/tmp", None), ("/homework", None),
        ("/mnt/my data/x", "fuse.sshfs"), ("/mnt/layers/x", None), ("/windows", "cifs"), ("/over/x", None),
    ],
)  # fmt: skip
def test_the_mount_of_a_folder(folder: str, kind: str | None) -> None:
    assert network_mount(Path(folder), MOUNTS) == kind


def test_the_first_local_place_is_taken_and_none_is_an_error(tmp_path: Path) -> None:
    assert local_folder(Path("/home/scratch"), MOUNTS, ()) == (Path("/home/scratch"), None)
    assert local_folder(Path("/home/me"), MOUNTS, ("/windows", "/not/there", str(tmp_path))) == (tmp_path, "nfs4")
    with pytest.raises(
        ResourceError, match=r"temporary files would be in /home/me, on a network mount \(nfs4\); none of /windows"
    ):
        local_folder(Path("/home/me"), MOUNTS, ("/windows",))


def test_a_run_gets_a_local_folder_says_so_once_and_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    lines = Lines(said.append, 0.0)
    with run.temporary_folder(lines) as env:
        assert env == {} and said == []
    monkeypatch.setattr(run, "local_folder", lambda current: (tmp_path, "nfs"))
    with run.temporary_folder(lines) as env:
        folder = Path(env["TMPDIR"])
        assert folder.parent == tmp_path and folder.is_dir() and len(said) == 1
        assert said[0].endswith(f"is on a network mount (nfs): temporary files of the tests go to {folder}")
    assert not folder.exists()
