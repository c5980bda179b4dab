"""`results.contains`: what the tools answered."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl.reward.leaf import Args, Leaf, Reading, object_schema, or_ref
from agentrl.reward.leaves.text import contained, wanted_texts
from agentrl.reward.values import NORMALIZERS
from agentrl.reward.view import View


class ResultsContains(Leaf):
    """Whether the tools' answers hold what was expected."""

    kind: ClassVar[str] = "results.contains"
    formula: ClassVar[str] = "as text.contains, over the answers of the calls made (errors left out)"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "expect": or_ref(
                {"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}}
            ),
            "mode": {"enum": ["all", "any"]},
            "credit": {"enum": ["all", "partial"]},
            "strings": {"enum": list(NORMALIZERS)},
            "word": {"type": "boolean"},
        },
        ("expect",),
    )
    example: ClassVar[dict[str, Any]] = {"expect": "booking confirmed", "strings": "fold"}

    def read(self, view: View, args: Args) -> Reading:
        answers = [
            made.result.content
            for made in view.calls
            if made.result is not None and made.result.error is None
        ]
        return contained(answers, wanted_texts(args["expect"]), args)
