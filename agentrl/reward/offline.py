"""Scores recorded episodes: JSONL files, in parallel, rows in the order of the file."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from agentrl.errors import JudgeBudgetError, UserError
from agentrl.files import read_text
from agentrl.plain_data import read_json
from agentrl.reward.score import Score, Scorer
from agentrl.trajectory import Json, Trajectory

_CHUNK = 64
Lines = list[tuple[int, str]]
MakeScorer = Callable[[], Scorer]

_worker: tuple[Scorer, str] | None = None


def read_lines(path: Path) -> Lines:
    """The non-empty rows of a JSONL file with their line numbers (from 1).

    Raises UserError if the file cannot be read or has no rows.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: contains no trajectory")
    return lines


def parse_row(path: str, number: int, line: str) -> Trajectory:
    """One row as a Trajectory. Raises UserError with file and line for a row of another shape."""
    try:
        return Trajectory.from_json(read_json(line))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise UserError(
            f"{path}:{number}: not a trajectory ({what}); expected a row as a run writes them to its trajectories/ folder"
        ) from error


def score_file(make: MakeScorer, path: Path, workers: int, done: Callable[[int], None]) -> list[dict[str, Json]]:
    """Scores of all rows, in order: row, task, member, value, turns, metrics and, if unscored, why.

    `make` builds the scorer; it must be picklable, since it runs in each worker process.
    `done` is called with the number of rows finished. A spec with a judge is scored by threads of this
    process, so that all rows share one budget and one cache. Raises UserError for the first invalid row.
    """
    scorer = make()
    chunks = list(_chunks(read_lines(path), bool(scorer.compares), str(path)))
    rows: list[dict[str, Json]] = []
    for chunk in _map(scorer, str(path), chunks, workers, make):
        rows.extend(chunk)
        done(len(chunk))
    return sorted(rows, key=lambda row: int(row["row"]))


def _map(scorer: Scorer, path: str, chunks: Sequence[Lines], workers: int, make: MakeScorer) -> Iterator[list[dict[str, Json]]]:
    workers = min(workers, len(chunks))
    if workers <= 1 and not scorer.asks:
        for chunk in chunks:
            yield _score_lines(scorer, path, chunk)
        return
    pool: Executor
    if scorer.asks:
        pool = ThreadPoolExecutor(max(workers, 8))
        with pool:
            yield from pool.map(lambda chunk: _score_lines(scorer, path, chunk), chunks)
        return
    # spawn: forking a process with threads (torch's, say) can deadlock.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start, initargs=(path, make))
    with pool:
        yield from pool.map(_score_chunk, chunks)


def _start(path: str, make: MakeScorer) -> None:
    global _worker
    _worker = make(), path


def _score_chunk(chunk: Lines) -> list[dict[str, Json]]:
    assert _worker is not None
    return _score_lines(_worker[0], _worker[1], chunk)


def _score_lines(scorer: Scorer, path: str, lines: Lines) -> list[dict[str, Json]]:
    trajectories = [parse_row(path, number, line) for number, line in lines]
    scores = _scores(scorer, trajectories)
    return [
        score_row(number, trajectory, score) for (number, _), trajectory, score in zip(lines, trajectories, scores, strict=True)
    ]


def _scores(scorer: Scorer, trajectories: list[Trajectory]) -> list[Score]:
    """Scores; rows beyond the judge's budget are unscored with that reason, since earlier ones are already paid for."""

    def unscored(error: JudgeBudgetError) -> Score:
        return Score(None, evidence={"spec": scorer.name, "value": None, "unscored": str(error)})

    if scorer.compares:
        try:
            return scorer.score_group(trajectories)
        except JudgeBudgetError as error:
            return [unscored(error)] * len(trajectories)
    scores: list[Score] = []
    for trajectory in trajectories:
        try:
            scores.append(scorer.score(trajectory))
        except JudgeBudgetError as error:
            scores.append(unscored(error))
    return scores


def score_row(number: int, trajectory: Trajectory, score: Score) -> dict[str, Json]:
    """One line of output."""
    row: dict[str, Json] = {
        "row": number,
        "task": trajectory.task.id,
        "member": trajectory.member,
        "value": score.value,
        "success": score.success,
        "turns": {str(turn): amount for turn, amount in score.turns.items()},
        "metrics": score.metrics,
    }
    return row if score.value is not None else {**row, "evidence": score.evidence}


def _chunks(lines: Lines, by_task: bool, path: str) -> Iterator[Lines]:
    """Rows in chunks; if group leaves compare episodes (`by_task`), all rows of a task are one chunk."""
    if not by_task:
        for start in range(0, len(lines), _CHUNK):
            yield lines[start : start + _CHUNK]
        return
    groups: dict[tuple[str, str], Lines] = {}
    for number, line in lines:
        trajectory = parse_row(path, number, line)
        groups.setdefault((trajectory.env_id, trajectory.task.id), []).append((number, line))
    yield from groups.values()
