"""A disk that is full at a chosen writer: a small tmpfs, which a file of zeros fills at the moment when the writer begins."""

import contextlib
import fnmatch
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

SIZE_MIB = 48
BALLAST = "ballast"


@dataclass(frozen=True)
class Writer:
    """`at` writes `files` of a run folder; the disk is full from its `call`th call on. `said`: what the last line names."""

    at: str
    files: tuple[str, ...]
    call: int = 1
    said: str = ""


TRAIN = {
    "config.toml": Writer("agentrl.run.folder:RunFolder.create", ("config.toml",)),
    "provenance.json": Writer("agentrl.run.provenance:Provenance.write", ("provenance.json",)),
    "token of the shared folder": Writer("agentrl.run.session:check_shared", (".agentrl-shared-*",)),
    "log.txt": Writer("agentrl.run.folder:LogFile.emit", ("log.txt",)),
    ".lock": Writer("agentrl.run.folder:_try_lock", (".lock",)),
    "model": Writer("agentrl.run.session:init_model", ("model/*",)),
    "model's manifest": Writer("agentrl.run.session:seal", ("model/manifest.json",)),
    "warm_start": Writer("agentrl.trainer.actor:Actor.end_sft", ("warm_start/*",)),
    "warm start's manifest": Writer("agentrl.run.sft:seal", ("warm_start/manifest.json",)),
    "metrics.jsonl": Writer("agentrl.run.folder:RunFolder.append_metrics", ("metrics.jsonl",), 5),
    "trajectories": Writer("agentrl.run.folder:RunFolder.write_trajectories", ("trajectories/*.jsonl",), 3),
    "tokens": Writer("agentrl.run.folder:RunFolder.write_tokens", ("tokens/*.jsonl",), 3),
    "tensorboard": Writer("agentrl.run.trackers:TensorBoard.row", ("tensorboard/*",), 3),
    "profile": Writer("agentrl.contrib.trackers.tracing:Timeline.write", ("profile/step_*.json.gz",)),
    "checkpoint's folder": Writer("agentrl.trainer.checkpoint:Checkpoints.begin", (), 3),
    "checkpoint's actor": Writer("agentrl.trainer.actor:Actor.begin_save", ("checkpoints/*/actor/*",), 3),
    "checkpoint's critic": Writer("agentrl.trainer.roles:Critic.begin_save", ("checkpoints/*/critic/*",), 3),
    "checkpoint's learner.json": Writer("agentrl.trainer.learner:json_text", ("checkpoints/*/learner.json",), 3),
    "checkpoint's driver.json": Writer(
        "agentrl.run.session:_write_driver", ("checkpoints/*/driver.json", "checkpoints/*/groups.jsonl"), 3
    ),
    "checkpoint's manifest.json": Writer("agentrl.trainer.checkpoint:seal", ("checkpoints/*/manifest.json",), 3),
    "checkpoint's score": Writer("agentrl.trainer.checkpoint:Checkpoints.rate", ("checkpoints/*/manifest.json",)),
    "final": Writer("agentrl.trainer.actor:Actor.export_hf", ("final/*",)),
    "final's manifest": Writer("agentrl.run.driver:seal", ("final/manifest.json",)),
    "curve.png": Writer("agentrl.run.driver:draw_curve", ("curve.png",)),
    "summary.json": Writer("agentrl.run.folder:RunFolder.write_summary", ("summary.json", ".reserved")),
}
"""Of `agentrl train`."""
RESUME = {
    "config_history": Writer("agentrl.run.folder:RunFolder.keep_config", ("config_history/*",)),
    "rewound metrics.jsonl": Writer("agentrl.run.folder:RunFolder.rewind", ("metrics.jsonl",)),
}
"""Of a resume with another setting."""
EVAL = {
    "exports": Writer("agentrl.run.provenance:_export_path", ("exports/*",)),
    "evaluation's episodes": Writer("agentrl.run.evaluate:atomic_write", (), 3),
    "evaluation's report": Writer("agentrl.run.evaluate:redact_json", ()),
}
"""Of `agentrl eval --run RUN`."""
EXPORT = {
    "export": Writer("agentrl.trainer.model_folder:save_model", ()),
    "export's tokenizer": Writer("agentrl.trainer.model_folder:load_tokenizer", ()),
}
"""Of `agentrl export`."""
ALL = {**TRAIN, **RESUME, **EVAL, **EXPORT}


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


def full_at(writer: str, disk: Path) -> None:
    """The disk is full from that call of a writer on."""
    module, _, path = ALL[writer].at.partition(":")
    *above, name = path.split(".")
    owner = importlib.import_module(module)
    for part in above:
        owner = getattr(owner, part)
    plain, made = vars(owner).get(name, getattr(owner, name)), 0
    kind: Any = classmethod if isinstance(plain, classmethod) else lambda function: function
    plain = getattr(plain, "__func__", plain)

    @wraps(plain)
    def writes(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == ALL[writer].call:
            fill(disk)
        return plain(*args, **kwargs)

    setattr(owner, name, kind(writes))


def commanded(words: list[str], writer: str, disk: str, said: str, opened: str, code_file: str) -> None:
    """`agentrl WORDS` in this process, with all that it says in a file, and the files that it opens to write below `opened`."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    from agentrl.cli.main import main
    from agentrl.run.checks import size_checks as capacity

    capacity.MIN_DISK_MIB = 1
    found: set[str] = set()
    if opened:
        sys.addaudithook(lambda event, args: noted(found, opened, args) if event == "open" else None)
    if writer:
        full_at(writer, Path(disk))
    code = main(words)
    Path(said + ".opened").write_text(json.dumps(sorted(found)))
    Path(code_file).write_text(str(code))


def noted(found: set[str], folder: str, args: tuple[Any, ...]) -> None:
    path, _, flags = args
    if isinstance(path, (str, os.PathLike)) and flags & (os.O_WRONLY | os.O_RDWR):
        absolute = Path(os.fsdecode(path)).absolute()
        if absolute.is_relative_to(folder):
            found.add(str(absolute.relative_to(folder)))


def unlisted(files: Iterable[str], writers: Iterable[Writer]) -> set[str]:
    """Those that no writer of the list names. A file that is written aside counts as that in whose place it comes."""
    patterns = [pattern for writer in writers for pattern in writer.files]
    return {file for file in map(final_name, files) if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)}


def final_name(file: str) -> str:
    file = re.sub(r"\.writing_(step_\d+)", r"\1", file)
    file = re.sub(r"/\.(step_\d+)/", r"/\1/", file)  # an export, until it is whole
    file = re.sub(r"(^|/)\.([^/]+?)(\.writing|\.\d+)$", r"\1\2", file)
    return re.sub(r"(^|/)\.([^/]+\.(png|gz))$", r"\1\2", file)


def free_again(disk: Path) -> None:
    (disk / BALLAST).unlink(missing_ok=True)
