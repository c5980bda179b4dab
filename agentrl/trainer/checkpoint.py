"""Checkpoint folders: complete or ignored.

A manifest, written last, has the size and SHA-256 of every file. Imports no torch."""

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
            os.fsync(file.fileno())  # else the manifest could reach the disk before the data that it lists
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(path)
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _hash_files(paths), strict=True)
    }
    write_manifest(folder, {"step": step, "files": files} | ({} if score is None else {"score": score}))


def is_whole(folder: Path) -> bool:
    """Return True if the manifest exists and every listed file has the listed size."""
    try:
        files = read_manifest(folder)["files"].items()
        for name, said in files:
            # A path outside of the folder could be a device, which reads forever.
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                return False
            if (folder / name).stat().st_size != int(said["size"]):
                return False
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return False


def check_intact(folder: Path) -> None:
    """Compare every listed file with the manifest. Raises CheckpointError naming those that changed."""
    if not is_whole(folder):
        raise CheckpointError(f"{folder}: a file is missing or short, or the manifest is damaged")
    files = {name: said["sha256"] for name, said in read_manifest(folder)["files"].items()}
    try:
        found = _hash_files([folder / name for name in files])
    except OSError as problem:
        raise CheckpointError(f"{folder}: a file cannot be read: {problem}") from None
    changed = [name for (name, was), now in zip(files.items(), found, strict=True) if was != now]
    if changed:
        raise CheckpointError(f"{folder}: {', '.join(changed)}: not as written (SHA-256 differs)")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest: step, files and, after an evaluation, score. Raises OSError or ValueError if it is unreadable."""
    found: dict[str, Any] = read_json(read_plain(folder / MANIFEST))
    return found


def check_model(folder: Path) -> None:
    """Run `check_intact` on a run's model folder, if it has a manifest. Raises CheckpointError with the fix."""
    if os.path.lexists(folder / MANIFEST):
        try:
            check_intact(folder)
        except CheckpointError as problem:
            raise CheckpointError(f"{problem}. Copy the folder back") from None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest atomically: a reader sees the old or the new one."""
    atomic_write(folder / MANIFEST, json_text(manifest))
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that new or renamed files in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_files(paths: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-sums") as pool:  # hashlib releases the GIL
        return list(pool.map(file_sha256, paths))


# The folders

_NAME = re.compile(r"(\.writing_)?step_(\d{6,})")
_OLD = ".old_"
_DAMAGED = ".damaged_"
_TOO_LITTLE = 1 << 20


def newest_checkpoint(run: Path) -> str:
    """Return the path of a run's newest whole checkpoint, or "none yet", for messages."""
    return str(Checkpoints(run / "checkpoints", 1).newest() or "none yet")


class Checkpoints:
    """The checkpoints of a run, in one root folder.

    Keeps the newest `keep`, and the `keep_best` with the highest scores (newer first); manifests store scores."""

    def __init__(self, root: Path, keep: int, keep_best: int = 0) -> None:
        self.root, self.keep, self.keep_best = Path(root), keep, keep_best

    def begin(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of `step`. Raises DiskFullError if the disk is full."""
        aside = self._writing_folder(step)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            self.give_up(step, error)
        return aside

    def commit(self, step: int, score: float | None = None) -> None:
        """Make the files written after `begin` the checkpoint of `step`, and prune old ones.

        Raises DiskFullError if the disk is full; after any error, older checkpoints stay.
        """
        aside = self._writing_folder(step)
        try:
            seal(aside, step, score)
            # A folder cannot be replaced atomically. Move an old one away first, so that `recover_interrupted` can restore it
            # if the process is killed between the two renames.
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
        """Remove the files written after `begin` and raise `error`; DiskFullError if the disk is full."""
        # PyTorch's zip writer does not report the reason of a failed write: "unexpected pos 704 vs 598".
        full = disk_full(error) or ("inline_container" in str(error) and shutil.disk_usage(self.root).free < _TOO_LITTLE)
        text = full_text(self.root, f"go on: checkpoint {step} was not written, older ones are intact") if full else ""
        shutil.rmtree(self._writing_folder(step), ignore_errors=True)
        if not full:
            raise error
        raise DiskFullError(text) from error

    def rate(self, step: int, score: float) -> None:
        """Store the score of the checkpoint of `step`, after an evaluation.

        Raises CheckpointError if the checkpoint is missing or damaged.
        """
        path = self.at(step)
        write_manifest(path, {**read_manifest(path), "score": score})
        self._prune()

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint, or None."""
        return next((path for _, path in sorted(self._steps(), reverse=True) if is_whole(path)), None)

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """Return the newest intact checkpoint, and the faults of newer ones.

        It is None if none was ever completed. Damaged ones are renamed to `.damaged_step_NNNNNN`. Raises CheckpointError if
        checkpoints exist and none is intact."""
        wrong: dict[Path, CheckpointError] = {}
        for _, path in sorted(self._steps(), reverse=True):
            try:
                check_intact(path)
            except CheckpointError as problem:
                wrong[path] = problem
                continue
            for damaged in wrong:  # else it would stay the newest, and new ones would be pruned
                shutil.rmtree(aside := damaged.with_name(f"{_DAMAGED}{damaged.name}"), ignore_errors=True)
                damaged.rename(aside)
            return path, [f"{problem}; it is {_DAMAGED}{damaged.name} now" for damaged, problem in wrong.items()]
        if wrong:
            found = "; ".join(map(str, wrong.values()))
            raise CheckpointError(f"no checkpoint is intact: {found}. Copy one back, or start over with --overwrite")
        return None, []

    def best(self) -> tuple[int, float] | None:
        """Return step and score of the best whole checkpoint, or None without scores."""
        rated = self._rated_steps()
        return (rated[0][1], rated[0][0]) if rated else None

    def is_new_best(self, score: float | None) -> bool:
        """Return True if a score beats those of all checkpoints kept as best."""
        return self.keep_best > 0 and score is not None and ((best := self.best()) is None or score > best[1])

    def at(self, step: int) -> Path:
        """Return the checkpoint of a step. Raises CheckpointError if it is missing or incomplete."""
        path = self.root / f"step_{step:06d}"
        if not is_whole(path):
            known = [str(number) for number, found in sorted(self._steps()) if is_whole(found)]
            raise CheckpointError(f"{path}: no whole checkpoint; whole ones: {', '.join(known) or 'none'}")
        return path

    def recover_interrupted(self) -> list[int]:
        """Clean up after a process that was killed during a save. Returns the interrupted steps after the newest checkpoint.

        Removes temporary folders, and restores a checkpoint that was moved away for an unfinished one of the same step."""
        for old in self.root.glob(f"{_OLD}step_*"):
            if not old.with_name(old.name.removeprefix(_OLD)).exists():
                old.rename(old.with_name(old.name.removeprefix(_OLD)))
        newest = self.newest()
        last = -1 if newest is None else int(newest.name.rpartition("_")[2])
        begun = self._steps(begun=True)
        for _, path in begun:
            shutil.rmtree(path, ignore_errors=True)
        return sorted(step for step, _ in begun if step > last)

    def _writing_folder(self, step: int) -> Path:
        return self.root / f".writing_step_{step:06d}"

    def _steps(self, begun: bool = False) -> list[tuple[int, Path]]:
        """Return steps and their folders, or (`begun`) folders that are being written."""
        if not self.root.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.root.iterdir() if path.is_dir())
        return [(int(match[2]), path) for match, path in found if match and bool(match[1]) is begun]

    def _rated_steps(self) -> list[tuple[float, int]]:
        """Return (score, step) of the whole checkpoints with a score, the best first."""
        found = [(read_manifest(path).get("score"), step) for step, path in self._steps() if is_whole(path)]
        return sorted(((score, step) for score, step in found if score is not None), reverse=True)

    def _prune(self) -> None:
        whole_ones = [(step, path) for step, path in sorted(self._steps(), reverse=True) if is_whole(path)]
        best = {step for _, step in self._rated_steps()[: self.keep_best]}
        for step, path in whole_ones[self.keep :]:
            if step not in best:
                (path / MANIFEST).unlink(missing_ok=True)  # a partly removed folder must not look whole
                shutil.rmtree(path, ignore_errors=True)
