"""The compiled tree: nodes, combinators, and comparisons with the group."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl.data.trajectory import Json
from agentrl.reward.leaf import Leaf, PendingError, View, object_schema
from agentrl.reward.values import ABSENT, UnscorableError, brief, decider, plain_float, references
from agentrl.utils.errors import fault_text, is_alien

# Nodes

TRUE = 1.0 - 1e-9
"""Lowest value that counts as 1 for `all`, `any` and success, so that 1/3 + 1/3 + 1/3 does."""


@dataclass(slots=True)
class Frame:
    """State of one pass over the tree: `pending` requests (key -> service name, request), the group's values by node, and a cache
    of leaf results, since the tree of success repeats leaves of the root."""

    pending: dict[str, tuple[str, Any]] = field(default_factory=dict)
    group: Mapping[str, Sequence[float | None]] | None = None
    member: int = 0
    readings: dict[Hashable, Result] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """A node's result for a view. `value` None: could not score. `skipped`: excluded from its parent's aggregate.
    `steps`: turn index -> the part of the value emitted at that turn; the rest is emitted at the end."""

    value: float | None
    evidence: dict[str, Json]
    steps: dict[int, float] = field(default_factory=dict)
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Mods:
    """Modifiers of a node, common to all kinds."""

    id: str | None = None
    weight: float = 1.0
    scale: tuple[float, float] | None = None
    clip: tuple[float, float] | None = None
    missing: str | int = "invalid"
    scope: str | None = None
    reduce: str = "mean"
    emit: str = "terminal"
    when: Mapping[str, Json] | None = None


class Node(ABC):
    """A node of a compiled spec, with its `children` in order."""

    label: str

    def __init__(self, pointer: str, mods: Mods, children: Sequence[Node] = ()) -> None:
        self.pointer = pointer
        self.mods = mods
        self.children = children
        self._decide = None if mods.when is None else decider(mods.when)
        self._marks: dict[str, Json] = {} if mods.id is None else {"id": mods.id}
        if mods.weight != 1.0:
            self._marks["weight"] = mods.weight

    @abstractmethod
    def inner(self, view: View, frame: Frame) -> Result:
        """Compute the value before modifiers."""

    def raw_range(self) -> tuple[float, float]:
        """Return bounds of the value before modifiers."""
        return 0.0, 1.0

    def evaluate(self, view: View, frame: Frame) -> Result:
        """Evaluate the node for a view; with a narrower scope for each of its parts, reduced to one value."""
        if self.mods.scope is None or self.mods.scope == view.scope or self.mods.scope == "group":
            return self._evaluate_part(view, frame)
        parts = view.parts(self.mods.scope)
        return self._reduce(parts, [self._evaluate_part(part, frame) for part in parts])

    def range(self) -> tuple[float, float]:
        """Return bounds of the node's value, including modifiers and scope."""
        given = [self._scale_and_clip(float(self.mods.missing))] if self.mods.missing in (0, 1) else []
        ends = [*(self._scale_and_clip(value) for value in self.raw_range()), *given]
        low, high = min(ends), max(ends)
        if self.mods.scope in ("round", "turn", "call"):
            if self.mods.reduce == "sum":
                low, high = -math.inf if low < 0 else low, math.inf if high > 0 else high
            elif self.mods.reduce == "all":
                low, high = min([0.0, *given]), max([1.0, *given])
        return low, high

    def _scale_and_clip(self, value: float) -> float:
        if self.mods.scale is not None:
            low, high = self.mods.scale
            value = low + (value * (high - low) if high != low else 0.0)  # an infinite bound times 0 would be NaN
        if self.mods.clip is not None:
            value = min(max(value, self.mods.clip[0]), self.mods.clip[1])
        return value

    def _evaluate_part(self, view: View, frame: Frame) -> Result:
        if self._decide is not None and self.mods.when is not None:
            decided = self._decide(view.value_at)
            if decided is None:
                absent = [ref for _, ref in references(self.mods.when) if view.value_at(ref) is ABSENT]
                pointers = " and ".join(dict.fromkeys(str(ref["$"]) for ref in absent))
                return self._finish(Result(None, {"unscored": f"`when` reads {pointers}, which does not exist"}))
            if not decided:
                return Result(None, self._header({"skipped": "when"}, None), skipped=True)
        return self._finish(self.inner(view, frame))

    def _finish(self, result: Result) -> Result:
        """Apply `missing`, then `scale`, then `clip`."""
        raw = result.value
        if raw is not None and not math.isfinite(raw):
            raw, result.evidence = None, {**result.evidence, "unscored": f"not a finite number: {raw!r}"}
        if raw is None:
            result.steps = {}  # a substituted value belongs to no turn
            if self.mods.missing == "skip":
                return Result(None, self._header({**result.evidence, "skipped": "missing"}, None), skipped=True)
            if self.mods.missing == "invalid":
                return Result(None, self._header(result.evidence, None))
            raw = float(self.mods.missing)
            result.evidence = {**result.evidence, "missing": raw}
        value = self._scale_and_clip(raw)
        if not math.isfinite(value):
            return Result(None, self._header({**result.evidence, "unscored": "the value is beyond all bounds"}, None))
        steps = result.steps
        if steps and self.mods.scale is not None:
            span = self.mods.scale[1] - self.mods.scale[0]
            steps = {turn: amount * span for turn, amount in steps.items()}
        evidence = result.evidence if value == raw else {"raw": raw, **result.evidence}
        return Result(value, self._header(evidence, value), steps)

    def _header(self, evidence: Mapping[str, Json], value: float | None) -> dict[str, Json]:
        return {"node": self.label, "at": self.pointer, "value": value, **self._marks, **evidence}

    def _reduce(self, parts: Sequence[View], results: Sequence[Result]) -> Result:
        evidence = {"scope": self.mods.scope, "reduce": self.mods.reduce, "parts": [r.evidence for r in results]}
        kept = [(part, r.value) for part, r in zip(parts, results, strict=True) if not r.skipped]
        values = [value for _, value in kept if value is not None]
        if len(values) < len(kept):
            return Result(None, self._header({**evidence, "unscored": "a part could not be scored"}, None))
        if results and not kept and self.mods.missing == "invalid":
            # All parts were skipped, so the node is skipped and does not affect its siblings.
            return Result(None, self._header({**evidence, "skipped": f"every {self.mods.scope}"}, None), skipped=True)
        if not values:
            evidence["unscored"] = f"no {self.mods.scope} to score"
            return self._finish(Result(None, evidence))
        # The reduced value, and each part's share of it; the shares add up to the value.
        how, place = self.mods.reduce, len(values) - 1
        if how in ("sum", "mean"):
            size = len(values) if how == "mean" else 1
            shares = [value / size for value in values]
            value = total(shares)
        elif how == "all":  # failure emits 0, and success is only known at the last part
            value = float(all(value >= TRUE for value in values))
            shares = [0.0] * place + [value]
        else:
            place = place if how == "last" else min(range(len(values)), key=lambda i: values[i])
            value, shares = values[place], [value if i == place else 0.0 for i, value in enumerate(values)]
        if not math.isfinite(value):
            return Result(None, self._header({**evidence, "unscored": "the value is beyond all bounds"}, None))
        steps: dict[int, float] = {}
        if self.mods.emit == "step":
            for (part, _), share in zip(kept, shares, strict=True):
                turn = part.last_turn
                if share != 0.0 and turn is not None:
                    steps[turn] = steps.get(turn, 0.0) + share
        return Result(value, self._header(evidence, value), steps)


def walk(node: Node) -> list[Node]:
    """List the node and all nodes below it, parents first."""
    return [node, *(below for child in node.children for below in walk(child))]


def total(values: Sequence[float]) -> float:
    """Return the exact sum, rounded once; infinity beyond the range of a float."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


class LeafNode(Node):
    """A leaf node. `readers` resolve the arguments that contain references, for each view."""

    def __init__(self, pointer: str, mods: Mods, leaf: Leaf, readers: Mapping[str, Callable[[View], Json]]) -> None:
        super().__init__(pointer, mods)
        self.leaf = leaf
        self.label = leaf.kind
        self._readers = readers
        self.key = json.dumps([leaf.kind, leaf.args], sort_keys=True)

    def inner(self, view: View, frame: Frame) -> Result:
        place = (self.key, *view.place)
        kept = frame.readings.get(place)
        if kept is None:
            try:
                value, evidence, turns = self.leaf.read(view, self.args_for(view))
                if not type(self.leaf).__module__.startswith("agentrl."):  # a plug-in may return numpy numbers
                    if value is not None and not -1e-9 <= (number := plain_float(value)) <= 1.0 + 1e-9:
                        raise UnscorableError(f"not a finite number in [0, 1]: {value!r:.80}")
                    value, evidence = None if value is None else number, brief(evidence)
                    turns = {turn: plain_float(share) for turn, share in (turns or {}).items()}
                kept = Result(value, {"evidence": evidence}, dict(turns or {}))
            except UnscorableError as error:
                kept = Result(None, {"unscored": str(error)})
            except PendingError as error:
                frame.pending[error.key] = str(self.leaf.asks), error.request
                kept = Result(None, {"unscored": "waits for an answer"})
            except BaseException as error:
                if type(self.leaf).__module__.startswith("agentrl.") or not is_alien(error):
                    raise
                # A plug-in's code may raise anything.
                kept = Result(None, {"unscored": f"{self.label} raised {fault_text(error)}"})
            frame.readings[place] = kept
        # A copy, since the node modifies its result; a node with a scope emits its parts' values instead.
        steps = dict(kept.steps) if self.mods.emit == "step" and self.mods.scope is None else {}
        return Result(kept.value, kept.evidence, steps, kept.skipped)

    def args_for(self, view: View) -> Mapping[str, Any]:
        """Resolve the references in the leaf's arguments. Raises UnscorableError if one resolves to nothing."""
        args = self.leaf.args
        # Most leaves have no references, so their arguments are not copied for each part.
        return {**args, **{key: read(view) for key, read in self._readers.items()}} if self._readers else args


class ConstantNode(Node):
    """A number as a branch of a gate."""

    label = "constant"

    def __init__(self, pointer: str, value: float) -> None:
        super().__init__(pointer, Mods())
        self.value = value

    def raw_range(self) -> tuple[float, float]:
        return self.value, self.value

    def inner(self, view: View, frame: Frame) -> Result:
        return Result(self.value, {})


# Combinators: sum, mean, product, min, max, all, any, and the gate.
#
# An aggregate has no value if any of its children could not be scored. Skipped children (`when` is false, or
# `missing: skip`) are left out; if none is left, it has no value.

Weighted = Sequence[tuple[float, float]]


def _sum(parts: Weighted) -> float:
    return total([weight * value for weight, value in parts])


def _mean(parts: Weighted) -> float | None:
    weights = total([weight for weight, _ in parts])
    return _sum(parts) / weights if weights > 0 else None


AGGREGATES: Mapping[str, Callable[[Weighted], float | None]] = {
    "sum": _sum,
    "mean": _mean,
    "product": lambda parts: math.prod(value for _, value in parts),
    "min": lambda parts: min(value for _, value in parts),
    "max": lambda parts: max(value for _, value in parts),
    "all": lambda parts: float(all(value >= TRUE for _, value in parts)),
    "any": lambda parts: float(any(value >= TRUE for _, value in parts)),
}
LINEAR = frozenset({"sum", "mean"})
"""Combinators that use weights and pass on the emissions of steps."""


class OpNode(Node):
    """A combinator: an aggregate of its children."""

    def __init__(self, pointer: str, mods: Mods, op: str, of: list[Node]) -> None:
        super().__init__(pointer, mods, of)
        self.label = op

    def raw_range(self) -> tuple[float, float]:
        skips = [child.mods.when is not None or child.mods.missing == "skip" for child in self.children]
        bounds = [(child.mods.weight, *child.range(), skip) for child, skip in zip(self.children, skips, strict=True)]
        if self.label in ("all", "any"):
            return 0.0, 1.0
        if self.label == "sum":
            ends = [(_multiply(w, low), _multiply(w, high), skip) for w, low, high, skip in bounds]
            lows = [min(a, b, 0.0) if skip else min(a, b) for a, b, skip in ends]
            highs = [max(a, b, 0.0) if skip else max(a, b) for a, b, skip in ends]
            return sum(lows), sum(highs)
        if self.label == "product":
            least, most = 1.0, 1.0
            for _, low, high, skip in bounds:
                ends_of = [_multiply(x, y) for x in (least, most) for y in (low, high)] + ([least, most] if skip else [])
                least, most = min(ends_of), max(ends_of)
            return least, most
        if self.label == "mean":
            lowest = -_highest_mean([(w, -low, skip) for w, low, _, skip in bounds])
            return lowest, _highest_mean([(w, high, skip) for w, _, high, skip in bounds])
        # The minimum is at most the smallest upper bound of the children that are never skipped; the maximum likewise.
        lows, highs = [low for _, low, _, _ in bounds], [high for _, _, high, _ in bounds]
        if self.label == "min":
            return min(lows), min((high for _, _, high, skip in bounds if not skip), default=max(highs))
        return max((low for _, low, _, skip in bounds if not skip), default=min(lows)), max(highs)

    def inner(self, view: View, frame: Frame) -> Result:
        results = [child.evaluate(view, frame) for child in self.children]
        evidence: dict[str, Json] = {"of": [result.evidence for result in results]}
        kept = [(child.mods.weight, r) for child, r in zip(self.children, results, strict=True) if not r.skipped]
        parts = [(weight, r.value) for weight, r in kept if r.value is not None]
        if len(parts) < len(kept):
            return Result(None, {"unscored": "a part could not be scored", **evidence})
        if not parts:
            return Result(None, {"unscored": "every part was skipped", **evidence})
        value = AGGREGATES[self.label](parts)
        if value is None:
            return Result(None, {"unscored": "the weights of the remaining parts add up to 0", **evidence})
        # The children's emissions are weighted like their values.
        whole = 1.0 if self.label == "sum" else math.fsum(weight for weight, _ in kept)
        steps: dict[int, float] = {}
        for weight, result in kept:
            for turn, amount in result.steps.items():
                steps[turn] = steps.get(turn, 0.0) + weight / whole * amount
        return Result(value, evidence, steps)


class GateNode(Node):
    """A gate: `then` if the value of `if` reaches `gte`, else `else`. Only the branch taken is evaluated."""

    label = "gate"

    def __init__(self, pointer: str, mods: Mods, gte: float, branches: tuple[Node, Node, Node]) -> None:
        super().__init__(pointer, mods, branches)
        self.gte = gte
        self.test, self.then, self.otherwise = branches

    def raw_range(self) -> tuple[float, float]:
        (a, b), (c, d) = self.then.range(), self.otherwise.range()
        return min(a, c), max(b, d)

    def inner(self, view: View, frame: Frame) -> Result:
        test = self.test.evaluate(view, frame)
        evidence: dict[str, Json] = {"gte": self.gte, "if": test.evidence}
        if test.value is None:
            return Result(None, {"unscored": "the condition could not be scored", **evidence})
        opened = test.value >= self.gte - 1e-9
        taken = (self.then if opened else self.otherwise).evaluate(view, frame)
        evidence["then" if opened else "else"] = taken.evidence
        if taken.value is None:
            return Result(None, {"unscored": "the branch taken could not be scored", **evidence})
        return Result(taken.value, evidence, taken.steps)


def _highest_mean(bounds: Sequence[tuple[float, float, bool]]) -> float:
    """Return the highest weighted mean for `bounds` of (weight, highest value, may be skipped): all that are never skipped, and
    from the highest down, those of the others that raise the mean."""
    kept = [(weight, high) for weight, high, skip in bounds if not skip and weight > 0]
    best = _mean(kept) if kept else None
    for weight, high in sorted(((weight, high) for weight, high, skip in bounds if skip and weight > 0), key=lambda one: -one[1]):
        if best is None or high > best:
            kept.append((weight, high))
            best = _mean(kept)
    return best if best is not None else max(high for _, high, _ in bounds)


def _multiply(weight: float, value: float) -> float:
    # Bounds may be infinite, and 0 * inf is NaN.
    return 0.0 if weight == 0.0 or value == 0.0 else weight * value


# Comparisons with the group


class GroupNode(Node):
    """Base class of leaves that compare the value of `of` within the group.

    Members that could not be scored are left out. Without a group there is no value.
    """

    kind: ClassVar[str]
    formula: ClassVar[str]
    schema: ClassVar[dict[str, Any]]
    example: ClassVar[dict[str, Any]]

    def __init__(self, pointer: str, mods: Mods, of: Node, args: Mapping[str, Any]) -> None:
        super().__init__(pointer, mods, [of])
        self.label = self.kind
        self.of = of
        self.args = args

    def inner(self, view: View, frame: Frame) -> Result:
        result = self.of.evaluate(view, frame)
        evidence: dict[str, Json] = {"of": result.evidence}
        if frame.group is None:
            return Result(None, {"unscored": "scored alone, without its group", **evidence})
        values = frame.group.get(self.pointer, ())
        own = values[frame.member] if frame.member < len(values) else None
        if own is None:
            return Result(None, {"unscored": "the compared value could not be scored", **evidence})
        others = [v for i, v in enumerate(values) if v is not None and i != frame.member]
        if not others:
            return Result(None, {"unscored": "no other member could be scored", **evidence})
        return Result(self.compare(own, others), {**evidence, "members": len(others) + 1})

    @abstractmethod
    def compare(self, own: float, others: Sequence[float]) -> float:
        """Return a value in [0, 1] from a member's value and those of one or more others."""


class GroupRank(GroupNode):
    """Share of the other members with a lower value; a tie counts half."""

    kind: ClassVar[str] = "group.rank"
    formula: ClassVar[str] = "(members below + ties / 2) / (scored members - 1)"
    schema: ClassVar[dict[str, Any]] = object_schema({"of": {"$ref": "#/$defs/node"}}, ("of",))
    example: ClassVar[dict[str, Any]] = {"of": {"use": "cost.turns", "args": {"max": 10}}}

    def compare(self, own: float, others: Sequence[float]) -> float:
        ties = sum(1 for value in others if abs(value - own) < 1e-9)  # also values that differ by a rounding error
        return (sum(1 for value in others if value <= own - 1e-9) + ties / 2) / len(others)


class GroupZscore(GroupNode):
    """Standard score within the group, clipped at +-bound and mapped to [0, 1]."""

    kind: ClassVar[str] = "group.zscore"
    formula: ClassVar[str] = (
        "(max(-b, min(b, z)) + b) / (2 b), z = (x - mean) / std over the scored members (unbiased std; "
        "z = 0 if it is 0); scale [-b, b] gives z back"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {"of": {"$ref": "#/$defs/node"}, "bound": {"type": "number", "exclusiveMinimum": 0}}, ("of",)
    )
    example: ClassVar[dict[str, Any]] = {"of": {"use": "cost.turns", "args": {"max": 10}}, "bound": 3}

    def compare(self, own: float, others: Sequence[float]) -> float:
        values = [own, *others]
        # fsum, since members add the values in different orders, and a plain sum would give each a slightly different mean.
        mean = math.fsum(values) / len(values)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
        bound = float(self.args.get("bound", 3.0))
        # Not > 0: the mean of equal values may have a rounding error, which the division would amplify.
        z = (own - mean) / deviation if deviation > 1e-12 else 0.0
        return (max(-bound, min(bound, z)) + bound) / (2 * bound)


GROUP_LEAVES: Mapping[str, type[GroupNode]] = {leaf.kind: leaf for leaf in (GroupRank, GroupZscore)}
