"""Statistics of episodes: by horizon, by environment, and as a learning curve."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agentrl.data.trajectory import Group, Trajectory
from agentrl.rollout.group_ledger import unscored_cause, zero_variance
from agentrl.rollout.player import RunEnv

# Horizons

VALUES = ("success", "reward", "scored", "unscored", "turns", "response_length")
"""Values of a row for each range of horizons, under `horizon/RANGE/`."""
KEY = re.compile(r"(?:env/([^/]+)/)?horizon/([^/]+)/success")
"""Pattern of the key of success by horizon: the environment's name (if there are several) and the range."""


def label_of(horizon: int) -> str:
    """Return the range of a horizon: 1 to 4 alone, then two ranges per octave: "5-6", "7-8", "9-12", "13-16", ..."""
    if horizon <= 4:
        return str(horizon)
    half = 1 << (horizon - 1).bit_length() - 2
    low = (horizon - 1) // half * half
    return f"{low + 1}-{low + half}"


def order(label: str) -> int:
    """Return the sort key of a range: its first horizon."""
    return int(label.partition("-")[0])


def by_label(horizons: Iterable[int | None]) -> dict[str, list[int]]:
    """Group the indices of known horizons by range, shortest first."""
    found: dict[str, list[int]] = {}
    for place, horizon in enumerate(horizons):
        if horizon is not None:
            found.setdefault(label_of(horizon), []).append(place)
    return {label: found[label] for label in sorted(found, key=order)}


def labels_of(row: Mapping[str, Any], env: str | None = None) -> list[str]:
    """List the ranges with a success in a row, of its only environment or of `env`; shortest first."""
    return sorted({match[2] for key in row if (match := KEY.fullmatch(key)) and match[1] == env}, key=order)


def summary_of(rows: Sequence[Mapping[str, Any]], env: str | None = None) -> dict[str, dict[str, Any]]:
    """Summarize held-out tasks by horizon: count, success and reward before and after training, episode lengths after it.
    Empty without horizons."""
    ends = {row["phase"]: row for row in rows if row["phase"] in ("before", "after")}
    found: dict[str, dict[str, Any]] = {}
    for label in sorted({label for row in ends.values() for label in labels_of(row, env)}, key=order):
        at = f"{'' if env is None else f'env/{env}/'}horizon/{label}"
        before, after = ({name: ends.get(phase, {}).get(f"{at}/{name}") for name in VALUES} for phase in ("before", "after"))
        counts = [of[name] for of in (after, before) for name in ("scored", "unscored") if of[name] is not None][:2]
        found[label] = {
            "tasks": sum(counts),
            **{f"{name}_before": before[name] for name in ("success", "reward")},
            **{f"{name}_after": after[name] for name in ("success", "reward", "turns", "response_length")},
        }
    return found


# Environments

Row = dict[str, Any]
Kind = Literal["term", "metric"]
Kinds = Mapping[str, Mapping[str, Kind]]
"""Kind of a value in `Trajectory.metrics` by environment and id: a node of the rewarded tree (or `success`), or a metric of the
reward spec."""
GRAM, MIN_TURN, PRIME = 4, 16, 1_000_003
"""For the metric `repetition`: n-gram size and minimum turn length in tokens, and the base of the n-gram hash."""
THIN = 4
"""A group with fewer scored members, at least half of all unscored, is thin: of three, a baseline has only two others."""


def kinds_of(envs: Iterable[RunEnv]) -> dict[str, dict[str, Kind]]:
    """Read the kinds from the environments' reward specs; an id of both kinds is a term."""
    return {env.name: {**dict.fromkeys(env.scorer.measures, "metric"), **dict.fromkeys(env.scorer.terms, "term")} for env in envs}


def episode_values(episodes: Sequence[Trajectory], kinds: Kinds, *, trained: bool, several: bool = False) -> Row:
    """Compute means, shares and counts over episodes. `trained`: they belong to an update, where an episode is scored only
    with a reward; in an evaluation a known success suffices. `several`: they come from several environments, so there are no
    values by horizon."""
    # Known values of each id by index of the episode; an id without any known value stays, empty.
    ends: dict[str, dict[int, float]] = {"success": {}, "reward": {}}
    terms: dict[str, dict[int, float]] = {}
    for env in sorted({t.env for t in episodes}):
        terms |= {f"{kind}/{name}": {} for name, kind in kinds.get(env, {}).items()}
    scored, unscored = list[int](), Counter[str]()
    for place, t in enumerate(episodes):
        if is_scored(t, trained):
            scored.append(place)
        else:
            unscored[unscored_cause(t)] += 1
        if t.success is not None:
            ends["success"][place] = float(t.success)
        if t.reward is not None:
            ends["reward"][place] = t.reward
        for name, value in t.metrics.items():
            known = terms.setdefault(f"{kinds.get(t.env, {}).get(name, 'term')}/{name}", {})
            if value is not None:
                known[place] = value
    everything = ends | dict(sorted(terms.items()))
    found: Row = {name: sum(known.values()) / len(known) if known else None for name, known in everything.items()}
    found |= {"scored": len(scored), "unscored": len(episodes) - len(scored)}
    found |= {f"unscored/{cause}": number for cause, number in sorted(unscored.items())}
    # An episode that was cut before its first token counts as 0.
    count, tokens, turns = max(len(episodes), 1), [t.sampled_tokens for t in episodes], [len(t.turns) for t in episodes]
    finishes = [turn.finish for t in episodes for turn in t.turns]
    later = sum(max(number - 1, 0) for number in turns)
    found |= {
        "tokens": sum(tokens),
        "turns": sum(turns) / count,
        "turns_max": max(turns, default=0),
        "response_length/mean": sum(tokens) / count,
        "response_length/max": max(tokens, default=0),
        "response_length/cut": finishes.count("length") / len(finishes) if finishes else None,
        "truncated": sum(t.truncated for t in episodes) / count,
        "forks": sum(max(len(t.ledgers) - 1 - len(t.rewrites), 0) for t in episodes) / later if later else None,
        **_repetition(episodes),
    }
    # Gold calls given to episodes at their start, only if an episode got any.
    given = [sum(len(turn.message.tool_calls) for turn in t.turns[: t.given]) for t in episodes]
    found |= {"given": sum(given) / count} if any(given) else {}
    answers = [[result.error is not None for turn in t.turns for result in turn.results] for t in episodes]
    errors, called = [error for of in answers for error in of], [place for place, of in enumerate(answers) if of]
    calls = sum(len(turn.message.tool_calls) for t in episodes for turn in t.turns)
    found |= {"tool_calls": calls / count, "tool_error_rate": sum(errors) / len(errors) if errors else None}
    found |= {f"stop/{stop}": n / len(episodes) for stop, n in sorted(Counter(t.stop.value for t in episodes).items())}
    found |= {f"n/{name}": len(known) for name, known in everything.items() if list(known) != scored}
    found |= {"n/tool_error_rate": len(called)} if called != scored else {}
    # The same for the episodes of each range of horizons.
    for label, places in () if several else by_label(t.horizon for t in episodes).items():
        at, has = f"horizon/{label}", sum(is_scored(episodes[place], trained) for place in places)
        for name, known in ends.items():
            values = [known[place] for place in places if place in known]
            found[f"{at}/{name}"] = sum(values) / len(values) if values else None
            found |= {f"n/{at}/{name}": len(values)} if len(values) != has else {}
        found |= {f"{at}/scored": has, f"{at}/unscored": len(places) - has}
        for name, column in (("given", given), ("turns", turns), ("response_length", tokens)):
            values = [column[place] for place in places]
            found |= {f"{at}/{name}": sum(values) / len(values)} if name != "given" or any(values) else {}
    return found


def group_values(groups: Sequence[Group]) -> Row:
    """Compute statistics of reward differences within groups, from which group-relative estimators learn."""
    rewards = [[t.reward for t in group.scored() if t.reward is not None] for group in groups]
    spreads = [statistics.stdev(scores) for scores in rewards if len(scores) > 1]
    thin = sum(len(scores) < THIN and 2 * len(scores) <= len(of.trajectories) for scores, of in zip(rewards, groups, strict=True))
    return {
        "reward_std": statistics.fmean(spreads) if spreads else None,
        "zero_variance": sum(map(zero_variance, groups)) / len(groups) if groups else None,
        "thin_groups": thin / len(groups) if groups else None,
    }


def is_scored(trajectory: Trajectory, trained: bool = False) -> bool:
    """Return True if the reward or, outside of an update, the success is known."""
    return trajectory.reward is not None or (trajectory.success is not None and not trained)


def _repetition(episodes: Sequence[Trajectory]) -> Row:
    """Compute shares of repeated output: n-grams within a turn, and last messages over episodes of different tasks."""
    grams = new = 0
    answers, tasks = Counter[tuple[object, ...]](), set[tuple[str, str, int]]()
    for t in episodes:
        for turn in t.turns:
            if turn.ledger >= 0 and turn.sampled_tokens >= MIN_TURN:
                ids = t.ledgers[turn.ledger].token_ids[turn.end + 1 - turn.sampled_tokens : turn.end + 1].astype(np.int64)
                hashes = np.zeros(len(ids) - GRAM + 1, np.int64)
                for at in range(GRAM):
                    hashes = hashes * PRIME + ids[at : at + len(hashes)]
                grams, new = grams + len(hashes), new + len(np.unique(hashes))
        if t.turns:
            last = t.turns[-1].message
            answers[(last.content.strip(), *((call.name, str(call.arguments)) for call in last.tool_calls))] += 1
            tasks.add((t.env, t.task.id, t.task.seed))
    return {
        "repetition": 1 - new / grams if grams else None,
        "same_answer": max(answers.values()) / answers.total() if len(tasks) > 1 else None,
    }


# The curve

TRAIN, EVALUATED = ("train",), ("before", "eval", "after")


def draw_curve(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw success by step (training tasks and held-out tasks) into a PNG. Several environments have a pair of lines each, and
    there is a line for the mean of the evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = sorted({key.split("/")[1] for row in rows for key in row if re.fullmatch("env/.*/success", key)})
    train, held = points(rows, TRAIN, "success"), points(rows, EVALUATED, "success")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if train and not names:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label="training tasks, sampled")
    for number, name in enumerate(names):
        color, key = f"C{number % 10}", f"env/{name}/success"
        if sampled := points(rows, TRAIN, key):
            axes.plot(*zip(*sampled, strict=True), color=color, linewidth=0.8, alpha=0.6)
        if found := points(rows, EVALUATED, key):
            axes.plot(*zip(*found, strict=True), "o--", color=color, label=f"{name}, held-out tasks")
    if held:
        color, label = ("black", "mean, held-out tasks") if names else ("tab:orange", "held-out tasks")
        axes.plot(*zip(*held, strict=True), "o--", color=color, label=label)
    axes.set(title=title, xlabel="update", ylabel="success rate", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if train or held:
        axes.legend(loc="lower right")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)  # atomic, so that a viewer never reads half an image


def points(rows: Sequence[Mapping[str, Any]], phases: Sequence[str], key: str) -> list[tuple[int, float]]:
    """List (step, value) of the rows of these phases in which `key` is known."""
    return [(row["step"], row[key]) for row in rows if row["phase"] in phases and row.get(key) is not None]
