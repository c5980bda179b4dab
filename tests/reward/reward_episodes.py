"""Small episodes for the reward tests, written down turn by turn."""

from pathlib import Path
from typing import Any

from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.env import ToolEnv, tool
from agentrl.reward import Context, compile_spec

SHELF = Path(__file__).parents[2] / "rewards"


def call(name: str, /, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return name, arguments


def gold(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Gold calls as tasks write them."""
    return [{"name": name, "arguments": arguments} for name, arguments in calls]


def tool_schema(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def episode(*turns: Any, task_gold: dict[str, Any] | None = None, **rest: Any) -> Trajectory:
    """An episode from turns: a text (a turn without calls), a list of calls, or "user: ..." for a user's message.

    A call is `call(...)`, a ToolCall, or (call, answer) with the tool's answer; an answer is "ok" by default.
    """
    messages = [Message("user", "do it")]
    record: list[Turn] = []
    ledger = TokenLedger()
    ledger.append_context([1, 2], 0)
    number = 0
    reasoning = rest.pop("reasoning", None)
    for item in turns:
        if isinstance(item, str) and item.startswith("user:"):
            messages.append(Message("user", item[5:].strip()))
            continue
        index = len(record)
        calls, results = [], []
        if not isinstance(item, str):
            for entry in item:
                answered = isinstance(entry, tuple) and isinstance(entry[0], (tuple, ToolCall))
                made, answer = entry if answered else (entry, "ok")
                if not isinstance(made, ToolCall):
                    made = ToolCall(made[0], made[1], id=f"c{number}")
                number += 1
                calls.append(made)
                results.append(ToolResult(made.id, made.name, answer))
        message = Message("assistant", item if isinstance(item, str) else "", tuple(calls), reasoning=reasoning)
        ledger.append_sampled([7, 8, 9], [-0.5] * 3, [0] * 3, index)
        turn = Turn(index, message, results, sampled_tokens=3, ledger=0, end=len(ledger) - 1)
        record.append(turn)
        messages.append(message)
        messages.extend(Message("tool", r.content, tool_call_id=r.call_id, name=r.name) for r in results)
        ledger.append_context([5, 5], index)
    task = Task("t0", 0, gold=task_gold or {})
    return Trajectory("Test/Env-v0", task, messages=messages, turns=record, ledgers=[ledger], **rest)


class Counter(ToolEnv):
    """A replay environment with one number: `add(x)` answers with the new total."""

    id = "Test/Counter-v0"

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.closed = False

    def make_task(self, rng_seed: int, split: str) -> Task:
        raise NotImplementedError

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", "count")]

    async def setup(self, task: Task) -> None:
        self.total = int(task.data.get("start", 0))

    async def teardown(self) -> None:
        self.closed = True

    @tool(inline=True)
    def add(self, x: int) -> str:
        """adds"""
        self.total += x
        return str(self.total)

    def state(self) -> Any:
        return {"total": self.total}


def spec(root: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"agentrl_reward": 1, "name": "test", "root": root, **rest}


def leaf(kind: str, args: dict[str, Any] | None = None, **mods: Any) -> dict[str, Any]:
    return {"use": kind, **({"args": args} if args is not None else {}), **mods}


def value(kind: str, args: dict[str, Any], trajectory: Trajectory, context: Context | None = None, **mods: Any) -> Any:
    """What one leaf gives."""
    return compile_spec(spec(leaf(kind, args, **mods)), context=context).score(trajectory).value
