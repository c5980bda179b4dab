"""Outcomes of episodes: by horizon, by environment, and as a learning curve."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agentrl.data.trajectory import Group, Trajectory
from agentrl.rollout.group_ledger import alike, unscored_cause
from agentrl.rollout.player import RunEnv

# Horizons

VALUES = ("success", "reward", "scored", "unscored", "turns", "response_length")
"""Values of a row for each range of horizons, under `horizon/RANGE/`."""
KEY = re.compile(r"(?:env/([^/]+)/)?horizon/([^/]+)/success")
"""A success by horizon in a row: the environment's name, of several, and the range."""


def label_of(horizon: int) -> str:
    """The range of a horizon: 1 to 4 alone, then two ranges an octave: "5-6", "7-8", "9-12", "13-16", "17-24", ..."""
    if horizon <= 4:
        return str(horizon)
    half = 1 << (horizon - 1).bit_length() - 2
    low = (horizon - 1) // half * half
    return f"{low + 1}-{low + half}"


def order(label: str) -> int:
    """By which labels are sorted, from the shortest tasks to the longest."""
    return int(label.partition("-")[0])


def by_label(episodes: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """The episodes whose horizon is known, by the ranges that these are in, the shortest first."""
    found: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        if episode.horizon is not None:
            found.setdefault(label_of(episode.horizon), []).append(episode)
    return {label: found[label] for label in sorted(found, key=order)}


def labels_of(row: Mapping[str, Any], env: str | None = None) -> list[str]:
    """The ranges of horizons with a success in a row: of its environment, or of the one called `env`; the shortest first."""
    return sorted({match[2] for key in row if (match := KEY.fullmatch(key)) and match[1] == env}, key=order)


def summary_of(rows: Sequence[Mapping[str, Any]], env: str | None = None) -> dict[str, dict[str, Any]]:
    """By horizon, of the held-out tasks before and after training: how many, success and reward, and how long their episodes were
    after it. Empty without horizons."""
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
"""What the values in `Trajectory.metrics` are, by environment and id: of a node of the rewarded tree (or of `success`), or of
one of the spec's `metrics`."""
GRAM, LEAST, PRIME = 4, 16, 1_000_003
"""Tokens of a run that is repeated, and of the shortest turn that is searched for them; PRIME: of their hash."""
THIN = 4
"""Scored members below which a group whose other members are unscored is thin: of 3, the mean of the others is of 2."""


def kinds_of(envs: Iterable[RunEnv]) -> dict[str, dict[str, Kind]]:
    """By the environments' reward specs. An id that has both kinds is a term."""
    return {env.name: {**dict.fromkeys(env.scorer.measures, "metric"), **dict.fromkeys(env.scorer.terms, "term")} for env in envs}


def episode_values(episodes: Sequence[Trajectory], kinds: Kinds, *, trained: bool, several: bool = False) -> Row:
    """Means, shares and counts over these episodes. `trained`: they belong to an update, for which only those with a reward are
    scored; an evaluation has also scored one with a known success alone. `several`: they are of several environments, so that
    nothing is said by horizon."""
    has_score = [is_scored(t, trained) for t in episodes]
    scored = [place for place, has in enumerate(has_score) if has]
    unscored = Counter(unscored_cause(t) for t, has in zip(episodes, has_score, strict=True) if not has)
    means = _means(episodes)
    # Each id's known values, by the episode's place; of an id that no episode knows, none.
    by_id: dict[str, dict[int, float]] = {}
    for env in sorted({t.env for t in episodes}):
        by_id |= {f"{kind}/{name}": {} for name, kind in kinds.get(env, {}).items()}
    for place, t in enumerate(episodes):
        for name, value in t.metrics.items():
            known = by_id.setdefault(f"{kinds.get(t.env, {}).get(name, 'term')}/{name}", {})
            if value is not None:
                known[place] = value
    terms = sorted(by_id.items())
    found: Row = {name: _mean(known) for name, known in means}
    found |= {"scored": len(scored), "unscored": len(episodes) - len(scored)}
    found |= {f"unscored/{cause}": count for cause, count in sorted(unscored.items())}
    found |= _lengths(episodes)
    answers = [[result.error is not None for turn in t.turns for result in turn.results] for t in episodes]
    errors, called = [error for of in answers for error in of], [place for place, of in enumerate(answers) if of]
    calls = sum(len(turn.message.tool_calls) for t in episodes for turn in t.turns)
    found |= {"tool_calls": calls / max(len(episodes), 1), "tool_error_rate": sum(errors) / len(errors) if errors else None}
    found |= {f"stop/{stop}": n / len(episodes) for stop, n in sorted(Counter(t.stop.value for t in episodes).items())}
    found |= {name: _mean(known) for name, known in terms}
    over = {name: len(known) for name, known in (*means, *terms) if list(known) != scored}
    if called != scored:
        over["tool_error_rate"] = len(called)
    found |= {f"n/{name}": count for name, count in over.items()}
    # Of the episodes of each range of horizons, counted in the same way.
    for label, members in () if several else by_label(episodes).items():
        at, count = f"horizon/{label}", sum(is_scored(t, trained) for t in members)
        means = _means(members)
        values: Row = {name: _mean(known) for name, known in means}
        values |= {"scored": count, "unscored": len(members) - count} | _given_calls(members)
        values["turns"] = sum(len(t.turns) for t in members) / len(members)
        values["response_length"] = sum(t.sampled_tokens for t in members) / len(members)
        found |= {f"{at}/{key}": value for key, value in values.items()}
        found |= {f"n/{at}/{name}": len(known) for name, known in means if len(known) != count}
    return found


def by_env(episodes: Iterable[Trajectory], kinds: Kinds, *, trained: bool) -> Row:
    """`episode_values` of each environment that has episodes among these, under `env/NAME/`."""
    found: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in episodes:
        found[trajectory.env].append(trajectory)
    return {
        f"env/{name}/{key}": value
        for name in sorted(found)
        for key, value in episode_values(found[name], kinds, trained=trained).items()
    }


def group_values(groups: Sequence[Group]) -> Row:
    """Differences of rewards within groups, from which group-relative estimators learn."""
    counts = [(len(group.scored()), len(group.trajectories)) for group in groups]
    spreads = [[t.reward for t in group.scored() if t.reward is not None] for group in groups]
    known = [statistics.stdev(rewards) for rewards in spreads if len(rewards) > 1]
    return {
        "reward_std": statistics.fmean(known) if known else None,
        "zero_variance": sum(alike(group) for group in groups) / len(groups) if groups else None,
        "thin_groups": sum(known < THIN and 2 * known <= of for known, of in counts) / len(counts) if counts else None,
    }


def is_scored(trajectory: Trajectory, trained: bool = False) -> bool:
    """Return True if its reward is known, or, outside of an update, its success."""
    return trajectory.reward is not None or (trajectory.success is not None and not trained)


def _means(episodes: Sequence[Trajectory]) -> list[tuple[str, dict[int, float]]]:
    """The known successes and rewards, by the episode's place."""
    return [
        ("success", {place: float(t.success) for place, t in enumerate(episodes) if t.success is not None}),
        ("reward", {place: t.reward for place, t in enumerate(episodes) if t.reward is not None}),
    ]


def _lengths(episodes: Sequence[Trajectory]) -> Row:
    """Sampled tokens, turns and what they repeat; an episode that was cut before its first token counts with 0."""
    tokens, turns = [t.sampled_tokens for t in episodes], [len(t.turns) for t in episodes]
    finishes = [turn.finish for t in episodes for turn in t.turns]
    later = sum(max(number - 1, 0) for number in turns)
    forks = sum(max(len(t.ledgers) - 1 - len(t.rewrites), 0) for t in episodes)
    count = max(len(episodes), 1)
    # Shares of the policy's words that it has said before: within a turn, and at the ends of episodes of different tasks.
    grams = new = 0
    for t in episodes:
        for turn in t.turns:
            if turn.ledger >= 0 and turn.sampled_tokens >= LEAST:
                ids = t.ledgers[turn.ledger].token_ids[turn.end + 1 - turn.sampled_tokens : turn.end + 1].astype(np.int64)
                hashes = np.zeros(len(ids) - GRAM + 1, np.int64)
                for at in range(GRAM):
                    hashes = hashes * PRIME + ids[at : at + len(hashes)]
                grams, new = grams + len(hashes), new + len(np.unique(hashes))
    ends = [(t.turns[-1].message, (t.env, t.task.id, t.task.seed)) for t in episodes if t.turns]
    said = Counter((m.content.strip(), *((call.name, str(call.arguments)) for call in m.tool_calls)) for m, _ in ends)
    return {
        "tokens": sum(tokens),
        "turns": sum(turns) / count,
        "turns_max": max(turns, default=0),
        "response_length/mean": sum(tokens) / count,
        "response_length/max": max(tokens, default=0),
        "response_length/cut": finishes.count("length") / len(finishes) if finishes else None,
        "truncated": sum(t.truncated for t in episodes) / count,
        "forks": forks / later if later else None,
        **_given_calls(episodes),
        "repetition": 1 - new / grams if grams else None,
        "same_answer": max(said.values()) / len(ends) if len({task for _, task in ends}) > 1 else None,
    }


def _given_calls(episodes: Sequence[Trajectory]) -> Row:
    """Gold calls that an episode was given, if any was given some."""
    calls = [sum(len(turn.message.tool_calls) for turn in t.turns[: t.given]) for t in episodes]
    return {"given": sum(calls) / len(calls)} if any(calls) else {}


def _mean(known: Mapping[int, float]) -> float | None:
    return sum(known.values()) / len(known) if known else None


# The curve

TRAIN, EVALUATED = ("train",), ("before", "eval", "after")


def draw_curve(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw success per step (on sampled training tasks, and on held-out tasks at evaluations) into a PNG; of several environments
    a pair of lines each, and the mean of the evaluations."""
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
    temporary.replace(path)  # a viewer never reads half an image


def points(rows: Sequence[Mapping[str, Any]], phases: Sequence[str], key: str) -> list[tuple[int, float]]:
    """(step, value) of the rows of these phases in which the key is known."""
    return [(row["step"], row[key]) for row in rows if row["phase"] in phases and row.get(key) is not None]
