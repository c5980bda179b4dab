"""A stand-in for `envs/toolsandbox/inside.py`, written for the tests: the same functions over a lamp and a phone book.

foreign_main.py toolsandbox_standin.py FOLDER NOW
"""

import base64
import json
from typing import Any

MOST = 6


def tool(name: str, /, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}, "required": []}
    return {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": parameters}}


def row(name: str, base: str, categories: list[str], network: list[str], says: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Ask if unsure."}, {"role": "user", "content": f"Do {base}."}]
    return {
        "name": name, "base": base, "family": base, "categories": categories, "messages": messages,
        "network": network, "says": says,
    }  # fmt: skip


def catalog() -> list[dict[str, Any]]:
    return [
        row("lamp_on", "lamp_on", ["SINGLE_TOOL_CALL", "NO_DISTRACTION_TOOLS"], [], 1),
        row("lamp_on_3", "lamp_on", ["SINGLE_TOOL_CALL", "THREE_DISTRACTION_TOOLS", "ARG_TYPE_SCRAMBLED"], [], 1),
        row("twice", "twice", ["MULTIPLE_USER_TURN", "THREE_DISTRACTION_TOOLS"], [], 2),
        row("weather", "weather", ["SINGLE_TOOL_CALL"], ["fetch"], 1),
        row("nothing", "nothing", ["INSUFFICIENT_INFORMATION"], [], 0),
    ]


def packed(held: dict[str, Any], over: bool = False) -> dict[str, Any]:
    over = over or not held["active"] or len(held["log"]) >= MOST
    return {"context": base64.b64encode(json.dumps(held).encode()).decode(), "over": over}


def opened(context: str) -> Any:
    return json.loads(base64.b64decode(context))


def start(name: str) -> dict[str, Any]:
    held = {"lamp": False, "log": [], "active": True}
    return {**packed(held), "tools": [tool("lamp", on="boolean"), tool("find", name="string"), tool("fetch")]}


def run(held: dict[str, Any], call: dict[str, Any]) -> tuple[str, str | None]:
    if call["name"] == "lamp" and call["arguments"].get("on") is (not held["lamp"]):
        held["lamp"] = call["arguments"]["on"]
        return "None", None
    if call["name"] == "find" and set(call["arguments"]) == {"name"}:
        return repr([call["arguments"]["name"]]), None
    return "ValueError: no", "ValueError: no"


def calls(name: str, context: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    held = opened(context)
    held["log"] += [call["name"] for call in calls]
    if len(held["log"]) >= MOST:
        return {**packed(held), "answers": [{"content": "", "error": None} for _ in calls]}
    answers = [run(held, call) for call in calls]
    return {**packed(held), "answers": [{"content": content, "error": error} for content, error in answers]}


def say(name: str, context: str, text: str, by: str) -> dict[str, Any]:
    held = opened(context)
    held["log"].append(f"{by}: {text}")
    return packed(held)


def leave(name: str, context: str) -> dict[str, Any]:
    return packed({**opened(context), "active": False})


def user_view(context: str) -> dict[str, Any]:
    log = [line for line in opened(context)["log"] if ": " in line]
    turned = {"agent": "user", "user": "assistant"}
    messages = [{"role": turned[line.split(": ")[0]], "content": line.split(": ")[1]} for line in log]
    return {"messages": [{"role": "system", "content": "play the user"}, *messages], "tools": [tool("end_conversation")]}


def verdict(name: str, context: str) -> dict[str, Any]:
    held = opened(context)
    spoke = sum(line.startswith("agent: ") and "lamp" in line for line in held["log"]) / max(1, 2 * (name == "twice"))
    reached = [float(held["lamp"]), min(1.0, spoke)] if name != "nothing" else []
    mine = float("lamp" in held["log"]) if name == "nothing" else 0.0
    mean = sum(reached) / len(reached) if reached else 1.0
    return {
        "similarity": mean * (mine == 0), "least": 0.0 if mine else min(reached, default=1.0), "milestone_similarity": mean,
        "minefield_similarity": mine, "turn_count": len(held["log"]), "milestones": reached, "databases": {"lamp": held["lamp"]},
    }  # fmt: skip


def gold(name: str) -> list[Any] | None:
    known: dict[str, list[Any]] = {
        "nothing": ["I cannot."],
        "twice": [["lamp", {"on": True}], "The lamp is on.", "The lamp is still on."],
    }
    return known.get(name, [["lamp", {"on": True}], "The lamp is on."])
