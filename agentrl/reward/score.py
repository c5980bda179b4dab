"""Score trajectories, decide success, and assign rewards to tokens."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.data.trajectory import Json, Trajectory, reward_spots, terminal_reward
from agentrl.reward.leaf import Client, episode_view
from agentrl.reward.nodes import LINEAR, TRUE, ConstantNode, Frame, GateNode, GroupNode, LeafNode, Node, OpNode, walk
from agentrl.reward.values import evidence_nodes, join
from agentrl.utils.event_loop import within
from agentrl.utils.threads import SCORING, TooLongError, at_once, size_of

# The node that decides success:
#
# 1. `success`, a node or `{"id": name, "gte": x}`, if the spec has it;
# 2. else the task part of the node with the id `success`, if every episode reaches that node;
# 3. else the task part of the root.
#
# The task part of a node is 1 if everything in it that earns reward has its best value, regardless of scale, clip and
# weight. It excludes reward shaping: costs, comparisons within a group, parts that can only reduce the reward, and sums
# over turns (which have no best value).

NAME = "success"
"""Id of the node that decides success if the spec has no `success`."""

_NARROW = ("round", "turn", "call")
_KEPT_MODS = ("when", "missing", "scope", "reduce")
Spec = Mapping[str, Any]
NewNode = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SuccessRule:
    """The node that decides success. `at`: its JSON Pointer in the spec; `node`: the evaluated node, in spec form;
    `derived`: `node` is the task part of the node at `at`, not that node itself."""

    at: str
    node: Mapping[str, Any]
    derived: bool

    def __str__(self) -> str:
        return f"the task part of {self.at}" if self.derived else self.at


def success_rule(spec: Spec, root: Node, metrics: list[Node]) -> SuccessRule | None:
    """Find the success rule of a spec with compiled nodes `root` and `metrics`; None if no part has a best value.

    Raises KeyError for an unknown id in `success`.
    """
    if "success" in spec:
        wanted = spec["success"]
        if "use" in wanted or "op" in wanted:
            return SuccessRule("/success", wanted, derived=False)
        test = plain(ids_of([spec["root"], *spec.get("metrics", [])])[wanted["id"]][0])
        gate = {"op": "gate", "if": test, "gte": wanted.get("gte", 1), "then": 1, "else": 0}
        return SuccessRule("/success", gate, derived=False)
    tops = [(spec["root"], root, "/root")]
    tops += [(item, node, f"/metrics/{i}") for i, (item, node) in enumerate(zip(spec.get("metrics", []), metrics, strict=True))]
    for item, node, at in tops:
        named = _named_node(item, node, at)
        part = None if named is None else task_part(named[0], named[1])
        if named is not None and part is not None:
            return SuccessRule(named[2], part, derived=True)
    part = task_part(spec["root"], root)
    return None if part is None else SuccessRule("/root", part, derived=True)


def visible_ids(tops: Sequence[Any]) -> list[str]:
    """List the ids of nodes, except inside a narrower scope, where they have no single value."""
    return [name for name, (_, inside) in ids_of(tops).items() if not inside]


def ids_of(tops: Sequence[Any]) -> dict[str, tuple[Spec, bool]]:
    """Map each id to its node, and to True if a narrower scope than the episode contains it."""
    found: dict[str, tuple[Spec, bool]] = {}

    def look(node: Any, inside: bool) -> None:
        if not isinstance(node, Mapping):
            return
        if "id" in node:
            found[node["id"]] = node, inside
        inside = inside or node.get("scope") in _NARROW
        for below in (*node.get("of", ()), node.get("if"), node.get("then"), node.get("else"), node.get("args", {}).get("of")):
            look(below, inside)

    for top in tops:
        look(top, False)
    return found


def _named_node(item: Spec, node: Node, at: str) -> tuple[Spec, Node, str] | None:
    """Find the node with the id `success` if every episode reaches it: not in a branch, `when` or narrower scope."""
    if item.get("id") == NAME:
        return item, node, at
    if "when" in item or item.get("scope") in _NARROW:
        return None
    if isinstance(node, GateNode):
        return _named_node(item["if"], node.test, join(at, "if"))
    if isinstance(node, OpNode):
        below = (_named_node(item["of"][i], child, join(at, "of", i)) for i, child in enumerate(node.children))
        return next((found for found in below if found is not None), None)
    return None


def task_part(item: Spec, node: Node, flipped: bool = False) -> NewNode | None:
    """Derive the task part of a node in spec form; None if it has none. `flipped`: the node's lowest value is best."""
    scale = item.get("scale", (0, 1))
    flipped ^= scale[1] < scale[0]
    if isinstance(node, ConstantNode) or item.get("reduce") == "sum" or scale[0] == scale[1]:
        return None
    if isinstance(node, GroupNode):
        part = task_part(item["args"]["of"], node.of, flipped)
        return None if part is None else _join_parts("all", [part], {key: item[key] for key in ("when",) if key in item})
    if isinstance(node, LeafNode) or node.label in ("all", "any"):  # taken whole, without scale and clip
        if not isinstance(node, LeafNode):  # without children that compare group members
            of = [child for child, below in zip(item["of"], node.children, strict=True) if not _has_group_leaf(below)]
            item = {**item, "of": of}
        if item.get("of") == [] or not _has_task_leaf(node):
            return None
        part = {key: value for key, value in plain(item).items() if key not in ("scale", "clip")}
        return {**part, "scale": [1, 0]} if flipped else part
    if flipped:  # a combination's lowest value does not determine the values of its children
        return None
    return _gate(item, node) if isinstance(node, GateNode) else _aggregate(item, node)


def _aggregate(item: Spec, node: Node) -> NewNode | None:
    """Require the best value of all parts (`max`: of any part that can be the highest).

    Parts that can only reduce a sum are required only if no part can increase it.
    """
    earning: list[NewNode] = []
    taking: list[NewNode] = []
    top = max(child.range()[1] for child in node.children)
    for child_item, child in zip(item["of"], node.children, strict=True):
        weight = child.mods.weight if node.label in LINEAR else 1.0
        part = None if weight == 0.0 else task_part(child_item, child, weight < 0.0)
        if part is None or (node.label == "max" and child.range()[1] < top):
            continue
        best = max(0.0 if end == 0.0 else weight * end for end in child.range())
        (taking if node.label in LINEAR and best <= 0.0 else earning).append(part)
    own = {key: item[key] for key in _KEPT_MODS if key in item}
    return _join_parts("any" if node.label == "max" else "all", earning or taking, own)


def _gate(item: Spec, node: GateNode) -> NewNode | None:
    """Require the branch that earns most and its test, unless that only tests costs."""
    own = {key: item[key] for key in _KEPT_MODS if key in item}
    high, low = node.then.range()[1], node.otherwise.range()[1]
    yes = None if isinstance(node.then, ConstantNode) else task_part(item["then"], node.then)
    no = None if isinstance(node.otherwise, ConstantNode) else task_part(item["else"], node.otherwise)
    if not _has_task_leaf(node.test) or _has_group_leaf(node.test):
        best = yes if high >= low else no
        return None if best is None else _join_parts("all", [best], own)
    if high == low and yes is None and no is None:
        return None
    test = plain(item["if"])
    branches = {"then": (yes or 1) if high >= low else 0, "else": (no or 1) if low >= high else 0}
    return {"op": "gate", "if": test, "gte": item.get("gte", 1), **branches, **copy.deepcopy(own)}


def _join_parts(op: str, parts: list[NewNode], own: Spec) -> NewNode | None:
    if not parts:
        return None
    if len(parts) == 1 and not own:
        return parts[0]
    return {"op": op, "of": parts, **copy.deepcopy(dict(own))}


def _has_group_leaf(node: Node) -> bool:
    return any(isinstance(below, GroupNode) for below in walk(node))


def _has_task_leaf(node: Node) -> bool:
    """Return True if the node has a leaf that is not a cost."""
    return any(isinstance(below, LeafNode) and not below.leaf.kind.startswith("cost.") for below in walk(node))


def plain(item: Spec, weighted: bool = False) -> NewNode:
    """Copy a node without ids, emissions and (unless `weighted`) its weight, which belong to the original."""
    dropped = ("id", "emit") if weighted else ("id", "emit", "weight")
    made: NewNode = copy.deepcopy({key: value for key, value in item.items() if key not in dropped})
    for key in ("if", "then", "else"):
        if isinstance(item.get(key), Mapping):
            made[key] = plain(item[key], weighted=True)
    if "of" in item:
        made["of"] = [plain(child, weighted=True) for child in item["of"]]
    if isinstance(item.get("args", {}).get("of"), Mapping) and str(item.get("use", "")).startswith("group."):
        made["args"] = {**made["args"], "of": plain(item["args"]["of"])}
    return made


# Scores

T = TypeVar("T")
Answers = dict[str, Any]
GroupValues = Mapping[str, Sequence[float | None]]
Work = Callable[[Answers], tuple[T, Frame]]
"""One pass over the tree, with the answers to the requests of earlier passes."""

# Each pass gets the answers to the requests of the last one; a few suffice unless a leaf's request changes with each answer.
_MAX_PASSES = 64
_LONG_EPISODE = 30_000
"""Characters from which on an episode is scored in a thread: comparing such long texts or states takes some 10 ms."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a spec for one trajectory.

    `value`: the episode's total reward, or None (could not score). `success`: True if the episode succeeded by `Scorer.rule`;
    None for an unscored episode, or if that node could not be scored. `turns`: turn index -> the part of `value` emitted at that
    turn; the rest, `terminal`, is emitted at the episode's last turn. `evidence`: the tree of nodes with values and reasons, as
    JSON. `metrics`: values of the spec's metrics and of all nodes with an id.
    """

    value: float | None
    turns: dict[int, float] = field(default_factory=dict)
    evidence: Json = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    success: bool | None = None

    @property
    def terminal(self) -> float | None:
        """`value` minus the emissions at turns (exactly 0 if only a rounding error is left); None without a value."""
        return None if self.value is None else terminal_reward(self.value, self.turns)


class Scorer:
    """A compiled spec, stateless, so threads and episodes can share it.

    `tops`: the trees of the reward, the metrics and success. `rule`: the success rule (None: no node can decide), compiled as
    `success`. `range`: bounds of the reward. `ids`: ids of all nodes, whose values are in `Score.metrics`; `terms` and
    `measures`: ids in the reward tree and in the spec's `metrics` with one value per episode. `compares`: True with group leaves,
    which need `score_group`. `judged`: pointers of leaves that use services; `asks`: the names of these services.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        root: Node,
        metrics: Sequence[Node],
        blocking: bool,
        services: Mapping[str, Client],
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
        self._by = str(rule)
        self._unknown: dict[str, float | None] = {str(node.mods.id): None for node in metrics}
        """Metrics of an unscored episode: None, not absent."""
        self.range = root.range()
        self._blocking = blocking
        self._services = services
        self._assumed: Callable[[Trajectory], bool] | None = None
        self.tops = [root, *self.metrics, *([] if success in (None, root) else [success])]
        nodes = [node for top in self.tops for node in walk(top)]
        self._groups = [node for node in nodes if isinstance(node, GroupNode)]
        self.ids = list(dict.fromkeys(node.mods.id for node in nodes if node.mods.id is not None))
        stated = spec.get("success", {})
        self.terms = visible_ids([spec["root"], *([stated] if {"use", "op"} & set(stated) else [])])
        self.measures = visible_ids(spec.get("metrics", []))
        self.compares = bool(self._groups)
        asking = [(node.pointer, node.leaf.asks) for node in nodes if isinstance(node, LeafNode) and node.leaf.asks is not None]
        self.judged, self.asks = [at for at, _ in asking], frozenset(name for _, name in asking)

    def assuming(self, best: Callable[[Trajectory], bool]) -> Scorer:
        """Return a scorer that calls no services: it assumes their best answers for episodes with `best(episode)`, else worst;
        itself if it uses no services."""
        if not self.asks:
            return self
        made = copy.copy(self)
        made._assumed = best
        return made

    def score(self, trajectory: Trajectory) -> Score:
        """Score one trajectory; blocks until services have answered."""
        return self._drive(partial(self._pass, trajectory, None, 0), trajectory)

    async def ascore(self, trajectory: Trajectory) -> Score:
        """Score one trajectory without blocking the event loop: services are awaited; specs with replays or own functions, long
        episodes and slow patterns are scored in a thread."""
        return await self._adrive(partial(self._pass, trajectory, None, 0), trajectory)

    def score_group(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score the trajectories of one task together, as group leaves require."""
        group = self._by_node([self._drive(partial(self._compare, t), t) for t in trajectories])
        return [self._drive(partial(self._pass, t, group, i), t) for i, t in enumerate(trajectories)]

    async def ascore_group(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score the trajectories of one task concurrently; see `score_group` and `ascore`."""
        # First the compared values of all members: a group leaf needs the others' values to score any of them.
        group = self._by_node(await asyncio.gather(*(self._adrive(partial(self._compare, t), t) for t in trajectories)))
        scoring = (self._adrive(partial(self._pass, t, group, i), t) for i, t in enumerate(trajectories))
        return list(await asyncio.gather(*scoring))

    def _by_node(self, values: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
        return {node.pointer: [row[k] for row in values] for k, node in enumerate(self._groups)}

    def _compare(self, trajectory: Trajectory, answers: Answers) -> tuple[list[float | None], Frame]:
        """Compute the values that group leaves compare, for one member."""
        frame = Frame()
        if trajectory.stop.infrastructure:
            return [None] * len(self._groups), frame
        view = episode_view(trajectory, answers)
        return [node.of.evaluate(view, frame).value for node in self._groups], frame

    def _drive(self, work: Work[T], trajectory: Trajectory) -> T:
        """Repeat passes over the tree, with answers to the requests so far, until no request is pending.

        Leaves thus stay synchronous, and the requests of a pass are answered concurrently.
        """
        answers: Answers = {}
        for _ in range(_MAX_PASSES):
            result, frame = work(answers)
            if not frame.pending:
                return result
            answers |= self._assume(trajectory, frame) or {
                key: self._services[name].ask(key, request) for key, (name, request) in frame.pending.items()
            }
        raise RuntimeError(f"reward spec {self.name!r}: a leaf makes a new request on every pass")

    async def _adrive(self, work: Work[T], trajectory: Trajectory) -> T:
        calls = sum(len(turn.message.tool_calls) for turn in trajectory.turns)
        said = sum(len(message.content) for message in trajectory.messages)
        # Roughly the characters to compare; matching n calls takes as long as comparing 10 n^2.
        size = said + 10 * calls**2 + size_of(trajectory.state, _LONG_EPISODE)
        answers: Answers = {}
        for _ in range(_MAX_PASSES):
            found: tuple[T, Frame] | None = None
            if not self._blocking and size < _LONG_EPISODE:  # tried on the event loop, where a slow pattern raises TooLongError
                with contextlib.suppress(TooLongError):
                    found = at_once(work, answers)
            if found is None:
                async with SCORING.slot():
                    # Inside the slot: waiting for one does not count against the spec's timeout.
                    found = await within(self.timeout, SCORING.call(self.name, work, answers), f"reward spec {self.name}")
            result, frame = found
            if not frame.pending:
                return result
            if not (given := self._assume(trajectory, frame)):
                asked = (self._services[name].aask(key, request) for key, (name, request) in frame.pending.items())
                given = dict(zip(frame.pending, await asyncio.gather(*asked), strict=True))
            answers |= given
        raise RuntimeError(f"reward spec {self.name!r}: a leaf makes a new request on every pass")

    def _assume(self, trajectory: Trajectory, frame: Frame) -> Answers:
        """Return assumed answers to a pass's requests, or none if services are used."""
        if self._assumed is None:
            return {}
        best = self._assumed(trajectory)
        return {key: request.assumption(best) for key, (_, request) in frame.pending.items()}

    def _pass(self, trajectory: Trajectory, group: GroupValues | None, member: int, answers: Answers) -> tuple[Score, Frame]:
        # A new frame per pass: the last one's cached readings lack the new answers.
        frame = Frame(group=group, member=member)
        if trajectory.stop.infrastructure:
            why = f"infrastructure: {trajectory.stop.value}"
            return Score(None, evidence={"spec": self.name, "value": None, "unscored": why}, metrics={**self._unknown}), frame
        view = episode_view(trajectory, answers)
        result = self.root.evaluate(view, frame)
        measured = [node.evaluate(view, frame).evidence for node in self.metrics]
        evidence: dict[str, Json] = {"spec": self.name, "value": result.value, "root": result.evidence}
        trees, success = [result.evidence], None
        if self.rule is not None and self.success is not None:
            decided = result if self.success is self.root else self.success.evaluate(view, frame)
            # An unscored episode has no success, unless its reward is unscored only for lack of its group.
            alone = self.compares and frame.group is None
            if decided.value is not None and (result.value is not None or alone):
                success = decided.value >= TRUE
            evidence["success"] = {"by": self._by, "value": success}
            if not self.rule.derived:  # a derived rule's evidence is part of the root's
                evidence["success"]["node"] = decided.evidence
                trees.append(decided.evidence)
        if measured:
            evidence["metrics"] = measured
        found = {node["id"]: node["value"] for node in evidence_nodes([*trees, *measured]) if "id" in node}
        steps = dict(sorted(result.steps.items())) if result.value is not None else {}
        value = result.value
        if value is not None and trajectory.given:  # the policy gets no reward for given turns
            value = math.fsum([value, *(-amount for turn, amount in steps.items() if turn < trajectory.given)])
            steps = {turn: amount for turn, amount in steps.items() if turn >= trajectory.given}
            evidence["given"] = {"turns": trajectory.given, "value": value}
        return Score(value, steps, evidence, {**self._unknown, **found}, success), frame


# Token rewards


def token_rewards(trajectory: Trajectory, score: Score) -> list[npt.NDArray[np.float32]]:
    """Return a float32 array per ledger, of its length, with the emitted rewards (`reward_spots`), else 0."""
    columns = [np.zeros(len(ledger), dtype=np.float32) for ledger in trajectory.ledgers]
    for ledger, token, amount in reward_spots(trajectory, score.terminal, score.turns):
        columns[ledger][token] = amount
    return columns
