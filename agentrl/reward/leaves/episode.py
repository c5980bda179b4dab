"""`episode.stopped` and `cost.*`: how an episode ended and what it used."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl.reward.leaf import Args, Context, Leaf, Reading, object_schema
from agentrl.reward.view import View
from agentrl.trajectory import StopReason

# The others are unscored before any leaf is read, so that a spec that names one would wait for it in vain.
POLICY_STOPS = tuple(reason.value for reason in StopReason if not reason.infrastructure)


class EpisodeStopped(Leaf):
    """Whether the episode ended for one of the given reasons."""

    kind: ClassVar[str] = "episode.stopped"
    formula: ClassVar[str] = "1 if the stop reason is among `reasons` (default: done), else 0"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {"reasons": {"type": "array", "items": {"enum": list(POLICY_STOPS)}, "minItems": 1}}
    )
    example: ClassVar[dict[str, Any]] = {"reasons": ["done"]}
    scopes: ClassVar[tuple[str, ...]] = ("episode",)

    def read(self, view: View, args: Args) -> Reading:
        stop = view.trajectory.stop.value
        return Reading(float(stop in args.get("reasons", ["done"])), {"stop": stop})


class _Cost(Leaf):
    """Share of a budget that was used: 0 up to `free`, 1 from `max` on, linear in between."""

    formula: ClassVar[str] = "min(1, max(0, (used - free) / (max - free)))"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {"max": {"type": "number", "exclusiveMinimum": 0}, "free": {"type": "number", "minimum": 0}}, ("max",)
    )
    example: ClassVar[dict[str, Any]] = {"max": 10, "free": 2}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        if args.get("free", 0) >= args["max"]:
            raise ValueError(f"free ({args['free']}) must be below max ({args['max']})")

    def read(self, view: View, args: Args) -> Reading:
        used, free = self.used(view, args), float(args.get("free", 0.0))
        share = (used - free) / (float(args["max"]) - free)
        return Reading(min(1.0, max(0.0, share)), {"used": used, "free": free, "max": args["max"]})

    def used(self, view: View, args: Args) -> float:
        raise NotImplementedError


class CostTurns(_Cost):
    """Policy turns."""

    kind: ClassVar[str] = "cost.turns"

    def used(self, view: View, args: Args) -> float:
        return float(len(view.turns))


class CostCalls(_Cost):
    """Tool calls."""

    kind: ClassVar[str] = "cost.calls"

    def used(self, view: View, args: Args) -> float:
        return float(len(view.calls))


class CostTokens(_Cost):
    """Sampled tokens."""

    kind: ClassVar[str] = "cost.tokens"

    def used(self, view: View, args: Args) -> float:
        return float(sum(turn.sampled_tokens for turn in view.turns))


class CostSeconds(_Cost):
    """Seconds of the turns' tool calls; not of sampling, which depend on the machine."""

    kind: ClassVar[str] = "cost.seconds"

    def used(self, view: View, args: Args) -> float:
        return float(sum(result.seconds for turn in view.turns for result in turn.results))


class CostUsd(_Cost):
    """Cost in USD at prices per million prompt and sampled tokens."""

    kind: ClassVar[str] = "cost.usd"
    formula: ClassVar[str] = (
        "as the other costs, used = (prompt tokens * per_million_prompt + sampled tokens * per_million_sampled) / 1e6"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "max": {"type": "number", "exclusiveMinimum": 0},
            "free": {"type": "number", "minimum": 0},
            "per_million_prompt": {"type": "number", "minimum": 0},
            "per_million_sampled": {"type": "number", "minimum": 0},
        },
        ("max", "per_million_prompt", "per_million_sampled"),
    )
    example: ClassVar[dict[str, Any]] = {"max": 0.05, "per_million_prompt": 0.4, "per_million_sampled": 1.6}

    def used(self, view: View, args: Args) -> float:
        prompt = sum(turn.prompt_tokens for turn in view.turns)
        sampled = sum(turn.sampled_tokens for turn in view.turns)
        return float(prompt * args["per_million_prompt"] + sampled * args["per_million_sampled"]) / 1e6
