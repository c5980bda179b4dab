"""A cabinet of drawers, with a user of several rounds who brings tools along: what replays by round are tested on."""

from typing import Any

from agentrl.contrib.users import ModelUser
from agentrl.data.trajectory import Trajectory, message_of
from agentrl.env import Message, Task, ToolCall, ToolEnv, tool
from agentrl.reward import Context, Scorer, compile_spec
from agentrl.utils.errors import ToolError

BY_ROUND = {"replay": {"$": "/task/gold/rounds"}}


class Cabinet(ToolEnv):
    """`task.data["says"]`: the user's texts after the first, one a round; `task.data["brings"]`: by round, the names of the tools
    that come with it (the others are there from the start). `task.data["history"]`: rows of messages before the first."""

    id = "test/Cabinet-v0"
    scripted = True

    def make_task(self, rng_seed: int, split: str) -> Task:
        raise NotImplementedError

    def prompt(self, task: Task) -> list[Message]:
        return [*map(message_of, task.data.get("history", ())), Message("user", "begin")]

    async def setup(self, task: Task) -> None:
        self.drawers: dict[str, list[str]] = {}
        self.round = 0
        for names in task.data.get("brings", {}).values():
            for name in names:
                self.toolbox.remove(name)

    async def user_reply(self, message: Message) -> list[Message] | None:
        self.round += 1
        if self.round > len(self.task.data["says"]):
            return None
        for name in self.task.data.get("brings", {}).get(str(self.round), ()):
            self.toolbox.add(getattr(type(self), name))
        return [Message("user", self.task.data["says"][self.round - 1])]

    def state(self) -> Any:
        return {"drawers": self.drawers, "round": self.round}

    @tool(inline=True)
    def put(self, drawer: str, thing: str) -> str:
        """puts"""
        self.drawers.setdefault(drawer, []).append(thing)
        return f"{drawer} has {len(self.drawers[drawer])}"

    @tool(inline=True)
    def take(self, drawer: str) -> str:
        """takes the last"""
        if not self.drawers.get(drawer):
            raise ToolError(f"{drawer} is empty")
        return self.drawers[drawer].pop()

    @tool(inline=True)
    def count(self) -> int:
        """counts"""
        return sum(map(len, self.drawers.values()))

    @tool
    async def swap(self, one: str, other: str) -> str:
        """swaps two drawers"""
        self.drawers[one], self.drawers[other] = self.drawers.get(other, []), self.drawers.get(one, [])
        return "swapped"

    @tool(inline=True)
    def lock(self) -> str:
        """ends the episode"""
        self.finish()
        return "locked"


class Guest(Cabinet):
    """A model is the user: it turns the cabinet by a tool of its own, says a line, and each of its turns brings `swap`."""

    scripted = False
    asked = 0

    async def setup(self, task: Task) -> None:
        await super().setup(task)
        self.toolbox.remove("swap")
        self.user = ModelUser(complete=self._said)

    @staticmethod
    async def _said(messages: object) -> str | Message:
        Guest.asked += 1
        return Message("user", "", (put("guest", str(Guest.asked)),)) if Guest.asked % 2 else f"line {Guest.asked}"

    async def user_reply(self, message: Message) -> list[Message] | None:
        if "swap" not in self.toolbox:
            self.toolbox.add(Cabinet.swap)
        return await ToolEnv.user_reply(self, message)

    @tool(by="user", inline=True, name="put")
    def guest_put(self, drawer: str, thing: str) -> str:
        """the guest puts"""
        return Cabinet.put.function(self, drawer, thing)


def put(drawer: str, thing: str) -> ToolCall:
    return ToolCall("put", {"drawer": drawer, "thing": thing})


def swap(one: str, other: str) -> ToolCall:
    return ToolCall("swap", {"one": one, "other": other})


def task_of(rounds: list[list[ToolCall]], **data: Any) -> Task:
    """A task with these gold calls by round, and a user who says as many things."""
    gold = [[{"name": call.name, "arguments": call.arguments} for call in calls] for calls in rounds]
    says = [f"round {number}" for number in range(1, len(rounds))]
    return Task("c", 0, "train", {"says": says, **data}, {"rounds": gold})


def played(task: Task, rounds: list[list[list[ToolCall]]], env: ToolEnv | None = None) -> Trajectory:
    """The episode of a policy that makes these calls: of each round its turns, of each turn its calls; then a text."""
    env = env or Cabinet()
    env.scorer = None
    env.reset(seed=task.seed, options={"task": task})
    for number, turns in enumerate(rounds):
        for calls in turns:
            env.step(Message("assistant", "", tuple(calls)))
            if not env.is_open:
                return env.trajectory
        env.step(f"done {number}")
    return env.trajectory


def by_gold(gold: list[list[ToolCall]], env: ToolEnv | None = None, **data: Any) -> Trajectory:
    """The episode of a policy that makes the gold calls, each in a turn of its own."""
    return played(task_of(gold, **data), [[[call] for call in calls] for calls in gold], env)


X, Y = put("a", "x"), put("a", "y")


def by_round(*leaves: str, make: Any = lambda task: Cabinet()) -> Scorer:
    """All of the leaves in every round that has gold calls."""
    root = {
        "op": "all",
        "scope": "round",
        "reduce": "all",
        "when": {"$": "/task/gold/rounds", "at": "round", "ne": []},
        "of": [{"use": name, "args": dict(BY_ROUND)} for name in leaves or ("state.match", "results.contains")],
    }
    return compile_spec({"agentrl_reward": 1, "name": "rounds", "root": root}, context=Context(replay_env=make))
