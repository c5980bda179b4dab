"""Problems to solve with a Python interpreter that runs in a sandboxed process."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng
from agentrl.errors import ConfigError
from agentrl.tool import tool
from agentrl.trajectory import Json

from .problems import FAMILIES, Problem
from .sandbox import Limits, SandboxResult, require_sandbox, run_code
from .teacher import Teacher

SYSTEM = (
    "Solve the problem. You can run Python code: the standard library is there, files in your folder stay "
    "from run to run, variables do not. End with the answer as a number."
)
ENDS = {
    "cpu": "stopped: more than {cpu} s of processor time",
    "wall": "stopped: not done after {wall:g} s",
    "disk": "stopped: more than {disk} bytes in the folder",
    "output": "stopped: too much output",
}


class Python(ToolEnv):
    """An episode's state is the files in its folder, as bytes. No process persists between runs."""

    id = "agentrl/Python-v0"
    reward = "python"
    summary = "solve problems by running Python in a locked-down interpreter"
    shared = frozenset({"levels", "limits", "isolate_files"})

    def __init__(
        self,
        *,
        level: int | Sequence[int] = (1, 3),
        cpu_s: int = 2,
        wall_s: float = 10.0,
        memory_mb: int = 512,
        file_mb: float = 1.0,
        isolate_files: bool = True,
        **base: Any,
    ) -> None:
        """`level`: a number or [lowest, highest] within 1..3. `cpu_s` (1..60), `wall_s` (1..300), `memory_mb`
        (64..8192) and `file_mb` (0.01..64, one file; the folder may be four times as large) bound one run.
        `isolate_files=False` does not confine code to its folder, for kernels without Landlock.

        Raises ConfigError for values outside these ranges and ResourceError if the kernel does not support
        the sandbox."""
        super().__init__(**base)
        low, high = (level, level) if isinstance(level, int) else (level[0], level[-1])
        if not 1 <= low <= high <= max(FAMILIES):
            raise ConfigError(f"python: level = {level!r}; expected a number or [low, high] within 1..3")
        bounds = {
            "cpu_s": (cpu_s, 1, 60),
            "wall_s": (wall_s, 1, 300),
            "memory_mb": (memory_mb, 64, 8192),
            "file_mb": (file_mb, 0.01, 64),
        }
        for name, (value, least, most) in bounds.items():
            if not least <= value <= most:
                raise ConfigError(f"python: {name} = {value!r}; expected a number within {least}..{most}")
        require_sandbox(isolate_files)
        self.isolate_files = isolate_files
        self.levels = range(low, high + 1)
        size = int(file_mb * (1 << 20))
        self.limits = Limits(cpu_s, wall_s, memory_mb << 20, size, 4 * size)
        self.files: dict[str, bytes] = {}
        self.runs = 0

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        rng = task_rng(self.id, split, rng_seed)
        problem = draw(rng, split, self._propose, Problem.fingerprint)
        return Task(
            id=f"python/{split}/{rng_seed}",
            seed=rng_seed,
            split=split,
            data={"statement": problem.statement, "files": problem.files, "family": problem.family},
            gold={"answer": problem.answer, "solution": problem.solution},
        )

    def _propose(self, rng: random.Random) -> Problem:
        """A problem whose answer is not in its statement and is not a small number that is easy to guess."""
        while True:
            problem = rng.choice(FAMILIES[rng.choice(self.levels)])(rng)
            if problem.answer > 9 and str(problem.answer) not in re.findall(r"\d+", problem.statement):
                return problem

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", SYSTEM), Message("user", task.data["statement"])]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.files = {name: text.encode() for name, text in task.data["files"].items()}
        self.runs = 0

    def state(self) -> Json:
        sizes = {name: len(content) for name, content in sorted(self.files.items())}
        return {"files": sizes, "runs": self.runs}

    # The sandbox enforces its own time limit; the tool's timeout only catches a machine that hangs.
    @tool(timeout=600, parallel=False, concurrency=8)
    async def run(self, code: str) -> str:
        """Run Python code; returns what it prints (the value of a last expression too).

        Args:
            code: a whole program
        """
        self.runs += 1
        outcome = await run_code(code, self.files, self.limits, isolate_files=self.isolate_files)
        self.files = outcome.files
        return self._report(outcome)

    def _report(self, outcome: SandboxResult) -> str:
        parts = [outcome.output.rstrip("\n")] if outcome.output.strip() else []
        if outcome.cut:
            parts.append(f"[{outcome.cut} more bytes of output]")
        if outcome.end in ENDS:
            limits = self.limits
            parts.append(f"[{ENDS[outcome.end].format(cpu=limits.cpu, wall=limits.wall, disk=limits.disk)}]")
        elif outcome.end == "killed":
            parts.append(f"[died of signal {-outcome.code}]")
        if outcome.dropped:
            parts.append(f"[files not kept: {', '.join(outcome.dropped)}]")
        return "\n".join(parts) or "(no output)"

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        call = ToolCall("run", {"code": task.gold["solution"]})
        return [
            Message("assistant", tool_calls=(call,)),
            Message("assistant", f"The answer is {task.gold['answer']}."),
        ]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return Teacher(task, rng, **params)
