"""Terminal and software tasks in Harbor's format, in a sandbox; the task's own tests are the judge."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, Sandbox
from agentrl.contrib.sandboxes.sandbox_pool import HeldSandbox, require, sandbox_config
from agentrl.contrib.suites.suite import SuiteEnv, SuiteTask, by_split, checkout_version
from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, ToolCall, tool
from agentrl.utils.errors import ConfigError, EnvError, ToolError

from .tasks import LONGEST, HarborTask, read_tasks, resolved

SYSTEM = (
    "You work in a Linux sandbox through tools. Each shell command starts in the working folder; files stay, shell variables do "
    "not. When the task is done, answer with a short message and no call."
)
TESTS, LOGS = "/tests", "/logs/verifier"
BEFORE = f"{TESTS}/before.sh"
SHOWN = 2000  # characters of what the tests printed that are kept in the state


class Harbor(SuiteEnv):
    """An episode's state is its sandbox. The tests are put into it when the episode has ended, and their verdict is read back."""

    id = "agentrl/Harbor-v0"
    host_params = SuiteEnv.host_params | {"tasks", "sandbox"}
    reward = "harbor"
    summary = "terminal and software tasks in Harbor's format, judged by their tests in a sandbox"
    suite = "harbor"
    obtain = "git clone a repository of task folders in Harbor's format"
    own = "tasks"
    shared = frozenset({"pool", "sandbox", "images", "command_s", "output", "reward_key"})

    def __init__(
        self,
        *,
        source: str | None = None,
        tasks: str | None = None,
        skip_unfit: bool = False,
        command_s: float = 60.0,
        output_kb: int = 16,
        reward_key: str = "reward",
        sandbox: Mapping[str, Any] | None = None,
        **base: Any,
    ) -> None:
        """`source`: a folder of task folders, by default what `agentrl env install harbor` recorded, else the project's own;
        `tasks` is another name for it. `skip_unfit`: leave out tasks that cannot run here instead of refusing. `command_s`
        (1..3600): seconds of one command; `output_kb` (1..1024): of its output that is shown. `reward_key`: which number of a
        reward.json with several is the verdict. `sandbox`: the config's `[env.sandbox]`.

        Raises ConfigError for values outside these ranges and, with the reason, for a task that cannot run; ResourceError if
        this machine does not have the sandbox; TaskDataError for a broken task folder."""
        if source is not None and tasks is not None:
            raise ConfigError("harbor: params.source and params.tasks name the same folder; give one of them")
        super().__init__(source=source or tasks, **base)
        for name, value, least, most in (("command_s", command_s, 1, 3600), ("output_kb", output_kb, 1, 1024)):
            if not least <= value <= most:
                raise ConfigError(f"harbor: {name} = {value!r}; expected a number within {least}..{most}")
        self.sandbox = sandbox_config(sandbox)
        provider = require(self.sandbox)
        self.images = "images" in SANDBOXES.entry(self.sandbox.provider).traits
        self.command_s, self.output, self.reward_key = command_s, output_kb << 10, reward_key
        self.pool: dict[str, HarborTask] = {}
        unfit: dict[str, str] = {}
        for task in read_tasks(self.source):
            try:
                provider.check(task.spec(self.images))
                self.pool[task.name] = task
            except ConfigError as reason:
                unfit[task.name] = str(reason)
        if unfit and not (skip_unfit and self.pool):
            shown = "\n".join(f"  {name}: {reason}" for name, reason in list(unfit.items())[:8])
            raise ConfigError(
                f"harbor: {len(unfit)} tasks cannot run with env.sandbox.provider = {self.sandbox.provider!r}:\n{shown}"
                + ("" if skip_unfit else "\nparams.skip_unfit = true leaves them out")
            )
        self.held: HeldSandbox | None = None
        self.verdict: dict[str, Json] | None = None

    # -- tasks -------------------------------------------------------------------------------------

    @classmethod
    def check_source(cls, folder: Path) -> str:
        read_tasks(folder)
        return "own tasks" if folder == Path(__file__).with_name("tasks") else checkout_version(folder)

    @classmethod
    def task_counts(cls, folder: Path) -> dict[str, dict[str, int]]:
        # Without an environment, which refuses what cannot run here: that is another question than what there is.
        pools = by_split(cls.suite, [_row(task, True) for task in read_tasks(folder)])
        return {split: dict(Counter(row.family for row in pools[split])) for split in cls.splits}

    def load(self) -> list[SuiteTask]:
        return [_row(task, self.images) for task in self.pool.values()]

    def whole(self) -> list[SuiteTask]:
        return [_row(task, self.images) for task in read_tasks(self.source)]

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", SYSTEM), Message("user", task.data["instruction"])]

    @property
    def current(self) -> HarborTask:
        return self.pool[self.task.data["name"]]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.verdict = None
        self.held = HeldSandbox(self.sandbox, self.pool[task.data["name"]].spec(self.images))
        await self.held.start()

    async def teardown(self) -> None:
        if self.held is not None:
            await self.held.stop()

    @property
    def queued(self) -> str:
        return self.held.queued if self.held is not None else ""

    @property
    def box(self) -> HeldSandbox:
        assert self.held is not None
        return self.held

    def state(self) -> Json:
        return {"task": self.task.data["name"], "verdict": self.verdict}

    # The sandbox enforces the time of a command; the tools' timeouts only catch a machine that hangs.
    @tool(timeout=4000, parallel=False)
    async def shell(self, command: str) -> str:
        """Run a shell command in the working folder; returns what it prints, and its exit status unless that is 0.

        Args:
            command: for sh
        """
        done = await self.box.use(
            lambda box: box.exec(_sendable(command), timeout=self.command_s, max_output=self.output, merge=True)
        )
        return self._report(done)

    def _report(self, done: ExecResult) -> str:
        parts = [done.stdout.rstrip("\n")] if done.stdout.strip() else []
        if done.cut:
            parts.append(f"[{done.cut} more bytes of output]")
        if done.end == "wall":
            parts.append(f"[stopped: not done after {self.command_s:g} s]")
        elif done.end not in ("ok", "error"):
            parts.append(f"[stopped: {done.end}]")
        elif done.code:
            parts.append(f"[exit status {done.code}]")
        return "\n".join(parts) or "(no output)"

    @tool(timeout=600, parallel=False, read_only=True)
    async def read(self, path: str) -> str:
        """Read a text file.

        Args:
            path: relative to the working folder
        """
        try:
            content = await self.box.use(lambda box: box.read(_sendable(path), most=1 << 20), changes=False)
        except (FileNotFoundError, ValueError) as problem:
            raise ToolError(str(problem)) from None
        cut = f"\n[{len(content) - self.output} more bytes]" if len(content) > self.output else ""
        return content[: self.output].decode("utf-8", "replace") + cut

    @tool(timeout=600, parallel=False)
    async def write(self, path: str, content: str) -> str:
        """Write a text file; what it had before is gone. Folders are made as needed.

        Args:
            path: relative to the working folder
            content: the whole text
        """
        body = content.encode("utf-8", "replace")
        try:
            await self.box.use(lambda box: box.write({_sendable(path): body}))
        except (FileExistsError, ValueError) as problem:
            raise ToolError(str(problem)) from None
        return f"{len(body)} bytes written"

    # -- the verdict -------------------------------------------------------------------------------

    async def conclude(self) -> None:
        self.verdict = await self.box.use(self._judged)

    async def _judged(self, box: Sandbox) -> dict[str, Json]:
        """Run the task's tests and read what they left. Tests that leave no verdict have failed: they ran in what the policy
        made of its sandbox. Raises SandboxError if the sandbox failed."""
        tests = self.current.tests()
        env = {**resolved(self.current.settings.verifier.env), "TESTS_DIR": box.path(TESTS), "LOGS_DIR": box.path(LOGS)}
        if (before := tests.pop(BEFORE, None)) is not None:
            # What the policy wrote runs while neither tests nor a place for their verdict is there, and is ended before they are.
            ran = await self._ran(box, BEFORE, {BEFORE: before}, env)
            if isinstance(ran, str):
                return {"reward": 0.0, "reason": ran}
            env["BEFORE_DONE"] = "1"
        done = await self._ran(box, f"{TESTS}/test.sh", {**tests, f"{LOGS}/.made": b""}, env)
        if isinstance(done, str):
            return {"reward": 0.0, "reason": done}
        await box.kill()
        told = self._told(done, box)
        if done.end not in ("ok", "error") or done.code < 0 or 128 < done.code < 160:
            return {"reward": 0.0, "reason": f"the tests were ended ({done.end}, status {done.code})", "tests": told}
        return {**await self._verdict(box), "tests": told}

    async def _ran(self, box: Sandbox, script: str, files: Mapping[str, bytes], env: Mapping[str, str]) -> ExecResult | str:
        """Run a script of the tests, with these files alone in their places, or say why it cannot be."""
        await box.kill()
        # What the policy put there itself goes first, links included: nothing of it may pass for tests or verdict.
        await box.remove([TESTS, "/logs"])
        try:
            await box.write(dict(files))
        except FileExistsError as problem:
            return f"the tests could not be put in place: {problem}"
        path = box.path(script)
        argv = [path] if files[script].startswith(b"#!") else ["sh", path]
        return await box.exec(argv, env=env, timeout=self.current.settings.verifier.timeout_sec, max_output=1 << 20, merge=True)

    def _told(self, done: ExecResult, box: Sandbox) -> Json:
        # Paths as the task knows them: a local sandbox's own are different each time.
        text = done.stdout.replace(box.path("/").rstrip("/") + "/", "/") if box.path("/") != "/" else done.stdout
        return {"code": done.code, "end": done.end, "output": text[-SHOWN:]}

    async def _verdict(self, box: Sandbox) -> dict[str, Json]:
        """The number of reward.json, or else of reward.txt, as Harbor reads them: fields of reward.json that are no numbers do
        not count, and if none is called "reward", reward.txt says that one. If both do, the lower one counts: the other one may
        be the policy's. Raises EnvError for a reward.json whose verdict is
        not told from its other numbers."""
        files = {name: await self._left(box, name) for name in ("reward.json", "reward.txt")}
        told = next((name for name, text in files.items() if text is not None), None)
        if told is None:
            return {"reward": 0.0, "reason": "the tests left no verdict"}
        try:
            numbers = _numbers(told, files[told] or "")
            if told == "reward.json" and files["reward.txt"] is not None:
                with suppress(ValueError):
                    (other,) = _numbers("reward.txt", files["reward.txt"]).values()
                    numbers["reward"] = min(numbers.get("reward", other), other)
        except (ValueError, OverflowError, RecursionError) as problem:
            return {"reward": 0.0, "reason": f"{told} is no verdict: {str(problem)[:200]}"}
        key = next(iter(numbers)) if len(numbers) == 1 else self.reward_key
        if not numbers:
            return {"reward": 0.0, "reason": f"{told} is no verdict: it has no number"}
        if key not in numbers:
            raise EnvError(f"harbor: {told} of {self.current.name} has {sorted(numbers)}; params.reward_key names one")
        if not math.isfinite(numbers[key]):
            return {"reward": 0.0, "reason": f"{told} is no verdict: {numbers[key]}"}
        return {"reward": numbers[key], **({"all": numbers} if len(numbers) > 1 else {})}

    async def _left(self, box: Sandbox, name: str) -> str | None:
        """The text of a file of the tests; one that is no text reads as an empty one."""
        try:
            return (await box.read(f"{LOGS}/{name}", most=1 << 16)).decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except ValueError:
            return ""

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        if "solution" not in task.gold:
            raise NotImplementedError(f"{task.id} has no solution/solve.sh that can run here")
        call = ToolCall("shell", {"command": task.gold["solution"]})
        return [Message("assistant", tool_calls=(call,)), Message("assistant", "Done.")]


def _numbers(name: str, text: str) -> dict[str, float]:
    """The numbers of a reward file. Raises ValueError for one that is none, and as `json.loads`."""
    read = json.loads(text) if name.endswith("json") else float(text.strip())
    found = read if isinstance(read, dict) else {"reward": read}
    if not isinstance(read, dict) and (isinstance(read, bool) or not isinstance(read, int | float)):
        raise ValueError("neither an object nor a number")
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def _row(task: HarborTask, images: bool) -> SuiteTask:
    solution = task.solved(images)
    data = {"name": task.name, "instruction": task.instruction}
    gold = {} if solution is None else {"solution": solution}
    return SuiteTask(f"harbor/{task.name}", task.family, data, gold, task.settings.metadata.agentrl.split)


def _sendable(text: str) -> str:
    """Text that can be an argument of a program. Raises ToolError for one with a zero byte, or beyond Linux's 128 KiB."""
    if "\0" in text or len(text.encode("utf-8", "replace")) > LONGEST:
        raise ToolError(f"it has a zero byte in it, or more than {LONGEST} bytes; write a file instead")
    return text.encode("utf-8", "replace").decode()
