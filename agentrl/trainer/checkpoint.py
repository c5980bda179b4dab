"""Checkpoint folders: a checkpoint is complete or ignored.

The manifest, written last, with size and SHA-256 of every file; then the folders. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, NoReturn

from agentrl.utils.errors import CheckpointError, DiskFullError
from agentrl.utils.files import atomic_write, disk_full, file_sha256, full_text, read_plain
from agentrl.utils.parsing import json_text, read_json

# The manifest

MANIFEST = "manifest.json"
_READERS = 4


def seal(folder: Path, step: int, score: float | None = None) -> None:
    """Flush all files of `folder` and write its manifest last."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # else the manifest could reach the disk before the data that it vouches for
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(path)
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _sums(paths), strict=True)
    }
    write_manifest(folder, {"step": step, "files": files} | ({} if score is None else {"score": score}))


def is_whole(folder: Path) -> bool:
    """True if the manifest exists and every file that it lists has the listed size."""
    try:
        files = read_manifest(folder)["files"].items()
        for name, said in files:
            # Outside of the folder may be a device, which is read for ever.
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                return False
            if (folder / name).stat().st_size != int(said["size"] if isinstance(said, dict) else said):
                return False
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return False


def check_intact(folder: Path) -> None:
    """Read every file that the manifest lists. Raises CheckpointError naming those that are not as they were written. A
    manifest without sums, of an older version, is compared by sizes."""
    if not is_whole(folder):
        raise CheckpointError(f"{folder}: a file is missing or short, or the manifest is damaged")
    files = {name: said["sha256"] for name, said in read_manifest(folder)["files"].items() if isinstance(said, dict)}
    try:
        found = _sums([folder / name for name in files])
    except OSError as problem:
        raise CheckpointError(f"{folder}: a file cannot be read: {problem}") from None
    changed = [name for (name, was), now in zip(files.items(), found, strict=True) if was != now]
    if changed:
        raise CheckpointError(f"{folder}: {', '.join(changed)}: not as written (SHA-256 differs)")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Step, files and, if it was evaluated, score. Raises OSError or ValueError for a missing or unreadable manifest."""
    found: dict[str, Any] = read_json(read_plain(folder / MANIFEST))
    return found


def check_model(folder: Path) -> None:
    """`check_intact` of a model folder of a run, if it has a manifest. Raises CheckpointError, with what to do."""
    if os.path.lexists(folder / MANIFEST):
        try:
            check_intact(folder)
        except CheckpointError as problem:
            raise CheckpointError(f"{problem}. Copy the folder back") from None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest: a reader sees the old one or the new one, never half of one."""
    atomic_write(folder / MANIFEST, json_text(manifest))
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder: a new or renamed file in it survives a power cut only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sums(paths: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-sums") as pool:  # hashlib lets go of the interpreter's lock
        return list(pool.map(file_sha256, paths))


# The folders

_NAME = re.compile(r"(\.writing_)?step_(\d{6,})")
_OLD = ".old_"
_DAMAGED = ".damaged_"
_TOO_LITTLE = 1 << 20


def newest_checkpoint(run: Path) -> str:
    """Message about the newest whole checkpoint of a run's folder."""
    return str(Checkpoints(run / "checkpoints", 1).newest() or "none yet")


class Checkpoints:
    """The checkpoints of a run, under one root folder: the newest `keep` are kept, and the `keep_best` with
    the highest scores (of equal scores, the newer). Scores are stored in the manifests."""

    def __init__(self, root: Path, keep: int, keep_best: int = 0) -> None:
        self.root, self.keep, self.keep_best = Path(root), keep, keep_best

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` to. Raises DiskFullError if the disk is full."""
        aside = self._aside(step)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            self.give_up(step, error)
        return aside

    def commit(self, step: int, score: float | None = None) -> None:
        """Make the files written after `begin` the checkpoint of `step`, and delete checkpoints beyond the kept ones.

        Raises DiskFullError if the disk is full; whatever goes wrong, older checkpoints stay.
        """
        aside = self._aside(step)
        try:
            seal(aside, step, score)
            # A folder cannot be replaced atomically. An old one is moved away first, so that `recover_interrupted` can bring it
            # back if the process is killed between the two renames.
            target = self.root / f"step_{step:06d}"
            old = target.with_name(f"{_OLD}{target.name}")
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            try:
                aside.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
            shutil.rmtree(old, ignore_errors=True)
            sync_folder(self.root)
        except OSError as error:
            self.give_up(step, error)
        self._prune()

    def give_up(self, step: int, error: BaseException) -> NoReturn:
        """Remove the files written after `begin`, and raise `error`, or a DiskFullError from it if the disk is full."""
        # PyTorch's zip writer does not say why it could not write: "unexpected pos 704 vs 598".
        full = disk_full(error) or ("inline_container" in str(error) and shutil.disk_usage(self.root).free < _TOO_LITTLE)
        text = full_text(self.root, f"go on: checkpoint {step} was not written, older ones are intact") if full else ""
        shutil.rmtree(self._aside(step), ignore_errors=True)
        if not full:
            raise error
        raise DiskFullError(text) from error

    def rate(self, step: int, score: float) -> None:
        """Give the checkpoint of `step` a score that was not known when it was written.

        Raises CheckpointError if it is missing or damaged.
        """
        path = self.at(step)
        write_manifest(path, {**read_manifest(path), "score": score})
        self._prune()

    def newest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        return next((path for _, path in sorted(self._steps(), reverse=True) if is_whole(path)), None)

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose files are as they were written, or None if none was ever completed; and the faults of
        newer ones, which are renamed to `.damaged_step_NNNNNN`. Raises CheckpointError if no checkpoint is intact."""
        wrong: dict[Path, CheckpointError] = {}
        for _, path in sorted(self._steps(), reverse=True):
            try:
                check_intact(path)
            except CheckpointError as problem:
                wrong[path] = problem
                continue
            for damaged in wrong:  # else it stays newest, and new ones are pruned
                shutil.rmtree(aside := damaged.with_name(f"{_DAMAGED}{damaged.name}"), ignore_errors=True)
                damaged.rename(aside)
            return path, [f"{problem}; it is {_DAMAGED}{damaged.name} now" for damaged, problem in wrong.items()]
        if wrong:
            found = "; ".join(map(str, wrong.values()))
            raise CheckpointError(f"no checkpoint is intact: {found}. Copy one back, or start over with --overwrite")
        return None, []

    def best(self) -> tuple[int, float] | None:
        """Step and score of the whole checkpoint with the highest score, or None if none has a score."""
        rated = self._rated_steps()
        return (rated[0][1], rated[0][0]) if rated else None

    def at(self, step: int) -> Path:
        """The checkpoint of one step. Raises CheckpointError if it is missing or incomplete."""
        path = self.root / f"step_{step:06d}"
        if not is_whole(path):
            known = [str(number) for number, found in sorted(self._steps()) if is_whole(found)]
            raise CheckpointError(f"{path}: no whole checkpoint; whole ones: {', '.join(known) or 'none'}")
        return path

    def recover_interrupted(self) -> list[int]:
        """Steps newer than the newest whole checkpoint whose writing was started but not completed, because the process
        was killed during a save. Removes the temporary folders, and moves a checkpoint back that was moved away for a
        new one of the same step that never took its place."""
        for old in self.root.glob(f"{_OLD}step_*"):
            if not old.with_name(old.name.removeprefix(_OLD)).exists():
                old.rename(old.with_name(old.name.removeprefix(_OLD)))
        newest = self.newest()
        last = -1 if newest is None else int(newest.name.rpartition("_")[2])
        begun = self._steps(begun=True)
        for _, path in begun:
            shutil.rmtree(path, ignore_errors=True)
        return sorted(step for step, _ in begun if step > last)

    def _aside(self, step: int) -> Path:
        return self.root / f".writing_step_{step:06d}"

    def _steps(self, begun: bool = False) -> list[tuple[int, Path]]:
        """Steps that have a folder, or (`begun`) one that is being written."""
        if not self.root.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.root.iterdir() if path.is_dir())
        return [(int(match[2]), path) for match, path in found if match and bool(match[1]) is begun]

    def _rated_steps(self) -> list[tuple[float, int]]:
        """(score, step) of the whole checkpoints that have a score, the best first."""
        found = [(read_manifest(path).get("score"), step) for step, path in self._steps() if is_whole(path)]
        return sorted(((score, step) for score, step in found if score is not None), reverse=True)

    def _prune(self) -> None:
        whole_ones = [(step, path) for step, path in sorted(self._steps(), reverse=True) if is_whole(path)]
        best = {step for _, step in self._rated_steps()[: self.keep_best]}
        for step, path in whole_ones[self.keep :]:
            if step not in best:
                (path / MANIFEST).unlink(missing_ok=True)  # a half-removed folder must never look whole
                shutil.rmtree(path, ignore_errors=True)
