"""A score as a readable tree: every node with its value, its weight and its evidence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from agentrl.reward.score import Score
from agentrl.trajectory import Json

_HEAD = ("node", "at", "value", "id", "weight")
_BELOW = ("of", "if", "then", "else", "parts")


def explain_text(score: Score) -> str:
    """The evidence of a score as an indented tree, one node per line."""
    evidence = score.evidence
    lines = [f"{evidence['spec']}: {_value(score.value)}"]
    if "unscored" in evidence:
        lines.append(f"  {evidence['unscored']}")
    if "root" in evidence:
        lines.extend(_node(evidence["root"], "  ", ""))
    if "success" in evidence:
        decided = evidence["success"]
        shown = {True: "yes", False: "no", None: "could not be scored"}[decided["value"]]
        lines.append(f"success: {shown}, by {decided['by']}")
        if "node" in decided:
            lines.extend(_node(decided["node"], "  ", ""))
    if score.turns:
        shares = ", ".join(f"turn {turn}: {_value(amount)}" for turn, amount in score.turns.items())
        lines.append(f"emitted at turns: {shares}; at the end: {_value(score.terminal)}")
    if evidence.get("metrics"):
        lines.append("metrics (measured, not rewarded):")
        for item in evidence["metrics"]:
            lines.extend(_node(item, "  ", ""))
    return "\n".join(lines)


def reasons(evidence: Json) -> Iterator[str]:
    """Why an evidence tree has no value: reasons from the unscorable leaf outward."""
    if isinstance(evidence, Mapping):
        for value in evidence.values():
            yield from reasons(value)
        if "unscored" in evidence:
            yield str(evidence["unscored"])
    elif isinstance(evidence, list):
        for item in evidence:
            yield from reasons(item)


def _node(evidence: Mapping[str, Json], indent: str, role: str) -> Iterator[str]:
    name = f" [{evidence['id']}]" if "id" in evidence else ""
    weight = f" x {evidence['weight']:g}" if "weight" in evidence else ""
    value = "skipped" if "skipped" in evidence else _value(evidence.get("value"))
    head = f"{indent}{role}{value:>8}{weight}"
    yield f"{head}  {evidence.get('node', '?')}{name}  {_why(evidence)}".rstrip()
    for key in _BELOW:
        below = evidence.get(key)
        if isinstance(below, Mapping):
            yield from _node(below, indent + "    ", f"{key}: ")
        elif isinstance(below, list):
            for index, item in enumerate(below):
                yield from _node(item, indent + "    ", f"part {index}: " if key == "parts" else "")


def _why(evidence: Mapping[str, Json]) -> str:
    notes = [f"{key}={_short(evidence[key])}" for key in evidence if key not in (*_HEAD, *_BELOW, "evidence")]
    detail = evidence.get("evidence")
    if isinstance(detail, Mapping):
        notes.extend(f"{key}={_short(value)}" for key, value in detail.items())
    elif detail is not None:
        notes.append(_short(detail))
    return ", ".join(notes)


def _short(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 160 else text[:160] + "..."


def _value(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.4g}"
