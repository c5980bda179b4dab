"""Checks before a run with an agent, and a rehearsal of an episode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import httpx

from agentrl.cluster.placement import is_planned
from agentrl.config.schema import AgentConfig, RolloutConfig
from agentrl.data.trajectory import Message, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import make_scorer
from agentrl.env.spaces import run_sync
from agentrl.env.wrappers import ToolWrapper
from agentrl.render.base import Renderer
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy
from agentrl.run.assembly import agents_of, renderer_of
from agentrl.run.checks import RUN_CHECKS, RunStart
from agentrl.utils.errors import AgentrlError, ConfigError, ResourceError
from agentrl.utils.network import exempt_own, through_proxy
from agentrl.utils.redaction import resolve_references

_ANSWERS_WITHIN = 10.0


@RUN_CHECKS.register("agents")
def check_agents(start: RunStart) -> list[str]:
    """Raise a UserError if the agent of [agent] does not exist, or is incompatible with other settings."""
    for env in start.config.envs:
        with start.alone(env) as one:
            if one.config.agent is not None:
                _check_agent(one, one.config.agent)
    return []


def _check_agent(start: RunStart, agent: AgentConfig) -> None:
    if agent.url is not None:
        address = resolve_references(agent.url, "agent.url")
        exempt_own(address)
        try:
            httpx.get(address, timeout=_ANSWERS_WITHIN)  # any answer will do: only a POST starts an episode
        except httpx.HTTPError as problem:
            fault = f"{type(problem).__name__}: {problem}{through_proxy(address)}"
            raise ResourceError(f"agent.url: {agent.url} does not answer: {fault}") from problem
    rollout = start.config.rollout
    if rollout.context != RolloutConfig().context or rollout.summary_model is not None:
        raise ConfigError(
            f"rollout.context = {rollout.context.name!r}: with [agent] the agent itself decides what the policy sees; "
            "leave rollout.context and rollout.summary_model out"
        )
    if "messages" in start.engine.traits:
        raise ConfigError("[agent]: an API model has an endpoint of its own; point the agent there")
    built = start.env.build()
    try:
        _check_calls(built)
        if not built.has_user:  # some environments have one only after a reset
            run_sync(built.areset(seed=0, options={"split": built.splits[0]}))
        if built.has_user and not agent.user:
            raise ConfigError(
                f"[agent]: {built.id} has a simulated user, whose messages this agent would not receive; set "
                "agent.user = true if the agent talks with it (AGENTRL_USER_URL, docs/agents.md)"
            )
    finally:
        built.close()


@RUN_CHECKS.register("agent_rehearsal", traits={"plan"})
def rehearse_agents(start: RunStart) -> list[str]:
    """Describe a rehearsed episode of each agent, unless the run is planned for other machines."""
    lines = []
    for env in [] if is_planned() else start.config.envs:
        with start.alone(env) as one:
            lines += [rehearse(one)] if one.config.agent is not None else []
    return lines


def rehearse(start: RunStart) -> str:
    """Run one episode of the agent with a scripted policy, which samples the task's gold turns if there are any; describe its
    outcome. Raises ConfigError, with the agent's output, if the agent failed."""
    config = start.config
    inputs, env = start.inputs(), start.env.build()
    agents, renderer = agents_of(config.agent, inputs.tokenizer), renderer_of(config.model, inputs.tokenizer)
    assert agents is not None
    try:
        turns = env.gold_turns(env.make_task(0, env.splits[0]))
    except (NotImplementedError, AgentrlError):
        turns = [Message("assistant", "This is a rehearsal.")]
    policy = Policy(Scripted(renderer, turns), renderer)
    spec = EpisodeSpec(0, env.splits[0], config.seed, 0, "rehearsal")
    limits, began = Limits.of(config.rollout, inputs.context), time.monotonic()
    scorer = make_scorer(inputs.specs[0], config.reward, start.env, timeout=config.rollout.env_timeout)

    async def play() -> Trajectory:
        try:
            return await agents.play(env, policy, spec, limits, scorer, Watch())
        finally:
            await agents.close()

    trajectory = asyncio.run(play())
    if trajectory.stop.infrastructure:
        raise ConfigError(f"[agent]: a rehearsal of one episode ended with {trajectory.stop}: {trajectory.error}")
    calls = sum(1 for _, _, result in trajectory.calls() if result is not None)
    played = "gold turns" if len(turns) > 1 else "a turn without calls"
    error = f" ({trajectory.error})" if trajectory.error else ""
    return (
        f"agent: a rehearsal on {played} ended with {trajectory.stop}{error} after {time.monotonic() - began:.1f} s: "
        f"{len(trajectory.turns)} turns, {calls} tool calls, {len(trajectory.ledgers)} ledgers, reward {trajectory.reward}"
    )


class Scripted(Engine):
    """Samples the given turns in order, then repeats the last one."""

    def __init__(self, renderer: Renderer, turns: Sequence[Message]) -> None:
        self._turns = [renderer.assistant(turn) for turn in turns]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        ids = self._turns.pop(0) if len(self._turns) > 1 else self._turns[0]
        cut = ids[: sampling.max_tokens]
        return Generation(cut, [0.0] * len(cut), [0] * len(cut), "stop" if len(cut) == len(ids) else "length")

    async def start(self) -> None: ...

    async def abort(self, request_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None: ...


def _check_calls(env: ToolEnv) -> None:
    """Raise ConfigError if the environment acts on whole steps, because an agent makes its calls one by one."""
    layer = env
    while True:
        base: type[ToolEnv] = ToolWrapper if isinstance(layer, ToolWrapper) else ToolEnv
        own = type(layer)
        steps = own.astep is not base.astep or own._answer is not ToolEnv._answer
        if steps and own.acall is base.acall:
            what = f"wrapper {own.__name__}" if base is ToolWrapper else f"environment {layer.id}"
            raise ConfigError(
                f"[agent]: {what} acts on whole steps (`astep`), and an agent makes its tool calls one by one; leave it out, or "
                "give it an `acall`"
            )
        if not isinstance(layer, ToolWrapper):
            return
        layer = layer.env
