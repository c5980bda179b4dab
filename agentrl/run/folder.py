"""The run folder, with its lock and its log file. Readers see each file complete at any moment."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
import socket
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any

from agentrl.config import TrainConfig, to_toml
from agentrl.config.origin import Origins
from agentrl.config.schema import KeepConfig
from agentrl.data.trajectory import Group, Trajectory
from agentrl.trainer.checkpoint import MANIFEST
from agentrl.utils.errors import ConfigError, DiskFullError, ResourceError, RunFolderError
from agentrl.utils.files import atomic_write, disk_full, full_text, naming, open_plain, plain_file, read_plain
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.redaction import redact, redact_json, redact_said
from agentrl.utils.terminal import safe

# The lock

log = logging.getLogger(__name__)

LOCK = ".lock"
LOG_BYTES, LOG_FILES = 64 << 20, 4
"""Maximum bytes of log.txt, and number of older log files to keep."""
LOCK_WAIT_S, LOCK_WARN_S = 3600, 30
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def lock_folder(folder: Path, otherwise: str = "", *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder that a run or an evaluation writes.

    Raises ConfigError if another process holds it (with `wait`: still holds it after `LOCK_WAIT_S`); the error names the process,
    its start, and an alternative (`otherwise`). The kernel releases the lock of a killed process. On a file system without locks
    (some network ones) only a warning is logged.
    """
    with open(folder / LOCK, "a+", encoding="utf-8", opener=plain_file) as file:
        _try_lock(folder, file, fcntl.LOCK_EX, otherwise, wait)
        file.seek(0)
        file.truncate()
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "Python"  # embedded Python has no argv
        since = datetime.now(UTC).isoformat(timespec="seconds")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": redact_said(command)}, file)
        file.flush()
        yield


def check_unlocked(folder: Path) -> None:
    """Raise ConfigError, as `lock_folder` does, if a process writes the run in a folder. Does not change the folder."""
    if not (folder / LOCK).is_file():
        return
    with open(folder / LOCK, encoding="utf-8", opener=plain_file) as file:
        _try_lock(folder, file, fcntl.LOCK_SH)


def _try_lock(folder: Path, file: IO[str], kind: int, otherwise: str = "", wait: bool = False) -> None:
    """Take the lock, or raise ConfigError that names the process holding it. With `wait`, retry for `LOCK_WAIT_S`, with a
    warning every `LOCK_WARN_S`."""
    begun, reported = time.monotonic(), -1.0
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            file.seek(0)
            holder, passed = file.read(), time.monotonic() - begun
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s: the file system has no locks, so a second process could write there: %s", folder, error)
            return
        if not wait or passed >= LOCK_WAIT_S:
            break
        if passed // LOCK_WARN_S > reported:
            reported = passed // LOCK_WARN_S
            until = f"is waited for, for {LOCK_WAIT_S - passed:.0f} s at most; Ctrl-C ends this"
            log.warning("%s: another process is writing there, and %s: %s", folder, until, holder or "it has just begun")
        time.sleep(0.1)
    try:
        by = read_json(holder)
    except ValueError:  # the other process has not written its name yet
        raise ConfigError(f"{folder}: another process is writing there. Wait for it") from None
    here = f"kill {by['pid']}" if by["host"] == socket.gethostname() else f"on {by['host']}: kill {by['pid']}"
    raise ConfigError(
        f"{folder}: process {by['pid']} on {by['host']} has been writing there since {by['since']} ({by['command']}). Wait for "
        f"it, or end it ({here}; what it has done is kept), or {otherwise or f'choose another name: name={folder.name}-2'}"
    )


# The log


class LogFile(RotatingFileHandler):
    """Log handler for lines with time, level and logger; at `LOG_BYTES` `log.txt` becomes `log.txt.1`, that `log.txt.2`, ...
    Raises OSError if `path` is not a plain file, because opening a pipe would block."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        """Format a record without secrets and with control characters escaped, also inside of another program."""
        return safe(redact_said(super().format(record)))

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore OSErrors, such as a full disk; lines stay in the buffer. Essential writes report the full disk; one traceback
        per log line on the terminal would hide that report."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file; on a full disk the buffered lines are lost."""
        with suppress(OSError):
            super().close()

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=plain_file)


# The folder

DRIVER = "driver.json"
"""File of the driver's state in a checkpoint."""

BEFORE_SFT = -2
"""Step of `rewind` before the warm start; -1 is after the warm start and before the first evaluation."""
_RESERVED = 1 << 16


def is_voided(phase: str, step: int, to: int) -> bool:
    """Return True if a row is written again when the run continues from step `to`; rows of a warm start only for -2."""
    return to < -1 or (phase not in ("sft", "gate") and (step > to or phase == "after"))


class NameTakenError(ConfigError):
    """A run of this name exists already."""


def check_free(name: str, out: str) -> None:
    """Check that the run folder `out/name` can be made, without making it. Raises NameTakenError if a run is there,
    ConfigError if something else is, ResourceError if it cannot be made."""
    path = Path(out) / name
    whole = path.absolute()
    # Detect without making the folder: a path part that is too long or a file, or a missing write permission.
    above = next(parent for parent in (whole, *whole.parents) if os.path.lexists(parent))
    try:
        for part in whole.relative_to(above).parts:  # one by one, because a lookup stops at the first missing part
            try:
                os.lstat(above / part)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise type(error)(error.errno, error.strerror, str(whole)) from None
        if above.is_symlink() and not above.exists():
            raise FileNotFoundError(errno.ENOENT, "a link that leads nowhere", str(above))
        if above != whole and not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(whole))
    except OSError as error:
        raise ResourceError(f"{whole}: the run folder cannot be written: {error}") from None
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{path}: it exists and is no run; choose another name: name={name}-2, or another folder: out=")
    raise NameTakenError(
        f"{path}: there is a run of that name. Continue it: {RunFolder(path).resume_command(path)}; or choose another name: "
        f"name={name}-2; or start over: --overwrite"
    )


class RunFolder:
    """Paths of a run, and the only code that writes its plain files.

    The paths are absolute, because workers, which have another working directory than the driver, write some of the files.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()
        self.path = path
        self.config = path / "config.toml"
        self.history = path / "config_history"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.reserved = path / ".reserved"  # disk space kept for the summary, in case the disk is full by then
        self.curve = path / "curve.png"
        self.log = path / "log.txt"
        self.trajectories = path / "trajectories"
        self.tokens = path / "tokens"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.warm_start = path / "warm_start"
        self.final = path / "final"
        self.exports = path / "exports"
        self.data = path / "data"
        self.only_warm_start = False
        self.held: contextlib.AbstractContextManager[Any] | None = None

    def lock(self, otherwise: str = "") -> contextlib.AbstractContextManager[Any]:
        """Return the folder's lock (`lock_folder`): the one held since the folder was made, else a new one."""
        held, self.held = self.held, None
        return held or lock_folder(self.path, otherwise)

    def check_places(self) -> None:
        """Raise RunFolderError if a path where the run keeps a folder is something else."""
        for path in (self.checkpoints, self.trajectories, self.tokens, self.final, self.model, self.warm_start, self.exports,
                     self.tensorboard, self.data, self.history):  # fmt: skip
            if os.path.lexists(path) and not path.is_dir():
                raise RunFolderError(f"{path}: not a folder, but the run keeps one there. Move it away and repeat the command")

    @classmethod
    def create(cls, config: TrainConfig, origins: Origins | None = None, files: Mapping[str, str] = {}) -> RunFolder:
        """Make a fresh folder `<out>/<name>`, which `check_free` found free, or from which an older run was removed.

        `origins`: sources of the config's values, for the comments in config.toml. `files`: further files, text by name. Raises
        ConfigError if a run of that name exists or TOML cannot express a value of the config, ResourceError if the folder cannot
        be written.
        """
        folder, text = cls(Path(config.out) / config.name), to_toml(config.with_date(date.today().isoformat()), origins)
        try:
            folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # a run's files may be confidential
            folder.trajectories.mkdir(parents=True)
            for name, content in {folder.config.name: text, **files}.items():
                atomic_write(folder.path / name, content, private=True)
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.trajectories.exists():  # another process made it after `check_free`
                raise NameTakenError(f"{folder.path}: another run of that name has just begun. Choose name=NAME") from None
            shutil.rmtree(folder.path, ignore_errors=True)
            if disk_full(error):
                raise DiskFullError(full_text(folder.path, "repeat the command")) from None
            raise ResourceError(f"{folder.path}: the run folder cannot be written: {error}") from None
        return folder

    def resume_command(self, shown: Path | None = None) -> str:
        """Return the command that continues the run; `shown`: its path as the user wrote it."""
        command = "sft" if self.only_warm_start or (self.data / "data.json").is_file() else "train"
        return f"agentrl {command} --resume {shlex.quote(str(shown or self.path))}"

    def day(self) -> str:
        """Return the ISO date on which this run started."""
        model = tomllib.loads(self.config.read_text(encoding="utf-8")).get("model", {})
        return str(model.get("date") or date.today().isoformat())

    def keep_config(self, now: str, step: int) -> Path | None:
        """Replace the run's config by `now` (TOML) from `step` (updates done) on, if it differs; returns the old one's file.
        The old config moves to `config_history/until_NNNNNN.toml`. After several changes at one step that file keeps the first
        of them, which ran. Returns None if the configs are equal."""
        before = self.config.read_text(encoding="utf-8")
        if tomllib.loads(before) == tomllib.loads(now):
            return None
        file = self.history / f"until_{step:06d}.toml"
        self.history.mkdir(exist_ok=True)
        if not file.exists():
            atomic_write(file, before, private=True)
        atomic_write(self.config, now, private=True)
        return file

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        with naming(self.metrics), open(self.metrics, "a", encoding="utf-8", opener=plain_file) as file:
            file.write(json_text(row) + "\n")

    def sync_metrics(self) -> None:
        """Flush metrics.jsonl to the disk, because a checkpoint seals the rows up to its step."""
        if self.metrics.exists():
            with open(self.metrics, "a", encoding="utf-8", opener=plain_file) as file:
                os.fsync(file.fileno())

    def metrics_seal(self, size: int = -1) -> dict[str, Any]:
        """Compute size and SHA-256 of metrics.jsonl, or of its first `size` bytes."""
        data = b""
        if self.metrics.exists():
            with open_plain(self.metrics) as file:
                data = file.read(size)
        return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read the complete rows of metrics.jsonl, only "phase" and numbers; skips other lines, such as one cut by a kill."""
        rows, numbers = self.sorted_metrics()[0], int | float | None
        return [{key: item for key, item in row.items() if key == "phase" or isinstance(item, numbers)} for row in rows]

    def sorted_metrics(self) -> tuple[list[dict[str, Any]], list[int], list[int]]:
        """Return the complete rows of metrics.jsonl, the numbers of damaged lines, and that of an incomplete last line."""
        if not self.metrics.exists():
            return [], [], []
        *whole, last = read_plain(self.metrics, "replace").split("\n")
        rows, damaged = list[dict[str, Any]](), list[int]()
        for number, line in enumerate(whole, 1):
            if not line:
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and isinstance(row.get("phase"), str) and isinstance(row.get("step"), int):
                rows.append(row)
            else:
                damaged.append(number)
        return rows, damaged, [len(whole) + 1] if last else []

    def rewind(self, step: int) -> list[int]:
        """Remove metric rows and exported models that a resume from `step` (updates done) will write again: an evaluation would
        mistake an old export for a new one. Also removes lines that are no rows, and returns their numbers."""
        rows, damaged, cut = self.sorted_metrics()
        kept = (row for row in rows if not is_voided(row["phase"], row["step"], step))
        atomic_write(self.metrics, "".join(json_text(row) + "\n" for row in kept))
        for model in self.exports.glob("step_*"):
            number = model.name.removeprefix("step_")
            if number.isdecimal() and int(number) > step:  # else a folder of the user's own
                shutil.rmtree(model)
        return [*damaged, *cut]

    def clear_final(self) -> None:
        """Prepare `final/` for a new model: remove the manifest and everything but plain files. Without the manifest half of a
        new model cannot pass for the old one; writing to a pipe would block. Raises OSError, and as `check_places`."""
        self.check_places()
        if not self.final.is_dir():
            return
        for path in self.final.iterdir():
            if path.name == MANIFEST or not (path.is_file() and not path.is_symlink()):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def rotate(self, keep: KeepConfig, step: int) -> None:
        """Remove the oldest files of episodes and tokens up to `step`, so that those of `keep.trajectories` steps remain.
        "before" and "after" always stay. Files of later steps stay too: they are left from a lost attempt, and are written
        again."""
        if not keep.trajectories:
            return
        files: dict[int, list[Path]] = defaultdict(list)
        for path in (*self.trajectories.glob("step_*.jsonl"), *self.trajectories.glob("eval_*.jsonl")):
            if (number := path.stem.partition("_")[2]).isdecimal():
                files[int(number)].append(path)
        for old in sorted((done for done in files if done <= step), reverse=True)[keep.trajectories :]:
            for path in files[old]:
                (self.tokens / path.name).unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def write_trajectories(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """Write `trajectories/<name>.jsonl` row by row, and replace an older file at the end."""
        atomic_write(self.trajectories / f"{name}.jsonl", lines(trajectories))

    def write_tokens(self, name: str, lines: Iterable[str]) -> None:
        """Write `tokens/<name>.jsonl` row by row, and replace an older file at the end."""
        self.tokens.mkdir(exist_ok=True)
        atomic_write(self.tokens / f"{name}.jsonl", lines)

    def read_summary(self) -> dict[str, Any] | None:
        """Read summary.json; None if the run has not ended. Raises RunFolderError if it is damaged."""
        found = stored_object(self.summary, "remove it")
        if found is not None and not {"status", "steps", "engine"} <= found.keys():
            raise RunFolderError(f"{self.summary}: damaged: it lacks status, steps or engine; remove it")
        return found

    def reserve(self) -> None:
        """Reserve disk space for `write_summary`, so that a run ended by a full disk can still write its summary."""
        with suppress(OSError), open(self.reserved, "wb", opener=plain_file) as file:
            file.write(os.urandom(_RESERVED))  # some file systems do not store zeros

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, into the disk space of `reserve`."""
        with suppress(OSError):
            self.reserved.unlink()
        atomic_write(self.summary, json_text(redact_json(summary, said=True), indent=2) + "\n")


def stored_object(path: Path, fix: str) -> dict[str, Any] | None:
    """Read a JSON object from a file of a run; None if it is missing. Raises RunFolderError, ending with `fix`, if damaged."""
    try:
        found = read_json(read_plain(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        raise RunFolderError(f"{path}: damaged: {problem}; {fix}") from None
    if not isinstance(found, dict):
        raise RunFolderError(f"{path}: damaged: expected a JSON object; {fix}")
    return found


def lines(rows: Iterable[Trajectory | Group]) -> Iterator[str]:
    """Yield one JSON line per row, in the chunks that the rows yield, without known secrets."""
    for row in rows:
        yield from map(redact, row.json_chunks())
        yield "\n"
