"""Episodes with a person as the agent, one line per turn."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentrl.env import Message, ToolCall, ToolEnv
from agentrl.env.users import GOLD, AsksModel
from agentrl.reward.explain import explain_text
from agentrl.utils.errors import ConfigError, EnvError, UserError, did_you_mean
from agentrl.utils.parsing import read_json
from agentrl.utils.schemas import first_fault, validator
from agentrl.utils.terminal import safe

if TYPE_CHECKING:
    from agentrl.reward import Scorer

Schema = Mapping[str, Any]
HELP = """  NAME a=b c=d     call a tool (values in JSON where the tool takes it; else a string), or NAME(a="b", c=1)
  {"name": ...}    call a tool, as the model would write it
  anything else    say it to the user; ":" in front always says it
  /tools /state /help /quit"""


def play_by_hand(
    env: ToolEnv,
    seed: int,
    split: str,
    read: Callable[[str], str],
    write: Callable[[str], None],
    own_user: bool = False,
    scorer: Scorer | None = None,
) -> int:
    """Play one episode with `read` as the agent; returns the exit code (130 if the person quit).

    The user is the script of the gold solution if there is one; `own_user`: the environment's user, which may be a model that
    costs money. `scorer` explains the final reward. Raises ConfigError if the user is a model without a script."""
    inner = env.unwrapped
    try:
        observation, info = env.reset(seed=seed, options={"split": split, **({} if own_user else {"user": GOLD})})
    except ConfigError as why:
        if own_user or not (isinstance(inner, ToolEnv) and isinstance(inner.user, AsksModel)):
            raise
        raise ConfigError(f"{why}; --model-user: its model plays the user") from None
    show, write = write, lambda text: show(safe(text))  # escape texts of tools and users
    write(f"{env.id}, task {info['task_id']}. Type /help for help.")
    if not own_user and isinstance(inner, ToolEnv) and type(inner).gold_user is not ToolEnv.gold_user:
        write("the script of the gold solution plays the user; --model-user: the environment's user does, which may be a model")
    _show(observation, write)
    shown = _show_calls(env, 0, write)
    while True:
        try:
            line = read("agent> ").strip()
        except (EOFError, KeyboardInterrupt):
            line = "/quit"
        if line == "/quit":
            env.close()
            write("quit; the episode is not scored")
            return 130
        functions = [schema["function"] for schema in env.toolbox.schemas()]
        if line.startswith("/"):
            tools = "\n".join(json.dumps(one, ensure_ascii=False) for one in functions)
            write(tools if line == "/tools" else json.dumps(env.state(), ensure_ascii=False) if line == "/state" else HELP)
            continue
        schemas = {one["name"]: one.get("parameters", {}) for one in reversed(functions)}
        try:
            action = parse_line(line, {name: schemas.get(name, {}) for name in env.toolbox.names})
            observation, reward, terminated, truncated, info = env.step(action)
        except NotACallError as why:  # a typing mistake must not end the episode
            write(str(why))
            continue
        except EnvError as fault:
            write(f"the environment failed: {fault}")
            return 1
        shown = _show_calls(env, shown, write)
        _show(observation, write)
        if terminated or truncated:
            break
    if env.trajectory.parting:
        write(f"user, leaving: {env.trajectory.parting}")
    calls = sum(1 for _ in env.trajectory.calls())
    write(f"ended ({info['stop']}) after {info['turns']} turns with {calls} calls; reward {reward:g}")
    if scorer is not None and not scorer.compares:
        write(explain_text(scorer.score(env.trajectory)))
    return 0


class NotACallError(UserError):
    """A line that looks like a tool call but is not a valid one."""


_PYTHON = re.compile(r"([\w.-]+)\((.*)\)\s*", re.DOTALL)


def parse_line(line: str, tools: Mapping[str, Schema]) -> Message:
    """Parse a typed line: a call if it is JSON, a tool's name followed only by a=b, or NAME(a=1); else text.
    `tools`: JSON Schemas of the parameters by name. Raises NotACallError for a call of an unknown tool."""
    if line.startswith(":"):
        return Message("assistant", line[1:].strip())
    if line.startswith("{"):
        from agentrl.render.tool_calls import parse_tool_calls

        content, calls = parse_tool_calls(f"<tool_call>\n{line}\n</tool_call>")
        return Message("assistant", content, calls)
    if found := _PYTHON.fullmatch(line):
        with suppress(SyntaxError, ValueError):
            parsed = ast.parse("call" + line.removeprefix(found[1]), mode="eval").body
            if isinstance(parsed, ast.Call) and not parsed.args and all(word.arg for word in parsed.keywords):
                return _call(found[1], [(str(word.arg), ast.literal_eval(word.value)) for word in parsed.keywords], tools)
        raise NotACallError(f"{found[1]}(...): expected keyword arguments with literal values, as in {found[1]}(a=1, b='two')")
    try:
        words = shlex.split(line, posix=True)
    except ValueError:
        return Message("assistant", line)
    named = bool(words) and all(re.match(r"\w[\w.-]*=", word) for word in words[1:])
    if named and (words[0] in tools or len(words) > 1 or did_you_mean(words[0], tools)):
        arguments: list[tuple[str, Any]] = []
        for key, text in (word.split("=", 1) for word in words[1:]):
            arguments.append((key, text))
            with suppress(ValueError):  # not JSON: keep the text
                value, fits = read_json(text), validator(tools.get(words[0], {}).get("properties", {}).get(key, {}))
                # Keep the text if the parameter accepts the text but not the JSON value.
                if first_fault(fits, value) is None or first_fault(fits, text) is not None:
                    arguments[-1] = key, value
        return _call(words[0], arguments, tools)
    return Message("assistant", line)


def _call(name: str, arguments: Sequence[tuple[str, Any]], tools: Mapping[str, Schema]) -> Message:
    given = dict(arguments)
    if twice := [key for place, (key, _) in enumerate(arguments) if key in dict(arguments[:place])]:
        raise NotACallError(f"{name}: {twice[0]} is given twice. Write each argument once")
    if name not in tools:
        near = did_you_mean(name, tools, f"tools: {', '.join(tools) or 'none'}")
        raise NotACallError(f"no tool {name!r}; {near} (to say the line to the user, begin it with ':')")
    return Message("assistant", tool_calls=(ToolCall(name, given),))


def _show(observation: list[Message], write: Callable[[str], None]) -> None:
    for message in observation:
        who = message.name if message.role == "tool" else message.role
        write(f"{who}: {message.content}")


def _show_calls(env: ToolEnv, shown: int, write: Callable[[str], None]) -> int:
    """Print the user's tool calls after the first `shown`, which an agent does not see; returns their number."""
    calls = env.trajectory.user_calls
    for made in calls[shown:]:
        answer = made.result.content if made.result is not None else "no answer"
        write(f"(the user: {made.call.name} {json.dumps(made.call.arguments, ensure_ascii=False)} -> {answer})")
    return len(calls)
