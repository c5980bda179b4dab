"""Problems to solve with a Python interpreter that runs in a sandboxed process."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, Sandbox, SandboxSpec
from agentrl.contrib.sandboxes.sandbox_pool import HeldSandbox, require, sandbox_config
from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ConfigError

from .files import keep_files
from .problems import FAMILIES, Problem
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
OUTPUT = 16 << 10  # bytes


class Python(ToolEnv):
    """An episode's state is the files in its sandbox. No process persists between runs."""

    id = "agentrl/Python-v0"
    host_params = frozenset({"sandbox"})
    reward = "python"
    summary = "solve problems by running Python in a locked-down interpreter"
    shared = frozenset({"levels", "wall", "wanted", "disk", "sandbox"})

    def __init__(
        self,
        *,
        level: int | Sequence[int] = (1, 3),
        cpu_s: int = 2,
        wall_s: float = 10.0,
        memory_mb: int = 512,
        file_mb: float = 1.0,
        isolate_files: bool = True,
        sandbox: Mapping[str, Any] | None = None,
        **base: Any,
    ) -> None:
        """`level`: a number or [lowest, highest] within 1..3. `cpu_s` (1..60), `wall_s` (1..300), `memory_mb`
        (64..8192) and `file_mb` (0.01..64, one file; the folder may be four times as large) bound one run.
        `isolate_files=False` does not confine code to its folder, for kernels without Landlock. `sandbox`: the config's
        `[env.sandbox]`; by default this machine's own, which are folders, as many as there are episodes.

        Raises ConfigError for values outside these ranges and ResourceError if this machine does not have
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
        if sandbox is not None and not isolate_files:
            raise ConfigError(
                "python: isolate_files belongs to the local sandbox; with env.sandbox say env.sandbox.args.isolate_files"
            )
        args = {} if isolate_files else {"isolate_files": False}  # an argument of the local one's
        self.sandbox = sandbox_config(sandbox if sandbox is not None else {"args": args, "limit": 1 << 20})
        require(self.sandbox)
        self.levels = range(low, high + 1)
        self.wall, size = wall_s, int(file_mb * (1 << 20))
        self.disk = 4 * size
        # Where processes cannot be forbidden, the sandbox keeps them to itself.
        alone = "alone" in SANDBOXES.entry(self.sandbox.provider).traits
        self.wanted = SandboxSpec(
            cpu_s=cpu_s,
            memory=memory_mb << 20,
            file_size=size,
            processes=not alone,
            workdir="/" if alone else "/app",
        )
        self.held: HeldSandbox | None = None
        self.sizes: dict[str, int] = {}
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
        files = {name: text.encode() for name, text in task.data["files"].items()}
        # Started by the first run: an episode that runs nothing needs none.
        self.held = HeldSandbox(self.sandbox, replace(self.wanted, files=files), disk=self.disk)
        self.sizes = {name: len(content) for name, content in files.items()}
        self.runs = 0

    async def teardown(self) -> None:
        if self.held is not None:
            await self.held.stop()

    @property
    def queued(self) -> str:
        return self.held.queued if self.held is not None else ""

    def state(self) -> Json:
        return {"files": dict(sorted(self.sizes.items())), "runs": self.runs}

    # The sandbox enforces its own time limit; the tool's timeout only catches a machine that hangs.
    @tool(timeout=600, parallel=False, concurrency=8)
    async def run(self, code: str) -> str:
        """Run Python code; returns what it prints (the value of a last expression too).

        Args:
            code: a whole program
        """
        assert self.held is not None
        self.runs += 1
        outcome, self.sizes, dropped = await self.held.use(lambda box: self._run(box, code))
        return self._report(outcome, dropped)

    async def _run(self, box: Sandbox, code: str) -> tuple[ExecResult, dict[str, int], list[str]]:
        """What a program printed, the sizes of the files that stay for the next one, and those that do not."""
        outcome = await box.python(code, timeout=self.wall, max_output=OUTPUT)
        return outcome, *await keep_files(box)

    def _report(self, outcome: ExecResult, dropped: list[str]) -> str:
        wanted = self.wanted if self.held is None else self.held.spec
        parts = [outcome.stdout.rstrip("\n")] if outcome.stdout.strip() else []
        if outcome.cut:
            parts.append(f"[{outcome.cut} more bytes of output]")
        if outcome.end in ENDS:
            parts.append(f"[{ENDS[outcome.end].format(cpu=wanted.cpu_s, wall=self.wall, disk=wanted.disk)}]")
        elif outcome.end == "killed":
            parts.append(f"[died of signal {-outcome.code}]")
        if dropped:
            parts.append(f"[files not kept: {', '.join(dropped)}]")
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
