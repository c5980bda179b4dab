"""Format runs and episodes as text for a terminal, and compare runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentrl.reward.explain import explain_text
from agentrl.reward.score import Score
from agentrl.utils.parsing import json_text
from agentrl.utils.terminal import console as safe_console
from agentrl.utils.terminal import safe, say

Json = Any
_OVERVIEW = ("status", "updates", "success_before", "success_after", "tokens", "seconds")
_LAST = (
    "reward", "success", "unscored", "tool_error_rate", "turns", "entropy", "kl_reference", "kl_behaviour", "mismatch_kl",
    "clip_fraction", "grad_norm",
)  # fmt: skip


def flat(table: Mapping[str, Json], at: str = "") -> dict[str, Json]:
    """Flatten a config to `a.b` keys; environments of a list by name or id."""
    out: dict[str, Json] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            out |= flat(value, f"{at}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) and "id" in item for item in value):
            for item in value:
                out |= flat(item, f"{at}{key}.{item.get('name', item['id'])}.")
        else:
            out[f"{at}{key}"] = value
    return out


def figures(metrics: Sequence[Sequence[Mapping[str, Json]]], overviews: Sequence[Mapping[str, Json]]) -> dict[str, list[Json]]:
    """Return final figures by name, one value per run: of the whole run, its best evaluation, and means over the last ten
    updates."""
    out: dict[str, list[Json]] = {name: [row[name] for row in overviews] for name in _OVERVIEW}
    held = [[row for row in rows if row.get("phase") in ("before", "eval", "after")] for rows in metrics]
    best = [
        max((row for row in rows if row.get("success") is not None), key=lambda row: row["success"], default=None)
        for rows in held
    ]
    out["best evaluation"] = [None if row is None else row["success"] for row in best]
    out["at step"] = [None if row is None else row["step"] for row in best]
    terms = sorted({name for rows in metrics for row in rows for name in row if name.startswith("term/")})
    for name in (*_LAST, *terms):
        values = [_last(rows, name) for rows in metrics]
        if any(value is not None for value in values):
            out[f"{name} (last updates)"] = values
    return out


def _last(rows: Sequence[Mapping[str, Json]], name: str) -> float | None:
    found = [row[name] for row in rows if row.get("phase") == "train" and isinstance(row.get(name), (int, float))][-10:]
    return sum(found) / len(found) if found else None


# Runs and episodes as terminal text.
#
# Texts of a policy, tool or file are untrusted here too: escape sequences could clear the screen, set its title or type for the
# user, and square brackets are rich markup. So every text from outside passes `safe` and is shown as `Text`.

PAGE = 120
"""Maximum width of an episode in columns."""


def cell(value: Json, most: int = 60) -> Text:
    """Format a value for a table on one line; "-" if unknown."""
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    if isinstance(value, int):
        return Text(f"{value:,}")
    return Text(safe(value, most).replace("\n", " "))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Json]], most: int = 60) -> Table:
    """Build a table of untrusted values."""
    named = Text(safe(title)) if title else None
    out = Table(title=named, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        out.add_column(Text(safe(name)), min_width=min(len(name), 8), overflow="fold")
    for row in rows:
        out.add_row(*(cell(value, most) for value in row))
    return out


def print_json(value: Json) -> None:
    """Serialize as ASCII JSON, so that no character affects a terminal; non-finite numbers are null."""
    say(json_text(value, indent=2))


def console() -> Console:
    """Create a console without markup and highlighting: all output is `Text` or from this file."""
    return safe_console(markup=False, highlight=False)


def runs_table(rows: Sequence[Mapping[str, Json]]) -> Table:
    """Format runs of `library.overview`, with success on held-out tasks before and after."""
    shown = []
    for row in rows:
        updates = f"{row['updates']}/{row['steps']}" if row["steps"] else row["updates"]
        success = " > ".join(cell(row[name]).plain for name in ("success_before", "success_after"))
        minutes = None if row["seconds"] is None else round(row["seconds"] / 60, 1)
        shown.append((row["run"], row["status"], ", ".join(row["envs"]), updates, success, row["tokens"], minutes))
    return table("", ("run", "status", "env", "updates", "success", "tokens", "min"), shown)


def failures_table(rows: Sequence[Mapping[str, Json]]) -> Table:
    """Format failures of `queries.failures` by reason."""
    columns = ("episodes", "kind", "reason", "steps", "for example")
    shown = [
        (row["episodes"], row["kind"], row["reason"], f"{row['first_step']}..{row['last_step']}", " ".join(row["examples"][:2]))
        for row in rows
    ]
    return table("why episodes did not succeed", columns, shown, most=90)


def episode_text(row: Mapping[str, Json]) -> RenderableType:
    """Format an episode turn by turn, its reward tree, and its timings."""
    head = Text.assemble(
        (safe(row["id"]), "bold"),
        f"  {safe(row['env'])}  {safe(row['task'])}  reward {cell(row['reward']).plain}  "
        f"success {cell(row['success']).plain}  stop {safe(row['stop'])}",
    )
    parts: list[RenderableType] = [head]
    if row["error"]:
        parts.append(Text(f"error: {safe(row['error'])}", style="red"))
    parts += _script(row)
    if row.get("parting"):
        parts.append(_panel("user, leaving", row["parting"]))
    if isinstance(row["evidence"], dict):
        rewards = {turn["index"]: turn["reward"] for turn in row["turns"] if turn["reward"] is not None}
        try:
            why = explain_text(Score(row["reward"], rewards, row["evidence"], row["metrics"] or {}, row["success"]))
        except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or from a policy
            why = json.dumps(row["evidence"], indent=1)
        parts.append(Panel(Text(safe(why)), title="reward", title_align="left"))
    times = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in (row["timings"] or {}).items())
    parts.append(Text(safe(times), style="dim"))
    return Group(*parts)


def _script(row: Mapping[str, Json]) -> list[RenderableType]:
    found: list[RenderableType] = []
    turns = list(row["turns"])
    messages = row["messages"] or []
    places = (at for at, one in enumerate(messages) if turns and one["role"] == "assistant" and _same(one, turns[0]["message"]))
    first = next(places, len(messages))
    opening, later = [one for one in messages[:first] if one["role"] != "tool"], messages[first:]
    users = [place for place, message in enumerate(opening) if message["role"] == "user"]
    first = users[-1] if users else len(opening)  # the user's calls before its first message
    found += [_panel(message["role"], _message_text(message)) for message in opening[:first]]
    found += [*_user_calls(row, -1), *(_panel(message["role"], _message_text(message)) for message in opening[first:])]
    for message in later:
        if turns and message["role"] == "assistant" and _same(message, turns[0]["message"]):
            turn = turns.pop(0)
            found += [*_turn(turn), *_user_calls(row, turn["index"])]
        elif message["role"] != "tool":
            found.append(_panel(message["role"], _message_text(message)))
    # A context policy may have removed turns from the messages; they were played, so show them.
    return found + [part for turn in turns for part in (*_turn(turn), *_user_calls(row, turn["index"]))]


def _same(message: Mapping[str, Json], played: Mapping[str, Json]) -> bool:
    calls = [len(one.get("tool_calls") or ()) for one in (message, played)]
    return message["content"] == played["content"] and calls[0] == calls[1]


def _message_text(message: Mapping[str, Json]) -> str:
    said = [f"({message['reasoning']})"] if message.get("reasoning") else []
    said += [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        said.append(_call(call) + (f"   [{call['error']}]" if call.get("error") else ""))
    return "\n".join(said)


def _call(call: Mapping[str, Json]) -> str:
    given = call["raw"] if call["arguments"] is None else json.dumps(call["arguments"], ensure_ascii=False)
    return f"-> {call['name']} {given}"


def _turn(turn: Mapping[str, Json]) -> list[RenderableType]:
    tokens, seconds = turn["tokens"], turn["seconds"]
    worth = "" if turn["value"] is None else f", value {turn['value']:.2f}"
    head = f"turn {turn['index']}: {tokens} tokens, {seconds:.2f} s{worth}"
    out: list[RenderableType] = [_panel(head, _message_text(turn["message"]))]
    for result in turn["results"]:
        mark = f"  error: {result['error']}" if result.get("error") else ""
        out.append(Text(safe(f"   {result['name']}{mark}: {result['content']}", 2000), style="dim" if not mark else "red"))
    return out


def _user_calls(row: Mapping[str, Json], turn: int) -> list[RenderableType]:
    """Format the simulated user's tool calls in answer to a turn; -1: before its first message."""
    out: list[RenderableType] = []
    for made in [made for made in row.get("user_calls") or [] if made["turn"] == turn]:
        result = made["result"] or {"error": "no answer", "content": ""}
        said = f" ({made['text']})" if made.get("text") else ""
        mark = f"  error: {result['error']}" if result.get("error") else ""
        text = f"   the user{said} {_call(made['call'])}{mark}: {result['content']}"
        out.append(Text(safe(text, 2000), style="red" if mark else "cyan"))
    return out


def _panel(title: str, text: Json) -> Panel:
    return Panel(Text(safe(text, 4000)), title=Text(safe(title)), title_align="left")
