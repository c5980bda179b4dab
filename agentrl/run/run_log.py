"""The log of a run's metrics: rows of updates and evaluations, the health checks on them, and their outlets."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from agentrl.config.envs import own_advantages
from agentrl.config.schema import CriticConfig, HealthConfig, KeepConfig, PrometheusConfig, RolloutConfig, TrainConfig
from agentrl.data.trajectory import Group, Trajectory
from agentrl.rollout.player import Evaluation, fault_of
from agentrl.rollout.stats import RolloutStats
from agentrl.run.display import Display, percent
from agentrl.run.folder import RunFolder
from agentrl.run.outcomes import Kinds, Row, episode_values, group_values, is_scored, points
from agentrl.run.reader import token_lines
from agentrl.run.services import Service
from agentrl.run.session import Session, Writes
from agentrl.run.trackers import FLUSH_S, LIVE_METRICS, Outlet, Status, Tracker, sampled_rows
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.utils.errors import NothingScoredError

if TYPE_CHECKING:
    from agentrl.trainer.minibatch import TrainedTokens


# Rows

TIMINGS = {"episode_s": "time/episode_s", "engine_s": "time/episode_engine_s", "env_s": "time/episode_env_s"}
"""Keys of an episode's `timings` whose mean a row has, and the metrics' names."""
DETAILS = {
    "tool_error_rate": "tool error rate",
    "turns": "turns",
    "response_length/mean": "tokens an episode",
    "zero_variance": "zero variance",
    "staleness_mean": "staleness",
    "mismatch_max": "mismatch max",
    "engine/cache_hit": "cache hit",
    "kl_reference": "kl to reference",
    "kl_behaviour": "kl behaviour",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "lr": "lr",
    "throughput/trained_tokens_per_s": "trained/s",
}
"""Further metrics of an update that the display shows, and their labels; most important first."""


def episodes_row(groups: Sequence[Group], kinds: Kinds, several: bool) -> Row:
    """Compute statistics of an update's episodes: over all, with `several` also per environment, and by horizon."""
    members = [t for group in groups for t in group.trajectories]
    row = _values_of(members, kinds, trained=True, several=several)
    row |= {"rewrites": sum(len(t.rewrites) for t in members) / len(members), **group_values(groups)}
    for env in sorted({group.env for group in groups}) if several else ():
        values = group_values([group for group in groups if group.env == env])
        row |= {f"env/{env}/{key}": value for key, value in values.items()}
    return row


def train_row(session: Session, episodes: Row, update: Mapping[str, Any]) -> Row:
    """Build the row of update `ledger.version`: its `episodes_row`, the learner's metrics (`update`), and timings."""
    row: Row = {**episodes, **update}
    for part in (session.collector, session.player, *session.services.values()):
        row |= part.metrics()
    trained, took = update.get("tokens_trained"), session.display.took
    return {
        **row,
        **{f"groups/{state}": count for state, count in session.collector.ledger.counts().items()},
        "throughput/trained_tokens_per_s": None if trained is None else trained / max(took["update"], 1e-9),
        **{f"time/{name}_s": took[name] for name in ("rollout", "batch", "update", "publish")},
    }


def evaluation_row(result: Evaluation, kinds: Kinds, seconds: float, services: Iterable[Service] = ()) -> Row:
    """Build the row of an evaluation, with each environment's values by horizon, and the metrics of reward `services`. With
    several environments success and reward are weighted means over them (`together`); the metrics of the services count from
    their last reading."""
    row = _values_of(result.trajectories, kinds, trained=False, several=bool(result.by_env))
    if result.by_env:  # numbers of episodes do not describe a mean over environments
        row = {key: value for key, value in row.items() if key not in ("n/success", "n/reward")}
    row |= {"success": result.success, "reward": result.reward, "time/eval_s": seconds}
    return row | {key: value for service in services for key, value in service.metrics().items()}


def shown_of(row: Mapping[str, Any], envs: Sequence[str]) -> tuple[Row, Row]:
    """Return the figures of an update that the display always shows, and those that mainly its frame shows."""
    each = {env: row.get(f"env/{env}/success") for env in envs} if len(envs) > 1 else {}
    main = {"success": row["success"], **each, "reward": row["reward"], "tokens/s": row.get("throughput/sampled_tokens_per_s")}
    if row.get("tokens_thrown"):
        main["thrown away"] = percent(row["tokens_thrown"] / max(row["tokens_sampled"], row["tokens_thrown"]))
    terms = {key: value for key, value in row.items() if key.startswith(("term/", "metric/"))}
    details = {label: row.get(key) for key, label in DETAILS.items()}
    return main, {**terms, **details, "staleness": details["staleness"] or None, "unscored": row["unscored"] or None}


def thrown_away(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum `tokens_sampled` and `tokens_thrown` over a run's updates, and `thrown` by cause, largest first. Empty if rows lack
    these keys."""
    counted = [row for row in updates if "tokens_sampled" in row]
    if not counted:
        return {}
    causes: Counter[str] = Counter()
    for row in counted:
        causes.update({key.partition("/")[2]: int(row[key] or 0) for key in row if key.startswith("tokens_thrown/")})
    sums = {key: int(sum(row.get(key) or 0 for row in counted)) for key in ("tokens_sampled", "tokens_thrown")}
    return {**sums, "thrown": dict(causes.most_common())}


def _values_of(episodes: Sequence[Trajectory], kinds: Kinds, *, trained: bool, several: bool) -> Row:
    """Compute `episode_values`, with `several` also per environment under `env/NAME/`, and times of episodes."""
    found = episode_values(episodes, kinds, trained=trained, several=several)
    for name in sorted({t.env for t in episodes}) if several else ():
        values = episode_values([t for t in episodes if t.env == name], kinds, trained=trained)
        found |= {f"env/{name}/{key}": value for key, value in values.items()}
    for name, key in TIMINGS.items():
        seconds = [t.timings[name] for t in episodes if name in t.timings]
        found[key] = sum(seconds) / len(seconds) if seconds else None
        if name == "episode_s":
            found["time/episode_max_s"] = max(seconds, default=None)
    return found


# Health

Unhealthy = Literal["trained nothing", "mostly unscored"]
TRAINED_NOTHING: Unhealthy = "trained nothing"
MOSTLY_UNSCORED: Unhealthy = "mostly unscored"
PLAYED, UNSCORED = "episodes_played", "episodes_unscored"
"""Keys of a training row: episodes that ended since the last update (dropped groups included), and the unscored ones."""

HealthRow = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem of a run: `status` of a run that ends with it, cause and advice. `fails`: such a run has failed; False for a
    trial of fewer updates than `health.idle_updates`, which is only mentioned."""

    status: Unhealthy
    cause: str
    advice: str
    fails: bool = True

    def __str__(self) -> str:
        return f"{self.cause}. {self.advice}"


class Updates:
    """Bounded statistics of a run's updates: the newest rows, how many of them taught nothing (`idle`), and `taught`.
    `taught`: any update so far taught the policy something."""

    def __init__(self, critic: CriticConfig | None, most: int, rows: Iterable[HealthRow] = ()) -> None:
        """`most`: number of newest rows to keep."""
        self.warmup = 0 if critic is None else critic.warmup
        self.newest = deque[HealthRow](maxlen=most)
        self.idle, self.taught = 0, False
        for row in rows:
            self.add(row)

    def add(self, row: HealthRow) -> None:
        self.newest.append(row)
        if row["step"] > self.warmup:
            self.idle = 0 if has_trained(row) else self.idle + 1
            self.taught |= has_trained(row)


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign of trouble: the metric `key` satisfies `shows(value, start)` in `health.idle_updates` consecutive updates.

    `start`: the `extreme` over the first rows, up to the `first`-th update that trained. `unless`: ignore the sign if success
    (else the reward) is near 1 ("solved"), or near 1 or higher than at first ("better"). `null`: value in place of one that was
    not finite."""

    name: str
    key: str
    shows: Callable[[float, float], bool]
    cause: str
    advice: str
    extreme: Callable[[float, float], float] = max
    unless: Literal["solved", "better"] | None = None
    first: Callable[[TrainConfig], int] = lambda config: config.health.idle_updates
    applies: Callable[[TrainConfig], bool] = lambda config: True
    null: float | None = None
    per_env: bool = True


SOLVED = 0.9
OLD_WEIGHTS = Sign(
    "weights not delivered", "mismatch_kl", lambda now, start: now >= max(2e-3, 10 * start),
    "the engine's log probabilities have moved away from the trainer's although its version moves, as if it kept old weights",
    "Try another weights.route; if you wrote it, compare a weight on both ends, or see docs/engines.md.",
    applies=lambda config: config.rollout.max_staleness == 0, first=lambda config: 1, null=math.inf, per_env=False,
)  # fmt: skip
"""The first update shows only rounding: 6e-5 to 4e-4 for real models in bfloat16, so 2e-3 is above its noise."""
SIGNS = (
    OLD_WEIGHTS,
    replace(
        OLD_WEIGHTS, shows=lambda now, start: now >= max(1e-2, 3 * start),
        applies=lambda config: config.rollout.max_staleness > 0,
        # The first updates show the effect of staleness, once the learning rate is no longer small. Later it is smaller.
        first=lambda config: 1 + config.rollout.max_staleness + config.optim.warmup,
    ),
    Sign(
        "entropy collapsed", "entropy", lambda now, start: now <= min(0.05, 0.1 * start),
        "the policy hardly varies any more, so it finds nothing new",
        "Lower optim.lr, raise clip_high or set algorithm.entropy_bonus; go back to a checkpoint from before.",
        unless="solved", per_env=False,
    ),
    Sign(
        "text repeats itself", "repetition", lambda now, start: now >= max(0.5, 2 * start),
        "turns repeat their own words", "Lower optim.lr or set algorithm.kl.coef, and check whether the reward pays for length.",
        extreme=min, unless="better",
    ),
    Sign(
        "tool calls vanished", "tool_calls", lambda now, start: start >= 0.5 and now <= 0.05 * start,
        "episodes called tools at first, and now do not, without more success",
        "Check whether the reward pays for answers without calls (`agentrl reward lint`), or lower optim.lr.",
        unless="better",
    ),
    Sign(
        "tool calls fail", "tool_error_rate", lambda now, start: start <= 0.4 and now >= 0.8,
        "most calls worked at first, and now most are malformed or refused, without more success",
        "Go back to an earlier checkpoint; lower optim.lr or set algorithm.kl.coef.",
        extreme=min, unless="better",
    ),
    Sign(
        "one answer for all", "same_answer", lambda now, start: start < 0.8 and now >= 0.95,
        "episodes of different tasks end with the same message, without more success",
        "Check whether the reward pays for that message (`agentrl show`), lower optim.lr or set algorithm.entropy_bonus.",
        extreme=min, unless="better",
    ),
    Sign(
        "prompts begin anew", "forks", lambda now, start: now >= 0.5,
        "the chat template rewrites earlier turns (without their reasoning, or their text next to calls), or an agent program "
        "does: each such turn is a separate row, and its whole prompt is computed again, in sampling and in training",
        "Set model.chat_template to one that keeps the whole text (docs/templates.md), or ask for calls without text.",
    ),
    Sign(
        "thin baselines", "thin_groups", lambda now, start: now >= 0.25,
        "members are compared with few others, because the rest of their group is unscored",
        "Find out why they are unscored (log.txt); rollout.min_survivors replaces such groups.",
        applies=lambda config: any(  # only if an estimator compares the members of a group
            "group" in ADVANTAGES.entry(one.name).needs
            for one in (config.algorithm.advantage, *own_advantages(config.envs).values())
        ),
    ),
)  # fmt: skip


class SignWatch:
    """Watches for a sign in a run's updates, or in those of an environment (`scope`: `env/NAME/`); `found`: its findings."""

    def __init__(self, sign: Sign, first: int, most: int, scope: str) -> None:
        """`first`: as `Sign.first`; `most`: consecutive updates in which the sign must show."""
        self.sign, self._scope, self._left = sign, scope, first
        self._start: float | None = None
        self._before = deque[float | None](maxlen=most)
        self._newest = deque[tuple[int, float, float | None]](maxlen=most)
        self.found: list[dict[str, Any]] = []

    def add(self, row: HealthRow, fault: str | None = None) -> dict[str, Any] | None:
        """Return the finding that begins with this update, if any. `fault`: cause of the first unscored episode."""
        key, sign, step = self._scope + self.sign.key, self.sign, row["step"]
        value = sign.null if key in row and row[key] is None else row.get(key)
        if value is None:
            return None
        good = row.get(f"{self._scope}success")
        good = row.get(f"{self._scope}reward") if good is None else good
        if self._left > 0:
            self._start = value if self._start is None else sign.extreme(self._start, value)
            self._before.append(good)
            self._left -= has_trained(row)
        self._newest.append((step, value, good))
        start = value if self._start is None else self._start
        shown = [sign.shows(number, start) for _, number, _ in self._newest]
        well = False
        if sign.unless is not None and any(shown):  # the policy may do well despite the sign
            newest, before = ([g for g in part if g is not None] for part in ([g for *_, g in self._newest], self._before))
            if newest and before:
                mean = sum(newest) / len(newest)
                well = mean >= SOLVED or (sign.unless == "better" and mean > sum(before) / len(before))
        begun = bool(self.found) and self.found[-1]["until"] is None
        if begun and (well or not any(shown)):
            self.found[-1]["until"] = step
        if begun or well or len(shown) < (self._newest.maxlen or 0) or not all(shown):
            return None
        why = f"; the first unscored episode: {fault}" if fault and sign.key == "thin_groups" else ""
        cause = f"{sign.cause} ({key} is {value:.2g} after update {step}, at first {start:.2g}){why}"
        since = self._newest[0][0]
        self.found.append({"name": sign.name, "since": since, "until": None, "cause": cause, "advice": sign.advice})
        return self.found[-1]


class Health:
    """Checks every row of a run as it is written, and warns once when a problem begins."""

    def __init__(self, config: TrainConfig, warn: Callable[[str], None]) -> None:
        self._config, self._warn = config, warn
        self._said: set[str] = set()
        self._fault: str | None = None
        self.begin(0, ())

    def begin(self, step: int, rows: Iterable[HealthRow], stats: RolloutStats | None = None) -> None:
        """Start over after `step` updates with these `rows`; rows after `step` are ignored, because they are written again.
        `stats`: knows the cause of the first unscored episode."""
        config, most = self._config, self._config.health.idle_updates
        before = [row for row in rows if row["phase"] == "train" and row["step"] <= step]
        self._updates, self._stats = Updates(config.critic, most, before), stats
        # With several environments, watch each of them for the signs of episodes.
        names = [f"env/{env.called}/" for env in config.envs] if len(config.envs) > 1 else [""]
        self._watches = [
            SignWatch(one, one.first(config), most, scope)
            for one in SIGNS
            if one.applies(config)
            for scope in (names if one.per_env else [""])
        ]
        for row in before:
            for watch in self._watches:
                watch.add(row)

    @property
    def findings(self) -> list[dict[str, Any]]:
        """List all findings by first update: name, cause, advice, `since` and `until` (an update; None if it persists)."""
        return sorted((one for watch in self._watches for one in watch.found), key=lambda one: one["since"])

    @property
    def fault(self) -> str | None:
        """Cause of the first unscored episode."""
        self._fault = self._fault or (None if self._stats is None else self._stats.fault)
        return self._fault

    def row(self, row: HealthRow) -> None:
        """Check a row of phase "train"."""
        updates = self._updates
        updates.add(row)
        findings = idle_finding(updates, self._config.rollout), unscored_finding(updates.newest, self._config.health, self.fault)
        found = {finding.status: finding for finding in findings if finding}
        enough = len(updates.newest) == updates.newest.maxlen
        for status, finding in found.items():
            if enough and status not in self._said:
                self._warn(f"{status}: {finding}")
        self._said = set(found) if enough else set()
        for watch in self._watches:
            if (begun := watch.add(row, self.fault)) is not None:
                self._warn(finding_text(begun))

    def evaluation(self, phase: str, found: Evaluation) -> bool:
        """Return False, with a warning, if too many episodes of an evaluation are unscored, in any environment.
        `check_any_scored` handles one without any score."""
        most, sound = self._config.health.max_unscored, True
        for name, one in (found.by_env or {"": found}).items():
            total = one.scored + one.unscored
            if one.unscored > most * total:
                sound, where, why = False, f" of {name}" if name else "", first_fault(one.trajectories)
                if phase != "before" or found.scored:
                    self._fault = self.fault or why
                    self._warn(f"[{phase}] {one.unscored} of {total} episodes{where} are unscored; the first: {why}")
        return sound

    def verdict(self, rows: Sequence[HealthRow]) -> Finding | None:
        """Return the problem of a run that ended with these rows; None if it learned. A run whose last updates trained nothing
        has learned if success has risen or `stop_at_success` is reached."""
        goal, cfg = self._config.stop_at_success, self._config.health
        updates = [row for row in rows if row["phase"] == "train"]
        last = [row for row in rows if row["phase"] == "after"][-1:]
        if found := unscored_finding(updates, cfg, self.fault) or unscored_finding(last, cfg, self.fault):
            return found
        held = [success for _, success in points(rows, ("eval", "after"), "success")]
        if goal is not None and held and held[-1] >= goal:
            return None
        parts = (updates[: cfg.idle_updates], updates[-cfg.idle_updates :])
        first, newest = ([success for _, success in points(part, ("train",), "success")] for part in parts)
        if any(map(has_trained, updates)) and first and newest and sum(newest) / len(newest) > sum(first) / len(first):
            return None
        return idle_finding(Updates(self._config.critic, cfg.idle_updates, updates), self._config.rollout)


def finding_text(one: Mapping[str, Any]) -> str:
    """Describe a finding, for the log and the end of a run."""
    until = "" if one["until"] is None else f" to {one['until']}"
    return f"{one['name']}, from update {one['since']}{until}: {one['cause']}. {one['advice']}"


def idle_finding(updates: Updates, rollout: RolloutConfig) -> Finding | None:
    """Return a finding if all the newest updates (as many as are kept) trained nothing, else None. None too if all their
    episodes succeeded after an update that taught something: nothing is left to learn."""
    count = updates.idle
    newest = [row for row in updates.newest if row["step"] > updates.warmup] if count else []
    if count < max(len(newest), 1):
        return None
    if updates.taught and all(row.get("success") == 1.0 for row in newest):
        return None
    groups = rollout.groups * len(newest)
    same = sum(row.get("groups_zero_variance") or 0 for row in newest)
    success, reward = (newest[-1].get(name) for name in ("success", "reward"))
    mean = "" if reward is None else f" (mean {reward:.3g})"
    cause = f"all episodes of a group had the same reward{mean}, so none was better than another"
    advice = "Raise rollout.group_size or rollout.temperature, or reward parts of a solution (docs/debugging.md)."
    if any(row.get("skipped_steps", 0) for row in newest):
        cause, advice = "its numbers were not finite (log.txt names the rows)", "Lower optim.lr, or see docs/debugging.md."
    elif all(row.get("tokens_trained") == 0 for row in newest):
        cause, advice = "every sampled token is rejected", "Check algorithm.correction and algorithm.truncated: they reject all."
    elif any(row.get("advantage_abs") for row in newest):
        cause, advice = "advantages are not 0, but the loss has no gradient", "Check algorithm.loss and its arguments."
    elif same < groups:
        cause = f"every advantage was 0 ({same:.0f} of {groups} groups had equal rewards)"
        advice = "Check algorithm.advantage and its arguments."
    elif success == 1.0:
        cause += ": every episode is a success"
        advice = "The model solves all training tasks: give it harder ones (env.params)."
    elif success == 0.0:
        cause += ", and none was a success"
        advice = (
            "Make tasks easier, reward parts of a solution, warm the model up ([sft]), or raise rollout.group_size; `agentrl "
            "reward explain` says why an episode has its reward."
        )
    last = "last " if updates.taught else ""
    many = f"{last}{count} updates" if count > 1 else f"{last}update"
    text = f"no token was trained in the {many}: {cause}"
    return Finding(TRAINED_NOTHING, text, advice, fails=count >= (updates.newest.maxlen or 0))


def has_trained(row: HealthRow) -> bool:
    """Return True if an update changed the policy: nonzero gradient, an optimizer step taken and none skipped."""
    steps = row.get("optimizer_steps", 1) or 0
    return bool((row.get("grad_norm") or 0.0) > 0 and steps > 0 and not row.get("skipped_steps", 0))


def unscored_finding(rows: Collection[HealthRow], health: HealthConfig, fault: str | None) -> Finding | None:
    """Return a finding if more episodes of these rows are unscored than `health.max_unscored` allows, else None."""
    lost = played = 0.0
    for row in rows:
        unscored = row.get("unscored") or 0
        lost += unscored if row.get(UNSCORED) is None else row[UNSCORED]
        played += (row.get("scored") or 0) + unscored if row.get(PLAYED) is None else row[PLAYED]
    if lost <= health.max_unscored * played:
        return None
    first = f"; the first: {fault}" if fault else ""
    return Finding(
        MOSTLY_UNSCORED,
        f"{lost:.0f} of {played:.0f} episodes could not be scored{first}",
        "An unscored episode teaches nothing; fix the cause (log.txt has every error) and resume the run.",
    )


def check_any_scored(found: Evaluation) -> None:
    """Raise NothingScoredError if no episode of the evaluation before training has a score. Updates would fail the same way,
    but only after much longer."""
    if found.scored == 0 and found.unscored > 0:
        raise NothingScoredError(
            f"none of the {found.unscored} episodes of the evaluation before training could be scored; the first: "
            f"{first_fault(found.trajectories)}. Nothing was trained: fix that, and start the run again"
        )


def first_fault(trajectories: Iterable[Trajectory]) -> str | None:
    """Return the cause of the first unscored episode; None if all are scored."""
    return next((fault_of(t) for t in trajectories if not is_scored(t)), None)


# The log


class RunLog(AbstractContextManager["RunLog"]):
    """Writes rows `{"step": updates done, "phase": ..., ...}` to metrics.jsonl and the trackers; `time/*` are in seconds."""

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        trackers: Sequence[tuple[str, Callable[[], Tracker]]],
        resumed: bool = False,
        health: Health | None = None,
        prometheus: PrometheusConfig | None = None,
        keep: KeepConfig = KeepConfig(),
    ) -> None:
        """`trackers`: (name, maker) pairs. `resumed`: the folder and the trackers already have rows of this run. `health`: checks
        every update and evaluation. `prometheus`: settings of its endpoint. `keep`: number of trajectory files to keep."""
        self._keep = keep
        self.folder, self.display, self.health = folder, display, health
        self.writes = Writes()
        self.trackers: list[Outlet] = []
        self.endpoint = None if prometheus is None else LIVE_METRICS.entry("prometheus").make(prometheus, self.trackers)
        if self.endpoint is not None:
            display.say(f"metrics for Prometheus      {self.endpoint.url}")
        self.trackers += [Outlet(name, make, display.warn) for name, make in trackers]  # last, because they start threads
        self._begun = resumed
        self._ending: tuple[Status, Mapping[str, Any]] = ("failed", {})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        for tracker in self.trackers:
            tracker.finish(*self._ending)
        until = time.monotonic() + FLUSH_S
        for tracker in self.trackers:
            tracker.join(max(until - time.monotonic(), 0.0))

    def row(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Record one row, with null for non-finite numbers, and plain ones for those of numpy or torch."""
        values = {k: value.tolist() if hasattr(value, "tolist") else value for k, value in values.items()}
        values = {k: None if isinstance(value, float) and not math.isfinite(value) else value for k, value in values.items()}
        self.folder.append_metrics({"step": step, "phase": phase, **values})
        if self.health is not None and phase == "train":
            self.health.row({"step": step, **values})
        self._begun = True
        numbers = {key: value for key, value in values.items() if value is None or isinstance(value, (int, float))}
        for tracker in self.trackers:
            tracker.call("row", phase, step, numbers)
        if self.endpoint is not None:
            self.endpoint.row(phase, step, numbers)

    def live(self, session: Session | None) -> None:
        """Give the Prometheus endpoint the run's parts, which it reads between two rows; None: they are closed."""
        if self.endpoint is not None:
            self.endpoint.watch(session)

    def rewound(self, step: int) -> None:
        """Report to the trackers that the folder was rewound and the run continues from `step`. -1: from the start of
        training; `folder.BEFORE_SFT`: from the start of the warm start."""
        for tracker in self.trackers if self._begun else []:
            tracker.call("rewind", step)

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Set the status and summary that the trackers get when this log closes, and send them the curve."""
        self._ending = (status, summary)
        for tracker in self.trackers if self.folder.curve.is_file() else []:
            tracker.call("picture", "curve", self.folder.curve)

    async def trajectories(self, name: str, trajectories: Sequence[Trajectory], tokens: TrainedTokens | None = None) -> None:
        """Start writing `trajectories/<name>.jsonl` once the previous file is written; `writes.wait` awaits its end. `tokens`:
        their trained tokens, for `tokens/<name>.jsonl`."""

        def write() -> None:
            if tokens is not None:
                self.folder.write_tokens(name, token_lines(trajectories, tokens))
            self.folder.write_trajectories(name, trajectories)
            self.folder.rotate(self._keep, int(name.rpartition("_")[2]))

        await self.writes.begin(write)

    async def evaluation(self, phase: str, step: int, result: Evaluation, values: Mapping[str, Any]) -> bool:
        """Record a held-out evaluation: its row, its trajectories, and a line for the user. Returns False if `health` finds too
        many unscored episodes in it."""
        self.row(phase, step, values)
        for tracker in self.trackers:
            tracker.call("episodes", phase, step, sampled_rows(result.trajectories))
        await self.trajectories(f"{phase}_{step:06d}", result.trajectories)
        self.display.show_evaluation(step, result.success)
        for name, one in {"": result, **result.by_env}.items():
            fault = first_fault(one.trajectories)
            unscored = "" if fault is None else f" ({one.unscored} unscored, the first: {fault})"
            head = f"  {name:<24}" if name else f"[{phase}] held-out success"
            tasks = len({t.task_key for t in one.trajectories if is_scored(t)})  # a small split's are played several times
            over = f"{tasks} tasks" if tasks == one.scored else f"{tasks} tasks in {one.scored} episodes"
            self.display.say(f"{head} {percent(one.success)} over {over}{unscored}")
        return self.health is None or self.health.evaluation(phase, result)
