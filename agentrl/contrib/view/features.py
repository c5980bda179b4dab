"""Columns and searchable names of an episode in the index."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.utils.parsing import read_json

Json = Any
MOST_TEXT = 20_000
"""Maximum characters of an episode that are searchable: questions, messages and answers, from the start."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_HEX = re.compile(r"\b(?:0x[0-9a-f]+|(?=[0-9a-f-]*[0-9])[0-9a-f]{8}[0-9a-f-]*)\b", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(slots=True)
class Features:
    """`columns`: of the table of episodes. Other fields: (name, ...) rows of related tables."""

    columns: dict[str, Any]
    tools: Counter[str] = field(default_factory=Counter)
    errors: set[str] = field(default_factory=set)
    terms: dict[str, float | None] = field(default_factory=dict)
    failures: set[tuple[str, str]] = field(default_factory=set)
    text: str = ""


def normal(text: str, most: int = 160) -> str:
    """Normalize an error text: remove quoted words, numbers and addresses, so that equal faults have equal texts."""
    text = " ".join(text.split())[: 4 * most]
    text = _NUMBER.sub("N", _HEX.sub("HEX", _QUOTED.sub("'...'", text)))
    return text if len(text) <= most else text[: most - 3] + "..."


def clean(text: str) -> str:
    """Replace lone surrogates, which JSON allows and SQLite and UTF-8 do not."""
    return text.encode("utf-8", "replace").decode()


def features_of(row: Mapping[str, Json]) -> Features:
    """Extract the features of a trajectory file's row. Raises KeyError, TypeError, AttributeError or ValueError for invalid
    forms."""
    task, turns = row["task"], row["turns"]
    results = [result for turn in turns for result in turn["results"]]
    bad = sum(result.get("error") is not None for result in results)
    spans = [span for ledger in row.get("ledgers") or [] for span in ledger.get("spans") or []]
    # The ids of an API model are messages: a provider counts the tokens of its turns, or nobody (0).
    by_turn = not spans or any(turn["ledger"] >= 0 and turn["prompt_tokens"] not in range(1, turn["end"] + 2) for turn in turns)
    counts = (turn["sampled_tokens"] for turn in turns) if by_turn else (span[0] for span in spans if span[2] >= 0)
    answer, calls = gold_distances(row)
    gap, judged, did = judge_values(row)
    terms = {clean(str(name)): _number(value) for name, value in (row.get("metrics") or {}).items()}
    reward, success = _number(row.get("reward")), row.get("success")
    error = row.get("error")
    content = [task.get("data"), task.get("gold")] if task.get("data") or task.get("gold") else task.get("seed")  # `task_key`
    out = Features(
        {
            "env": clean(str(row.get("env") or row["env_id"])),
            "task": clean(str(task["id"])),
            "seed": _whole(task.get("seed") or 0),
            "content": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
            "split": clean(str(task.get("split", ""))),
            "member": _whole(row.get("member", 0)),
            "reward": reward,
            "success": None if success is None else int(bool(success)),
            "stop": clean(str(row.get("stop", ""))),
            "error": None if error is None else clean(str(error)[:2000]),
            "turns": len(turns),
            "calls": sum(1 for _ in made_calls(row)),
            "tool_errors": bad,
            "tokens": _whole(sum(counts)),
            "seconds": _number((row.get("timings") or {}).get("episode_s")),
            "terms": json.dumps(terms),
            "gold_answer": answer,
            "gold_calls": calls,
            "repeated": repetition(row),
            "judge": gap,
            "judged": judged,
            "did": did,
        },
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
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None  # excludes NaN and infinities


def _whole(value: Json) -> int:
    """Raise OverflowError for a number that SQLite cannot store."""
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
    """Return (kind, reason) pairs of an unsuccessful episode: its error, tool errors, lost reward, and stop reason."""
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
            if result.get("error") not in (None, "malformed_call"):  # already listed by the call
                text = str(result.get("content") or "")
                with suppress(ValueError, RecursionError):  # the message inside agentrl's own error form
                    found = read_json(text[:4000])
                    if isinstance(found, dict) and isinstance(found.get("message"), str):
                        text = found["message"]
                yield "tool", f"{result.get('name') or '?'}: {result['error']}: {normal(text)}"
    evidence = row.get("evidence")
    if isinstance(evidence, Mapping):
        decided = evidence.get("success")
        missed = list(missed_leaves(evidence.get("root")))
        deciding = list(missed_leaves(decided.get("node") if isinstance(decided, Mapping) else None))
        # A success by id is a gate of 1 or 0: its 0 adds nothing to the reward terms that were missed.
        for leaf in [*missed, *(leaf for leaf in deciding if not missed or leaf["node"] != "constant")]:
            name = str(leaf.get("id") or leaf.get("at") or "?")
            if isinstance(leaf["value"], (int, float)):
                yield "term", f"{name} ({leaf['node']}) below 0.5"
            else:
                yield "unscored", f"{name}: {normal(str(leaf.get('unscored') or 'no value'))}"


# Signs of reward hacking in one episode: distance from the gold solution, repetition, and a judge's distance from the other
# terms. They are hints for a reader, never part of a reward. A row may have any form: a missing part gives None.

_GRAM = 4
_LEAST_WORDS = 24
_WORD = re.compile(r"\w+")
_BELOW = ("root", "of", "if", "then", "else", "node", "success")


def leaves_of(evidence: Json) -> Iterator[Mapping[str, Json]]:
    """Return the evidence leaves that earn reward, outer ones first: without ops, costs (negative weights) and parts of
    scopes."""
    if isinstance(evidence, Mapping):
        if isinstance(evidence.get("node"), str) and "value" in evidence:
            weight = evidence.get("weight", 1)
            leaf = not isinstance(evidence.get("of"), list) and "if" not in evidence
            if leaf and isinstance(weight, (int, float)) and weight >= 0:
                yield evidence
        for key in _BELOW:
            yield from leaves_of(evidence.get(key))
    elif isinstance(evidence, list):
        for item in evidence:
            yield from leaves_of(item)


def missed_leaves(evidence: Json) -> Iterator[Mapping[str, Json]]:
    """Return the leaves that explain a node below 0.5 or unknown: not those under a node above it (one of several alternatives),
    nor conditions of gates, nor parts that the spec skips."""
    if isinstance(evidence, list):
        for item in evidence:
            yield from missed_leaves(item)
    elif isinstance(evidence, Mapping) and isinstance(evidence.get("node"), str) and "value" in evidence:
        value, weight = evidence["value"], evidence.get("weight", 1)
        if "skipped" in evidence:
            return
        if (isinstance(value, (int, float)) and value >= 0.5) or (isinstance(weight, (int, float)) and weight < 0):
            return
        below = [evidence[key] for key in ("of", "then", "else") if isinstance(evidence.get(key), (list, Mapping))]
        if not below:
            yield evidence
        for part in below:
            yield from missed_leaves(part)


def gold_distances(row: Mapping[str, Json]) -> tuple[float | None, float | None]:
    """Return the distances of the final answer from `gold.answer` and of the calls from `gold.calls`: 0 (equal) to 1; None
    without a comparable gold.

    Answer: share of its items that the last assistant text does not contain as whole words. Calls: share of gold calls not made
    with these arguments, in any order; a list among a gold call's arguments allows each of its items.
    """
    gold = (row.get("task") or {}).get("gold") or {}
    if not isinstance(gold, Mapping):
        return None, None
    turns = row.get("turns") or []
    said = str((turns[-1].get("message") or {}).get("content") or "") if turns else ""
    return _answer_distance(gold.get("answer"), said), _calls_distance(gold.get("calls"), list(made_calls(row)))


def made_calls(row: Mapping[str, Json]) -> Iterator[Mapping[str, Json]]:
    """Return the episode's calls in order."""
    for turn in row.get("turns") or []:
        yield from (turn.get("message") or {}).get("tool_calls") or []


def _answer_distance(answer: Json, text: str) -> float | None:
    items = answer if isinstance(answer, list) else [answer]
    if not items or not all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in items):
        return None
    said = f" {' '.join(_words(text))} "
    wanted = [words for item in items if (words := _words(str(item)))]
    missing = sum(f" {' '.join(words)} " not in said for words in wanted)
    return missing / len(wanted) if wanted else None


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _calls_distance(gold: Json, made: Sequence[Mapping[str, Json]]) -> float | None:
    wanted = [call for item in gold for call in (item if isinstance(item, list) else [item])] if isinstance(gold, list) else []
    named = [_named_call(call) for call in wanted]
    if not named or None in named:
        return None
    left = list(made)
    missing = 0
    for name, arguments in (call for call in named if call is not None):
        found = next((i for i, call in enumerate(left) if call.get("name") == name and _fits(call, arguments)), None)
        if found is None:
            missing += 1
        else:
            del left[found]
    return missing / len(named)


def _named_call(call: Json) -> tuple[str, Mapping[str, Json]] | None:
    """Return name and arguments of a gold call, also of the form {name: arguments}."""
    if not isinstance(call, Mapping):
        return None
    if isinstance(call.get("name"), str):
        arguments = call.get("arguments") or {}
        return (call["name"], arguments) if isinstance(arguments, Mapping) else None
    if len(call) == 1 and isinstance(arguments := next(iter(call.values())), Mapping):
        return str(next(iter(call))), arguments
    return None


def _fits(call: Mapping[str, Json], arguments: Mapping[str, Json]) -> bool:
    given = call.get("arguments")
    return isinstance(given, Mapping) and all(
        given.get(key) == value or (isinstance(value, list) and (given.get(key) in value or (key not in given and "" in value)))
        for key, value in arguments.items()
    )


def repetition(row: Mapping[str, Json]) -> float:
    """Measure repetition in the policy's text, 0 to 1: the larger of the share of repeated word 4-grams within a turn (of at
    least 24 words), and the share of turns that repeat an earlier turn (with at least 4 turns)."""
    texts = [_turn_text(turn) for turn in row.get("turns") or []]
    again = 1 - len(set(texts)) / len(texts) if len(texts) >= 4 else 0.0
    for words in map(_words, texts):
        if len(words) >= _LEAST_WORDS:
            grams = Counter(zip(*(words[start:] for start in range(_GRAM)), strict=False))
            again = max(again, 1 - len(grams) / grams.total())
    return again


def _turn_text(turn: Mapping[str, Json]) -> str:
    message = turn.get("message") or {}
    calls = [f"{call.get('raw') or ''} {call.get('name')} {call.get('arguments')}" for call in message.get("tool_calls") or []]
    return " ".join([str(message.get("reasoning") or ""), str(message.get("content") or ""), *calls])


def judge_values(row: Mapping[str, Json]) -> tuple[float | None, float | None, str]:
    """Return three figures of the episode's judges: the largest distance of one from the mean of the other leaves or from another
    judge (None without either), their mean value (or None), and a digest of the episode's calls and texts, equal for episodes
    that a judge should score equally."""
    evidence = row.get("evidence")
    values: dict[bool, list[float]] = {True: [], False: []}
    for leaf in leaves_of(evidence.get("root") if isinstance(evidence, Mapping) else None):
        if isinstance(leaf["value"], (int, float)):
            values[leaf["node"] == "judge"].append(float(leaf["value"]))
    judges, others = values[True], values[False]
    if not judges:
        return None, None, ""
    mean = sum(others) / len(others) if others else None
    gaps = [max(judges) - min(judges)] if len(judges) > 1 else []
    gaps += [] if mean is None else [abs(judge - mean) for judge in judges]
    did = [[_turn_text(turn), [result.get("content") for result in turn.get("results") or []]] for turn in row.get("turns") or []]
    digest = hashlib.sha256(repr(did).encode("utf-8", "replace")).hexdigest()[:16]
    return max(gaps, default=None), sum(judges) / len(judges), digest
