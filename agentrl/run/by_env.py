"""What metrics rows say of episodes: of all together, and of each environment under `env/NAME/`.

A mean is over the episodes of which its value is known, and null if that is none; `n/KEY` says over how many it is, unless these
are just the scored ones. Names, units and formulas are in `run/metrics.py`.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from agentrl.rollout.group import alike, unscored_cause
from agentrl.rollout.player import RunEnv
from agentrl.run.horizon import Bins, by_bin
from agentrl.trajectory import Group, Trajectory

Row = dict[str, Any]
Kind = Literal["term", "metric"]
Kinds = Mapping[str, Mapping[str, Kind]]
"""What the values in `Trajectory.metrics` are, by environment and id: of a node of the rewarded tree (or of `success`), or of
one of the spec's `metrics`."""
NO_BINS: Mapping[str, Bins] = MappingProxyType({})


def kinds_of(envs: Iterable[RunEnv]) -> dict[str, dict[str, Kind]]:
    """By the environments' reward specs. An id that has both kinds is a term."""
    return {env.name: {**dict.fromkeys(env.scorer.measures, "metric"), **dict.fromkeys(env.scorer.terms, "term")} for env in envs}


def episode_values(episodes: Sequence[Trajectory], kinds: Kinds, *, trained: bool, bins: Bins | None = None) -> Row:
    """Means, shares and counts over these episodes. `trained`: they belong to an update, for which only those with a reward are
    scored; an evaluation has also scored one of which only the success is known. `bins`: of the horizons of their environment,
    None if these are not known or the episodes are of several."""
    has_score = [_is_scored(t, trained) for t in episodes]
    scored = [place for place, has in enumerate(has_score) if has]
    unscored = Counter(unscored_cause(t) for t, has in zip(episodes, has_score, strict=True) if not has)
    means = _means(episodes)
    terms = _terms(episodes, kinds)
    found: Row = {name: _mean(known) for name, known in means}
    found |= {"scored": len(scored), "unscored": len(episodes) - len(scored)}
    found |= {f"unscored/{cause}": count for cause, count in sorted(unscored.items())}
    found |= _lengths(episodes) | _given(episodes)
    called, tools = _tools(episodes)
    found |= tools
    found |= {f"stop/{stop}": n / len(episodes) for stop, n in sorted(Counter(t.stop.value for t in episodes).items())}
    found |= {name: _mean(known) for name, known in terms}
    over = {name: len(known) for name, known in (*means, *terms) if list(known) != scored}
    if called != scored:
        over["tool_error_rate"] = len(called)
    found |= {f"n/{name}": count for name, count in over.items()}
    return found if bins is None else found | by_horizon(episodes, bins, trained=trained)


def by_horizon(episodes: Sequence[Trajectory], bins: Bins, *, trained: bool) -> Row:
    """Of the episodes of each bin: success, reward, how many are scored and not, and how long they were; counted as in
    `episode_values`."""
    found: Row = {}
    for label, members in by_bin(episodes, bins).items():
        scored = sum(_is_scored(t, trained) for t in members)
        means = _means(members)
        values: Row = {name: _mean(known) for name, known in means}
        values |= {"scored": scored, "unscored": len(members) - scored}
        values |= _given(members)
        values["turns"] = sum(len(t.turns) for t in members) / len(members)
        values["response_length"] = sum(t.sampled_tokens for t in members) / len(members)
        found |= {f"horizon/{label}/{key}": value for key, value in values.items()}
        found |= {f"n/horizon/{label}/{name}": len(known) for name, known in means if len(known) != scored}
    return found


def by_env(episodes: Iterable[Trajectory], kinds: Kinds, *, trained: bool, bins: Mapping[str, Bins] = NO_BINS) -> Row:
    """`episode_values` of each environment that has episodes among these, under `env/NAME/`."""
    found: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in episodes:
        found[trajectory.env].append(trajectory)
    return {
        f"env/{name}/{key}": value
        for name in sorted(found)
        for key, value in episode_values(found[name], kinds, trained=trained, bins=bins.get(name)).items()
    }


def group_values(groups: Sequence[Group]) -> Row:
    """How much the rewards of a group differ, which is what group-relative estimators learn from."""
    spreads = [[t.reward for t in group.scored() if t.reward is not None] for group in groups]
    known = [statistics.stdev(rewards) for rewards in spreads if len(rewards) > 1]
    return {
        "reward_std": statistics.fmean(known) if known else None,
        "zero_variance": sum(alike(group) for group in groups) / len(groups) if groups else None,
    }


def env_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The environments that metrics rows have a success of, sorted; none if the run has only one."""
    return sorted({key.split("/")[1] for row in rows for key in row if key.startswith("env/") and key.endswith("/success")})


def _is_scored(trajectory: Trajectory, trained: bool) -> bool:
    return trajectory.reward is not None or (trajectory.success is not None and not trained)


def _means(episodes: Sequence[Trajectory]) -> list[tuple[str, dict[int, float]]]:
    """The known successes and rewards, by the episode's place."""
    return [
        ("success", {place: float(t.success) for place, t in enumerate(episodes) if t.success is not None}),
        ("reward", {place: t.reward for place, t in enumerate(episodes) if t.reward is not None}),
    ]


def _terms(episodes: Sequence[Trajectory], kinds: Kinds) -> list[tuple[str, dict[int, float]]]:
    """Each id's known values, by the episode's place; of an id that no episode knows, none."""
    found: dict[str, dict[int, float]] = {}
    for env in sorted({t.env for t in episodes}):
        found |= {f"{kind}/{name}": {} for name, kind in kinds.get(env, {}).items()}
    for place, trajectory in enumerate(episodes):
        of = kinds.get(trajectory.env, {})
        for name, value in trajectory.metrics.items():
            known = found.setdefault(f"{of.get(name, 'term')}/{name}", {})
            if value is not None:
                known[place] = value
    return sorted(found.items())


def _lengths(episodes: Sequence[Trajectory]) -> Row:
    """Sampled tokens and turns; an episode that was cut before its first token counts with 0."""
    tokens, turns = [t.sampled_tokens for t in episodes], [len(t.turns) for t in episodes]
    ends = [turn.finish for t in episodes for turn in t.turns]
    count = max(len(episodes), 1)
    return {
        "tokens": sum(tokens),
        "turns": sum(turns) / count,
        "turns_max": max(turns, default=0),
        "response_length/mean": sum(tokens) / count,
        "response_length/max": max(tokens, default=0),
        "response_length/cut": ends.count("length") / len(ends) if ends else None,
        "truncated": sum(t.truncated for t in episodes) / count,
    }


def _given(episodes: Sequence[Trajectory]) -> Row:
    """Gold calls that an episode was given, if any was given some."""
    calls = [sum(len(turn.message.tool_calls) for turn in t.turns[: t.given]) for t in episodes]
    return {"given": sum(calls) / len(calls)} if any(calls) else {}


def _tools(episodes: Sequence[Trajectory]) -> tuple[list[int], Row]:
    """The places of the episodes that called tools, and how these calls went."""
    wrong = [[result.error is not None for turn in t.turns for result in turn.results] for t in episodes]
    every = [error for of in wrong for error in of]
    rates = {
        "tool_calls": sum(len(turn.message.tool_calls) for t in episodes for turn in t.turns) / max(len(episodes), 1),
        "tool_error_rate": sum(every) / len(every) if every else None,
    }
    return [place for place, of in enumerate(wrong) if of], rates


def _mean(known: Mapping[int, float]) -> float | None:
    return sum(known.values()) / len(known) if known else None
