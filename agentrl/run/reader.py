"""Reader of run folders for `agentrl.load_run`, the viewer and the terminal commands. Never imports torch."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentrl.data.token_ledger import TokenLedger, decode_array, encode_array
from agentrl.data.trajectory import Trajectory
from agentrl.run.folder import RunFolder, stored_object
from agentrl.utils.errors import ConfigError, RunFolderError, checks_arguments, hint_text
from agentrl.utils.files import open_plain, read_plain, shown_path
from agentrl.utils.parsing import json_text, read_json, toml_table

if TYPE_CHECKING:
    from agentrl.config import TrainConfig
    from agentrl.trainer.minibatch import TrainedTokens


PHASES = {"before": "before", "eval": "eval", "step": "train", "after": "after"}
"""First part of a trajectory file's name -> phase in metrics.jsonl."""
_NAME = re.compile(r"([a-z]+)_(\d+)\.jsonl")
_ORDER = {"before": 0, "train": 1, "eval": 2, "rollout": 2, "after": 3}
REPEAT_EVAL = "remove it, and repeat the evaluation"
_TAIL = 65536
LIVE_S = 120.0
"""A run without a summary counts as live for this many seconds after its last write, or for four of its steps if longer."""


@dataclass(frozen=True, slots=True)
class EpisodeFile:
    """A file of trajectories: `name` (without .jsonl), the phase that wrote it, and the updates done by then."""

    name: str
    path: Path
    phase: str
    step: int


class RunRecord:
    """A run folder; each access reads the disk, except the cached `text`, `table` and `config`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.folder = RunFolder(self.path)

    def __repr__(self) -> str:
        return f"RunRecord({str(self.path)!r})"

    @property
    def evaluation(self) -> str | None:
        """Purpose of a folder that is not a run: "eval" or "rollout"; None for a run."""
        if self.folder.config.is_file() or self.folder.metrics.is_file() or self.folder.trajectories.is_dir():
            return None
        return "rollout" if (self.path / "rollout.json").is_file() else "eval"

    # -- config --------------------------------------------------------------------------------------

    @cached_property
    def text(self) -> str:
        """Text of config.toml; "" without one. Raises RunFolderError if it cannot be read."""
        with _name_damaged(self.folder.config):
            return read_plain(self.folder.config, "replace") if self.folder.config.exists() else ""

    @cached_property
    def table(self) -> dict[str, Any]:
        """config.toml as a table, not validated, so of any version. Raises RunFolderError if it is not TOML."""
        with _name_damaged(self.folder.config):
            return toml_table(self.text)

    @cached_property
    def config(self) -> TrainConfig:
        """The validated config. Raises RunFolderError without one, ConfigError if it is of another version."""
        from agentrl.config import load_config

        if not self.folder.config.is_file():
            raise RunFolderError(f"{self.path}: it has no config.toml")
        try:
            return load_config(self.folder.config)
        except ConfigError as problem:
            raise ConfigError(f"{problem}\nthe run may be of another version of agentrl") from None

    @property
    def name(self) -> str:
        """Name of the run in its config, else of its folder; for an evaluation with its parent folder."""
        default = self.path.name if self.evaluation is None else f"{self.path.parent.name}/{self.path.name}"
        try:
            return str(self.table.get("name", default))
        except RunFolderError:
            return default

    @property
    def envs(self) -> list[str]:
        from agentrl.config.envs import name_of

        try:
            given = self.table.get("env", []) if self.evaluation is None else self.evaluated_env()
        except RunFolderError:
            return []
        return [name for entry in (given if isinstance(given, list) else [given]) if (name := name_of(entry))]

    def identity(self) -> dict[str, Any]:
        """Return what an evaluation's episodes depend on, or digests of the files that a run's config names."""
        name, key = ("provenance", "contents") if self.evaluation is None else (self.evaluation, "identity")
        found = (stored_object(self.path / f"{name}.json", REPEAT_EVAL if self.evaluation else "restore it") or {}).get(key)
        return found if isinstance(found, dict) else {}

    def evaluated_env(self) -> dict[str, Any]:
        """Return the environment in an evaluation's identity as a config table."""
        from agentrl.config.load import Override, apply_overrides

        given = [Override(key.split("."), value, key) for key, value in self.identity().items() if key.startswith("env.")]
        return dict(apply_overrides({}, given).get("env", {}))

    @property
    def report(self) -> dict[str, Any]:
        """report.json of an evaluation; empty without one. Raises RunFolderError if it is damaged."""
        return stored_object(self.path / "report.json", REPEAT_EVAL) or {}

    @property
    def official(self) -> dict[str, Any]:
        """Official tables of an evaluation, its own or the joint ones in the parent folder. Raises RunFolderError."""
        above = RunRecord(self.path.parent).report
        shared = above.get("official") if self.path.name in (above.get("envs") or {}) else None
        return self.report.get("official") or shared or {}

    # -- results -------------------------------------------------------------------------------------

    @property
    def summary(self) -> dict[str, Any] | None:
        """summary.json; None until the run has ended. Raises RunFolderError if it is damaged."""
        return stored_object(self.folder.summary, "remove it")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, without an incomplete last one. Raises RunFolderError if a line is damaged."""
        with _name_damaged(self.folder.metrics):
            rows, damaged, _ = self.folder.sorted_metrics()
        if damaged:
            raise RunFolderError(f"{self.folder.metrics}: damaged: line {damaged[0]} is no row")
        return rows

    @property
    def files(self) -> list[EpisodeFile]:
        """Episode files by step: before, each step with its evaluation, after. Raises RunFolderError for an unreadable folder."""
        kind = self.evaluation
        if kind is not None:
            path = self.path / "trajectories.jsonl"
            return [EpisodeFile("trajectories", path, kind, 0)] if path.is_file() else []
        folder = self.folder.trajectories
        with _name_damaged(folder):
            paths = list(folder.iterdir()) if folder.exists() else []
        names = [(path, named) for path in paths if (named := _NAME.fullmatch(path.name)) and named[1] in PHASES]
        found = [EpisodeFile(path.stem, path, PHASES[named[1]], int(named[2])) for path, named in names]
        return sorted(found, key=lambda file: (file.step, _ORDER[file.phase], file.name))

    @checks_arguments
    def episodes(self, phase: str | None = None, step: int | None = None) -> Iterator[Trajectory]:
        """Yield the episodes by step, one at a time in memory. Raises ConfigError for an unknown phase, RunFolderError for a
        damaged row."""
        files = self.files
        if phase is not None and phase not in _ORDER:
            known = ", ".join(dict.fromkeys(file.phase for file in files)) or "none"
            hint = hint_text(phase, _ORDER)
            raise ConfigError(f"episodes: phase = {phase!r}{hint}; phases with episodes in {self.path}: {known}")
        return self._episodes(files, phase, step)

    def _episodes(self, files: list[EpisodeFile], phase: str | None, step: int | None) -> Iterator[Trajectory]:
        for file in files:
            if phase in (None, file.phase) and step in (None, file.step):
                with _name_damaged(file.path):
                    opened = open_plain(file.path)
                with opened as lines:
                    for number, line in enumerate(lines, 1):
                        if line.endswith(b"\n"):
                            yield episode_of(line, f"{file.path}:{number}")

    @property
    def live(self) -> bool:
        """True if the run seems to be running: it has no summary (a start or resume removes it) and has written recently."""
        if self.evaluation is not None or self.folder.summary.exists():
            return False
        signs = [_change_time(path) for path in (self.folder.metrics, self.folder.log, self.folder.trajectories)]
        last = max((sign for sign in signs if sign is not None), default=None)
        # Complete rows within the last bytes of the file that are JSON objects.
        ends, lines = list[Any](), list[bytes]()
        with suppress(OSError), open_plain(self.folder.metrics) as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL, 0))
            lines = file.read().split(b"\n")[0 if size <= _TAIL else 1 : -1]
        for line in lines:
            with suppress(ValueError):
                ends.append(read_json(line))
        rows = [row for row in ends if isinstance(row, dict)]
        laps = [[v for k, v in row.items() if k.startswith("time/") and isinstance(v, (int, float))] for row in rows]
        return last is not None and time.time() - last < max(LIVE_S, 4 * max(map(sum, laps), default=0.0))

    @property
    def started(self) -> float | None:
        """Unix time at which the folder's first file was written; None if unknown."""
        files = (self.path / "provenance.json", self.folder.config, self.path / "eval.json", self.path / "rollout.json")
        return min((time for path in files if (time := _change_time(path)) is not None), default=None)


def episode_of(line: str | bytes, where: str) -> Trajectory:
    """Parse a row of a trajectory file. Raises RunFolderError, beginning with `where`, if it cannot be parsed."""
    try:
        return Trajectory.from_json(read_json(line))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as problem:
        what = f"{type(problem).__name__}: {problem}"[:200]
        raise RunFolderError(f"{where}: not an episode of this version of agentrl: {what}") from None


def is_run(path: Path) -> bool:
    """Return True if a folder holds a run or the episodes of an evaluation."""
    names = ("config.toml", "metrics.jsonl", "trajectories", "trajectories.jsonl")
    return path.is_dir() and any((path / name).exists() for name in names)


@checks_arguments
def load_run(path: str | Path) -> RunRecord:
    """Open the run in a folder. Raises RunFolderError, with similar names, without one."""
    folder = Path(path).expanduser()
    if is_run(folder):
        return RunRecord(folder)
    if not folder.exists():
        near = [item.name for item in folder.parent.iterdir() if item.is_dir()] if folder.parent.is_dir() else []
        usual = "runs" / folder  # the user may have given only the run's name
        hint = hint_text(folder.name, near, show=lambda name: repr(str(folder.parent / name)))
        hint = f"; did you mean {str(usual)!r}?" if is_run(usual) else hint
        raise RunFolderError(f"{folder}: there is no such folder{hint}")
    inside = find_runs(folder)
    hint = f"; there are runs in it: {', '.join(shown_path(run.path) for run in inside[:5])}" if inside else ""
    raise RunFolderError(
        f"{folder}: expected a run folder (with config.toml, metrics.jsonl or trajectories) or an evaluation's{hint}"
    )


def find_runs(folder: Path, depth: int = 3) -> list[RunRecord]:
    """Find the runs at most `depth` levels below a folder (evaluations: evals/NAME/MODEL/ENV), by path; not inside runs."""
    found: list[RunRecord] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_run(path):
            found.append(RunRecord(path))
        elif depth > 1 and path.is_dir() and not path.name.startswith(".") and not path.is_symlink():
            found += find_runs(path, depth - 1)
    return found


@contextmanager
def _name_damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as problem:
        raise RunFolderError(f"{path}: damaged: {problem}") from None


def _change_time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


# `tokens/<name>.jsonl`: advantages and ratios of the tokens in `trajectories/<name>.jsonl`, row by row.
#
# A row is `{"check": n, "ledgers": [{"advantage": a, "log_ratio": r}, ...]}`, with one entry per ledger, or "ledgers": null for
# an episode that was not trained on. `a` is one number if all sampled tokens share it, else base64 of little-endian float32, one
# per sampled token; `r` is base64 of float16, or null. `check` is a checksum of the sampled log probabilities in the trajectory's
# row: a resumed run rewrites both files, and if it is killed in between, they hold different episodes.


def token_lines(members: Sequence[Trajectory], tokens: TrainedTokens) -> Iterator[str]:
    """Yield one line per member; the rows of `tokens` are the non-empty ledgers of scored members, in order."""
    row = 0
    for member in members:
        entries: list[dict[str, Any]] | None = None
        if member.reward is not None:
            entries = []
            for ledger in member.ledgers:
                advantage: float | str = 0.0
                log_ratio = None
                if len(ledger):
                    advantages, ratios = tokens.row(row)
                    same = len(advantages) > 0 and bool((advantages == advantages[0]).all())
                    advantage = float(advantages[0]) if same else encode_array(np.asarray(advantages, np.float32))
                    log_ratio = None if ratios is None else encode_array(np.asarray(ratios, np.float16))
                entries.append({"advantage": advantage, "log_ratio": log_ratio})
                row += len(ledger) > 0
        yield json_text({"check": check_of(member.ledgers), "ledgers": entries}) + "\n"


def check_of(ledgers: Sequence[TokenLedger]) -> int:
    """Compute a checksum of the log probabilities of an episode's sampled tokens."""
    found = 0
    for ledger in ledgers:
        found = zlib.crc32(np.ascontiguousarray(ledger.logprobs[ledger.sampled], dtype="<f4").tobytes(), found)
    return found


def token_columns(
    row: Mapping[str, Any], ledgers: Sequence[TokenLedger], at: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None] | None:
    """Return advantages and ratios of the sampled tokens of ledger `at`, from its episode's row in the token file. None if the
    episode was not trained on, or the row belongs to another episode. Raises KeyError, TypeError, ValueError or IndexError for
    a malformed row."""
    if row["check"] != check_of(ledgers) or row["ledgers"] is None:
        return None
    entry, count = row["ledgers"][at], ledgers[at].sampled_tokens
    given = entry["advantage"]
    advantages = (
        np.full(count, given, dtype=np.float32) if isinstance(given, (int, float)) else _decode_floats(given, "<f4", count)
    )
    ratio = None if entry["log_ratio"] is None else np.exp(_decode_floats(entry["log_ratio"], "<f2", count).astype(np.float32))
    return advantages, ratio


def _decode_floats(text: str, kind: str, count: int) -> npt.NDArray[Any]:
    found = decode_array(text, kind)
    if len(found) != count:
        raise ValueError(f"{len(found)} numbers for {count} sampled tokens")
    return found
