"""Combinators: sum, mean, product, min, max, all, any, and the gate.

An aggregate has no value if one of its children could not be scored, regardless of the others; skipped children
(`when` is false, or `missing: skip`) are left out; without any children left it has no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from agentrl.reward.node import TRUE, Frame, Mods, Node, Result, total
from agentrl.reward.pointer import Absent
from agentrl.reward.view import View
from agentrl.trajectory import Json

ReadRef = Callable[[View, Mapping[str, Json]], "Json | Absent"]
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
"""Combinators that use weights and preserve the share of each step's emission."""


class OpNode(Node):
    """An aggregate of its children."""

    def __init__(self, pointer: str, mods: Mods, read_ref: ReadRef, op: str, of: list[Node]) -> None:
        super().__init__(pointer, mods, read_ref)
        self.label = op
        self.of = of

    def children(self) -> list[Node]:
        return self.of

    def raw_range(self) -> tuple[float, float]:
        bounds = [(child.mods.weight, *child.range(), _may_skip(child)) for child in self.of]
        if self.label in ("all", "any"):
            return 0.0, 1.0
        if self.label == "sum":
            ends = [(_times(w, low), _times(w, high), skip) for w, low, high, skip in bounds]
            lows = [min(a, b, 0.0) if skip else min(a, b) for a, b, skip in ends]
            highs = [max(a, b, 0.0) if skip else max(a, b) for a, b, skip in ends]
            return sum(lows), sum(highs)
        if self.label == "product":
            return _product_range([(low, high, skip) for _, low, high, skip in bounds])
        if self.label == "mean":
            return -_highest_mean([(w, -low, skip) for w, low, _, skip in bounds]), _highest_mean(
                [(w, h, s) for w, _, h, s in bounds]
            )
        # The least of all is at most the least of the highs, of those that are always there; the greatest likewise.
        lows, highs = [low for _, low, _, _ in bounds], [high for _, _, high, _ in bounds]
        if self.label == "min":
            return min(lows), min((high for _, _, high, skip in bounds if not skip), default=max(highs))
        return max((low for _, low, _, skip in bounds if not skip), default=min(lows)), max(highs)

    def inner(self, view: View, frame: Frame) -> Result:
        results = [child.evaluate(view, frame) for child in self.of]
        evidence: dict[str, Json] = {"of": [result.evidence for result in results]}
        kept = [(child.mods.weight, r) for child, r in zip(self.of, results, strict=True) if not r.skipped]
        parts = [(weight, r.value) for weight, r in kept if r.value is not None]
        if len(parts) < len(kept):
            return Result(None, {"unscored": "a part could not be scored", **evidence})
        if not parts:
            return Result(None, {"unscored": "every part was skipped", **evidence})
        value = AGGREGATES[self.label](parts)
        if value is None:
            return Result(None, {"unscored": "the weights of the remaining parts add up to 0", **evidence})
        return Result(value, evidence, self._steps([(weight, r) for weight, r in kept]))

    def _steps(self, kept: Sequence[tuple[float, Result]]) -> dict[int, float]:
        """The children's emissions, weighted like their values."""
        if not any(result.steps for _, result in kept):
            return {}
        whole = 1.0 if self.label == "sum" else math.fsum(weight for weight, _ in kept)
        steps: dict[int, float] = {}
        for weight, result in kept:
            for turn, amount in result.steps.items():
                steps[turn] = steps.get(turn, 0.0) + weight / whole * amount
        return steps


class GateNode(Node):
    """`then` if the value of `if` reaches `gte`, otherwise `else`. Only the branch taken is evaluated."""

    label = "gate"

    def __init__(self, pointer: str, mods: Mods, read_ref: ReadRef, gte: float, branches: tuple[Node, Node, Node]) -> None:
        super().__init__(pointer, mods, read_ref)
        self.gte = gte
        self.test, self.then, self.otherwise = branches

    def children(self) -> list[Node]:
        return [self.test, self.then, self.otherwise]

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


def _may_skip(node: Node) -> bool:
    return node.mods.when is not None or node.mods.missing == "skip"


def _highest_mean(bounds: Sequence[tuple[float, float, bool]]) -> float:
    """The highest weighted mean of values [(weight, highest value, whether it may be skipped)]: with what is always there and of
    the others, from the highest down, those that raise it."""
    kept = [(weight, high) for weight, high, skip in bounds if not skip and weight > 0]
    best = _mean(kept) if kept else None
    for weight, high in sorted(((weight, high) for weight, high, skip in bounds if skip and weight > 0), key=lambda one: -one[1]):
        if best is None or high > best:
            kept.append((weight, high))
            best = _mean(kept)
    return best if best is not None else max(high for _, high, _ in bounds)


def _times(weight: float, value: float) -> float:
    # Bounds may be infinite, and 0 * inf would be nan.
    return 0.0 if weight == 0.0 or value == 0.0 else weight * value


def _product_range(bounds: Sequence[tuple[float, float, bool]]) -> tuple[float, float]:
    low, high = 1.0, 1.0
    for a, b, skip in bounds:
        ends = [_times(x, y) for x in (low, high) for y in (a, b)] + ([low, high] if skip else [])
        low, high = min(ends), max(ends)
    return low, high
