"""Writes tasks.jsonl, the tasks of the default server: `python envs/mcp/make_tasks.py > envs/mcp/tasks.jsonl`.

Level n is about n items: each is searched for and counted, and from level 2 on some of it is taken or added first.
"""

from __future__ import annotations

import json
import random
from typing import Any

COLORS = "red blue green black white yellow".split()  # noqa: SIM905
THINGS = "lamp chair mug clock bag pen box scarf".split()  # noqa: SIM905
LEVELS, EACH = 4, 60


def row(number: int, level: int) -> dict[str, Any]:
    """One task: its stock, the request, and the calls, answer and final stock of its solution."""
    rng = random.Random(f"mcp/{level}/{number}")
    names = rng.sample([f"{color} {thing}" for color in COLORS for thing in THINGS], 8)
    codes = [f"k{value}" for value in rng.sample(range(1000, 10000), len(names))]
    stock: dict[str, dict[str, Any]] = {
        code: {"name": name, "count": rng.randrange(20, 60)} for code, name in zip(codes, names, strict=True)
    }
    after = {code: it["count"] for code, it in sorted(stock.items())}
    wishes: list[str] = []
    calls: list[dict[str, Any]] = []
    for code in rng.sample(codes, level):
        name = stock[code]["name"]
        calls.append({"name": "search", "arguments": {"text": name}})
        if level > 1:
            verb, amount = rng.choice(["take", "add"]), rng.randrange(1, 20)
            after[code] += amount if verb == "add" else -amount
            calls.append({"name": verb, "arguments": {"code": code, "amount": amount}})
            wishes.append(f"{verb} {amount} of {name}")
        else:
            wishes.append(name)
        calls.append({"name": "count", "arguments": {"code": code}})
    total = sum(after[call["arguments"]["code"]] for call in calls if call["name"] == "count")
    first = f"How many of {wishes[0]} are in stock?"
    more = f"{'; '.join(wishes)}. How many of these items are in stock then, all together?"
    return {
        "id": f"stock/{level}/{number}",
        "split": "heldout" if number % 6 == 0 else "train",
        "level": level,
        "prompt": first if level == 1 else more,
        "setup": [{"name": "load", "arguments": {"stock": stock}}],
        "gold": {"answer": total, "calls": calls, "state": after},
    }


if __name__ == "__main__":
    for level in range(1, LEVELS + 1):
        for number in range(EACH):
            print(json.dumps(row(number, level)))
