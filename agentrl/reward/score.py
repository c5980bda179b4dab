"""Score and Scorer: a compiled spec applied to trajectories."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.deadline import within
from agentrl.executors import SCORING, TooLongError, at_once, size_of
from agentrl.reward.group import GroupNode
from agentrl.reward.judge.assumed import AssumedJudge
from agentrl.reward.leaf import JudgeClient
from agentrl.reward.node import TRUE, Frame, LeafNode, Node, Result, walk
from agentrl.reward.success import SuccessRule, measures_of, terms_of
from agentrl.reward.view import View, episode_view
from agentrl.trajectory import Json, Trajectory

T = TypeVar("T")
Answers = dict[str, Any]
GroupValues = Mapping[str, Sequence[float | None]]
Work = Callable[[Answers], tuple[T, Frame]]

# A pass answers what the one before it asked; a handful suffices, unless a leaf's request changes with each answer.
_MOST_PASSES = 64
_LONG = 30_000
"""Characters from which on an episode is scored in a thread: comparing texts or states so long takes some 10 ms."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a spec for one trajectory.

    `value`: the episode's total reward, or None (could not score). `success`: whether the episode succeeded, by
    `Scorer.rule`; None for an unscored episode, or if that node could not be scored. `turns`: turn index -> the part
    of `value` that is emitted at that turn; the rest, `terminal`, is emitted at the episode's last turn.
    `evidence`: the tree of nodes with values and reasons, as JSON. `metrics`: the spec's metrics and every
    node with an id.
    """

    value: float | None
    turns: dict[int, float] = field(default_factory=dict)
    evidence: Json = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    success: bool | None = None

    @property
    def terminal(self) -> float | None:
        """`value` minus what is emitted at turns (exactly 0 if only rounding error is left); None if there is
        no value."""
        if self.value is None:
            return None
        rest = math.fsum([self.value, *(-amount for amount in self.turns.values())])
        rounding = 1e-12 * math.fsum(map(abs, self.turns.values()))
        return 0.0 if abs(rest) <= rounding else rest


class Scorer:
    """A compiled spec. It is stateless and can be shared by threads and episodes.

    `rule`: what decides success (None: nothing in the spec can), compiled as `success`. `range`: bounds of
    its values. `ids`: the ids of its nodes, whose values are in `Score.metrics`; `terms` and `measures`: those of the
    reward tree and those of the spec's `metrics` that have one value for an episode. `compares`: it has group leaves,
    so use `score_group`. `judged`: the places of its judge leaves; `asks`: it has some.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        root: Node,
        metrics: Sequence[Node],
        blocking: bool,
        judge: JudgeClient | None,
        rule: SuccessRule | None = None,
        success: Node | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.spec = spec
        self.timeout = timeout
        self.name = str(spec["name"])
        self.root = root
        self.metrics = list(metrics)
        self.rule = rule
        self.success = success
        # As often: the whole root is the task part, and need not be evaluated a second time.
        self._same = rule is not None and rule.derived and rule.node == _without_ids(spec["root"])
        self.range = root.range()
        self._blocking = blocking
        self._judge = judge
        self._assumed: Callable[[Trajectory], bool] | None = None
        tops = [root, *self.metrics, *([success] if success is not None else [])]
        nodes = [node for top in tops for node in walk(top)]
        self._groups = [node for node in nodes if isinstance(node, GroupNode)]
        self.ids = list(dict.fromkeys(node.mods.id for node in nodes if node.mods.id is not None))
        self.terms, self.measures = terms_of(spec), measures_of(spec)
        self.compares = bool(self._groups)
        self.judged = [node.pointer for node in nodes if isinstance(node, LeafNode) and node.leaf.kind == "judge"]
        self.asks = bool(self.judged)

    def assuming(self, best: Callable[[Trajectory], bool]) -> Scorer:
        """This scorer with a judge that asks no model, and says the best of the episodes for which `best` is true, the worst of
        the others: what the other leaves decide. Itself if it has no judge."""
        if not self.asks:
            return self
        made = copy.copy(self)
        made._assumed = best
        return made

    def score(self, trajectory: Trajectory) -> Score:
        """Score one trajectory. If the spec has a judge, waits for its answer."""
        return self._drive(self._scoring(trajectory, None, 0), trajectory)

    async def ascore(self, trajectory: Trajectory) -> Score:
        """As `score`, without blocking the event loop: judges are awaited; what replays, calls a user's function, is long or has
        a slow pattern is scored in a thread."""
        return await self._adrive(self._scoring(trajectory, None, 0), trajectory)

    def score_group(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score the trajectories of one task together, as group leaves need."""
        group = self._by_node([self._drive(self._comparing(trajectory), trajectory) for trajectory in trajectories])
        return [self._drive(self._scoring(t, group, i), t) for i, t in enumerate(trajectories)]

    async def ascore_group(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """As `score_group`, awaited; the members are scored at the same time."""
        # First what is compared, of all members: a group leaf needs the others' values before it can score any of them.
        values = await asyncio.gather(*(self._adrive(self._comparing(t), t) for t in trajectories))
        group = self._by_node(values)
        scoring = (self._adrive(self._scoring(t, group, i), t) for i, t in enumerate(trajectories))
        return list(await asyncio.gather(*scoring))

    def _by_node(self, values: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
        return {node.pointer: [row[k] for row in values] for k, node in enumerate(self._groups)}

    def _comparing(self, trajectory: Trajectory) -> Work[list[float | None]]:
        """The values that the group leaves compare, for one member."""

        def work(answers: Answers) -> tuple[list[float | None], Frame]:
            frame = Frame()
            if trajectory.stop.infrastructure:
                return [None] * len(self._groups), frame
            view = episode_view(trajectory, answers)
            return [node.of.evaluate(view, frame).value for node in self._groups], frame

        return work

    def _scoring(self, trajectory: Trajectory, group: GroupValues | None, member: int) -> Work[Score]:
        def work(answers: Answers) -> tuple[Score, Frame]:
            # A new one for each pass: the readings of the last one still say that a judge's answer is missing.
            frame = Frame(group=group, member=member)
            return self._pass(trajectory, frame, answers), frame

        return work

    def _drive(self, work: Work[T], trajectory: Trajectory) -> T:
        """Pass over the tree until no leaf has a pending request; each pass has the answers to the previous requests.

        Leaves thus stay synchronous and stateless, and all requests of a pass can be answered concurrently.
        """
        answers: Answers = {}
        for _ in range(_MOST_PASSES):
            result, frame = work(answers)
            if not frame.pending:
                return result
            client = self._client(trajectory)
            answers.update({key: client.ask(key, request) for key, request in frame.pending.items()})
        raise RuntimeError(f"reward spec {self.name!r}: a leaf makes a new request on every pass")

    async def _adrive(self, work: Work[T], trajectory: Trajectory) -> T:
        size = _size_of(trajectory)
        answers: Answers = {}
        for _ in range(_MOST_PASSES):
            result, frame = await self._pass_over(work, answers, size)
            if not frame.pending:
                return result
            client, keys = self._client(trajectory), list(frame.pending)
            verdicts = await asyncio.gather(*(client.aask(key, frame.pending[key]) for key in keys))
            answers.update(zip(keys, verdicts, strict=True))
        raise RuntimeError(f"reward spec {self.name!r}: a leaf makes a new request on every pass")

    async def _pass_over(self, work: Work[T], answers: Answers, size: int) -> tuple[T, Frame]:
        """One pass: on the event loop unless it may take long, which is seen beforehand or by trying."""
        if not self._blocking and size < _LONG:
            with contextlib.suppress(TooLongError):
                return at_once(work, answers)
        return await self._in_thread(work, answers)

    async def _in_thread(self, work: Work[T], answers: Answers) -> tuple[T, Frame]:
        async with SCORING.slot():
            # Inside the place: waiting for one is not the spec's time.
            return await within(self.timeout, SCORING.call(self.name, work, answers), f"reward spec {self.name}")

    def _client(self, trajectory: Trajectory) -> JudgeClient:
        if self._assumed is not None:
            return AssumedJudge(self._assumed(trajectory))
        assert self._judge is not None  # only a judge leaf makes requests, and it does not compile without a client
        return self._judge

    def _pass(self, trajectory: Trajectory, frame: Frame, answers: Answers) -> Score:
        # Also for an unscored episode: its metrics are unknown (None), not absent.
        names = {node.mods.id: None for node in self.metrics if node.mods.id is not None}
        if trajectory.stop.infrastructure:
            why = f"infrastructure: {trajectory.stop.value}"
            return Score(None, evidence={"spec": self.name, "value": None, "unscored": why}, metrics=dict(names))
        view = episode_view(trajectory, answers)
        result = self.root.evaluate(view, frame)
        measured = [node.evaluate(view, frame) for node in self.metrics]
        evidence: dict[str, Json] = {"spec": self.name, "value": result.value, "root": result.evidence}
        metrics: dict[str, float | None] = dict(names)
        _collect(result.evidence, metrics)
        success = self._success(view, frame, result, evidence, metrics)
        if measured:
            evidence["metrics"] = [item.evidence for item in measured]
            _collect(evidence["metrics"], metrics)
            for node, item in zip(self.metrics, measured, strict=True):
                if node.mods.id is not None:
                    metrics[node.mods.id] = item.value
        steps = dict(sorted(result.steps.items())) if result.value is not None else {}
        value = result.value
        if value is not None and trajectory.given:  # what the given turns earned is not the policy's
            value = math.fsum([value, *(-amount for turn, amount in steps.items() if turn < trajectory.given)])
            steps = {turn: amount for turn, amount in steps.items() if turn >= trajectory.given}
            evidence["given"] = {"turns": trajectory.given, "value": value}
        return Score(value, steps, evidence, metrics, success)

    def _success(
        self, view: View, frame: Frame, root: Result, evidence: dict[str, Json], metrics: dict[str, float | None]
    ) -> bool | None:
        """Whether the node of `rule` is true. An unscored episode has none, unless it is unscored only because
        its reward needs the group for comparison."""
        if self.rule is None or self.success is None:
            return None
        result = root if self._same else self.success.evaluate(view, frame)
        alone = self.compares and frame.group is None
        known = result.value is not None and (root.value is not None or alone)
        success = result.value >= TRUE if known and result.value is not None else None
        evidence["success"] = {"by": str(self.rule), "value": success}
        if not self.rule.derived:  # the evidence of a derived rule is in that of the root
            evidence["success"]["node"] = result.evidence
            _collect(result.evidence, metrics)
        return success


def _size_of(trajectory: Trajectory) -> int:
    """About how much there is to be looked at, in characters. Matching n calls takes as long as 10 n^2 characters."""
    calls = sum(len(turn.message.tool_calls) for turn in trajectory.turns)
    said = sum(len(message.content) for message in trajectory.messages)
    return said + 10 * calls**2 + size_of(trajectory.state, _LONG)


def _without_ids(node: Json) -> Json:
    """A part of a spec without what names its nodes."""
    if isinstance(node, Mapping):
        return {key: _without_ids(item) for key, item in node.items() if key != "id"}
    return [_without_ids(item) for item in node] if isinstance(node, list) else node


def _collect(evidence: Json, metrics: dict[str, float | None]) -> None:
    """Collect the values of nodes with an id from the evidence tree, except from the parts of a scoped node."""
    if isinstance(evidence, dict):
        if isinstance(evidence.get("id"), str) and "node" in evidence:
            metrics[evidence["id"]] = evidence["value"]
        for key, item in evidence.items():
            # The parts of a scoped node carry the same ids, once per call or turn: the last would stand for all.
            if isinstance(item, (dict, list)) and key not in ("evidence", "parts"):
                _collect(item, metrics)
    elif isinstance(evidence, list):
        for item in evidence:
            _collect(item, metrics)
