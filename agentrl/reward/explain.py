"""Explanations of scores, comparisons of two specs, and scores of stored episodes."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.data.trajectory import Json, Trajectory
from agentrl.reward.score import Score, Scorer
from agentrl.utils.errors import JudgeBudgetError, UserError
from agentrl.utils.files import read_text
from agentrl.utils.parsing import read_json

_HEAD = ("node", "at", "value", "id", "weight")
_BELOW = ("of", "if", "then", "else", "parts")


def explain_text(score: Score) -> str:
    """Format the evidence of a score as an indented tree, one node per line."""
    evidence = score.evidence
    lines = [f"{evidence['spec']}: {show_value(score.value)}"]
    if "unscored" in evidence:
        lines.append(f"  {evidence['unscored']}")
    if "root" in evidence:
        lines.extend(_node(evidence["root"], "  ", ""))
    if "success" in evidence:
        decided = evidence["success"]
        shown = {True: "yes", False: "no", None: "could not be scored"}[decided["value"]]
        lines.append(f"success: {shown}, by {decided['by']}")
        if "node" in decided:
            lines.extend(_node(decided["node"], "  ", ""))
    if score.turns:
        shares = ", ".join(f"turn {turn}: {show_value(amount)}" for turn, amount in score.turns.items())
        lines.append(f"emitted at turns: {shares}; at the end: {show_value(score.terminal)}")
    if evidence.get("metrics"):
        lines.append("metrics (measured, not rewarded):")
        for item in evidence["metrics"]:
            lines.extend(_node(item, "  ", ""))
    return "\n".join(lines)


def reasons(evidence: Json) -> Iterator[str]:
    """Yield the reasons why an evidence tree has no value, from the unscorable leaf outward."""
    if isinstance(evidence, Mapping):
        for value in evidence.values():
            yield from reasons(value)
        if "unscored" in evidence:
            yield str(evidence["unscored"])
    elif isinstance(evidence, list):
        for item in evidence:
            yield from reasons(item)


def _node(evidence: Mapping[str, Json], indent: str, role: str) -> Iterator[str]:
    name = f" [{evidence['id']}]" if "id" in evidence else ""
    weight = f" x {evidence['weight']:g}" if "weight" in evidence else ""
    value = "skipped" if "skipped" in evidence else show_value(evidence.get("value"))
    head = f"{indent}{role}{value:>8}{weight}"
    notes = [f"{key}={_short(evidence[key])}" for key in evidence if key not in (*_HEAD, *_BELOW, "evidence")]
    detail = evidence.get("evidence")
    if isinstance(detail, Mapping):
        notes.extend(f"{key}={_short(value)}" for key, value in detail.items())
    elif detail is not None:
        notes.append(_short(detail))
    yield f"{head}  {evidence.get('node', '?')}{name}  {', '.join(notes)}".rstrip()
    for key in _BELOW:
        below = evidence.get(key)
        if isinstance(below, Mapping):
            yield from _node(below, indent + "    ", f"{key}: ")
        elif isinstance(below, list):
            for index, item in enumerate(below):
                yield from _node(item, indent + "    ", f"part {index}: " if key == "parts" else "")


def _short(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 160 else text[:160] + "..."


def show_value(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.4g}"


# Two specs compared


@dataclass(frozen=True, slots=True)
class Change:
    """An episode that two specs rank differently. Ranks within its task start at 1; ties share the best rank; None if the spec
    could not score the episode."""

    row: int
    task: str
    member: int
    value_a: float | None
    value_b: float | None
    rank_a: int | None
    rank_b: int | None


def changed_values(a: Sequence[float | None], b: Sequence[float | None]) -> list[tuple[int, float | None, float | None]]:
    """List rows whose values differ by more than rounding, with both values: first those that only one spec could score, then by
    decreasing difference. For tasks with one episode, this is the only comparison, since there are no ranks."""
    rows = [(row, one, other) for row, (one, other) in enumerate(zip(a, b, strict=True)) if _gap(one, other) > 1e-9]
    return sorted(rows, key=lambda item: _gap(item[1], item[2]), reverse=True)


def count_single(trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Return the number of tasks with only one episode, and the number of tasks."""
    counts = Counter(trajectory.task_key for trajectory in trajectories)
    return sum(count == 1 for count in counts.values()), len(counts)


def _gap(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b)


def changed_ranks(trajectories: Sequence[Trajectory], a: Sequence[float | None], b: Sequence[float | None]) -> list[Change]:
    """List the episodes that change rank within their task, largest change first. `a`, `b`: values by the two specs, per row."""
    groups: dict[str, list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.task_key, []).append(row)
    changes: list[Change] = []
    for rows in groups.values():
        ranks = list[list[int | None]]()
        for values in (a, b):
            near = [None if (value := values[row]) is None else round(value, 9) for row in rows]  # rounding errors do not count
            known = [value for value in near if value is not None]
            ranks.append([None if value is None else 1 + sum(other > value for other in known) for value in near])
        for row, before, after in zip(rows, *ranks, strict=True):
            if before != after:
                changes.append(Change(row, trajectories[row].task.id, trajectories[row].member, a[row], b[row], before, after))
    return sorted(changes, key=lambda change: _gap(change.rank_a, change.rank_b), reverse=True)


# Stored episodes

_CHUNK = 64
Lines = list[tuple[int, str]]
MakeScorer = Callable[[], Scorer]

_worker: Scorer | None = None
"""The scorer of this process, if it is a worker of `score_file`."""


def read_lines(path: Path) -> Lines:
    """Read the non-empty rows of a JSONL file, with line numbers from 1.

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
    """Parse a row as a Trajectory. Raises UserError with file and line for an invalid row."""
    try:
        return Trajectory.from_json(read_json(line))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise UserError(
            f"{path}:{number}: not a trajectory ({what}); expected a row as a run writes them to its trajectories/ folder"
        ) from error


def score_file(make: MakeScorer, path: Path, workers: int, done: Callable[[int], None]) -> list[dict[str, Json]]:
    """Score all rows in order: row, task, member, value, success, turns, metrics, and evidence if unscored.

    `make` builds the scorer in each worker process, so it must be picklable. `done` is called with the number of newly finished
    rows. A spec with services is scored by threads of this process, so that all rows share one budget and one cache. Raises
    UserError for the first invalid row.
    """
    scorer = make()
    lines = read_lines(path)
    chunks = [lines[start : start + _CHUNK] for start in range(0, len(lines), _CHUNK)]
    if scorer.compares:  # group leaves compare episodes, so all rows of a task are one chunk
        groups: dict[str, Lines] = {}
        for number, line in lines:
            groups.setdefault(parse_row(str(path), number, line).task_key, []).append((number, line))
        chunks = list(groups.values())
    workers = min(workers, len(chunks))
    rows: list[dict[str, Json]] = []
    with ExitStack() as stack:
        found: Iterator[list[dict[str, Json]]] = map(partial(_score_lines, scorer, str(path)), chunks)
        if scorer.asks:
            threads = stack.enter_context(ThreadPoolExecutor(max(workers, 8)))
            found = threads.map(partial(_score_lines, scorer, str(path)), chunks)
        elif workers > 1:
            # spawn: forking a process with threads (for example of torch) can deadlock.
            spawn = multiprocessing.get_context("spawn")
            processes = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start, initargs=(make,))
            found = stack.enter_context(processes).map(partial(_score_lines, None, str(path)), chunks)
        for chunk in found:
            rows.extend(chunk)
            done(len(chunk))
    return sorted(rows, key=lambda row: int(row["row"]))


def _start(make: MakeScorer) -> None:
    global _worker
    _worker = make()


def _score_lines(scorer: Scorer | None, path: str, lines: Lines) -> list[dict[str, Json]]:
    """Score rows; those beyond the judge's budget are returned unscored, since earlier ones are already paid for."""
    scorer = scorer or _worker
    assert scorer is not None
    trajectories = [parse_row(path, number, line) for number, line in lines]
    scores: list[Score] = []
    for some in [trajectories] if scorer.compares else [[one] for one in trajectories]:
        try:
            scores += scorer.score_group(some) if scorer.compares else [scorer.score(one) for one in some]
        except JudgeBudgetError as error:
            scores += [Score(None, evidence={"spec": scorer.name, "value": None, "unscored": str(error)})] * len(some)
    return [
        {
            "row": number,
            "task": trajectory.task.id,
            "member": trajectory.member,
            "value": score.value,
            "success": score.success,
            "turns": {str(turn): amount for turn, amount in score.turns.items()},
            "metrics": score.metrics,
            **({"evidence": score.evidence} if score.value is None else {}),
        }
        for (number, _), trajectory, score in zip(lines, trajectories, scores, strict=True)
    ]
