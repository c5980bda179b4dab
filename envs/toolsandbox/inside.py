"""Run by the benchmark's own Python (`agentrl.contrib.suites.foreign`): its scenarios, tools and evaluator.

    foreign_main.py inside.py FOLDER NOW

An episode is its execution context as bytes: a request brings it along and gets the next one back, so nothing of an episode
is left in this process, and any process can answer for any episode.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import sys
import time
import types
from typing import Any

sys.path.insert(0, sys.argv[1])
if sys.argv[2] != "machine":
    os.environ["TZ"] = "UTC"  # the same tasks on every machine
    time.tzset()

import dill
from agentrl_foreign import load_sibling, steady
from tool_sandbox.common import execution_context as contexts
from tool_sandbox.common.message_conversion import Message, openai_tool_call_to_python_code, to_openai_messages
from tool_sandbox.common.scenario import Scenario
from tool_sandbox.common.tool_conversion import convert_to_openai_tools
from tool_sandbox.common.tool_discovery import ToolBackend
from tool_sandbox.roles.base_role import BaseRole
from tool_sandbox.roles.execution_environment import ExecutionEnvironment
from tool_sandbox.scenarios import named_scenarios
from tool_sandbox.tools import rapid_api_search_tools

Role = contexts.RoleType
AUGMENTED = re.compile(r"_(3_distraction_tools(_\w+_scrambled)?|10_distraction_tools|all_tools)$")
VARIANT = re.compile(
    r"_(alt|implicit|ambiguous|twice|multiple_user_turn|insufficient_information|low_battery_mode|wifi_off|cellular_off"
    r"|no_remove_contact|no_search_contacts|and_location)(?=_|$)"
)


class Agent(BaseRole):
    """The agent's side of theirs: what it sees, and which tools."""

    role_type = Role.AGENT


# An episode's time begins at NOW and goes on by a second a message.
NOW = None if sys.argv[2] == "machine" else sys.argv[2]
ANEW = steady("tool_sandbox", NOW, lambda: max(contexts.get_current_context().max_sandbox_message_index, 0))
random.seed(42)  # as their command does, before it makes the scenarios
SCENARIOS: dict[str, Scenario] = named_scenarios(preferred_tool_backend=ToolBackend.DEFAULT)
NETWORK = {name for name, value in vars(rapid_api_search_tools).items() if getattr(value, "is_tool", False)}
NETWORK = {name for name in NETWORK if getattr(rapid_api_search_tools, name).__module__ == rapid_api_search_tools.__name__}


def catalog() -> list[dict[str, Any]]:
    """Every scenario: name, family, categories, the tools of the network that its milestones cannot do without."""
    rows = []
    for name, scenario in SCENARIOS.items():
        base = AUGMENTED.sub("", name)
        needed = set(SCENARIOS[base].starting_context.tool_allow_list or ()) if milestones(name) else set()
        contexts.set_current_context(scenario.starting_context)
        opening, _ = to_openai_messages(Agent.filter_messages(BaseRole.get_messages()))
        rows.append(
            {
                "name": name, "base": base, "messages": opening, "family": VARIANT.sub("", base),
                "categories": [str(one) for one in scenario.categories], "network": sorted(needed & NETWORK),
                "says": sum(said_to_user(one) is not None for one in milestones(name)),
            }
        )  # fmt: skip
    return rows


def milestones(name: str) -> Any:
    return SCENARIOS[name].evaluation.milestone_matcher.milestones


def said_to_user(milestone: Any) -> str | None:
    """What a milestone wants the agent to say, if it wants that."""
    for constraint in milestone.snapshot_constraints:
        rows = [] if constraint.target_dataframe is None else constraint.target_dataframe.to_dicts()
        if rows and rows[0].get("sender") == Role.AGENT and rows[0].get("recipient") == Role.USER:
            return str(rows[0]["content"])
    return None


def start(name: str) -> dict[str, Any]:
    """A fresh episode, and the tools that the agent is shown, in OpenAI's form."""
    context = dill.loads(dill.dumps(SCENARIOS[name].starting_context))
    contexts.set_current_context(context)
    for index, message in enumerate(BaseRole.get_messages()):
        if (message.sender, message.recipient) == (Role.SYSTEM, Role.EXECUTION_ENVIRONMENT):
            ExecutionEnvironment().respond(ending_index=index)
    return {**_now(name), "tools": convert_to_openai_tools(Agent.get_available_tools())}


def calls(name: str, context: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The calls of one turn, all in each order as theirs does; `calls`: name and arguments."""
    _load(context)
    held, available = contexts.get_current_context(), Agent.get_available_tools()
    sent = []
    for number, call in enumerate(calls):
        mark = f"call_{held.max_sandbox_message_index}_{number}"
        function = types.SimpleNamespace(name=call["name"], arguments=json.dumps(call["arguments"]))
        made = types.SimpleNamespace(id=mark, function=function)
        code = openai_tool_call_to_python_code(made, set(available), held.get_execution_facing_tool_name(call["name"]))
        asked = Message(Role.AGENT, Role.EXECUTION_ENVIRONMENT, code, openai_tool_call_id=mark, openai_function_name=call["name"])
        sent.append(asked)
    BaseRole.add_messages(sent)
    over = _now(name)
    if over["over"]:  # their loop stops before the calls are made
        return {**over, "answers": [{"content": "", "error": None} for _ in sent]}
    ExecutionEnvironment().respond()
    told = {message.openai_tool_call_id: message for message in BaseRole.get_messages()[-len(sent) :]}
    answers = [told[message.openai_tool_call_id] for message in sent]
    return {**_now(name), "answers": [{"content": one.content, "error": one.tool_call_exception} for one in answers]}


def say(name: str, context: str, text: str, by: str) -> dict[str, Any]:
    """A text of the agent to the user, or (`by` "user") of the user to the agent."""
    _load(context)
    sides = (Role.AGENT, Role.USER) if by == "agent" else (Role.USER, Role.AGENT)
    BaseRole.add_messages([Message(*sides, text)])
    return _now(name)


def leave(name: str, context: str) -> dict[str, Any]:
    """The user ends the conversation, by the tool that it has for it."""
    _load(context)
    code = "end_response = end_conversation()\nprint(repr(end_response))"
    BaseRole.add_messages([Message(Role.USER, Role.EXECUTION_ENVIRONMENT, code)])
    ExecutionEnvironment().respond()
    return _now(name)


def user_view(context: str) -> dict[str, Any]:
    """What their simulated user is shown: instruction, examples and conversation, with the roles swapped, and its tool."""
    _load(context)
    as_shown = {(Role.SYSTEM, Role.USER): "system", (Role.AGENT, Role.USER): "user", (Role.USER, Role.AGENT): "assistant"}
    visible = [message for message in BaseRole.get_messages() if Role.USER in (message.visible_to or ())]
    pairs = [(as_shown.get((message.sender, message.recipient)), message.content) for message in visible]
    messages = [{"role": role, "content": content} for role, content in pairs if role is not None]
    tools = contexts.get_current_context().get_available_tools(scrambling_allowed=False)
    own = {name: tool for name, tool in tools.items() if Role.USER in getattr(tool, "visible_to", ())}
    return {"messages": messages, "tools": convert_to_openai_tools(own)}


def verdict(name: str, context: str) -> dict[str, Any]:
    """Their evaluation, and the databases as the episode left them."""
    _load(context)
    held, scenario = contexts.get_current_context(), SCENARIOS[name]
    found = scenario.evaluation.evaluate(execution_context=held, max_turn_count=scenario.max_messages)
    spaces = [space for space in contexts.DatabaseNamespace if space != contexts.DatabaseNamespace.SANDBOX]
    reached = [one for _, one in found.milestone_mapping.values()]
    return {
        "similarity": found.similarity, "least": 0.0 if found.minefield_similarity else min(reached, default=1.0),
        "milestone_similarity": found.milestone_similarity,
        "minefield_similarity": found.minefield_similarity, "turn_count": found.turn_count,
        "milestones": reached,
        "databases": {str(space): held.get_database(space).to_dicts() for space in spaces},
    }  # fmt: skip


def _load(context: str) -> None:
    ANEW()
    contexts.set_current_context(dill.loads(base64.b64decode(context)))


def _now(name: str) -> dict[str, Any]:
    """The context in progress as bytes, and whether their loop would end here."""
    held, scenario = contexts.get_current_context(), SCENARIOS[name]
    rows = held.get_database(contexts.DatabaseNamespace.SANDBOX, drop_sandbox_message_index=False)
    most = scenario.max_messages + scenario.starting_context.max_sandbox_message_index
    over = not rows["conversation_active"][-1] or rows["sandbox_message_index"][-1] >= most
    return {"context": base64.b64encode(dill.dumps(held)).decode(), "over": bool(over)}


def gold(name: str) -> list[Any] | None:
    """Turns that reach every milestone, if these determine them: a text, or a call's name and arguments. See `gold.py`."""
    return load_sibling(__file__, "gold").gold(sys.modules[__name__], name)  # type: ignore[no-any-return]
