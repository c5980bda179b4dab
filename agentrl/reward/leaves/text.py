"""`text.contains`, `text.equals`, `number.close`, `format.regex`: the policy's text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

from agentrl.matching import TextTooLongError, compile_pattern, within_seconds
from agentrl.numerals import Numeral, is_letter, numeral, numerals
from agentrl.reward.leaf import Args, Context, Leaf, Reading, UnscorableError, object_schema, or_ref
from agentrl.reward.values import NORMALIZERS, as_number, brief, numbers_close, shown
from agentrl.reward.view import View
from agentrl.trajectory import Json

WHERE = {"enum": ["answer", "replies", "all", "reasoning"]}
_TEXTS = or_ref({"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}})
_STRINGS = {"enum": list(NORMALIZERS)}


def spoken(view: View, where: str) -> str | None:
    """The text that a leaf reads: the final answer, the turns without a call, all text, or all reasoning.

    None if there is no final answer (the last turn is a call, or there is no turn).
    """
    if where == "answer":
        return view.answer()
    if where == "replies":
        return "\n".join(turn.message.content for turn in view.turns if not turn.message.tool_calls)
    if where == "all":
        return "\n".join(turn.message.content for turn in view.turns)
    return "\n".join(turn.message.reasoning or "" for turn in view.turns)


def wanted_texts(value: Json) -> list[str]:
    """One string or number, or a list of them, as strings. Raises UnscorableError for another shape."""
    items = value if isinstance(value, (list, tuple)) else [value]
    # Not true and false: they would be looked for as "True" and "False", Python's words.
    if not all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in items):
        raise UnscorableError(f"expected text must be a string or a list of strings, not {brief(value, 80)!r}")
    return [str(item) for item in items]


class TextContains(Leaf):
    """Whether the text contains what was expected."""

    kind: ClassVar[str] = "text.contains"
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
        text = spoken(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"text": None, "expected": brief(wanted), "why": "no final answer"})
        found = texts_found([text], wanted, args)
        return Reading(found.value, {"text": brief(text), **found.evidence})


def texts_found(texts: Sequence[str], wanted: Sequence[str], args: Args) -> Reading:
    """Which of the wanted texts occur in any of the texts.

    Raises UnscorableError if there are no wanted texts and `mode` is any; with mode all nothing is missing then.
    """
    fold = NORMALIZERS[args.get("strings", "exact")]
    heard = [fold(text) for text in texts]
    said = list(chain.from_iterable(map(numerals, texts))) if args.get("word") else []
    found = []
    for item in wanted:
        number = numeral(item) if args.get("word") else None
        # In each text for itself: in all of them joined, one could begin what the next one ends.
        alone = any(_occurs(fold(item), text, bool(args.get("word"))) for text in heard) if number is None else False
        found.append(alone or (number is not None and any(_same_number(number, other) for other in said)))
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


def _same_number(wanted: Numeral, said: Numeral) -> bool:
    if wanted.text[:1] == "0" and wanted.text[1:2].isdigit():
        return said.text == wanted.text  # a postcode, not a quantity
    return said.value == wanted.value and said.percent >= wanted.percent


def _occurs(item: str, text: str, word: bool) -> bool:
    start = text.find(item)
    if not word or not item:
        return start >= 0
    while start >= 0:
        end = start + len(item)
        joined = (is_letter(item[0]) and is_letter(text[start - 1 : start])) or is_letter(text[end : end + 1])
        if not joined:
            return True
        start = text.find(item, start + 1)
    return False


class TextEquals(Leaf):
    """Whether the whole text equals one of the expected ones."""

    kind: ClassVar[str] = "text.equals"
    formula: ClassVar[str] = "1 if the text equals one of the expected texts after normalization, else 0"
    schema: ClassVar[dict[str, Any]] = object_schema({"expect": _TEXTS, "where": WHERE, "strings": _STRINGS}, ("expect",))
    example: ClassVar[dict[str, Any]] = {"expect": {"$": "/task/gold/answer"}, "strings": "fold"}

    def read(self, view: View, args: Args) -> Reading:
        wanted = wanted_texts(args["expect"])
        text = spoken(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"text": None, "expected": brief(wanted), "why": "no final answer"})
        fold = NORMALIZERS[args.get("strings", "exact")]
        return Reading(float(fold(text) in [fold(item) for item in wanted]), {"text": brief(text), "expected": brief(wanted)})


class NumberClose(Leaf):
    """Whether the text contains the expected number as a complete number token."""

    kind: ClassVar[str] = "number.close"
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
        text = spoken(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"expected": shown(wanted), "why": "no final answer"})
        said = list(numerals(text))
        which = args.get("which", "last")
        looked_at = said[-1:] if which == "last" else said
        tolerance = float(args.get("abs", 0.0)), float(args.get("rel", 0.0))
        hits = [numbers_close(number.value, wanted, *tolerance) for number in looked_at]
        # `all` alone would be true for a text without any number.
        right = any(hits) if which == "any" else bool(hits) and all(hits)
        return Reading(
            float(right), {"expected": shown(wanted), "said": brief([number.text for number in said[-5:]]), "numbers": len(said)}
        )


class FormatRegex(Leaf):
    """Whether the text matches a regular expression, with a time limit."""

    kind: ClassVar[str] = "format.regex"
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
            # `regex` and not `re`, which cannot be stopped: a pattern may take exponential time on what a policy wrote.
            self.pattern = compile_pattern(args["pattern"])
        except ValueError as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error
        self.seconds = float(args.get("seconds", 0.1))

    def read(self, view: View, args: Args) -> Reading:
        text = spoken(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"pattern": args["pattern"], "why": "no final answer"})
        look = self.pattern.fullmatch if args.get("match", "full") == "full" else self.pattern.search
        try:
            found = within_seconds(look, text, self.seconds)
        except TextTooLongError as error:  # the policy's doing, so a score
            return Reading(0.0, {"pattern": args["pattern"], "why": str(error)})
        except TimeoutError as error:
            raise UnscorableError(f"the pattern took longer than {self.seconds} s on {len(text)} characters") from error
        match = {"match": brief(found.group(0))} if found else {"match": None, "text": brief(text)}
        return Reading(float(found is not None), {"pattern": args["pattern"], **match})
