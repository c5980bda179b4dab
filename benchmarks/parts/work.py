"""Workload of the rollout and train benchmarks: tool episodes of the key_value environment.

`Instant` is an engine that answers at once. `Forced` makes every turn of a random model a valid call of maximal length, so that
a peer can run the same token work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.cluster.launch import launch
from agentrl.cluster.machine import reachable_address
from agentrl.config import RolloutConfig
from agentrl.config.schema import InitModelConfig, ModelConfig, OptimConfig, VllmConfig, WeightsConfig
from agentrl.data.trajectory import Message, Task, ToolCall
from agentrl.env import ToolEnv, tool
from agentrl.env.catalog import EnvRef, find_reward
from agentrl.render import make_renderer
from agentrl.render.base import Renderer
from agentrl.reward import Scorer, compile_spec, load_spec
from agentrl.rollout.collector import Collector
from agentrl.rollout.engine import Engine, EngineConnection, EngineStats, Generation, Sampling
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.mixtures import MixedTasks, Part
from agentrl.rollout.player import LocalPlayer, Player, RunEnv
from agentrl.rollout.workers.channel import Channel
from agentrl.rollout.workers.worker_pool import WorkerPool
from agentrl.trainer.actor import Actor
from agentrl.trainer.pretrained import load_tokenizer
from agentrl.trainer.publish import Publisher

MILLION = InitModelConfig(layers=4, hidden=128, mlp=384, heads=8, kv_heads=2, head_dim=32, context=4096)
"""Qwen3 model with 1.0 million parameters, for all comparisons with peers."""
CONTEXT = 4096


def scorer() -> Scorer:
    return compile_spec(load_spec(find_reward("key_value_exact")))


def tasks(calls: int = 2) -> EnvRef:
    """Return an environment: look numbers up, add them, report the total, in `calls` tool turns and an answer."""
    return EnvRef("key_value", {"calls": calls, "set_share": 0.0})


def run_env(policy: Policy, config: RolloutConfig, env: EnvRef | None = None) -> RunEnv:
    ref = env or tasks()
    return RunEnv(getattr(ref, "id", "lookup"), ref, policy, scorer(), Limits.of(config, CONTEXT))


def collector(policy: Policy, config: RolloutConfig, env: EnvRef | None = None, seed: int = 0) -> Collector:
    part = run_env(policy, config, env)
    return collector_of(LocalPlayer([part]), part, config, seed)


def collector_of(player: Player, part: RunEnv, config: RolloutConfig, seed: int = 0) -> Collector:
    """Return a collector of one environment, whose episodes `player` plays."""
    mixed = MixedTasks([Part(part.name, part.env, config.sampler)], config.mixture, seed)
    return Collector(player, [part], mixed, config, seed=seed)


@dataclass(frozen=True)
class WorkerParts:
    """Parts of a rollout worker."""

    player: Player

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class ForcedRecipe:
    """Recipe of a rollout worker with forced turns."""

    folder: str
    config: RolloutConfig
    connection: EngineConnection

    async def build(self, channel: Channel) -> WorkerParts:
        policy = Policy(self.connection.connect(), Forced(make_renderer(load_tokenizer(self.folder))))
        return WorkerParts(LocalPlayer([run_env(policy, self.config)]))


def workers(folder: str, policy: Policy, config: RolloutConfig, count: int) -> WorkerPool:
    """Return rollout workers in the replicas of the policy's engine, not started."""

    def recipe(connection: EngineConnection | None) -> ForcedRecipe:
        assert connection is not None
        return ForcedRecipe(folder, config, connection)

    seats = policy.engine.seats(count, recipe, reachable_address)
    assert seats is not None
    envs, engine = [run_env(policy, config)], policy.engine
    return WorkerPool(envs, seats, count=count, engine=engine, timeout=60.0, startup_timeout=120.0, respawns=0)


def publisher(folder: str, engine: Engine) -> Publisher:
    """Return a publisher of a model folder's weights from an actor over a route, as in a run."""
    actors = launch(Actor, backend="inline", world_size=1)
    actors.run(Actor.init_model, folder, ModelConfig(), OptimConfig(), 1)
    return Publisher(actors, engine, WeightsConfig())


def vllm_section(context: int) -> VllmConfig:
    """Return the config of one small replica without respawns, with the KV cache size of raw vLLM."""
    return VllmConfig(kv_cache_mib=256, max_model_len=context, max_respawns=0)


class Instant(Engine):
    """Engine that answers at once with the given turns in order, repeated for each episode."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self._turns = [list(turn) for turn in turns]
        self._played: dict[str, int] = {}
        self._version = 0

    async def start(self) -> None: ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        turn = self._played.get(request_key, 0)
        self._played[request_key] = turn + 1
        ids = self._turns[turn % len(self._turns)]
        return Generation(list(ids), [-1.0] * len(ids), [self._version] * len(ids), "stop")

    async def take(self, version: int) -> None:
        """Set the version, as the callback of `Collector.exchange`; there are no weights."""
        self._version = version

    async def abort(self, request_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats(version=self._version)

    async def close(self) -> None: ...


class Forced(Renderer):
    """Renderer without stop tokens, so that each turn uses its whole budget, and with a tool call in every turn.

    Sampled tokens are parsed as usual, and then replaced by a valid call, since a random model makes none.
    """

    def __init__(self, inner: Renderer) -> None:
        self._inner = inner
        self._call = Message("assistant", tool_calls=(ToolCall("get", {"key": "a"}),))

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._inner.start(messages, tools)

    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        return self._inner.extend(finish, messages)

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        self._inner.parse(token_ids, finish)
        return self._call

    def assistant(self, message: Message) -> list[int]:
        return self._inner.assistant(message)


class Lookup(ToolEnv):
    """Environment with one tool and a short question, for the comparison with TRL, whose tools are plain functions."""

    id = "bench/Lookup-v0"
    summary = "look a number up"

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"lookup/{split}/{rng_seed}", rng_seed, split, {"key": "abcdefgh"[rng_seed % 8]}, {"answer": "17"})

    def prompt(self, task: Task) -> list[Message]:
        return [
            Message("system", "get each key, add its value, report the total."),
            Message("user", f"report {task.data['key']}"),
        ]

    @tool(read_only=True)
    async def get(self, key: str) -> str:
        """value of a key"""
        return "17"


class Ref:
    """Substitute for an EnvRef, because `Lookup` is not registered."""

    def build(self) -> ToolEnv:
        return Lookup()
