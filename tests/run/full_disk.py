"""A disk that is full at a chosen writer: a small tmpfs, which a file of zeros fills at the moment when the writer begins."""

import contextlib
import importlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

SIZE_MIB = 48
BALLAST = "ballast"


@dataclass(frozen=True)
class Writer:
    """What writes files of a run; the disk is full from its `call`th call on."""

    at: str
    call: int = 1


TRAIN = {
    "config.toml": Writer("agentrl.run.folder:RunFolder.create"),
    "provenance.json": Writer("agentrl.run.folder:atomic_write", 2),
    "token of the shared folder": Writer("agentrl.run.session:check_shared"),
    "log.txt": Writer("agentrl.run.folder:LogFile.emit"),
    ".lock": Writer("agentrl.run.folder:_try_lock"),
    "model": Writer("agentrl.run.session:init_model"),
    "model's manifest": Writer("agentrl.run.session:seal"),
    "warm_start": Writer("agentrl.trainer.actor:Actor.end_sft"),
    "warm start's manifest": Writer("agentrl.run.sft:seal"),
    "metrics.jsonl": Writer("agentrl.run.folder:RunFolder.append_metrics", 5),
    "trajectories": Writer("agentrl.run.folder:RunFolder.write_trajectories", 3),
    "tokens": Writer("agentrl.run.folder:RunFolder.write_tokens", 3),
    "tensorboard": Writer("agentrl.run.trackers:TensorBoard.row", 3),
    "profile": Writer("agentrl.contrib.trackers.tracing:Timeline.write"),
    "checkpoint's folder": Writer("agentrl.trainer.checkpoint:Checkpoints.begin", 3),
    "checkpoint's actor": Writer("agentrl.trainer.actor:Actor.begin_save", 3),
    "checkpoint's critic": Writer("agentrl.trainer.roles:Critic.begin_save", 3),
    "checkpoint's learner.json": Writer("agentrl.trainer.learner:json_text", 3),
    "checkpoint's driver.json": Writer("agentrl.run.session:_write_driver", 3),
    "checkpoint's manifest.json": Writer("agentrl.trainer.checkpoint:seal", 3),
    "checkpoint's score": Writer("agentrl.trainer.checkpoint:Checkpoints.rate"),
    "final": Writer("agentrl.trainer.actor:Actor.export_hf"),
    "final's manifest": Writer("agentrl.run.driver:seal"),
    "curve.png": Writer("agentrl.run.driver:draw_curve"),
    "summary.json": Writer("agentrl.run.folder:RunFolder.write_summary"),
}
"""Of `agentrl train`."""
RESUME = {
    "config_history": Writer("agentrl.run.folder:RunFolder.keep_config"),
    "rewound metrics.jsonl": Writer("agentrl.run.folder:RunFolder.rewind"),
}
"""Of a resume with another setting."""
EVAL = {
    "exports": Writer("agentrl.run.provenance:export_run"),
    "evaluation's episodes": Writer("agentrl.run.evaluate:atomic_write", 3),
    "evaluation's report": Writer("agentrl.run.evaluate:redact_json"),
}
"""Of `agentrl eval --run RUN`."""
EXPORT = {
    "export": Writer("agentrl.trainer.model_folder:save_model"),
    "export's tokenizer": Writer("agentrl.trainer.model_folder:load_tokenizer"),
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


def commanded(words: list[str], writer: str, disk: str, said: str, code_file: str) -> None:
    """`agentrl WORDS` in this process, with all that it says in a file."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    from agentrl.cli.main import main
    from agentrl.run.checks import size_checks as capacity

    capacity.MIN_DISK_MIB = 1
    if writer:
        full_at(writer, Path(disk))
    Path(code_file).write_text(str(main(words)))


def free_again(disk: Path) -> None:
    (disk / BALLAST).unlink(missing_ok=True)
