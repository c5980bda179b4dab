"""Color square: look at a picture and name the color of the square in it. The tool answers an image."""

from __future__ import annotations

import json
import random
from typing import Any

from agentrl.data.images import Image
from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ConfigError

from .teacher import Teacher

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "black": (10, 10, 10),
    "yellow": (240, 220, 40),
    "purple": (150, 40, 170),
}


class ColorSquare(ToolEnv):
    """Name the color of a square that only the tool `look` shows."""

    id = "agentrl/ColorSquare-v0"
    reward = "color_square"
    summary = "look at a picture, which a tool answers as an image, and name the color of its square"

    def __init__(self, *, colors: int = 6, side: int = 56, **base: Any) -> None:
        """`colors`: how many there are, 2..6. `side` of the picture in pixels, 16..1024. Raises ConfigError for other values."""
        super().__init__(**base)
        if not 2 <= colors <= len(COLORS):
            raise ConfigError(f"color_square: colors = {colors!r}; expected 2..{len(COLORS)}")
        if not 16 <= side <= 1024:
            raise ConfigError(f"color_square: side = {side!r}; expected 16..1024")
        self.colors, self.side = tuple(COLORS)[:colors], side
        self.looks = 0

    def make_task(self, rng_seed: int, split: str) -> Task:
        picture = draw(task_rng(self.id, split, rng_seed), split, self._propose, json.dumps)
        calls: list[Json] = [{"name": "look", "arguments": {}}]
        gold = {"answer": picture["color"], "calls": calls}
        return Task(f"color_square/{split}/{rng_seed}", rng_seed, split, {"picture": picture}, gold)

    def _propose(self, rng: random.Random) -> dict[str, Any]:
        size = rng.randint(self.side // 3, 3 * self.side // 4)
        x, y = (rng.randint(0, self.side - size) for _ in range(2))
        ground = tuple(rng.randint(200, 255) for _ in range(3))
        return {"color": rng.choice(self.colors), "x": x, "y": y, "size": size, "ground": list(ground)}

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "look, then name the color."), Message("user", "which color?")]

    async def setup(self, task: Task) -> None:
        self.looks = 0

    def state(self) -> Json:
        return {"looks": self.looks}

    @tool(read_only=True)
    async def look(self) -> Image:
        """the picture"""
        from PIL import Image as Pictures
        from PIL import ImageDraw

        drawn = self.task.data["picture"]
        picture = Pictures.new("RGB", (self.side, self.side), tuple(drawn["ground"]))
        x, y, far = drawn["x"], drawn["y"], drawn["size"] - 1
        ImageDraw.Draw(picture).rectangle((x, y, x + far, y + far), COLORS[drawn["color"]])
        self.looks += 1
        return Image.of(picture)

    def gold_turns(self, task: Task) -> list[Message]:
        return [Message("assistant", tool_calls=(ToolCall("look", {}),)), Message("assistant", task.gold["answer"])]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return Teacher(self.colors, task, rng, **params)
