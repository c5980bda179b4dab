"""A disk that is full at a chosen writer: a small tmpfs, which a file of zeros fills at the moment when the writer begins."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

SIZE_MIB = 48
BALLAST = "ballast"


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of its own at `place`. Raises PermissionError if this process may not mount one."""
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise PermissionError(made.stderr)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    with (disk / BALLAST).open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def writers() -> dict[str, tuple[Any, str]]:
    """Where each file of a run is written: (owner, name)."""
    from agentrl.run import checkpoint, main, provenance
    from agentrl.run.folder import RunFolder
    from agentrl.run.log_file import LogFile
    from agentrl.run.trackers.tensorboard import TensorBoard
    from agentrl.train import checkpoint as folders
    from agentrl.train.actor import Actor
    from agentrl.train.learner import Learner

    return {
        "config.toml": (RunFolder, "create"),
        "provenance.json": (provenance, "write_provenance"),
        "log.txt": (LogFile, "emit"),
        "metrics.jsonl": (RunFolder, "append_metrics"),
        "trajectories": (RunFolder, "write_trajectories"),
        "tokens": (RunFolder, "write_tokens"),
        "tensorboard": (TensorBoard, "row"),
        "checkpoint's folder": (folders.Checkpoints, "begin"),
        "checkpoint's models": (Learner, "begin_save"),
        "checkpoint's driver.json": (checkpoint, "_write_driver"),
        "checkpoint's manifest.json": (folders, "seal"),
        "summary.json": (RunFolder, "write_summary"),
        "curve.png": (main, "draw_curve"),
        "final": (Actor, "export_hf"),
    }


def full_at(writer: str, call: int, disk: Path) -> None:
    """The disk is full from the `call`th call of a writer on."""
    owner, name = writers()[writer]
    plain, made = owner.__dict__[name], 0
    kind = classmethod if isinstance(plain, classmethod) else lambda function: function
    plain = getattr(plain, "__func__", plain)

    @wraps(plain)
    def writes(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == call:
            fill(disk)
        return plain(*args, **kwargs)

    setattr(owner, name, kind(writes))


def trained(words: list[str], writer: str, call: int, disk: str, said: str, code_file: str) -> None:
    """`agentrl train WORDS` in this process, with all that it says in a file."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    from agentrl.cli.main import main
    from agentrl.run.checks import capacity

    capacity.MIN_DISK_MIB = 1
    if writer:
        full_at(writer, call, Path(disk))
    Path(code_file).write_text(str(main(["train", *words])))


def free_again(disk: Path) -> None:
    (disk / BALLAST).unlink(missing_ok=True)
