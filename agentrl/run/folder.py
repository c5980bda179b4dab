"""The run folder: everything that a run writes. Readers see each file complete at any moment.

The lock of a folder, its log file, and the folder."""

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
"""Largest size of log.txt, and number of older ones that stay."""
LOCK_WAIT_S, LOCK_SAID_S = 3600, 30
_NONE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def lock_folder(folder: Path, otherwise: str = "", *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder that a run or an evaluation writes. Raises ConfigError, naming the process that holds it and
    since when, and what else can be done (`otherwise`), if another does, or waits for it. A process that was killed holds none:
    the kernel gives it back.

    On a file system without locks (some network ones) a warning in the log takes its place.
    """
    with open(folder / LOCK, "a+", encoding="utf-8", opener=plain_file) as file:
        _try_lock(folder, file, fcntl.LOCK_EX, otherwise, wait)
        file.seek(0)
        file.truncate()
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "Python"  # embedded, it may have none
        since = datetime.now(UTC).isoformat(timespec="seconds")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": redact_said(command)}, file)
        file.flush()
        yield


def check_unlocked(folder: Path) -> None:
    """Raise ConfigError, as `locked` does, if a process writes the run in a folder. Leaves the folder as it is."""
    if not (folder / LOCK).is_file():
        return
    with open(folder / LOCK, encoding="utf-8", opener=plain_file) as file:
        _try_lock(folder, file, fcntl.LOCK_SH)


def _try_lock(folder: Path, file: IO[str], kind: int, otherwise: str = "", wait: bool = False) -> None:
    """Raise ConfigError, naming the process that holds the lock, if another does; with `wait` only after `LOCK_WAIT_S`, and say
    every `LOCK_SAID_S` that it is waited for."""
    begun, said = time.monotonic(), -1.0
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            file.seek(0)
            holder, passed = file.read(), time.monotonic() - begun
        except OSError as error:
            if error.errno not in _NONE:
                raise
            log.warning("%s: the file system has no locks, so nothing keeps a second driver out: %s", folder, error)
            return
        if not wait or passed >= LOCK_WAIT_S:
            break
        if passed // LOCK_SAID_S > said:
            said = passed // LOCK_SAID_S
            until = f"is waited for, for {LOCK_WAIT_S - passed:.0f} s at most; Ctrl-C ends this"
            log.warning("%s: another process is writing there, and %s: %s", folder, until, holder or "it has just begun")
        time.sleep(0.1)
    try:
        by = read_json(holder)
    except ValueError:  # it has just been taken
        raise ConfigError(f"{folder}: another process is writing there. Wait for it") from None
    here = f"kill {by['pid']}" if by["host"] == socket.gethostname() else f"on {by['host']}: kill {by['pid']}"
    raise ConfigError(
        f"{folder}: process {by['pid']} on {by['host']} has been writing there since {by['since']} ({by['command']}). Wait for "
        f"it, or end it ({here}; what it has done is kept), or {otherwise or f'choose another name: name={folder.name}-2'}"
    )


# The log


class LogFile(RotatingFileHandler):
    """Writes lines with time, level and name; at `LOG_BYTES` `log.txt` becomes `log.txt.1`, that one `log.txt.2`, ... Raises
    OSError if there is something else than a plain file: a pipe in its place would be waited for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        """Without secrets, and with what a terminal could act on written out, whichever program the run is part of."""
        return safe(redact_said(super().format(record)))

    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk lines wait in the buffer. That the disk is full is said by what the run cannot do without; a traceback a
        line on the terminal would hide it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Also on a full disk; what still waits is lost then."""
        with suppress(OSError):
            super().close()

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=plain_file)


# The folder

DRIVER = "driver.json"
"""The driver's state in a checkpoint."""


NOTHING = -2
"""Rewind to before everything, the warm start too; -1 is after it, before the first evaluation."""
_RESERVED = 1 << 16


class NameTakenError(ConfigError):
    """There is a run of that name already."""


def check_free(name: str, out: str) -> None:
    """Raise ConfigError if there is something where the run's folder would be (NameTakenError: a run), ResourceError if it cannot
    be made there. Makes and changes nothing."""
    path = Path(out) / name
    whole = path.absolute()
    # As far as it shows without making it: a part of the path is too long, or a file, or it may not be written.
    above = next(there for there in (whole, *whole.parents) if os.path.lexists(there))
    try:
        for part in whole.relative_to(above).parts:  # alone: the system reads no further than the first that is missing
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
    """The paths of a run, and the only code that writes its plain files.

    All of them are absolute, because workers, whose working directory is not the driver's, write some of the files.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()
        self.path = path
        self.config = path / "config.toml"
        self.history = path / "config_history"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.reserved = path / ".reserved"  # what a summary takes of a disk that is full by then
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
        """The folder's lock (`lock_folder`): that which whoever made it has held since, or a new one."""
        held, self.held = self.held, None
        return held or lock_folder(self.path, otherwise)

    def check_places(self) -> None:
        """Raise RunFolderError if something else than a folder is where the run keeps one."""
        for path in (self.checkpoints, self.trajectories, self.tokens, self.final, self.model, self.warm_start, self.exports,
                     self.tensorboard, self.data, self.history):  # fmt: skip
            if os.path.lexists(path) and not path.is_dir():
                raise RunFolderError(f"{path}: it is no folder, and the run keeps one there. Move it away and repeat the command")

    @classmethod
    def create(cls, config: TrainConfig, origins: Origins | None = None, *, over: bool = False) -> RunFolder:
        """A fresh folder `<out>/<name>`; `origins`: where the config's values are from, for the comments in config.toml. `over`:
        in place of a run whose other files were removed under its lock.

        Raises ConfigError if a run of that name exists (nothing is overwritten) or TOML lacks a value of it, ResourceError if
        it cannot be written.
        """
        folder, text = cls(Path(config.out) / config.name), to_toml(config.with_date(date.today().isoformat()), origins)
        if not over:
            check_free(config.name, config.out)
        try:
            folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # what a run writes may hold what is private
            folder.trajectories.mkdir(parents=True)
            atomic_write(folder.config, text, private=True)
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.trajectories.exists():  # another process's, since `check_free`
                raise NameTakenError(f"{folder.path}: another run of that name has just begun. Choose name=NAME") from None
            shutil.rmtree(folder.path, ignore_errors=True)
            if disk_full(error):
                raise DiskFullError(full_text(folder.path, "repeat the command")) from None
            raise ResourceError(f"{folder.path}: the run folder cannot be written: {error}") from None
        return folder

    def resume_command(self, shown: Path | None = None) -> str:
        """Command that continues the run; `shown`: its path as the user wrote it."""
        command = "sft" if self.only_warm_start or (self.data / "data.json").is_file() else "train"
        return f"agentrl {command} --resume {shlex.quote(str(shown or self.path))}"

    def day(self) -> str:
        """The date on which this run started."""
        model = tomllib.loads(self.config.read_text(encoding="utf-8")).get("model", {})
        return str(model.get("date") or date.today().isoformat())

    def keep_config(self, now: str, step: int) -> Path | None:
        """Make `now`, a config as TOML, the run's, from `step` (updates done) on, if it says anything else than the one before,
        which is then in `config_history/until_NNNNNN.toml`; returns that file. Of several until one step the first ran."""
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
        """Add a row to metrics.jsonl."""
        with naming(self.metrics), open(self.metrics, "a", encoding="utf-8", opener=plain_file) as file:
            file.write(json_text(row) + "\n")

    def sync_metrics(self) -> None:
        """Flush metrics.jsonl to the disk: a checkpoint vouches for the rows of its step and before."""
        if self.metrics.exists():
            with open(self.metrics, "a", encoding="utf-8", opener=plain_file) as file:
                os.fsync(file.fileno())

    def metrics_seal(self, size: int = -1) -> dict[str, Any]:
        """Size and SHA-256 of metrics.jsonl, or of its first `size` bytes."""
        data = b""
        if self.metrics.exists():
            with open_plain(self.metrics) as file:
                data = file.read(size)
        return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete rows of metrics.jsonl, with numbers alone; any other line, as one cut short by a kill, is skipped."""
        rows, numbers = self.sorted_metrics()[0], int | float | None
        return [{key: item for key, item in row.items() if key == "phase" or isinstance(item, numbers)} for row in rows]

    def sorted_metrics(self) -> tuple[list[dict[str, Any]], list[int], list[int]]:
        """The complete rows of metrics.jsonl, and the numbers of lines that hold none: whole lines, and the last one if it is
        being written or was cut short."""
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
        """Remove the rows that a resume from `step` (updates done) will write again, and models of checkpoints that it will write
        again, which an evaluation would take for theirs. A warm start comes again from
        `NOTHING` alone. Returns the numbers of lines that
        were no rows; they are removed too."""
        found, damaged, cut = self.sorted_metrics()
        rows = [
            row
            for row in found
            if step != NOTHING and (row["phase"] in ("sft", "gate") or (row["step"] <= step and row["phase"] != "after"))
        ]
        atomic_write(self.metrics, "".join(json_text(row) + "\n" for row in rows))
        for model in self.exports.glob("step_*"):
            if int(model.name.rpartition("_")[2]) > step:
                shutil.rmtree(model)
        return [*damaged, *cut]

    def clear_final(self) -> None:
        """Remove from `final/`, before a model is written there, all but plain files (a pipe would be waited for), and the
        manifest: half of a new model must not look like the whole old one. Raises OSError, and as `check_places`."""
        self.check_places()
        if not self.final.is_dir():
            return
        for path in self.final.iterdir():
            if path.name == MANIFEST or not (path.is_file() and not path.is_symlink()):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def rotate(self, keep: KeepConfig, step: int) -> None:
        """Remove the episodes, and what training made of their tokens, of updates and evaluations up to `step` that are more than
        `keep` says. Those of the newest step stay, and of "before" and "after". What lies beyond `step` an attempt left that was
        lost; it is written again."""
        if not keep.trajectories:
            return
        files: dict[int, list[Path]] = defaultdict(list)
        for path in (*self.trajectories.glob("step_*.jsonl"), *self.trajectories.glob("eval_*.jsonl")):
            files[int(path.stem.rpartition("_")[2])].append(path)
        for number in sorted((number for number in files if number <= step), reverse=True)[keep.trajectories :]:
            for path in files[number]:
                (self.tokens / path.name).unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def write_trajectories(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """Write `trajectories/<name>.jsonl`, row by row; an older file of that name is replaced at the end."""
        atomic_write(self.trajectories / f"{name}.jsonl", lines(trajectories))

    def write_tokens(self, name: str, lines: Iterable[str]) -> None:
        """Write `tokens/<name>.jsonl`, row by row; an older file of that name is replaced at the end."""
        self.tokens.mkdir(exist_ok=True)
        atomic_write(self.tokens / f"{name}.jsonl", lines)

    def read_summary(self) -> dict[str, Any] | None:
        """Content of summary.json; None if the run has not ended. Raises RunFolderError if it is damaged."""
        found = stored_object(self.summary, "remove it")
        if found is not None and not {"status", "steps", "engine"} <= found.keys():
            raise RunFolderError(f"{self.summary}: damaged: it lacks what a summary has; remove it")
        return found

    def reserve(self) -> None:
        """Hold a little of the disk until `write_summary`: a run that ends because the disk is full can still say so there."""
        with suppress(OSError), open(self.reserved, "wb", opener=plain_file) as file:
            file.write(os.urandom(_RESERVED))  # what is all zeros some file systems do not store

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, with what `reserve` held of the disk."""
        with suppress(OSError):
            self.reserved.unlink()
        atomic_write(self.summary, json_text(redact_json(summary, said=True), indent=2) + "\n")


def stored_object(path: Path, fix: str) -> dict[str, Any] | None:
    """A JSON object of a run; None if there is no such file. Raises RunFolderError, which ends with what to do, `fix`."""
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
    """One JSON object per line, in the chunks that the rows yield, without known secrets."""
    for row in rows:
        yield from map(redact, row.json_chunks())
        yield "\n"
