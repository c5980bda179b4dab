"""Calls as Python writes them, and what the leaderboard's classes answer and hold."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentrl.contrib.suites.benchmarks import calling
from agentrl.data.trajectory import Json, Message
from agentrl.utils.parsing import expression_of


def read_call(text: str, function: Callable[[str], Callable[..., Any]]) -> tuple[str, dict[str, Json]]:
    """Name and arguments of a call that is written in Python, such as `move("a", to="b")`; values are literals. `function(name)`
    gives what would be called, whose signature names arguments given by position (of a method, looked up in its class, the first
    parameter is left out). Raises ValueError for anything else."""
    try:
        node = expression_of(text.strip())
    except SyntaxError as problem:
        raise ValueError(f"not a call: {text[:100]!r}") from problem
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"not a call by name: {text[:100]!r}")
    places = [ast.literal_eval(item) for item in node.args]
    named = {item.arg: ast.literal_eval(item.value) for item in node.keywords if item.arg}
    if places:
        parameters = [name for name in inspect.signature(function(node.func.id)).parameters if name != "self"]
        named = dict(zip(parameters, places, strict=False)) | named
    return node.func.id, named


def public_methods(classes: Mapping[str, type]) -> dict[str, str]:
    """The public methods of classes, each with the name of the last class that has it."""
    return {
        method: name
        for name, one in classes.items()
        for method, _ in inspect.getmembers(one, inspect.isroutine)
        if method[0] != "_"
    }


def answer_of(api: Any, name: str, arguments: Mapping[str, Json], fault: str = "Error during execution: {}") -> str:
    """Result of a method call, as text: JSON for a dictionary that has a JSON form, else `str`; for an exception, `fault` with
    its words. `api` None: Python's words for a name that nothing has."""
    try:
        if api is None:
            raise NameError(f"name {name!r} is not defined")
        result = getattr(api, name)(**arguments)
    except Exception as problem:  # whatever the benchmark's code raises is its answer
        return fault.format(problem)
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


_AS_IT_IS = frozenset({str, int, float, type(None)})


def public_state(value: Any) -> Json:
    """A value as JSON, for states that are compared as Python compares them: true and 1 and 1.0 are the same.

    Of an object: its attributes without those whose name begins with "_", and without those that hold another object of its class
    (a directory's parent, say, which would lead in a circle). Keys that are not strings differ from strings that look
    like them.
    """
    kind = type(value)
    if kind in _AS_IT_IS:  # by far the most, and twice as quick as what follows
        return value
    if kind is dict:
        return {key if type(key) is str else _key(key): public_state(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _AS_IT_IS else public_state(item) for item in value]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {_key(key): public_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public_state(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((public_state(item) for item in value), key=repr)
    if hasattr(value, "__dict__"):
        return {
            name: item if type(item) in _AS_IT_IS else public_state(item)
            for name, item in vars(value).items()
            if name[:1] != "_" and type(item) is not kind
        }
    return repr(value)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, float | bool) and key == int(key):
        key = int(key)
    return f"{key!r} ({type(key).__name__})"


def round_turns(rounds: Iterable[Sequence[Mapping[str, Any]]]) -> list[Message]:
    """The turns of a solution by rounds of a conversation: the calls of each round at once, if it has some, and then a text, to
    which the user answers."""
    pairs = [(calling((call["name"], call["arguments"]) for call in calls), Message("assistant", "done")) for calls in rounds]
    return [turn for pair in pairs for turn in pair if turn.tool_calls or turn.content]
