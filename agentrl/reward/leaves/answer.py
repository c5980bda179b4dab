"""Leaves that score the policy's text, the episode's end and cost, and Python functions."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any, ClassVar

from agentrl.data.trajectory import Json, StopReason
from agentrl.reward.leaf import LEAVES, Args, Context, Leaf, Reading, View, object_schema, or_ref
from agentrl.reward.values import NORMALIZERS, UnscorableError, as_number, brief, plain_float
from agentrl.reward.values import show_number as shown
from agentrl.utils.errors import did_you_mean, is_from_outside, place_of, raised_text
from agentrl.utils.parsing import deep_copy_json, is_letter, numeral, numerals
from agentrl.utils.schemas import TextTooLongError, compile_pattern, within_seconds
from agentrl.utils.search_path import PREFIX, is_given

WHERE = {"enum": ["answer", "replies", "all", "reasoning"]}
_TEXTS = or_ref({"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}})
_STRINGS = {"enum": list(NORMALIZERS)}


def spoken_text(view: View, where: str) -> str | None:
    """Return the text that a leaf reads: the final answer, the turns without a call, all text, or all reasoning.

    None if there is no final answer (the last turn makes a call, or there is no turn).
    """
    if where == "answer":
        return view.answer()
    if where == "replies":
        return "\n".join(turn.message.content for turn in view.turns if not turn.message.tool_calls)
    if where == "all":
        return "\n".join(turn.message.content for turn in view.turns)
    return "\n".join(turn.message.reasoning or "" for turn in view.turns)


def wanted_texts(value: Json) -> list[str]:
    """Convert a string or number, or a list of them, to strings. Raises UnscorableError for another shape."""
    items = value if isinstance(value, (list, tuple)) else [value]
    # Booleans are refused, since they would be searched for as Python's "True" and "False".
    if not all(isinstance(item, str) or as_number(item) is not None for item in items):
        raise UnscorableError(f"expected text must be a string or a list of strings, not {brief(value, 80)!r}")
    # 3.0 becomes "3" (tables with missing values store integers as floats), and 1e-05 "0.00001".
    return [item if isinstance(item, str) else shown(as_number(item) or Fraction(0)) for item in items]


@LEAVES.register("text.contains")
class TextContains(Leaf):
    """Score the expected texts by their occurrence in the text."""

    formula: ClassVar[str] = "share of the expected texts that occur (credit=partial), or 1 if all / any do (mode)"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "expect": _TEXTS,
            "where": WHERE,
            "mode": {"enum": ["all", "any"]},
            "credit": {"enum": ["all", "partial"]},
            "strings": _STRINGS,
            "word": {"type": "boolean"},
        },
        ("expect",),
    )
    example: ClassVar[dict[str, Any]] = {"expect": {"$": "/task/gold/outputs"}, "strings": "fold"}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        if args.get("credit") == "partial" and args.get("mode") == "any":
            raise ValueError("credit: partial counts all expected texts, so it cannot be used with mode: any")

    def read(self, view: View, args: Args) -> Reading:
        wanted = wanted_texts(args["expect"])
        text = spoken_text(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"text": None, "expected": brief(wanted), "why": "no final answer"})
        found = texts_found([text], wanted, args)
        return Reading(found.value, {"text": brief(text), **found.evidence})


def texts_found(texts: Sequence[str], wanted: Sequence[str], args: Args) -> Reading:
    """Score the wanted texts by their occurrence in any of `texts`.

    Raises UnscorableError if a wanted text is empty, or without any if `mode` is any; with mode all the value is then 1.
    """
    fold = NORMALIZERS[args.get("strings", "exact")]
    if not all(map(str.strip, map(fold, wanted))):
        raise UnscorableError("empty expected text")
    folded = [fold(text) for text in texts]
    said = list(chain.from_iterable(map(numerals, texts))) if args.get("word") else []
    found = []
    for item in wanted:
        number = numeral(item) if args.get("word") else None
        if number is None:
            # Searched in each text separately: a match must not span two texts.
            found.append(any(_occurs(fold(item), text, bool(args.get("word"))) for text in folded))
        elif number.text[:1] == "0" and number.text[1:2].isdigit():  # a postcode, not a quantity
            found.append(any(other.text == number.text for other in said))
        else:
            found.append(any(other.value == number.value and other.percent >= number.percent for other in said))
    missing = [brief(item) for item, hit in zip(wanted, found, strict=True) if not hit]
    if args.get("mode", "all") == "any":
        if not wanted:
            raise UnscorableError("mode: any needs at least one expected text")
        value = float(any(found))
    elif args.get("credit") == "partial":
        value = sum(found) / len(found) if found else 1.0
    else:
        value = float(all(found))
    return Reading(value, {"expected": brief(wanted), "missing": missing})


def _occurs(item: str, text: str, word: bool) -> bool:
    start = text.find(item)
    if not word or not item:
        return start >= 0
    while start >= 0:
        end = start + len(item)
        joined = (is_letter(item[0]) and is_letter(text[start - 1 : start])) or is_letter(text[end : end + 1])
        joined |= item[-1].isdigit() and re.match(r"[.,:/][0-9]", text[end:]) is not None  # 5 is not in 5.5
        joined |= item[0].isdigit() and re.search(r"[0-9][.,:/]$", text[:start]) is not None
        if not joined:
            return True
        start = text.find(item, start + 1)
    return False


@LEAVES.register("text.equals")
class TextEquals(Leaf):
    """Score 1 if the whole text equals one of the expected texts."""

    formula: ClassVar[str] = "1 if the text equals one of the expected texts after normalization, else 0"
    schema: ClassVar[dict[str, Any]] = object_schema({"expect": _TEXTS, "where": WHERE, "strings": _STRINGS}, ("expect",))
    example: ClassVar[dict[str, Any]] = {"expect": {"$": "/task/gold/answer"}, "strings": "fold"}

    def read(self, view: View, args: Args) -> Reading:
        wanted = wanted_texts(args["expect"])
        text = spoken_text(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"text": None, "expected": brief(wanted), "why": "no final answer"})
        fold = NORMALIZERS[args.get("strings", "exact")]
        if not (wanted and all(map(str.strip, map(fold, wanted)))):
            raise UnscorableError("no expected text")
        return Reading(float(fold(text) in [fold(item) for item in wanted]), {"text": brief(text), "expected": brief(wanted)})


@LEAVES.register("number.close")
class NumberClose(Leaf):
    """Score 1 if the text contains the expected number as a complete number token."""

    formula: ClassVar[str] = (
        "1 if |x - y| <= max(abs, rel |y|) for the last (which=last), every (only) or some (any) number x of the text, else 0"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "expect": or_ref({"type": ["number", "string"]}),
            "where": WHERE,
            "which": {"enum": ["last", "only", "any"]},
            "abs": {"type": "number", "minimum": 0},
            "rel": {"type": "number", "minimum": 0},
        },
        ("expect",),
    )
    example: ClassVar[dict[str, Any]] = {"expect": {"$": "/task/gold/answer"}, "which": "last"}

    def read(self, view: View, args: Args) -> Reading:
        wanted = as_number(args["expect"])
        if wanted is None:
            raise UnscorableError(f"the expected answer must be a number, not {brief(args['expect'], 80)!r}")
        text = spoken_text(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"expected": shown(wanted), "why": "no final answer"})
        said = list(numerals(text))
        which = args.get("which", "last")
        looked_at = said[-1:] if which == "last" else said
        absolute, relative = (Fraction(repr(float(args.get(key, 0.0)))) for key in ("abs", "rel"))
        hits = [abs(number.value - wanted) <= max(absolute, relative * abs(wanted)) for number in looked_at]
        # `all` alone would be true for a text without numbers.
        right = any(hits) if which == "any" else bool(hits) and all(hits)
        return Reading(
            float(right), {"expected": shown(wanted), "said": brief([number.text for number in said[-5:]]), "numbers": len(said)}
        )


@LEAVES.register("format.regex")
class FormatRegex(Leaf):
    """Score 1 if the text matches a regular expression, within a time limit."""

    formula: ClassVar[str] = "1 if the pattern matches (the whole text, or somewhere in it), else 0; null after `seconds`"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "pattern": {"type": "string", "description": "as Python's re reads it"},
            "where": WHERE,
            "match": {"enum": ["full", "search"]},
            "seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
        },
        ("pattern",),
    )
    example: ClassVar[dict[str, Any]] = {"pattern": "The answer is \\d+\\.", "match": "full"}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        try:
            # `regex`, not `re`, which cannot be interrupted: a pattern may take exponential time on the policy's text.
            self.pattern = compile_pattern(args["pattern"])
        except ValueError as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error
        self.seconds = float(args.get("seconds", 0.1))

    def read(self, view: View, args: Args) -> Reading:
        text = spoken_text(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"pattern": args["pattern"], "why": "no final answer"})
        look = self.pattern.fullmatch if args.get("match", "full") == "full" else self.pattern.search
        try:
            found = within_seconds(look, text, self.seconds)
        except TextTooLongError as error:  # the policy's fault, so it is scored
            return Reading(0.0, {"pattern": args["pattern"], "why": str(error)})
        except TimeoutError as error:
            raise UnscorableError(f"the pattern took longer than {self.seconds} s on {len(text)} characters") from error
        match = {"match": brief(found.group(0))} if found else {"match": None, "text": brief(text)}
        return Reading(float(found is not None), {"pattern": args["pattern"], **match})


# End and cost of an episode

# Without infrastructure reasons, with which an episode is unscored before any leaf is read.
POLICY_STOPS = tuple(reason.value for reason in StopReason if not reason.infrastructure)


@LEAVES.register("episode.stopped")
class EpisodeStopped(Leaf):
    """Score 1 if the episode ended for one of the given reasons."""

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
    """Score the used share of a budget: 0 up to `free`, 1 from `max` on, linear in between."""

    formula: ClassVar[str] = "min(1, max(0, (used - free) / (max - free)))"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {"max": {"type": "number", "exclusiveMinimum": 0}, "free": {"type": "number", "minimum": 0}}, ("max",)
    )
    example: ClassVar[dict[str, Any]] = {"max": 10, "free": 2}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        if args.get("free", 0) >= args["max"]:
            raise ValueError(f"free ({args['free']}) must be below max ({args['max']})")

    def amount(self, view: View, args: Args) -> float:
        """Return the amount used, in the budget's unit."""
        return _USED[self.kind](view)

    def read(self, view: View, args: Args) -> Reading:
        used, free = self.amount(view, args), float(args.get("free", 0.0))
        share = (used - free) / (float(args["max"]) - free)
        return Reading(min(1.0, max(0.0, share)), {"used": used, "free": free, "max": args["max"]})


_USED: Mapping[str, Callable[[View], float]] = {
    "cost.turns": lambda view: len(view.turns),
    "cost.calls": lambda view: len(view.calls),
    "cost.tokens": lambda view: sum(turn.sampled_tokens for turn in view.turns),
    "cost.seconds": lambda view: sum(result.seconds for turn in view.turns for result in turn.results),
}


@LEAVES.register("cost.turns")
class CostTurns(_Cost):
    """Cost in policy turns."""


@LEAVES.register("cost.calls")
class CostCalls(_Cost):
    """Cost in tool calls."""


@LEAVES.register("cost.tokens")
class CostTokens(_Cost):
    """Cost in sampled tokens."""


@LEAVES.register("cost.seconds")
class CostSeconds(_Cost):
    """Cost in seconds of tool calls, without sampling, whose time depends on the machine."""


@LEAVES.register("cost.usd")
class CostUsd(_Cost):
    """Cost in USD, at prices per million prompt and sampled tokens."""

    formula: ClassVar[str] = (
        "as the other costs, used = (prompt tokens * per_million_prompt + sampled tokens * per_million_sampled) / 1e6"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            **_Cost.schema["properties"],
            "per_million_prompt": {"type": "number", "minimum": 0},
            "per_million_sampled": {"type": "number", "minimum": 0},
        },
        ("max", "per_million_prompt", "per_million_sampled"),
    )
    example: ClassVar[dict[str, Any]] = {"max": 0.05, "per_million_prompt": 0.4, "per_million_sampled": 1.6}

    def amount(self, view: View, args: Args) -> float:
        prompt, sampled = sum(turn.prompt_tokens for turn in view.turns), sum(turn.sampled_tokens for turn in view.turns)
        return float(prompt * args["per_million_prompt"] + sampled * args["per_million_sampled"]) / 1e6


# Python functions


@LEAVES.register("python")
class PythonFunction(Leaf):
    """Call `context.python[name](view, args)`. A spec can name a function but not define or import one."""

    formula: ClassVar[str] = "what the function returns: a number in [0, 1], None, or (number or None, evidence)"
    schema: ClassVar[dict[str, Any]] = object_schema({"name": {"type": "string"}, "args": {}}, ("name",))
    example: ClassVar[dict[str, Any]] = {"name": "politeness", "args": {"language": "en"}}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        name = args["name"]
        if name not in context.python:
            allowed = ", ".join(context.python) or "none"
            hint = did_you_mean(name, context.python)
            known = f"{f'{hint} ' if hint else ''}allowed: {allowed}"
            give = (
                "" if not is_given(name) else f" (in Python: agentrl.give(FUNCTION, {name.removeprefix(PREFIX)!r}) comes first)"
            )
            raise ValueError(
                f"name: this run does not allow a function {name!r}; {known}. Name its file's function: --python "
                f'{name}=MODULE:FUNCTION, or reward.python.{json.dumps(name)} = "MODULE:FUNCTION" in a config{give}'
            )
        self.function = context.python[name]

    def blocks(self) -> bool:
        return True

    def read(self, view: View, args: Args) -> Reading:
        try:
            # Copies, since a function may change its arguments: episodes share a task, and other leaves read the lists.
            whole = copy(view.trajectory)
            whole.task, whole.messages, whole.turns = whole.task.copied(), list(whole.messages), list(whole.turns)
            copied = replace(view, trajectory=whole, turns=list(view.turns), calls=list(view.calls), memo={})
            answer: Any = self.function(copied, deep_copy_json(args.get("args")))
        except BaseException as error:  # custom code may raise anything, which must not stop a run
            if is_from_outside(error):
                raise
            raise UnscorableError(f"{args['name']} {raised_text(error, self.function)}") from error
        value, evidence = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        if value is None:
            return Reading(None, brief(evidence))
        # Rounding: a sum of twenty 0.05 is slightly more than 1.
        if not -1e-9 <= (number := plain_float(value)) <= 1.0 + 1e-9:
            if inspect.iscoroutine(value):
                value.close()
            shown, at = f"{value!r:.80}", place_of(self.function)
            raise UnscorableError(f"{args['name']} returned {shown}, expected a number in [0, 1], a truth value or None ({at})")
        return Reading(min(max(0.0, number), 1.0), brief(evidence))
