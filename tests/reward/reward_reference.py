"""A slow evaluator of reward specs by the documentation, of the leaves that random specs have."""

import itertools
import math
from fractions import Fraction
from functools import cache
from typing import Any

SKIP = "skip"


class Part:
    """The turns and calls that a node sees."""

    def __init__(self, trajectory: Any, turns: list[Any], calls: list[Any], scope: str) -> None:
        self.trajectory, self.turns, self.calls, self.scope = trajectory, turns, calls, scope


def whole(trajectory: Any) -> Part:
    return Part(trajectory, trajectory.turns, [c for t in trajectory.turns for c in t.message.tool_calls], "episode")


def reference(node: dict[str, Any], part: Part) -> Any:
    """Value of a node: a Fraction or float, None (unscored) or SKIP."""
    scope = node.get("scope")
    if scope is None or scope == part.scope:
        return modified(node, once(node, part))
    if scope == "turn":
        parts = [Part(part.trajectory, [t], list(t.message.tool_calls), "turn") for t in part.turns]
    else:
        parts = [
            Part(part.trajectory, [t], [c], "call")
            for t in part.turns
            for c in t.message.tool_calls
            if any(c is made for made in part.calls)
        ]
    values = [modified(node, once(node, piece)) for piece in parts]
    asked = [value for value in values if value != SKIP]
    if values and not asked and node.get("missing", "invalid") == "invalid":
        return SKIP  # of no part anything was asked
    values = asked
    if None in values:
        return None
    if not values:
        return modified(node, None)
    return {
        "sum": sum(values), "mean": sum(values) / len(values), "last": values[-1], "min": min(values),
        "all": 1 if all(value >= 1 - 1e-9 for value in values) else 0,
    }[node.get("reduce", "mean")]  # fmt: skip


def modified(node: dict[str, Any], value: Any) -> Any:
    if value == SKIP:
        return SKIP
    if value is None:
        missing = node.get("missing", "invalid")
        if missing in ("invalid", "skip"):
            return None if missing == "invalid" else SKIP
        value = missing
    if "scale" in node:
        low, high = node["scale"]
        value = low + value * (high - low)
    if "clip" in node:
        value = min(max(value, node["clip"][0]), node["clip"][1])
    return value


def once(node: dict[str, Any], part: Part) -> Any:
    if "when" in node:
        turns = len(part.trajectory.turns)
        if not turns > node["when"]["gt"]:
            return SKIP
    if "use" in node:
        return LEAVES[node["use"]](node.get("args", {}), part)
    if node["op"] == "gate":
        test = reference(node["if"], part)
        if test is None or test == SKIP:
            return None
        taken = node["then"] if test >= node.get("gte", 1) - 1e-9 else node.get("else", 0)
        value = taken if isinstance(taken, (int, float)) else reference(taken, part)
        return None if value == SKIP else value
    values = [(child.get("weight", 1), reference(child, part)) for child in node["of"]]
    values = [(weight, value) for weight, value in values if value != SKIP]
    if not values or any(value is None for _, value in values):
        return None
    plain = [value for _, value in values]
    if node["op"] == "mean":
        weights = sum(weight for weight, _ in values)
        return sum(w * v for w, v in values) / weights if weights > 0 else None
    return {
        "sum": sum(w * v for w, v in values), "product": math.prod(plain), "min": min(plain), "max": max(plain),
        "all": 1 if all(v >= 1 - 1e-9 for v in plain) else 0, "any": 1 if any(v >= 1 - 1e-9 for v in plain) else 0,
    }[node["op"]]  # fmt: skip


def equal(a: Any, b: Any) -> bool:
    return (isinstance(a, bool) == isinstance(b, bool)) and a == b


def full_match(made: Any, gold: dict[str, Any]) -> bool:
    want = gold["arguments"]
    return (
        made.name == gold["name"]
        and made.arguments is not None
        and set(made.arguments) == set(want)
        and all(equal(made.arguments[key], want[key]) for key in want)
    )


def part_match(made: Any, gold: dict[str, Any]) -> Fraction:
    if made.name != gold["name"] or made.arguments is None:
        return Fraction(0)
    keys = set(made.arguments) | set(gold["arguments"])
    shared = set(made.arguments) & set(gold["arguments"])
    right = sum(equal(made.arguments[key], gold["arguments"][key]) for key in shared)
    return Fraction(1 + right, 1 + len(keys))


def most(weights: Any, ordered: bool = False) -> Any:
    """The greatest total of one-to-one pairings, by trying them all; of those that cross nowhere if `ordered`."""

    @cache
    def best(row: int, free: tuple[int, ...]) -> Any:
        if row == len(weights):
            return 0
        pairs = [(weights[row][j], free[at + 1 :] if ordered else free[:at] + free[at + 1 :]) for at, j in enumerate(free)]
        return max([best(row + 1, free), *(weight + best(row + 1, rest) for weight, rest in pairs)])

    return best(0, tuple(range(len(weights[0]) if weights else 0)))


def calls_match(args: dict[str, Any], part: Part) -> Fraction:
    made, gold = part.calls, args["expect"]
    partial = args.get("credit") == "partial" and args.get("order") != "prefix"
    credit = part_match if partial else lambda a, b: Fraction(int(full_match(a, b)))
    if (order := args.get("order", "free")) == "prefix":
        total = len(list(itertools.takewhile(lambda pair: full_match(*pair), zip(made, gold, strict=False))))
    else:
        total = most([[credit(a, b) for b in gold] for a in made], order == "ordered")
    size = {"exact": max(len(made), len(gold)), "superset": len(gold), "subset": len(made)}[args.get("compare", "exact")]
    share = Fraction(total) / size if size else Fraction(int(not gold))
    if args.get("credit", "all") == "all":
        return Fraction(int(share == 1))
    return share


def calls_none(args: dict[str, Any], part: Part) -> int:
    names = args.get("names")
    return 0 if any(names is None or call.name in names for call in part.calls) else 1


def text_equals(args: dict[str, Any], part: Part) -> Any:
    if isinstance(args["expect"], dict):
        return None  # the random specs only hold references that resolve to nothing
    last = part.turns[-1].message if part.turns else None
    return 1 if last is not None and not last.tool_calls and last.content == args["expect"] else 0


def cost_calls(args: dict[str, Any], part: Part) -> Fraction:
    return min(Fraction(len(part.calls), args["max"]), Fraction(1))


LEAVES = {"calls.match": calls_match, "calls.none": calls_none, "text.equals": text_equals, "cost.calls": cost_calls}
