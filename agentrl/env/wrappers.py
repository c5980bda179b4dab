"""Wrappers that change what a policy can do or see: tools, faults, lengths."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from agentrl.env.base import StepResult, ToolEnv
from agentrl.env.hooks import Opening
from agentrl.env.spaces import Action, Observation
from agentrl.env.users import GOLD, UserModel
from agentrl.env.wrapper import WRAPPERS, ToolWrapper
from agentrl.errors import ConfigError, ToolError
from agentrl.tool import CountTokens, Tool, estimate_tokens
from agentrl.tool.output import fit
from agentrl.tool.process import Child
from agentrl.tool.validate import nearest
from agentrl.trajectory import Message, Task, ToolCall, ToolResult, Turn


class _ChangesTools(ToolWrapper):
    """Base class of wrappers that change the tools of every episode, right after its reset."""

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observation, info = await self.env.areset(seed=seed, options=options)
        self._change_tools()
        # The record was made with the environment's own tools, and a spec checks calls against what it says.
        self.trajectory.tools = self.toolbox.schemas()
        return observation, info

    def _change_tools(self) -> None:
        raise NotImplementedError


@WRAPPERS.register("tool_subset")
class ToolSubset(_ChangesTools):
    """Only some of the environment's tools."""

    def __init__(self, env: ToolEnv, names: Sequence[str] | Set[str]) -> None:
        """The first reset raises ConfigError for a name that the environment does not have."""
        super().__init__(env)
        self.names = frozenset(names)

    def _change_tools(self) -> None:
        for name in sorted(self.names):
            if name not in self.toolbox:
                hint = nearest(name, list(self.toolbox.names))
                raise ConfigError(f"ToolSubset: {self.id} has no tool {name!r}; {hint}")
        self.toolbox.table = {k: v for k, v in self.toolbox.table.items() if k in self.names}


@WRAPPERS.register("tool_faults", traits={"chance_faults"})
class ToolFaults(_ChangesTools):
    """A share of the calls fails with an error message, without running the tool.

    Which calls fail depends only on `seed`, the task, the turn and the arguments, so that a replay has the
    same faults and a fork has no hidden state.
    """

    def __init__(
        self,
        env: ToolEnv,
        rate: float,
        *,
        seed: int = 0,
        message: str = "the service is unavailable; try again",
    ) -> None:
        """Raises ValueError for a rate outside of [0, 1]."""
        super().__init__(env)
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"ToolFaults: rate = {rate}; expected a share from 0 to 1")
        self.rate, self.seed, self.message = rate, seed, message

    def _change_tools(self) -> None:
        for item in list(self.toolbox):
            self.toolbox.replace(_Flaky.of(item, self.rate, self.seed, self.message))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Flaky(Tool):
    """A tool of which a share of the calls fails; the others are calls of `item`, with its own limits."""

    item: Tool
    rate: float
    seed: int
    message: str

    @classmethod
    def of(cls, item: Tool, rate: float, seed: int, message: str) -> _Flaky:
        return cls(
            item.function, item.name, item.options, item.method, item.signature, item=item, rate=rate, seed=seed, message=message
        )

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Child | None]:
        async with self.item.place() as child:
            yield child

    async def invoke(self, owner: Any, values: Mapping[str, Any], child: Child | None = None) -> Any:
        record = owner.trajectory
        # Not `hash`, which differs from process to process for text.
        place = f"{self.seed}/{record.task.seed}/{len(record.turns)}/{self.name}/{dict(values)!r}"
        chance = int.from_bytes(blake2b(place.encode(errors="replace"), digest_size=4).digest(), "big") / 2**32
        if chance < self.rate:
            raise ToolError(self.message)
        return await self.item.invoke(owner, values, child)


@WRAPPERS.register("observation_limit")
class ObservationLimit(ToolWrapper):
    """Cuts every message of an observation to `tokens` tokens, with a mark at the cut; also in the record."""

    def __init__(self, env: ToolEnv, tokens: int, count: CountTokens = estimate_tokens) -> None:
        super().__init__(env)
        self.tokens = tokens
        self.count = count

    async def acall(self, turn: Turn, call: ToolCall) -> ToolResult:
        whole = await self.env.acall(turn, call)
        cut, record = replace(whole, content=fit(whole.content, self.tokens, self.count)), self.trajectory
        turn.results = [cut if result is whole else result for result in turn.results]
        record.messages = [
            replace(m, content=cut.content) if m.tool_call_id == cut.call_id and m.role == "tool" else m for m in record.messages
        ]
        return cut

    async def astep(self, action: Action) -> StepResult:
        observation, *rest = await self.env.astep(action)
        cut = [replace(m, content=fit(m.content, self.tokens, self.count)) for m in observation]
        record = self.trajectory
        # For no messages the slice would be [-0:], the whole record.
        if cut:
            record.messages[-len(cut) :] = cut
        turn = record.turns[-1]
        turn.results = [replace(r, content=fit(r.content, self.tokens, self.count)) for r in turn.results]
        return cut, *rest  # type: ignore[return-value]


@WRAPPERS.register("system_prompt")
class SystemPrompt(ToolWrapper):
    """`text`, before the environment's own system message, or as one if it has none; also in the record.

    Before it and not in its place, since an environment's own may hold what its tasks need, and in one message, since many
    chat templates take only one, at the beginning.
    """

    def __init__(self, env: ToolEnv, text: str) -> None:
        super().__init__(env)
        self.text = text

    def prompt(self, task: Task) -> Opening:
        opening = self.env.prompt(task)
        if isinstance(opening, list):
            return self._with(opening)

        async def later() -> list[Message]:
            return self._with(await opening)

        return later()

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observation, info = await self.env.areset(seed=seed, options=options)
        opening = self._with(observation)
        self.trajectory.messages[: len(observation)] = opening
        return opening, info

    def _with(self, messages: Observation) -> list[Message]:
        if messages and messages[0].role == "system":
            return [replace(messages[0], content=f"{self.text}\n\n{messages[0].content}"), *messages[1:]]
        return [Message("system", self.text), *messages]


@WRAPPERS.register("gold_user")
class GoldUser(ToolWrapper):
    """The user of the environment's gold solution (`ToolEnv.gold_user`) in place of its own, so that nobody asks a model; a reset
    that is given another user (a replay's) has that one."""

    def __init__(self, env: ToolEnv) -> None:
        super().__init__(env)

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        return await self.env.areset(seed=seed, options={"user": GOLD, **(options or {})})

    def user_models(self) -> Sequence[UserModel]:
        return ()


class ToolSchedule(ToolWrapper):
    """Tools that are added and removed during an episode.

    `changes`: number of turns -> (tools to add, names to remove) after that many turns. A user message at the
    end of that turn's observation tells the policy, with the schemas of the new tools.
    """

    def __init__(self, env: ToolEnv, changes: Mapping[int, tuple[Sequence[Tool], Sequence[str]]]) -> None:
        super().__init__(env)
        self.changes = dict(changes)

    async def astep(self, action: Action) -> StepResult:
        observation, reward, terminated, truncated, info = await self.env.astep(action)
        record = self.trajectory
        change = self.changes.get(len(record.turns))
        if change is not None and not (terminated or truncated):
            added, removed = change
            for item in added:
                self.toolbox.add(item)
            for name in removed:
                self.toolbox.remove(name)
            notice = _notice(added, removed)
            record.messages.append(notice)
            # Removed ones stay: the calls that were made of them are checked against their schemas.
            record.tools += [item.schema for item in added]
            observation = [*observation, notice]
        return observation, reward, terminated, truncated, info


def _notice(added: Sequence[Tool], removed: Sequence[str]) -> Message:
    lines = [f"New tool: {json.dumps(item.schema['function'], ensure_ascii=False)}" for item in added]
    lines += [f"The tool {name} is gone." for name in removed]
    return Message("user", "\n".join(lines))
