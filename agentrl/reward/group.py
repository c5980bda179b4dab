"""`group.rank` and `group.zscore`: an episode relative to the other episodes of its task."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from agentrl.reward.leaf import object_schema
from agentrl.reward.node import Frame, Mods, Node, Result
from agentrl.reward.pointer import Absent
from agentrl.reward.view import View
from agentrl.trajectory import Json

ReadRef = Callable[[View, Mapping[str, Json]], "Json | Absent"]


class GroupNode(Node):
    """Compares the value of the node `of` with that of the other members of the group.

    Members that could not be scored are left out. Without a group there is nothing to compare, hence no value.
    """

    kind: ClassVar[str]
    formula: ClassVar[str]
    schema: ClassVar[dict[str, Any]]
    example: ClassVar[dict[str, Any]]

    def __init__(self, pointer: str, mods: Mods, read_ref: ReadRef, of: Node, args: Mapping[str, Any]) -> None:
        super().__init__(pointer, mods, read_ref)
        self.label = self.kind
        self.of = of
        self.args = args

    def children(self) -> list[Node]:
        return [self.of]

    def raw_range(self) -> tuple[float, float]:
        return 0.0, 1.0

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
        """A value in [0, 1] from the member's own value and the other members' values (at least one)."""


class GroupRank(GroupNode):
    """Share of the other members with a lower value; a tie counts half."""

    kind: ClassVar[str] = "group.rank"
    formula: ClassVar[str] = "(members below + ties / 2) / (scored members - 1)"
    schema: ClassVar[dict[str, Any]] = object_schema({"of": {"$ref": "#/$defs/node"}}, ("of",))
    example: ClassVar[dict[str, Any]] = {"of": {"use": "cost.turns", "args": {"max": 10}}}

    def compare(self, own: float, others: Sequence[float]) -> float:
        below = sum(1 for value in others if value < own)
        ties = sum(1 for value in others if value == own)
        return (below + ties / 2) / len(others)


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
        # fsum, because members see the values in different orders: a plain sum would give each a slightly different mean.
        mean = math.fsum(values) / len(values)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
        bound = float(self.args.get("bound", 3.0))
        # Not > 0: the mean of equal values may be off by a rounding error, which the division would blow up.
        z = (own - mean) / deviation if deviation > 1e-12 else 0.0
        return (max(-bound, min(bound, z)) + bound) / (2 * bound)


GROUP_LEAVES: Mapping[str, type[GroupNode]] = {leaf.kind: leaf for leaf in (GroupRank, GroupZscore)}
