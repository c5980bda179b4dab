"""Whether a run learns, from its metrics rows: what it says meanwhile, and as what it ends (docs/debugging.md).

An update trains nothing if its gradient is 0, as with advantages that are all 0, or if its optimizer steps were skipped.
Updates in which only the critic learns do not count. Everything is read from rows, so a resumed run goes on with what was before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.config import TrainConfig
from agentrl.errors import NothingScoredError
from agentrl.rollout.evaluate import Evaluation, fault_of
from agentrl.trajectory import Trajectory

Unhealthy = Literal["trained nothing", "mostly unscored"]
TRAINED_NOTHING: Unhealthy = "trained nothing"
MOSTLY_UNSCORED: Unhealthy = "mostly unscored"
PLAYED, UNSCORED = "episodes_played", "episodes_unscored"
"""Keys of a training row: episodes that ended since the last update, also of dropped groups, and how many are unscored."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a run: the `status` that it has if it ends so, why, and what to do. `fails`: whether a run that ends so
    has failed; one of fewer updates than `health.idle_updates` is a trial, of which it is only said."""

    status: Unhealthy
    cause: str
    advice: str
    fails: bool = True

    def __str__(self) -> str:
        return f"{self.cause}. {self.advice}"


class Updates:
    """What is kept of the updates of a run, of which there may be tens of thousands: the newest rows, `health.idle_updates` at
    most, how many of the newest taught nothing, and whether any before them taught something."""

    def __init__(self, config: TrainConfig, rows: Iterable[Row] = ()) -> None:
        self._warmup = 0 if config.critic is None else config.critic.warmup
        self.newest = deque[Row](maxlen=config.health.idle_updates)
        self.idle, self.taught = 0, False
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        self.newest.append(row)
        if row["step"] > self._warmup:
            self.idle = 0 if trained(row) else self.idle + 1
            self.taught |= trained(row)

    @property
    def of_policy(self) -> list[Row]:
        """Of the newest, those in which not the critic alone learned."""
        return [row for row in self.newest if row["step"] > self._warmup]


class Health:
    """Looks at every row of a run as it is written, and warns once for each time that something begins to be wrong."""

    def __init__(self, config: TrainConfig, warn: Callable[[str], None]) -> None:
        self._config, self._warn = config, warn
        self._updates = Updates(config)
        self._said: set[str] = set()
        self._fault: str | None = None
        self._faults: Callable[[], str | None] = lambda: None

    def begin(self, step: int, rows: Iterable[Row], fault: Callable[[], str | None]) -> None:
        """Updates begin after `step`, with these rows before them; those after it are forgotten, as they are done again. `fault`:
        why the first episode of theirs was unscored, once there was one."""
        self._updates = Updates(self._config, (row for row in rows if row["phase"] == "train" and row["step"] <= step))
        self._faults = fault

    @property
    def fault(self) -> str | None:
        """Why the first unscored episode is unscored."""
        self._fault = self._fault or self._faults()
        return self._fault

    def row(self, row: Row) -> None:
        """Look at a row of phase "train"."""
        updates = self._updates
        updates.add(row)
        found = {f.status: f for f in (idle(updates, self._config), unscored(updates.newest, self._config, self.fault)) if f}
        enough = len(updates.newest) == updates.newest.maxlen
        for status, finding in found.items():
            if enough and status not in self._said:
                self._warn(f"{status}: {finding}")
        self._said = set(found) if enough else set()

    def evaluation(self, phase: str, found: Evaluation) -> None:
        """Look at an evaluation, each environment by itself. One in which nothing is scored ends the run (`check_any_scored`)."""
        if phase == "before" and found.scored == 0:
            return
        for name, one in (found.by_env or {"": found}).items():
            total = one.scored + one.unscored
            if one.unscored > self._config.health.max_unscored * total:
                where = f" of {name}" if name else ""
                self.note(one.trajectories)
                why = first_fault(one.trajectories)
                self._warn(f"[{phase}] {one.unscored} of {total} episodes{where} are unscored; the first: {why}")

    def note(self, trajectories: Iterable[Trajectory]) -> None:
        """Keep why the first of these episodes was unscored."""
        self._fault = self.fault or first_fault(trajectories)

    def verdict(self, rows: Sequence[Row]) -> Finding | None:
        """What is wrong with a run that has ended with these rows; None if it learned. One whose last updates trained nothing has
        learned if its episodes succeed more often than at first, and is done if it reached `stop_at_success`."""
        updates = [row for row in rows if row["phase"] == "train"]
        last = next((row for row in reversed(rows) if row["phase"] == "after"), None)
        return (
            unscored(updates, self._config, self.fault)
            or (None if last is None else unscored([last], self._config, self.fault))
            or (None if self._reached(rows) else idle(Updates(self._config, updates), self._config))
        )

    def _reached(self, rows: Sequence[Row]) -> bool:
        goal = self._config.stop_at_success
        found = [row["success"] for row in rows if row["phase"] in ("eval", "after") and row["success"] is not None]
        updates = [row for row in rows if row["phase"] == "train"]
        return (goal is not None and bool(found) and found[-1] >= goal) or _improved(updates, self._config.health.idle_updates)


def idle(updates: Updates, config: TrainConfig) -> Finding | None:
    """Whether the newest updates, `health.idle_updates` of them or all if there are fewer, trained nothing. Not if every episode
    of them was a success after others that taught something: then nothing is left to learn."""
    newest, count = updates.of_policy, updates.idle
    if not newest or any(trained(row) for row in newest):
        return None
    if updates.taught and all(row["success"] == 1.0 for row in newest):
        return None
    cause, advice = _why_idle(newest, config)
    last = "last " if updates.taught else ""
    many = f"{last}{count} updates" if count > 1 else f"{last}update"
    said = f"no token was trained in the {many}: {cause}"
    return Finding(TRAINED_NOTHING, said, advice, fails=count >= config.health.idle_updates)


def _improved(updates: Sequence[Row], count: int) -> bool:
    first, last = ([row["success"] for row in part if row["success"] is not None] for part in (updates[:count], updates[-count:]))
    learned = any(trained(row) for row in updates)
    return learned and bool(first and last) and sum(last) / len(last) > sum(first) / len(first)


def trained(row: Row) -> bool:
    """Whether an update taught the policy something: its gradient is not 0, and an optimizer step was taken."""
    return bool((row.get("grad_norm") or 0.0) > 0 and row.get("optimizer_steps", 1) > 0 and not row.get("skipped_steps", 0))


def _why_idle(rows: Sequence[Row], config: TrainConfig) -> tuple[str, str]:
    groups = config.rollout.groups
    if any(row.get("skipped_steps", 0) for row in rows):
        return "its numbers were not finite (log.txt names the rows)", "Lower optim.lr, or see docs/debugging.md."
    same = sum(row.get("groups_zero_variance", 0) for row in rows)
    if same < groups * len(rows):
        return (
            f"every advantage was 0 ({same:.0f} of {groups * len(rows)} groups had equal rewards)",
            "Look at algorithm.advantage and its arguments.",
        )
    success, reward = rows[-1]["success"], rows[-1]["reward"]
    said = f"all episodes of a group had the same reward (mean {reward:.3g}), so none was better than another"
    if success == 1.0:
        return f"{said}: every episode is a success", "The model solves all training tasks: give it harder ones (env.params)."
    if success == 0.0:
        return (
            f"{said}, and none was a success",
            "Make tasks easier, reward parts of a solution, warm the model up ([sft]), or raise rollout.group_size; `agentrl "
            "reward explain` says why an episode has its reward.",
        )
    return said, "Raise rollout.group_size or rollout.temperature, or reward parts of a solution (docs/debugging.md)."


def unscored(rows: Collection[Row], config: TrainConfig, fault: str | None) -> Finding | None:
    """Whether more episodes of these rows are unscored than `health.max_unscored` allows."""
    lost = sum(row.get(UNSCORED, row["unscored"]) for row in rows)
    played = sum(row.get(PLAYED, row["scored"] + row["unscored"]) for row in rows)
    if lost <= config.health.max_unscored * played:
        return None
    first = f"; the first: {fault}" if fault else ""
    return Finding(
        MOSTLY_UNSCORED,
        f"{lost:.0f} of {played:.0f} episodes could not be scored{first}",
        "An unscored episode teaches nothing; mend what failed (log.txt has every error) and resume the run.",
    )


def check_any_scored(found: Evaluation) -> None:
    """Raise NothingScoredError if no episode of the evaluation before the first update could be scored: no update could be
    either, and they would take much longer to show it."""
    if found.scored == 0 and found.unscored > 0:
        raise NothingScoredError(
            f"none of the {found.unscored} episodes of the evaluation before training could be scored; the first: "
            f"{first_fault(found.trajectories)}. Nothing was trained: mend that, and start the run again"
        )


def first_fault(trajectories: Iterable[Trajectory]) -> str | None:
    """Why the first episode without reward and success has none; None if there is no such episode."""
    return next((fault_of(t) for t in trajectories if t.reward is None and t.success is None), None)
