"""Replays a run from its record: no engine, no environment, no tools, no simulated user, no judge.

Every request is compared with the recorded one before its answer is returned; the first that differs is a ReplayError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from agentrl.catalog import EnvRef
from agentrl.env import Action, Message, Observation, StepResult, Task, ToolEnv
from agentrl.errors import EngineError, EnvError, ToolTimeoutError, UserError
from agentrl.reward.judge import Verdict
from agentrl.reward.leaf import JudgeClient
from agentrl.reward.twins import Twins
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, Usage
from agentrl.rollout.replay.io import Entries, EpisodeIO, ReplayEnvMaker
from agentrl.rollout.replay.record import engine_ask, env_key
from agentrl.rollout.replay.tape import Numbers, Recorded, TapeRow, current_episode, digest, diverged, outcome_of
from agentrl.rollout.replay.twins import TapedReplayEnv, TapedTwins
from agentrl.tool import Tool, Toolbox
from agentrl.trajectory import Json, StopReason, ToolResult, Trajectory, Turn, as_row, message_of, user_calls_of


class Replayer(EpisodeIO):
    """Answers everything from the record."""

    live = False

    def __init__(self, record: Recorded) -> None:
        self.record = record
        self._makers = count()

    def env(self, ref: EnvRef, episode: str) -> ToolEnv:
        return TapedEnv(self.record, episode, env_key(ref))

    def engine(self, make: Callable[[], Engine] | None = None) -> Engine:
        return ReplayEngine(self.record)

    def transcript(self, owner: str) -> tuple[Entries, Callable[[int, Json], None]]:
        return self.record.transcripts.get(owner, {}), lambda number, entry: None

    def judge(self, client: JudgeClient) -> JudgeClient:
        return ReplayJudge(self.record)

    def replay_env(self, make: ReplayEnvMaker) -> ReplayEnvMaker:
        of = next(self._makers)
        return lambda task: TapedReplayEnv(self.record, of, task)

    def replays(self) -> Twins:
        return TapedTwins(self.record)

    def ready(self, episode: str) -> Trajectory | None:
        row = self.record.rows.get((episode, "whole", 0))
        return None if row is None else Trajectory.from_json(row.answer)

    def ended(self, episode: str, trajectory: Trajectory) -> None:
        """Compare the outcome with the recorded one, and copy the recorded timings.

        Raises ReplayError if the outcomes differ although every call was the same: the code in between has changed.
        """
        if self.ready(episode) is not None:
            return
        row = self.record.find(episode, "done", 0)
        expected = row.answer["outcome"]
        got = outcome_of(trajectory)
        if got != expected:
            raise diverged(self.record.path, row, expected, got)
        trajectory.timings = dict(row.answer["timings"])


class TapedEnv(ToolEnv):
    """An environment that answers what the recorded one answered."""

    def __init__(self, record: Recorded, episode: str, key: Mapping[str, Json]) -> None:
        super().__init__()
        self.id = str(key["env"])  # type: ignore[misc]
        self._tape, self._episode, self._key = record, episode, key
        self._numbers = Numbers()

    def make_task(self, rng_seed: int, split: str) -> Task:
        raise UserError("a replay has only the recorded tasks")

    def prompt(self, task: Task) -> list[Message]:
        raise UserError("a replay has only the recorded tasks")

    @property
    def trajectory(self) -> Trajectory:
        if self._record is None:
            raise EnvError(f"{self.id}: no episode yet; call reset first")
        return self._record

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        answer = self._take("reset", {**self._key, "seed": seed, "split": (options or {}).get("split")})
        self.id = answer["env_id"]  # type: ignore[misc]
        if "task" in answer:
            self._record = Trajectory(self.id, Task(**answer["task"]), horizon=answer.get("horizon"))
        _raise(answer)
        self._open = True
        self._change(answer)
        observation = _messages(answer["observation"])
        return observation, answer["info"]

    async def astep(self, action: Action) -> StepResult:
        answer = self._take("step", {"action": as_row(action) if isinstance(action, Message) else action})
        if answer["turn"] is not None:
            results = [ToolResult(**result) for result in answer["turn"]["results"]]
            turns = self.trajectory.turns
            turns.append(Turn(len(turns), message_of(answer["turn"]["message"]), results))
        self._change(answer)
        _raise(answer)
        observation = _messages(answer["observation"])
        return observation, 0.0, answer["terminated"], answer["truncated"], answer["info"]

    async def aend(self, stop: StopReason, error: str | None = None) -> float:
        answer = self._take("end", {"stop": stop.value, "error": error})
        await super().aend(stop, error)
        self.trajectory.state = answer["state"]
        return 0.0

    def _take(self, kind: str, ask: Json) -> Json:
        return self._tape.take(self._episode, kind, self._numbers.next(self._episode, kind), ask).answer

    def _change(self, answer: Mapping[str, Json]) -> None:
        record = self.trajectory
        record.messages[answer["keep"] :] = _messages(answer["add"])
        if "tools" in answer:
            record.tools = answer["tools"]
        if (made := answer.get("user_calls")) is not None:
            record.user_calls[made["keep"] :] = user_calls_of(made["add"])
        record.parting = answer.get("parting", "")
        if "schemas" in answer:
            self.toolbox = Toolbox([_tool(schema) for schema in answer["schemas"]])


class ReplayEngine(Engine):
    """An engine that returns what the recorded one sampled."""

    untrainable = "a replay has no weights to update"

    def __init__(self, record: Recorded) -> None:
        self._tape = record
        self._numbers = Numbers()
        self._known: dict[str, list[int]] = {}

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        row = self._tape.find(request_key, "engine", self._numbers.next(request_key, "engine"))
        ask, expected = engine_ask(token_ids, sampling), self._expected(row)
        if digest(ask) != row.asked:
            raise diverged(self._tape.path, row, expected, ask)
        if "error" in row.answer:
            raise EngineError(row.answer["error"])
        usage = row.answer["usage"]
        self._known[request_key] = [*token_ids, *row.answer["token_ids"]]
        return replace(Generation(**row.answer), usage=None if usage is None else Usage(**usage))

    def _expected(self, row: TapeRow) -> Json:
        """The recorded request, with its full prompt restored."""
        known = self._known.get(row.episode, [])
        self._known[row.episode] = prompt = [*known[: row.ask["keep"]], *row.ask["ids"]]
        return {"prompt": prompt, "sampling": row.ask["sampling"]}

    async def start(self) -> None: ...

    async def abort(self, request_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None: ...


class ReplayJudge:
    """Returns the verdicts of the record."""

    def __init__(self, record: Recorded) -> None:
        self._tape = record
        self._numbers = Numbers()

    def ask(self, key: str, request: Any) -> Any:
        episode = current_episode()
        row = self._tape.take(episode, "judge", self._numbers.next(episode, "judge"), asdict(request))
        return Verdict(**row.answer)

    async def aask(self, key: str, request: Any) -> Any:
        return self.ask(key, request)


def _raise(answer: Mapping[str, Json]) -> None:
    if "error" in answer:
        kind = ToolTimeoutError if answer["error"]["type"] == "ToolTimeoutError" else EnvError
        raise kind(answer["error"]["message"])


def _tool(schema: Mapping[str, Json]) -> Tool:
    def never(**arguments: Any) -> Json:
        raise UserError("a replay runs no tools")

    return Tool.declared(schema, never)


def _messages(rows: Sequence[Mapping[str, Json]]) -> list[Message]:
    return [message_of(row) for row in rows]
