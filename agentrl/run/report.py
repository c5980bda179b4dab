"""The report of an evaluation: success with intervals, reward terms, stop reasons, errors and costs.

Unknown values are null, never 0: the price of an unknown model, tokens that a provider did not count, the latency
of an episode that got no answer.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from agentrl.env.passk import mean_with_interval, pass_at_k, pass_hat_k
from agentrl.run.horizon import Bins, by_bin
from agentrl.shown import cell, folding
from agentrl.trajectory import Trajectory, Turn

ABOUT = ("model", "run", "official")
"""What a report says of its model, and a suite's own table, which has a printed one of its own."""

HORIZONS = "horizons"
_COLUMNS = ("success", "reward", "turns", "tokens", "tasks", "unscored")


def make_report(trajectories: Sequence[Trajectory], samples: int) -> dict[str, Any]:
    """pass@k and pass^k with 95 % intervals over tasks, reward terms, stop reasons, error classes, tokens, latency
    in seconds and cost in US dollars; per episode unless stated otherwise."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.task.id].append(trajectory)
    counts = [
        (len(known), sum(known))
        for members in by_task.values()
        if (known := [t.success for t in members if t.success is not None])
    ]
    report: dict[str, Any] = {
        "tasks": len(by_task),
        "episodes": len(trajectories),
        "unscored": sum(t.reward is None and t.success is None for t in trajectories),
    }
    for k in range(1, samples + 1):
        usable = [(n, c) for n, c in counts if n >= k]  # unscored episodes can leave a task with fewer than k
        report[f"pass@{k}"] = _interval([pass_at_k(n, c, k) for n, c in usable])
        report[f"pass^{k}"] = _interval([pass_hat_k(n, c, k) for n, c in usable])
    names = sorted({name for t in trajectories for name in t.metrics})
    report["metrics"] = {name: _mean(t.metrics.get(name) for t in trajectories) for name in names}
    report["reward"] = _mean(t.reward for t in trajectories)
    report["stops"] = dict(Counter(t.stop.value for t in trajectories))
    report["errors"] = dict(Counter(error_class(t) for t in trajectories if t.error))
    report["tool_errors"] = dict(Counter(r.error for t in trajectories for _, _, r in t.calls() if r and r.error))
    return {**report, **_effort(trajectories), **_by_horizon(trajectories)}


def _by_horizon(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """By the number of calls in the gold solution, if it is known and tasks differ in it: mean success over episodes with its
    95 % interval over tasks, reward, and how long episodes are."""
    bins = Bins.of({t.horizon for t in trajectories if t.horizon is not None})
    parts = by_bin(trajectories, bins)
    return {HORIZONS: {label: _of_horizon(members) for label, members in parts.items()}} if len(parts) > 1 else {}


def _of_horizon(members: Sequence[Trajectory]) -> dict[str, Any]:
    known: dict[str, list[bool]] = defaultdict(list)
    for t in members:
        if t.success is not None:
            known[t.task.id].append(t.success)
    return {
        "tasks": len({t.task.id for t in members}),
        "episodes": len(members),
        "unscored": sum(t.reward is None and t.success is None for t in members),
        "success": _interval([statistics.fmean(of) for of in known.values()]),
        "reward": _mean(t.reward for t in members),
        "turns": _mean(float(len(t.turns)) for t in members),
        "tokens": _mean(_tokens(t, lambda turn: turn.sampled_tokens) for t in members),
    }


def unscored_cause(trajectories: Iterable[Trajectory]) -> str | None:
    """How many episodes are unscored, and why the first of them is; None if all are scored."""
    found = [t for t in trajectories if t.reward is None and t.success is None]
    if not found:
        return None
    first = found[0]
    why = first.error or "its reward spec could not score it"
    return f"{len(found)} episodes are unscored; the first ({first.task.id}) ended with {first.stop.value}: {why}"


def error_class(trajectory: Trajectory) -> str:
    """The stop reason and the error's first words, so that errors that differ only in details are counted together."""
    return f"{trajectory.stop.value}: {re.split('[:(]', trajectory.error or '')[0].strip()}"


def _effort(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    turns = [turn for t in trajectories for turn in t.turns]
    priced = [turn.usd for turn in turns if turn.usd is not None]
    episodes = [seconds for t in trajectories if t.reward is not None and (seconds := t.timings.get("episode_s")) is not None]
    return {
        "turns": _mean(float(len(t.turns)) for t in trajectories),
        "tokens": _mean(_tokens(t, lambda turn: turn.sampled_tokens) for t in trajectories),
        "prompt_tokens": _mean(_tokens(t, lambda turn: turn.prompt_tokens) for t in trajectories),
        "seconds": _mean(t.timings.get("episode_s") for t in trajectories),
        "turn_seconds": _percentiles([seconds for turn in turns if (seconds := _sampling_s(turn)) is not None]),
        "episode_seconds": _percentiles(episodes),
        "usd": _mean(_usd(t) for t in trajectories),
        "usd_total": sum(priced) if priced else None,
        "unpriced_turns": len(turns) - len(priced),
    }


def _tokens(trajectory: Trajectory, count: Callable[[Turn], int]) -> float | None:
    """Sum over the turns; None if a turn was not counted (a prompt is never empty)."""
    if any(turn.prompt_tokens == 0 for turn in trajectory.turns) or not trajectory.turns:
        return None
    return float(sum(count(turn) for turn in trajectory.turns))


def _usd(trajectory: Trajectory) -> float | None:
    prices = [turn.usd for turn in trajectory.turns]
    return sum(price for price in prices if price is not None) if prices and None not in prices else None


def _sampling_s(turn: Turn) -> float | None:
    """Seconds that the model took for a turn; None if it did not finish the turn."""
    return turn.seconds - sum(result.seconds for result in turn.results) if turn.ledger >= 0 else None


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p95": None}
    middle, high = np.percentile(np.asarray(values), [50, 95])
    return {"p50": float(middle), "p95": float(high)}


def _interval(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    mean, low, high = mean_with_interval(values)
    return {"mean": mean, "low": low, "high": high}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report as a table; "-" stands for an unknown value."""
    table = folding("", "value", "95 % interval", title=f"{report['episodes']} episodes of {report['tasks']} tasks")
    for key, value in report.items():
        if key == HORIZONS:
            continue
        if isinstance(value, dict) and "mean" in value:
            table.add_row(key, f"{value['mean']:.3f}", f"{value['low']:.3f} to {value['high']:.3f}")
        elif key in ABOUT:
            continue
        elif isinstance(value, dict):
            for name, inner in value.items():
                table.add_row(cell(f"{key} / {name}"), cell(_short(inner)), "")
        elif key not in ("tasks", "episodes"):
            table.add_row(cell(key), cell(_short(value)), "")
    console.print(table)
    print_horizons({"": report}, console)


def print_horizons(reports: Mapping[str, Any], console: Console) -> None:
    """Success by the number of calls of the solution, a line each, of the environments whose tasks differ in it."""
    for name, report in reports.items():
        table = folding("calls", *_COLUMNS, title=cell(f"{name}{': ' if name else ''}by calls of the solution"))
        for label, one in report.get(HORIZONS, {}).items():
            rate = one["success"]
            shown = "-" if rate is None else f"{rate['mean']:.3f} ({rate['low']:.2f} to {rate['high']:.2f})"
            table.add_row(label, shown, *(_short(one[column]) for column in _COLUMNS[1:]))
        if table.row_count:
            console.print(table)


def print_reports(reports: Mapping[str, Any], success: float | None, console: Console) -> None:
    """The reports of several environments, a column each."""
    table = folding("", *map(cell, reports), "mean", title="held-out tasks by environment")
    for key in [name for name in next(iter(reports.values())) if name not in (*ABOUT, HORIZONS)]:
        cells = [report[key] for report in reports.values()]
        if key.startswith("pass"):
            rates = ["-" if v is None else f"{v['mean']:.3f} ({v['low']:.2f} to {v['high']:.2f})" for v in cells]
            table.add_row(key, *rates, _short(success) if key == "pass@1" else "")
        elif not any(isinstance(value, dict) for value in cells) and any(value is not None for value in cells):
            table.add_row(cell(key), *(cell(_short(value)) for value in cells), "")
    console.print(table)
    print_horizons(reports, console)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 3 if abs(value) >= 0.01 or value == 0 else 6
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".")
