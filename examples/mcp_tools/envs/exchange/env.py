"""Exchange: convert an amount into euros, with a rate that only a server knows."""

import random

from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool


class Exchange(ToolEnv):
    """Say how many euros an amount of another currency is. The tool `rate` comes from the config's MCP server."""

    id = "examples/Exchange-v0"
    reward = "reward.json"
    summary = "amounts in euros, with a tool of an MCP server"

    def make_task(self, rng_seed, split):
        def propose(rng: random.Random):
            return rng.randrange(2, 200), rng.choice(["dollar", "pound", "franc"])

        amount, currency = draw(task_rng(self.id, split, rng_seed), split, propose, str)
        gold = amount * {"dollar": 2, "pound": 3, "franc": 4}[currency]
        return Task(
            f"exchange/{split}/{rng_seed}", rng_seed, split, {"amount": amount, "currency": currency}, {"answer": str(gold)}
        )

    def prompt(self, task):
        return [Message("user", f"How many euros are {task.data['amount']} {task.data['currency']}?")]

    @tool(read_only=True)
    async def multiply(self, a: int, b: int) -> int:
        """a times b"""
        return a * b

    def gold_turns(self, task):
        gold, amount = int(task.gold["answer"]), task.data["amount"]
        ask = ToolCall("rate", {"currency": task.data["currency"]})
        return [
            Message("assistant", tool_calls=(ask,)),
            Message("assistant", tool_calls=(ToolCall("multiply", {"a": amount, "b": gold // amount}),)),
            Message("assistant", task.gold["answer"]),
        ]
