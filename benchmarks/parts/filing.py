"""Environment of a small file system with a scripted user of several rounds, like BFCL's multi-turn tasks."""

from __future__ import annotations

import random
from typing import Any

from agentrl.data.trajectory import Trajectory
from agentrl.env import Message, Task, ToolCall, ToolEnv, tool
from agentrl.utils.errors import ToolError


class Folder:
    """A folder: entries by name, each a Folder or the text of a file."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = {name: Folder(item) if isinstance(item, dict) else item for name, item in entries.items()}

    def plain(self) -> dict[str, Any]:
        return {name: item.plain() if isinstance(item, Folder) else item for name, item in self.entries.items()}


class Filing(ToolEnv):
    """File system environment. `task.data`: `root`, the tree of folders and files; `says`, the user's messages."""

    id = "benchmark/Filing-v0"
    scripted = True

    def make_task(self, rng_seed: int, split: str) -> Task:
        return make_task(rng_seed)

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "You keep the files."), Message("user", task.data["says"][0])]

    async def setup(self, task: Task) -> None:
        self.root = Folder(task.data["root"])
        self.path = [self.root]
        self.round = 0

    async def user_reply(self, message: Message) -> list[Message] | None:
        self.round += 1
        says = self.task.data["says"]
        return [Message("user", says[self.round])] if self.round < len(says) else None

    def state(self) -> Any:
        return {"root": self.root.plain(), "depth": len(self.path)}

    def _file(self, name: str) -> str:
        found = self.path[-1].entries.get(name)
        if not isinstance(found, str):
            raise ToolError(f"no file {name}")
        return found

    @tool(inline=True)
    def cd(self, folder: str) -> str:
        """enter a folder, or go back with .."""
        if folder == "..":
            self.path = self.path[:-1] or [self.root]
            return "ok"
        found = self.path[-1].entries.get(folder)
        if not isinstance(found, Folder):
            raise ToolError(f"no folder {folder}")
        self.path.append(found)
        return "ok"

    @tool(inline=True)
    def ls(self) -> list[str]:
        """list the folder"""
        return list(self.path[-1].entries)

    @tool(inline=True)
    def mkdir(self, name: str) -> str:
        """make a folder"""
        if name in self.path[-1].entries:
            raise ToolError(f"{name} is there")
        self.path[-1].entries[name] = Folder({})
        return "made"

    @tool(inline=True)
    def mv(self, source: str, destination: str) -> str:
        """move a file into a folder, or rename it"""
        text = self._file(source)
        here = self.path[-1].entries
        del here[source]
        target = here.get(destination)
        if isinstance(target, Folder):
            target.entries[source] = text
        else:
            here[destination] = text
        return "moved"

    @tool(inline=True)
    def echo(self, name: str, content: str) -> str:
        """write a file"""
        self.path[-1].entries[name] = content
        return "written"

    @tool(inline=True)
    def cat(self, name: str) -> str:
        """read a file"""
        return self._file(name)

    @tool(inline=True)
    def grep(self, name: str, pattern: str) -> list[str]:
        """the lines of a file with a text"""
        return [line for line in self._file(name).splitlines() if pattern in line]

    @tool(inline=True)
    def wc(self, name: str) -> int:
        """count the words of a file"""
        return len(self._file(name).split())


WORDS = ("budget", "report", "draft", "notes", "plan", "summary", "archive", "log", "final", "temp")


def make_task(seed: int) -> Task:
    """Make a task: three folders with two or three files, and four rounds with 5.5 calls on average, as in BFCL."""
    rng = random.Random(seed)

    def lines() -> str:
        return "\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(3))

    root = {f"{word}_{seed}": {f"{name}.txt": lines() for name in rng.sample(WORDS, rng.randint(2, 3))} for word in WORDS[:3]}
    folder = next(iter(root))
    file, other = list(root[folder])[:2]
    rounds = [
        [("cd", {"folder": folder}), ("mkdir", {"name": "temp"}), ("mv", {"source": file, "destination": "temp"})],
        [("grep", {"name": other, "pattern": "budget"})],
        [("echo", {"name": "new.txt", "content": lines()})] if seed % 2 else [],
        [("wc", {"name": other})],
    ]
    gold = [[{"name": name, "arguments": arguments} for name, arguments in calls] for calls in rounds]
    says = [f"Please do part {number} of what I need with {file}." for number in range(len(rounds))]
    return Task(f"filing/{seed}", seed, "train", {"root": root, "says": says}, {"rounds": gold})


def play(task: Task, spoiled: bool) -> Trajectory:
    """Play the gold calls, one per turn, with a text after each round; `spoiled`: with wrong calls in the last round."""
    env = Filing(scorer=None)
    env.reset(seed=task.seed, options={"task": task})
    for number, calls in enumerate(task.gold["rounds"]):
        for call in calls:
            made = ToolCall(call["name"], dict(call["arguments"]))
            if spoiled and number == len(task.gold["rounds"]) - 1:
                made = ToolCall("echo", {"name": "wrong.txt", "content": "wrong"})
            env.step(Message("assistant", "", (made,)))
        env.step(Message("assistant", f"Part {number} is done."))
    return env.trajectory
