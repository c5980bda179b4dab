"""A person as the agent: one line per turn."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from agentrl.env import Message, ToolCall, ToolEnv
from agentrl.env.users import GOLD, ModelUser
from agentrl.utils.errors import ConfigError, EnvError
from agentrl.utils.parsing import read_json
from agentrl.utils.terminal import safe

HELP = """  NAME a=b c=d     call a tool (values in JSON; a bare word is a string)
  {"name": ...}    call a tool, as the model would write it
  anything else    say it to the user; ":" in front always says it
  /tools /state /help /quit"""


def play_by_hand(
    env: ToolEnv, seed: int, split: str, read: Callable[[str], str], write: Callable[[str], None], own_user: bool = False
) -> int:
    """Run one episode with `read` as the agent; returns the exit code (130 if the person quit). The user is that of the gold
    solution if there is one; `own_user`: the environment's own, which may be a model that costs money. Raises ConfigError if the
    user is a model and has no script."""
    observation, info = _begin(env, seed, split, own_user)
    show, write = write, lambda text: show(safe(text))  # what a tool or a user says
    write(f"{env.id}, task {info['task_id']}. Type /help for help.")
    inner = env.unwrapped
    if not own_user and isinstance(inner, ToolEnv) and type(inner).gold_user is not ToolEnv.gold_user:
        write(
            "the user is played by the script of the gold solution; --model-user: by the environment's own, which may be a model"
        )
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
        if line.startswith("/"):
            write(_command(env, line))
            continue
        try:
            observation, reward, terminated, truncated, info = env.step(parse_line(line, env.toolbox.names))
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
    return 0


def _begin(env: ToolEnv, seed: int, split: str, own_user: bool) -> tuple[list[Message], dict[str, Any]]:
    try:
        return env.reset(seed=seed, options={"split": split, **({} if own_user else {"user": GOLD})})
    except ConfigError as why:
        inner = env.unwrapped
        if own_user or not (isinstance(inner, ToolEnv) and isinstance(inner.user, ModelUser)):
            raise
        raise ConfigError(f"{why}; --model-user: its model plays the user") from None


def parse_line(line: str, tools: tuple[str, ...]) -> Message:
    """The message that a typed line means: a call if it is JSON or a tool's name followed only by a=b, else text."""
    if line.startswith(":"):
        return Message("assistant", line[1:].strip())
    if line.startswith("{"):
        return _from_json(line)
    try:
        words = shlex.split(line, posix=True)
    except ValueError:
        return Message("assistant", line)
    if words and words[0] in tools and all("=" in word for word in words[1:]):
        arguments = {key: _value(text) for key, _, text in (word.partition("=") for word in words[1:])}
        return Message("assistant", tool_calls=(ToolCall(words[0], arguments),))
    return Message("assistant", line)


def _from_json(line: str) -> Message:
    from agentrl.render.tool_calls import parse_tool_calls

    content, calls = parse_tool_calls(f"<tool_call>\n{line}\n</tool_call>")
    return Message("assistant", content, calls)


def _value(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return text


def _command(env: ToolEnv, line: str) -> str:
    if line == "/tools":
        return "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in env.toolbox.schemas())
    if line == "/state":
        return json.dumps(env.state(), ensure_ascii=False)
    return HELP


def _show(observation: list[Message], write: Callable[[str], None]) -> None:
    for message in observation:
        who = message.name if message.role == "tool" else message.role
        write(f"{who}: {message.content}")


def _show_calls(env: ToolEnv, shown: int, write: Callable[[str], None]) -> int:
    """Print the user's own tool calls since the first `shown` calls, which the agent would not see; how many there are now."""
    calls = env.trajectory.user_calls
    for made in calls[shown:]:
        answer = made.result.content if made.result is not None else "no answer"
        write(f"(the user: {made.call.name} {json.dumps(made.call.arguments, ensure_ascii=False)} -> {answer})")
    return len(calls)
