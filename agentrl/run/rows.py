"""Rows of metrics.jsonl: how that of an update, of an evaluation and of the warm start's gate is made of what each part knows.

`run/metrics.py` has the table of all names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.rollout.evaluate import Evaluation
from agentrl.run.by_env import NO_BINS, Kinds, Row, by_env, episode_values, group_values
from agentrl.run.frame import percent
from agentrl.run.horizon import Bins
from agentrl.run.session import Session
from agentrl.trajectory import Group, Trajectory

SPENT = {"episode_s": "time/episode_s", "engine_s": "time/episode_engine_s", "env_s": "time/episode_env_s"}
"""Of an episode's `timings`, those that a row has a mean of."""
DETAILS = {
    "tool_error_rate": "tool errors",
    "turns": "turns",
    "response_length/mean": "tokens an episode",
    "zero_variance": "zero variance",
    "staleness_mean": "staleness",
    "mismatch_max": "mismatch",
    "engine/cache_hit": "cache",
    "kl_reference": "kl",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "throughput/trained_tokens_per_s": "trained/s",
}
"""Further numbers of an update that the display shows, and its words for them; the most wanted come first."""


def episodes_row(groups: Sequence[Group], kinds: Kinds, several: bool, bins: Mapping[str, Bins] = NO_BINS) -> Row:
    """What the episodes of an update are like, all together and, of `several` environments, each one's; and by the `bins` of the
    environments' horizons."""
    members = [t for group in groups for t in group.trajectories]
    return {
        **episode_values(members, kinds, trained=True, bins=None if several else _only(bins)),
        "rewrites": sum(len(t.rewrites) for t in members) / len(members),
        **group_values(groups),
        **(_of_envs(members, groups, kinds, bins) if several else {}),
        **_episode_times(members),
    }


def train_row(session: Session, episodes: Row, update: Mapping[str, Any], laps: Mapping[str, float]) -> Row:
    """The row of update number `ledger.version`: its `episodes_row`, what it did (`update`), and the wall-clock seconds of its
    parts."""
    collector = session.collector
    trained = update.get("tokens_trained")
    return {
        **episodes,
        **update,
        **collector.metrics(),
        **session.player.metrics(),
        **session.judges.metrics(),
        **{f"groups/{state}": count for state, count in collector.ledger.counts().items()},
        "throughput/trained_tokens_per_s": None if trained is None else trained / max(laps["update_s"], 1e-9),
        **{f"time/{name}": seconds for name, seconds in laps.items()},
    }


def evaluation_row(result: Evaluation, kinds: Kinds, seconds: float, bins: Mapping[str, Bins] = NO_BINS) -> Row:
    """What an evaluation found, and by the `bins` of the environments' horizons. Of several environments success and reward are
    means over them, by weight (`together`)."""
    alone = None if result.by_env or not result.trajectories else bins.get(result.trajectories[0].env)
    values = episode_values(result.trajectories, kinds, trained=False, bins=alone)
    if result.by_env:  # over how many episodes a mean is says nothing of one that is over environments
        values = {key: value for key, value in values.items() if key not in ("n/success", "n/reward")}
    return {
        **values,
        "success": result.success,
        "reward": result.reward,
        **(by_env(result.trajectories, kinds, trained=False, bins=bins) if result.by_env else {}),
        **_episode_times(result.trajectories),
        "time/eval_s": seconds,
    }


def shown_of(row: Mapping[str, Any], envs: Sequence[str]) -> tuple[Row, Row]:
    """What the display says of an update: in plain lines too, and only in its frame."""
    each = {env: row.get(f"env/{env}/success") for env in envs} if len(envs) > 1 else {}
    said = {"success": row["success"], **each, "reward": row["reward"], "tokens/s": row.get("throughput/sampled_tokens_per_s")}
    if row.get("tokens_thrown"):
        said["thrown away"] = percent(row["tokens_thrown"] / row["tokens_sampled"])
    terms = {key: value for key, value in row.items() if key.startswith(("term/", "metric/"))}
    details = {words: row.get(key) for key, words in DETAILS.items()}
    return said, {**terms, **details, "staleness": details["staleness"] or None, "unscored": row["unscored"] or None}


def thrown_away(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over the rows of a run's updates: `tokens_sampled`, `tokens_thrown`, and by cause `thrown`, the most first; nothing of an
    older run, whose rows do not have them."""
    counted = [row for row in updates if "tokens_sampled" in row]
    if not counted:
        return {}
    causes: Counter[str] = Counter()
    for row in counted:
        causes.update({key.partition("/")[2]: int(row[key]) for key in row if key.startswith("tokens_thrown/")})
    sums = {key: int(sum(row[key] for row in counted)) for key in ("tokens_sampled", "tokens_thrown")}
    return {**sums, "thrown": dict(causes.most_common())}


def known(row: Mapping[str, Any]) -> Row:
    """The row with null in the place of numbers that are not finite: JSON has none, and they say no more than that."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _only(bins: Mapping[str, Bins]) -> Bins | None:
    return next(iter(bins.values()), None)


def _of_envs(members: Sequence[Trajectory], groups: Sequence[Group], kinds: Kinds, bins: Mapping[str, Bins]) -> Row:
    found = by_env(members, kinds, trained=True, bins=bins)
    for env in sorted({group.env for group in groups}):
        own = group_values([group for group in groups if group.env == env])
        found |= {f"env/{env}/{key}": value for key, value in own.items()}
    return found


def _episode_times(episodes: Sequence[Trajectory]) -> Row:
    """Means over the episodes that have such a time, and the longest episode."""
    found: Row = {}
    for name, key in SPENT.items():
        seconds = [t.timings[name] for t in episodes if name in t.timings]
        found[key] = sum(seconds) / len(seconds) if seconds else None
        if name == "episode_s":
            found["time/episode_max_s"] = max(seconds, default=None)
    return found
