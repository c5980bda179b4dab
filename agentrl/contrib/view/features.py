"""The index's row of an episode: its columns, and the names that it is found by."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.contrib.view.signs import (
    gold_distances,
    judge_gap,
    judge_value,
    made_calls,
    missed_leaves,
    repetition,
)
from agentrl.utils.parsing import read_json

Json = Any
MOST_TEXT = 20_000
"""Characters of an episode that the search for words knows: of questions, messages and answers, from the start."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_HEX = re.compile(r"\b(?:0x[0-9a-f]+|(?=[0-9a-f-]*[0-9])[0-9a-f]{8}[0-9a-f-]*)\b", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(slots=True)
class Features:
    """`columns`: of the table of episodes. The others: (name, ...) rows of the tables next to it. `task`: which episodes belong
    together, (environment, task, seed), in a file."""

    columns: dict[str, Any]
    task: tuple[str, str, Any]
    tools: Counter[str] = field(default_factory=Counter)
    errors: set[str] = field(default_factory=set)
    terms: dict[str, float | None] = field(default_factory=dict)
    failures: set[tuple[str, str]] = field(default_factory=set)
    text: str = ""


def normal(text: str, most: int = 160) -> str:
    """An error text without what differs from case to case: quoted words, numbers and addresses, so that equal faults are
    equal texts."""
    text = " ".join(text.split())[: 4 * most]
    text = _NUMBER.sub("N", _HEX.sub("HEX", _QUOTED.sub("'...'", text)))
    return text if len(text) <= most else text[: most - 3] + "..."


def clean(text: str) -> str:
    """The text without lone surrogates, which JSON can hold and SQLite and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def features_of(row: Mapping[str, Json]) -> Features:
    """The features of a row of a trajectory file. Raises KeyError, TypeError, AttributeError or ValueError for another shape."""
    task, turns = row["task"], row["turns"]
    results = [result for turn in turns for result in turn["results"]]
    bad = sum(result.get("error") is not None for result in results)
    spans = [span for ledger in row.get("ledgers") or [] for span in ledger.get("spans") or []]
    sampled = sum(span[0] for span in spans if span[2] >= 0) if spans else sum(turn.get("sampled_tokens", 0) for turn in turns)
    answer, calls = gold_distances(row)
    terms = {clean(str(name)): _number(value) for name, value in (row.get("metrics") or {}).items()}
    reward, success = _number(row.get("reward")), row.get("success")
    error = row.get("error")
    env = clean(str(row.get("env") or row["env_id"]))
    out = Features(
        {
            "env": env,
            "task": clean(str(task["id"])),
            "split": clean(str(task.get("split", ""))),
            "member": _whole(row.get("member", 0)),
            "reward": reward,
            "success": None if success is None else int(bool(success)),
            "stop": clean(str(row.get("stop", ""))),
            "error": None if error is None else clean(str(error)[:2000]),
            "turns": len(turns),
            "calls": sum(1 for _ in made_calls(row)),
            "tool_errors": bad,
            "tokens": _whole(sampled),
            "seconds": _number((row.get("timings") or {}).get("episode_s")),
            "terms": json.dumps(terms),
            "gold_answer": answer,
            "gold_calls": calls,
            "repeated": repetition(row),
            "judge": judge_gap(row),
            "judged": judge_value(row)[0],
            "did": judge_value(row)[1],
        },
        (env, str(task["id"]), task.get("seed")),
        Counter(clean(str(call.get("name"))) for call in made_calls(row)),
        {clean(str(result["error"])) for result in results if result.get("error") is not None},
        terms,
        text=clean(" ".join(_texts(row))[:MOST_TEXT]),
    )
    if error is not None:
        out.errors.add(f"{out.columns['stop']}: {clean(normal(str(error), 80))}")
    if success is not True and success != 1 and not (success is None and reward is not None and reward > 0):
        out.failures = {(kind, clean(reason)) for kind, reason in _failures(row)}
    return out


def _number(value: Json) -> float | None:
    return float(value) if isinstance(value, (int, float)) and value == value else None  # NaN is unknown, too


def _whole(value: Json) -> int:
    """Raises OverflowError for a number that SQLite cannot hold."""
    found = int(value)
    if not -(1 << 63) <= found < 1 << 63:
        raise OverflowError(f"{found:.3g} is no number of tokens or members")
    return found


def _texts(row: Mapping[str, Json]) -> Iterator[str]:
    yield str(row["task"]["id"])
    if row.get("error"):
        yield str(row["error"])
    for message in row.get("messages") or []:
        yield str(message.get("content") or "")
        yield str(message.get("reasoning") or "")
        for call in message.get("tool_calls") or []:
            yield f"{call.get('name')} {json.dumps(call.get('arguments'), ensure_ascii=False)}"


def _failures(row: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """(kind, reason) of an episode that did not succeed: its error, its tools' errors, what its reward misses, its stop."""
    stop = str(row.get("stop", ""))
    if row.get("error"):
        yield "error", f"{stop}: {normal(str(row['error']))}"
    if stop != "done":
        yield "stop", stop
    if row.get("tools") and not any((turn.get("message") or {}).get("tool_calls") for turn in row["turns"]):
        yield "call", "no tool call"
    for turn in row["turns"]:
        for call in (turn.get("message") or {}).get("tool_calls") or []:
            if call.get("error"):
                cut = turn.get("finish") == "length"
                yield "call", "call cut by max_turn_tokens" if cut else f"malformed call: {normal(str(call['error']))}"
        for result in turn["results"]:
            if result.get("error") not in (None, "malformed_call"):  # which the call has told already
                yield (
                    "tool",
                    f"{result.get('name') or '?'}: {result['error']}: {normal(_error_text(str(result.get('content') or '')))}",
                )
    evidence = row.get("evidence")
    if isinstance(evidence, Mapping):
        decided = evidence.get("success")
        found = list(missed_leaves(evidence.get("root")))
        deciding = list(missed_leaves(decided.get("node") if isinstance(decided, Mapping) else None))
        # A success by id is a gate between 1 and 0: its 0 says nothing beside what the reward itself missed.
        for leaf in [*found, *(leaf for leaf in deciding if not found or leaf["node"] != "constant")]:
            yield _miss(leaf)


def _miss(leaf: Mapping[str, Json]) -> tuple[str, str]:
    name = str(leaf.get("id") or leaf.get("at") or "?")
    if isinstance(leaf["value"], (int, float)):
        return "term", f"{name} ({leaf['node']}) below 0.5"
    return "unscored", f"{name}: {normal(str(leaf.get('unscored') or 'no value'))}"


def _error_text(content: str) -> str:
    """Text of a tool's error: the message in it, if it is agentrl's own form."""
    try:
        found = read_json(content[:4000])
    except (ValueError, RecursionError):
        return content
    return str(found["message"]) if isinstance(found, dict) and isinstance(found.get("message"), str) else content
