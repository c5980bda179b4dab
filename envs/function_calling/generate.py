"""The generated set: requests built from the function library, with gold by construction."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from agentrl.data.trajectory import Json

from .library import FUNCTIONS, Function
from .rows import MISSING, NO_FUNCTION, Row

OPENINGS = ("{}.", "Please {}.", "Could you {}?", "I need this: {}.", "{}, please.")


def propose(rng: random.Random, kinds: dict[str, float], calls: Sequence[int], distractors: int) -> Row:
    """One task. `kinds`: weights; `calls`: [lowest, highest] for the parallel kinds; `distractors`: additional
    functions in the task (of the same domain first)."""
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    count = rng.randint(calls[0], calls[-1]) if kind.startswith("parallel") else 1
    chosen = rng.sample(FUNCTIONS, min(count, len(FUNCTIONS))) if kind == "parallel_multiple" else (
        [rng.choice(FUNCTIONS)] * count)  # fmt: skip
    omitted = ""
    if kind == "missing":
        omitted = rng.choice([argument.name for argument in chosen[0].arguments if argument.required])
    asked = [_ask(function, rng, omitted) for function in chosen]
    while len({json.dumps(call, sort_keys=True) for _, call in asked}) < len(asked):
        asked = [_ask(function, rng, omitted) for function in chosen]  # two identical calls would count as one
    offered = [] if kind == "irrelevance" else list(dict.fromkeys(chosen))
    least = {"irrelevance": 1, "multiple": 1}.get(kind, 0)
    extra = 0 if kind == "single" else max(least, distractors)
    offered += _distractors(chosen, extra, rng)
    rng.shuffle(offered)
    message: dict[str, Json] = {"role": "user", "content": _request([text for text, _ in asked], rng)}
    tools = [function.schema() for function in offered]
    if kind in ("irrelevance", "missing"):
        answer = NO_FUNCTION if kind == "irrelevance" else f"{MISSING} {omitted}"
        return Row("", [message], tools, "answer", [], [answer], kind)
    return Row("", [message], tools, "sets", [call for _, call in asked], [], kind)


def fingerprint(row: Row) -> str:
    """The request and its answer: the same request with other distractors is the same task."""
    calls = sorted(json.dumps(call, sort_keys=True) for call in row.calls)
    said = [] if row.calls else [message["content"] for message in row.messages]
    return json.dumps([row.scoring, calls, row.answers, said])


def _ask(function: Function, rng: random.Random, omitted: str) -> tuple[str, dict[str, Json]]:
    """The text of a request and its gold call."""
    words = function.ask
    allowed: dict[str, list[Json]] = {}
    taken: set[str] = set()
    for argument in function.arguments:
        if argument.name == omitted:
            continue
        if not argument.required and rng.random() < 0.5:
            if "default" in argument.schema:
                allowed[argument.name] = [argument.schema["default"], ""]
            continue
        said, values = argument.pool(rng)
        while said in taken:  # no trip from a city to itself
            said, values = argument.pool(rng)
        taken.add(said)
        words += argument.clause.format(said)
        default = argument.schema.get("default")
        optional = not argument.required and default in values
        allowed[argument.name] = [*values, ""] if optional else values
    return words, {"name": function.name, "arguments": allowed}


def _distractors(chosen: Sequence[Function], count: int, rng: random.Random) -> list[Function]:
    """Other functions, those of the same domains first."""
    others = [function for function in FUNCTIONS if function not in chosen]
    domains = {function.domain for function in chosen}
    rng.shuffle(others)
    others.sort(key=lambda function: function.domain not in domains)
    return others[:count]


def _request(asked: list[str], rng: random.Random) -> str:
    first, *rest = asked
    opening = rng.choice(OPENINGS)
    text = opening.format(first if opening.startswith("{}") else first[0].lower() + first[1:])
    joins = ("Also, {}.", "And {}.", "Then {}.")
    return " ".join([text, *(rng.choice(joins).format(part[0].lower() + part[1:]) for part in rest)])
