"""Checkpoint folders: whole or not there."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.trainer.checkpoint import MANIFEST, Checkpoints, check_intact, is_whole
from agentrl.utils.errors import CheckpointError, ResourceError
from agentrl.utils.files import disk_full


@contextmanager
def writing(checkpoints: Checkpoints, step: int, score: float | None = None) -> Iterator[Path]:
    """The folder of a checkpoint, which is complete when the block ends without an error."""
    folder = checkpoints.begin(step)
    try:
        yield folder
    except BaseException as error:
        checkpoints.give_up(step, error)
    checkpoints.commit(step, score)


def write(checkpoints: Checkpoints, *steps: int) -> Checkpoints:
    for step in steps:
        with writing(checkpoints, step) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / "data.bin").write_bytes(b"x" * step)
    return checkpoints


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_keeps_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    write(checkpoints, 10, 20, 30)
    assert names(tmp_path) == ["step_000020", "step_000030"]
    assert checkpoints.newest() == tmp_path / "step_000030"
    manifest = json.loads((tmp_path / "step_000030" / MANIFEST).read_text())
    assert manifest["step"] == 30
    assert manifest["files"] == {"actor/data.bin": {"size": 30, "sha256": hashlib.sha256(b"x" * 30).hexdigest()}}


def test_a_failed_write_leaves_the_older_ones_and_a_full_disk_is_a_resource_error(tmp_path: Path) -> None:
    checkpoints = write(Checkpoints(tmp_path, keep=1), 10)
    with pytest.raises(ValueError), writing(checkpoints, 20) as folder:
        (folder / "half").write_text("x")
        raise ValueError("the actor died")
    with pytest.raises(ResourceError, match="disk is full"), writing(checkpoints, 20):
        raise RuntimeError("writer failed") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == ["step_000010"] and checkpoints.newest() == tmp_path / "step_000010"


def test_damaged_checkpoints_are_passed_over(tmp_path: Path) -> None:
    checkpoints = write(Checkpoints(tmp_path, keep=5, keep_best=1), 1, 2, 3, 4, 5)
    checkpoints.rate(5, 0.5)
    assert checkpoints.best() == (5, 0.5)
    (tmp_path / "step_000005" / MANIFEST).write_text('{"step": 5, "fi')
    (tmp_path / "step_000004" / MANIFEST).unlink()
    (tmp_path / "step_000003" / "actor" / "data.bin").write_bytes(b"x")
    assert checkpoints.newest() == tmp_path / "step_000002" and checkpoints.best() is None
    with pytest.raises(CheckpointError, match="whole ones: 1, 2"):
        checkpoints.at(3)
    with pytest.raises(CheckpointError):
        checkpoints.rate(5, 0.9)
    assert checkpoints.at(1).name == "step_000001"


def test_the_same_step_again_replaces_and_of_equal_scores_the_newer_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1)
    for step, score, file in ((1, 0.5, "x"), (2, 0.5, "x"), (3, 0.1, "x"), (3, 0.1, "y")):
        with writing(checkpoints, step, score) as folder:
            (folder / file).touch()
    assert names(tmp_path) == ["step_000002", "step_000003"] and names(tmp_path / "step_000003") == [MANIFEST, "y"]


def test_what_a_kill_in_the_middle_of_a_write_leaves_is_no_checkpoint_and_written_anew(tmp_path: Path) -> None:
    """A kill itself is in test_ranks.py."""
    checkpoints = write(Checkpoints(tmp_path, keep=1), 10)
    (checkpoints.begin(20) / "half").write_text("x")
    assert checkpoints.newest() == tmp_path / "step_000010"
    write(checkpoints, 20)
    assert names(tmp_path) == ["step_000020"] and is_whole(tmp_path / "step_000020")
    assert not (tmp_path / "step_000020" / "half").exists()


def test_what_was_written_and_is_gone_at_the_commit_is_said(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    shutil.rmtree(checkpoints.begin(3))
    with pytest.raises(FileNotFoundError, match=r"\.writing_step_000003") as caught:
        checkpoints.commit(3)
    assert caught.value.__cause__ is None and not disk_full(caught.value)
    caught.value.__cause__ = caught.value  # an error that is its own cause is looked through once
    assert not disk_full(caught.value)


def test_the_only_checkpoint_survives_one_of_its_own_step_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one has been moved away when the new one cannot take its place: by an error, and by a kill."""
    checkpoints = write(Checkpoints(tmp_path, keep=1), 10)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing_"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(OSError, match="Input/output") as caught:
            write(checkpoints, 10)
        assert caught.value.__cause__ is None and not disk_full(caught.value)
    assert names(tmp_path) == ["step_000010"] and checkpoints.newest() == tmp_path / "step_000010"
    (tmp_path / "step_000010").rename(tmp_path / ".old_step_000010")  # what a kill between the two leaves
    again = Checkpoints(tmp_path, keep=1)
    assert again.recover_interrupted() == [] and again.newest() == tmp_path / "step_000010"


def test_a_flipped_bit_is_found_and_the_older_checkpoint_taken(tmp_path: Path) -> None:
    checkpoints = write(Checkpoints(tmp_path, keep=3), 10, 20, 30)
    for step in (20, 30):
        data = tmp_path / f"step_0000{step}" / "actor" / "data.bin"
        data.write_bytes(b"y" + data.read_bytes()[1:])
    assert checkpoints.newest() == tmp_path / "step_000030"  # of the right size
    found, wrong = checkpoints.newest_intact()
    assert found == tmp_path / "step_000010"
    assert [problem.partition(": ")[2] for problem in wrong] == [
        f"actor/data.bin: not as written (SHA-256 differs); it is .damaged_step_0000{step} now" for step in (30, 20)
    ]
    assert names(tmp_path) == [".damaged_step_000020", ".damaged_step_000030", "step_000010"]
    narrow = write(Checkpoints(tmp_path, keep=1), 20)
    assert narrow.newest_intact() == (tmp_path / "step_000020", [])  # not dropped for the damaged ones


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest_intact() == (None, [])  # a run that ended before its first
    write(checkpoints, 10, 20)
    (tmp_path / "step_000010" / "actor" / "data.bin").write_bytes(b"z" * 10)
    (tmp_path / "step_000020" / MANIFEST).write_text("garbage")
    with pytest.raises(CheckpointError, match=r"no checkpoint is intact: .*step_000020: .*step_000010: .*--overwrite"):
        checkpoints.newest_intact()
    assert names(tmp_path) == ["step_000010", "step_000020"]


def test_a_short_file_is_damage_and_not_a_checkpoint_that_was_being_written(tmp_path: Path) -> None:
    checkpoints = write(Checkpoints(tmp_path, keep=2), 10, 20)
    (tmp_path / "step_000020" / "actor" / "data.bin").write_bytes(b"x")
    checkpoints.begin(30)
    assert checkpoints.recover_interrupted() == [30]
    found, wrong = checkpoints.newest_intact()
    assert found == tmp_path / "step_000010" and "step_000020" in wrong[0]


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"files": []}', '{"files": {"actor/data.bin": null}}', "\0"])
def test_a_damaged_manifest_vouches_for_nothing(tmp_path: Path, text: str) -> None:
    write(Checkpoints(tmp_path, keep=1), 10)
    (tmp_path / "step_000010" / MANIFEST).write_text(text)
    assert not is_whole(tmp_path / "step_000010")
    with pytest.raises(CheckpointError, match="the manifest is damaged"):
        check_intact(tmp_path / "step_000010")
