"""Writes tasks.jsonl, the packaged tasks: `python envs/own_tools/make_tasks.py > envs/own_tools/tasks.jsonl`.

Each has a lookup (a shop's prices, a library's shelves, ...) with recorded answers of its own, and a tool that is of no use.
"""

from __future__ import annotations

import json
import random
from typing import Any

LOOKUPS = {
    "price_of": ("item", "the price of an item, in cents", ["lamp", "chair", "mug", "clock", "bag", "pen"]),
    "shelf_of": ("book", "the number of a book's shelf", ["atlas", "novel", "poems", "essays", "diary", "guide"]),
    "platform_of": ("city", "the platform of the next train to a city", ["Porto", "Lyon", "Graz", "Turin", "Ghent", "Bergen"]),
    "height_of": ("tower", "the height of a tower in metres", ["north", "south", "east", "west", "old", "new"]),
}
EACH = 60


def declaration(name: str) -> dict[str, Any]:
    parameter, description, known = LOOKUPS[name]
    properties = {parameter: {"type": "string", "enum": known}}
    parameters = {"type": "object", "properties": properties, "required": [parameter], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def row(name: str, number: int) -> dict[str, Any]:
    """One task: what its tools answer, and the sum that is asked for."""
    rng = random.Random(f"own_tools/{name}/{number}")
    parameter, description, known = LOOKUPS[name]
    other = rng.choice([item for item in LOOKUPS if item != name])
    values = {item: rng.randrange(10, 500) for item in known}
    wanted = rng.sample(known, rng.choice([1, 2]))
    calls = [{"name": name, "arguments": {parameter: item}} for item in wanted]
    what = description.removeprefix("the ").partition(" of ")[0].partition(", ")[0]
    question = f"What is the {what} of {' and '.join(wanted)}{', added up' if len(wanted) > 1 else ''}?"
    return {
        "id": f"{name}/{number}",
        "prompt": question,
        "tools": rng.sample([declaration(name), declaration(other)], 2),
        "answers": [{"name": name, "arguments": {parameter: item}, "content": str(value)} for item, value in values.items()],
        "gold": {"answer": sum(values[item] for item in wanted), "calls": calls},
    }


if __name__ == "__main__":
    for index in range(EACH):
        for lookup in LOOKUPS:
            print(json.dumps(row(lookup, index)))
