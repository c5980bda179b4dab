"""`math.equal`: mathematics compared by math-verify."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from decimal import Decimal
from typing import Any, ClassVar

from agentrl.executors import SCORING
from agentrl.reward.equality import equal, fault_of, places, require_math
from agentrl.reward.leaf import Args, Context, Leaf, Reading, UnscorableError, object_schema, or_ref
from agentrl.reward.leaves.text import WHERE, spoken, wanted_texts
from agentrl.reward.values import brief
from agentrl.reward.view import View
from agentrl.trajectory import Json

SECONDS = 5
_GOLD = {"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}, "minItems": 1}


class MathEqual(Leaf):
    """Whether the mathematics in the text equals the gold answer, however it is written: boxed, LaTeX, or plain."""

    kind: ClassVar[str] = "math.equal"
    formula: ClassVar[str] = (
        "1 if the answer, read as a whole, equals one of `expect` (numbers to 6 places, all else by math-verify) and is worked "
        "out (for a number no sum, no power, lowest terms), else 0; 0 too after `seconds` of processor time; null if `expect` is "
        "no mathematics as a whole"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "expect": or_ref(_GOLD),
            "where": WHERE,
            "boxed": {"type": "boolean", "description": "only an answer in a \\boxed{} counts"},
            "strict": {"type": "boolean", "description": "names of variables count: x + 1 is not y + 1 (default true)"},
            "seconds": {"type": "integer", "minimum": 1, "maximum": 60},
        },
        ("expect",),
    )
    example: ClassVar[dict[str, Any]] = {"expect": {"$": "/task/gold/answer"}}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        require_math()
        self.seconds = int(args.get("seconds", SECONDS))

    def blocks(self) -> bool:
        return True

    def longest(self) -> tuple[Hashable, float] | None:
        # Its turn comes when the others that are scored at the same time have had as long.
        return json.dumps([self.kind, dict(self.args)], sort_keys=True), self.seconds * SCORING.most / places()

    def gold_fault(self, args: Args) -> str | None:
        return fault_of(_gold(args["expect"]), self.seconds)

    def read(self, view: View, args: Args) -> Reading:
        wanted = _gold(args["expect"])
        text = spoken(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"expected": brief(wanted), "why": "no final answer"})
        found = equal(wanted, text, self.seconds, bool(args.get("strict", True)), bool(args.get("boxed")))
        evidence: dict[str, Json] = {"expected": brief(wanted), "expected_as": brief(list(found.wanted_as))}
        evidence |= {"said": brief(found.said), "said_as": found.said_as}
        return Reading(float(found.right), evidence if found.why is None else {**evidence, "why": found.why})


def _gold(value: Json) -> list[str]:
    """The gold answers as texts; numbers in full, since 1e+22 reads as 1 * e + 22. Raises UnscorableError as `wanted_texts`."""
    items = value if isinstance(value, (list, tuple)) else [value]
    whole = [format(Decimal(repr(item)), "f") if isinstance(item, float) and math.isfinite(item) else item for item in items]
    found = wanted_texts(whole)
    if not found:
        raise UnscorableError("there is no gold answer in the list")
    return found
