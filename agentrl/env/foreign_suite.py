"""Suites whose benchmark runs in an interpreter of its own (`agentrl.env.foreign`), and a world that one process of it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentrl.env.foreign import Foreign, ForeignProcess, foreign, python_of
from agentrl.env.suite import SuiteEnv
from agentrl.errors import ConfigError, EnvError, within
from agentrl.trajectory import Json


class ForeignSuite(SuiteEnv):
    """A suite over processes of the benchmark's own Python, which serve the functions of `script`, a file of the suite.

    `inside`: the processes. A subclass that adds to `beside` or `shared` keeps what is here (`ForeignSuite.beside | {...}`)."""

    script: ClassVar[Path]
    beside = frozenset({"python", "processes"})
    host_params = SuiteEnv.host_params | {"python", "processes"}
    shared = frozenset({"inside", "python", "source", "version"})

    def __init__(self, *, python: str | None = None, processes: int = 2, **base: Any) -> None:
        """`python`: the interpreter that has the benchmark's packages, by default that of SOURCE/.venv, else this one.
        `processes` (1..256): how many of them answer at the same time; what is more waits.

        Raises ConfigError for a number outside this range, and for an interpreter that does not exist."""
        super().__init__(**base)
        self.python = python_of(self.source, python)
        most = within(processes, 1, 256, f"{self.suite}: processes")
        self.inside: Foreign = foreign(self.python, self.script, self.arguments(), most)

    def arguments(self) -> tuple[str, ...]:
        """What the script sees as `sys.argv[1:]`; by default the source."""
        return (str(self.source),)

    def first(self, function: str) -> Any:
        """What the script answers to a first question, such as which tasks there are. Raises ConfigError if it cannot be loaded
        by that interpreter."""
        try:
            return self.inside.ask(function)
        except EnvError as problem:
            raise ConfigError(
                f"{self.suite}: {self.python} cannot load {self.source}: {problem}\nIts packages belong into an environment of "
                f"its own: python3.11 -m venv {self.source}/.venv, then what envs/{self.suite}/README.md lists"
            ) from None


class HeldWorld:
    """A benchmark's world that lives in a process's memory, one at a time: held by one episode, from `start` to `end`.

    `begin`: the script's function that makes it, and what that gets; `made`: the calls that changed it so far. A copy makes them
    again, in a process of its own, when it is first used: right for worlds whose time and random numbers are fixed."""

    def __init__(
        self,
        pool: Foreign,
        begin: tuple[str, Mapping[str, Json]],
        made: tuple[tuple[str, Mapping[str, Json]], ...] = (),
    ) -> None:
        self.pool, self.begin, self.made = pool, begin, list(made)
        self.waits = False
        self._process: ForeignProcess | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldWorld:
        return HeldWorld(self.pool, self.begin, tuple(self.made))

    def __del__(self) -> None:
        self.end()

    async def start(self) -> None:
        """Take a process (waiting for one), and make the world in it."""
        self.waits = True
        try:
            self._process = await self.pool.held()
        finally:
            self.waits = False
        for function, values in (self.begin, *self.made):
            await self._process.call(function, dict(values))

    async def ask(self, function: str, **values: Json) -> Any:
        """Call a function that leaves the world as it is. Raises EnvError if it fails or its process ends."""
        if self._process is None:
            await self.start()
        assert self._process is not None
        return await self._process.call(function, values)

    async def act(self, function: str, **values: Json) -> Any:
        """Call a function that may change the world. Raises EnvError as `ask`."""
        if self._process is None:
            await self.start()
        self.made.append((function, values))
        return await self.ask(function, **values)

    def end(self) -> None:
        """Give the process back; idempotent. The next world in it takes this one's place."""
        process, self._process = self._process, None
        if process is not None:
            self.pool.give(process)
