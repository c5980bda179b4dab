"""Record a run on a tape, and replay it: no engine, environment, tool, simulated user or judge."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.data.trajectory import Json, StopReason, ToolResult, Trajectory, Turn, UserCall, as_row, message_of, user_calls_of
from agentrl.env import Action, Message, Observation, StepResult, Task, ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.env.toolbox import Toolbox
from agentrl.env.tools import Tool
from agentrl.env.wrappers import ToolWrapper
from agentrl.reward.judge import Verdict
from agentrl.reward.leaf import JudgeClient
from agentrl.reward.twins import Twins
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, Usage
from agentrl.rollout.episode import scoring_failed
from agentrl.rollout.tape import (
    Entries,
    EpisodeIO,
    Numbers,
    Recorded,
    RecordingReplayEnv,
    RecordingTwins,
    RecordWriter,
    ReplayEnvMaker,
    TapedReplayEnv,
    TapedTwins,
    TapeRow,
    common,
    current_episode,
    digest,
    divergence_error,
    outcome_of,
)
from agentrl.utils.errors import EngineError, EnvError, ReplayError, ToolTimeoutError, UserError

# Recording


class Recorder(EpisodeIO):
    """Runs live and records every answer. Close it at the end.

    `transcripts`: the numbered messages of API models, by owner, in the record that is being continued.
    """

    def __init__(self, path: Path, transcripts: Mapping[str, Entries] | None = None) -> None:
        self.writer = RecordWriter(path)
        self._transcripts = transcripts or {}
        self._cut: set[str] = set()
        self._makers = count()

    def env(self, ref: EnvRef, episode: str) -> ToolEnv:
        return RecordingEnv(ref.build(), self.writer, episode, env_key(ref), self._cut)

    def engine(self, make: Callable[[], Engine]) -> Engine:
        return RecordingEngine(make(), self.writer, self._cut)

    def judge(self, client: JudgeClient) -> JudgeClient:
        return RecordingJudge(client, self.writer)

    def replay_env(self, make: ReplayEnvMaker) -> ReplayEnvMaker:
        of = next(self._makers)
        return lambda task: RecordingReplayEnv(make, of, task, self.writer)

    def replays(self) -> Twins:
        return RecordingTwins(self.writer)

    def transcript(self, owner: str) -> tuple[Entries, Callable[[int, Json], None]]:
        known = self._transcripts.get(owner, {})
        return known, lambda number, entry: self.writer.add(owner, "transcript", number, None, entry)

    def ended(self, episode: str, trajectory: Trajectory) -> None:
        """Close an episode. One that was cut by a timeout, or its scoring, is stored whole: a replay cannot know when a timeout
        fires."""
        if episode in self._cut or "policy_s" in (trajectory.cause or {}) or scoring_failed(trajectory):
            self._cut.discard(episode)
            self.writer.add(episode, "whole", 0, None, trajectory.to_json())
            return
        self.writer.add(episode, "done", 0, None, {"outcome": outcome_of(trajectory), "timings": trajectory.timings})

    def close(self) -> None:
        self.writer.close()


def env_key(ref: EnvRef) -> dict[str, Json]:
    """Key of an environment: name, parameters and wrappers."""
    wrappers = [{"name": choice.name, "args": choice.args} for choice in ref.wrappers]
    return {"env": ref.id, "params": dict(ref.params), "wrappers": wrappers}


class RecordingEnv(ToolWrapper):
    """An environment whose answers are recorded."""

    def __init__(self, env: ToolEnv, writer: RecordWriter, episode: str, key: Mapping[str, Json], cut: set[str]) -> None:
        super().__init__(env)
        self._writer, self._episode, self._key, self._cut = writer, episode, key, cut
        self._messages: list[Message] = []
        self._schemas: list[dict[str, Json]] = []
        self._tools: list[dict[str, Json]] = []
        self._user_calls: list[UserCall] = []

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self._writer.begin(self._episode)
        self._cut.discard(self._episode)
        self._messages, self._schemas, self._tools, self._user_calls = [], [], [], []
        ask = {**self._key, "seed": seed, "split": (options or {}).get("split")}
        try:
            observation, info = await self.env.areset(seed=seed, options=options)
        except BaseException as fault:
            self._fault("reset", ask, fault, {"env_id": self.env.id})
            raise
        record = self.trajectory
        answer = {
            "env_id": record.env_id,
            "task": asdict(record.task),
            "observation": _rows(observation),
            "info": self._plain(info),
            **({} if record.horizon is None else {"horizon": record.horizon}),
            **self._changes(),
        }
        self._add("reset", ask, answer)
        return observation, info

    async def astep(self, action: Action) -> StepResult:
        ask = {"action": as_row(action) if isinstance(action, Message) else action}
        turns = len(self.trajectory.turns)
        try:
            result = await self.env.astep(action)
        except BaseException as fault:
            self._fault("step", ask, fault, {"turn": self._turn(turns), **self._changes()})
            raise
        observation, _, terminated, truncated, info = result
        answer = {
            "observation": _rows(observation),
            "terminated": terminated,
            "truncated": truncated,
            "info": self._plain(info),
            "turn": self._turn(turns),
            **self._changes(),
        }
        self._add("step", ask, answer)
        return result

    async def aend(self, stop: StopReason, error: str | None = None) -> float:
        reward = await self.env.aend(stop, error)
        self._add("end", {"stop": stop.value, "error": error}, {"state": self.trajectory.state})
        return reward

    def _plain(self, info: Mapping[str, Any]) -> Json:
        """`info` as JSON. Raises ReplayError for values that JSON cannot represent."""
        for key, value in info.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as problem:
                raise ReplayError(f"{self.id}: info[{key!r}] cannot be recorded: {problem}") from None
        return dict(info)

    def _turn(self, before: int) -> Json:
        turns: list[Turn] = self.trajectory.turns
        if len(turns) == before:
            return None
        return {"message": as_row(turns[-1].message), "results": [as_row(result) for result in turns[-1].results]}

    def _changes(self) -> dict[str, Json]:
        """Changes of the messages, the user's calls and the offered tools since the last written ones."""
        # Only the difference: whole histories would make the file quadratic in the number of turns.
        record, schemas = self.trajectory, self.toolbox.schemas()
        keep = common(self._messages, record.messages)
        changes: dict[str, Json] = {"keep": keep, "add": _rows(record.messages[keep:])}
        self._messages = list(record.messages)
        if schemas != self._schemas:
            changes["schemas"] = self._schemas = schemas
        if record.tools != self._tools:
            changes["tools"] = self._tools = list(record.tools)
        if record.user_calls != self._user_calls:
            done = common(self._user_calls, record.user_calls)
            changes["user_calls"] = {"keep": done, "add": [as_row(made) for made in record.user_calls[done:]]}
            self._user_calls = list(record.user_calls)
        if record.parting:
            changes["parting"] = record.parting
        return changes

    def _fault(self, kind: str, ask: Json, fault: BaseException, more: dict[str, Json]) -> None:
        if isinstance(fault, asyncio.CancelledError):
            self._cut.add(self._episode)
        elif isinstance(fault, EnvError):
            name = "ToolTimeoutError" if isinstance(fault, ToolTimeoutError) else "EnvError"
            self._add(kind, ask, {**more, "error": {"type": name, "message": str(fault)}})
        elif isinstance(fault, Exception):  # the episode loop turns it into an EnvError with this text
            message = f"{type(fault).__name__}: {fault}"
            self._add(kind, ask, {**more, "error": {"type": "EnvError", "message": message}})

    def _add(self, kind: str, ask: Json, answer: Json) -> None:
        self._writer.add(self._episode, kind, self._writer.number(self._episode, kind), ask, answer)


class RecordingEngine(Engine):
    """An engine whose generations are recorded, with the seconds they took."""

    untrainable = "a recorded engine keeps the weights that its record began with"

    def __init__(self, engine: Engine, writer: RecordWriter, cut: set[str]) -> None:
        self._engine, self._writer, self._cut = engine, writer, cut

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        # Numbered before the first await: calls that overlap end in any order, a replay makes them in this one.
        writer, call = self._writer, self._writer.number(request_key, "engine")
        asked = digest(engine_ask(token_ids, sampling))
        began = time.monotonic()
        try:
            generation = await self._engine.generate(token_ids, sampling, request_key)
        except asyncio.CancelledError:
            self._cut.add(current_episode())
            raise
        except EngineError as fault:
            ask = {**writer.prompt(request_key, token_ids, []), "sampling": _plain(sampling)}
            writer.add(request_key, "engine", call, ask, {"error": str(fault)}, asked=asked)
            raise
        generation = replace(generation, seconds=time.monotonic() - began)
        ask = {**writer.prompt(request_key, token_ids, generation.token_ids), "sampling": _plain(sampling)}
        # Without experts: what a record replays has no weights, so nothing is trained on it.
        writer.add(request_key, "engine", call, ask, asdict(replace(generation, experts=None)), asked=asked)
        return generation

    def meet(self, env: ToolEnv, request_key: str) -> ToolEnv:
        return self._engine.meet(env, request_key)

    def progress(self, request_key: str) -> int | None:
        return self._engine.progress(request_key)

    async def start(self) -> None:
        await self._engine.start()

    async def abort(self, request_key: str) -> None:
        await self._engine.abort(request_key)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()


_LEFT_OUT = {"experts_from", "stop", "grammar"}


def engine_ask(token_ids: Sequence[int], sampling: Sampling) -> dict[str, Json]:
    """The whole request of an engine call, as JSON."""
    return {"prompt": list(token_ids), "sampling": {**_plain(sampling), "stop_token_ids": list(sampling.stop_token_ids)}}


def _plain(sampling: Sampling) -> dict[str, Json]:
    """The answer's inputs as plain values: not what is told next to it, nor what episodes never set."""
    return {name: value for name, value in asdict(sampling).items() if name not in _LEFT_OUT}


class RecordingJudge:
    """A judge whose verdicts are recorded under the episode they are about."""

    def __init__(self, client: JudgeClient, writer: RecordWriter) -> None:
        self._client, self._writer = client, writer

    def ask(self, key: str, request: Any) -> Any:
        episode, call = current_episode(), self._writer.number(current_episode(), "judge")
        verdict = self._client.ask(key, request)
        self._writer.add(episode, "judge", call, asdict(request), asdict(verdict))
        return verdict

    async def aask(self, key: str, request: Any) -> Any:
        episode, call = current_episode(), self._writer.number(current_episode(), "judge")
        verdict = await self._client.aask(key, request)
        self._writer.add(episode, "judge", call, asdict(request), asdict(verdict))
        return verdict


def _rows(messages: Sequence[Message]) -> list[Json]:
    return [as_row(message) for message in messages]


# Replaying


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
            raise divergence_error(self.record.path, row, expected, got)
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
            raise divergence_error(self._tape.path, row, expected, ask)
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
