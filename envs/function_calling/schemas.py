"""Declarations of a row in OpenAI's form, and gold values as sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.contrib.toolkit.bfcl_calls import possible_call
from agentrl.contrib.toolkit.chat_forms import Declaration, declarations
from agentrl.data.chat_forms import FormError
from agentrl.data.trajectory import Json
from agentrl.env.call_options import compile_validator
from agentrl.reward.values import same

from .rows import bad, fitting_arguments


def read_tools(listed: Any, where: str) -> list[Declaration]:
    """A list of declarations. Raises BadRowError for one whose parameters are not read, or no call could be checked against."""
    try:
        tools = list(declarations(listed, where))
        for number, tool in enumerate(tools):
            where = f"{where.partition('[')[0]}[{number}].parameters"
            compile_validator(tool["function"]["name"], tool["function"]["parameters"])
    except FormError as problem:
        bad(problem.key, problem.problem)
    except TypeError as problem:
        bad(where, str(problem))
    return tools


def as_sets(name: Json, arguments: Json, tools: list[dict[str, Json]]) -> dict[str, Json]:
    """A dataset's single gold call as sets of allowed values.

    Omitting an argument and giving its declared default are the same call, so either one is allowed.
    Raises BadRowError for anything that is not a call.
    """
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        bad("calls", f"a call must be a name with an object of arguments, got {name!r}, {arguments!r}"[:200])
    allowed: dict[str, list[Json]] = {key: [value] for key, value in arguments.items()}
    for tool in tools:
        if tool["function"]["name"] != name:
            continue
        for key, schema in tool["function"]["parameters"].get("properties", {}).items():
            if isinstance(schema, Mapping) and "default" in schema:
                given = arguments.get(key, schema["default"])
                if same(given, schema["default"]):
                    allowed[key] = [given, ""]
    return {"name": name, "arguments": allowed}


def one_of(call: Mapping[str, Json], tools: list[dict[str, Json]]) -> tuple[str, dict[str, Json]]:
    """A call that matches a gold call in either form: the first allowed values that fit, without optional arguments."""
    literal = isinstance(call.get("name"), str)
    if not literal:
        return possible_call(call, declared(tools))
    return call["name"], fitting_arguments(call, declared(tools).get(call["name"], {}))[0]


def declared(tools: list[dict[str, Json]]) -> dict[str, dict[str, Json]]:
    """The parameters of each tool by its name."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
