"""Checks of environments: names, sections of a config, starts, demonstrations; remote environments, suites, agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import reduce

import httpx

from agentrl.config.envs import alone, each, entry_name, trained_at_all, warm_start_envs
from agentrl.config.origin import COMMAND_LINE, DEFAULT, Keys, Origins
from agentrl.config.schema import AgentConfig, RolloutConfig, TrainConfig
from agentrl.data.trajectory import Message, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.address import PROTOCOLS
from agentrl.env.catalog import EnvRef, ParameterError, check_ref
from agentrl.env.spaces import run_sync
from agentrl.env.wrappers import WRAPPERS, ToolWrapper
from agentrl.render.base import Renderer
from agentrl.rollout.context import CONTEXTS
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy
from agentrl.rollout.samplers import fresh_seed, make_sampler
from agentrl.run.assembly import agents_of, read_inputs, renderer_of, scorer_of
from agentrl.run.digests import suite_env
from agentrl.run.engine_choice import engine_of
from agentrl.utils.errors import AgentrlError, CatalogError, ConfigError, ResourceError
from agentrl.utils.network import exempt_own, through_proxy
from agentrl.utils.redaction import resolve_references
from agentrl.utils.registry import Registry

# Names


def check_named(config: TrainConfig, origins: Callable[[], Origins] = Origins) -> None:
    """Raise CatalogError if an environment is nowhere, or does not take the parameters that it is given, in the warm start too.
    `origins`: of the config's values, asked only for a message.

    Reads: env, sft.params, sft.gate_params, sft.envs.
    """
    check_played(config, origins)
    for env in [] if config.sft is None else warm_start_envs(config.envs, config.sft):
        sft, number = alone(config, env).sft, config.envs.index(env)
        assert sft is not None
        for name, params in (("params", sft.params), ("gate_params", sft.gate_params)):
            own = env.sft is not None and getattr(env.sft, name) is not None
            keys: Keys = (*_at(config, number), "sft", name) if own else ("sft", name)
            try:
                check_ref(EnvRef.of(alone(config, env)).with_params(params))
            except ParameterError as problem:
                raise _with_key(config, problem, (*keys, problem.name or ""), number, origins) from problem


def check_played(config: TrainConfig, origins: Callable[[], Origins] = Origins, only: Collection[str] | None = None) -> None:
    """The part of `check_named` that is of `[env]`, of those environments that are called by a name in `only`."""
    for number, env in enumerate(config.envs):
        if only is None or env.called in only:
            try:
                check_ref(EnvRef.of(alone(config, env)))
            except CatalogError as problem:
                # A parameter that it needs and is not given stands nowhere.
                name = problem.name if isinstance(problem, ParameterError) else None
                own = name == "sandbox" and "sandbox" not in env.params
                key = ("id",) if name is None else ("sandbox",) if own else ("params", name)
                raise _with_key(config, problem, (*_at(config, number), *key), number, origins) from problem


def _at(config: TrainConfig, number: int) -> Keys:
    return ("env", number) if isinstance(config.env, list) else ("env",)


def _with_key(
    config: TrainConfig, problem: CatalogError, keys: Keys, number: int, origins: Callable[[], Origins]
) -> CatalogError:
    """The error with the key and its place in front; as it is, if it is of a name that was typed as such."""
    place = origins().of(keys)
    if place == COMMAND_LINE:
        return problem
    words = list(keys)
    if keys[0] == "env" and isinstance(config.env, list):
        words[:2] = [entry_name(number, config.envs[number].called) if len(config.envs) > 1 else "env"]
    return CatalogError(f"{'' if place in ('', DEFAULT) else f'{place}: '}{'.'.join(map(str, words))}: {problem}")


# Sections whose features register checks

CHECKS: Registry[Callable[[TrainConfig, EnvRef], None]] = Registry("section", "CHECKS", "agentrl.run.checks")
"""Checks of a config with one environment, each by the name of a section without which it is not run."""
OPTIONAL = ("rollout.branch",)
"""Sections of features in contrib: a config with one of them is refused if its feature is not installed."""


def run_section_checks(one: TrainConfig, ref: EnvRef) -> None:
    """Run the checks of the sections that a config with one environment has. Raises a UserError."""
    for name in sorted({*CHECKS, *OPTIONAL}):
        if reduce(lambda section, key: getattr(section, key, None), name.split("."), one) is not None:
            CHECKS.entry(name).make(one, ref)


# Starts

TASKS = 4
"""Tasks per set of parameters whose gold solution is tried."""


def check_start(one: TrainConfig, ref: EnvRef) -> None:
    """Raise ConfigError, naming the obstacle, if gold calls cannot be made before the policy begins.

    Reads: rollout.start, rollout.context, rollout.sampler, env, agent, seed.
    """
    if one.rollout.start is None:
        return
    why = _gold_obstacle(
        one,
        ref,
        "that plays by itself begins at the beginning",
        "the policy would write summaries of turns that are not its own",
        played=True,
    )
    if why is not None:
        raise ConfigError(f"rollout.start ({one.envs[0].called}): {why}; leave rollout.start out")


def _gold_obstacle(one: TrainConfig, ref: EnvRef, agent: str, summaries: str, *, played: bool) -> str | None:
    """Why gold solutions cannot be had, or (`played`) not be played by the run; `agent`, `summaries`: why with these two not."""
    rollout = one.rollout
    if ref.at is not None:
        return f"env.url = {ref.at.url!r}: the gold solutions of an environment elsewhere are not asked for in a run"
    if one.agent is not None:
        return f"[agent]: an agent {agent}"
    if "summarizes" in CONTEXTS.entry(rollout.context.name).traits:
        return f"rollout.context = {rollout.context.name!r}: {summaries}"
    for choice in ref.wrappers if played else ():
        if "chance_faults" in WRAPPERS.entry(choice.name).traits:
            return f"env.wrappers: with {choice.name!r} tools fail at random, and gold calls with them"
    for env in each_env(rollout, ref):
        if played and env.user_models():
            return "its user is a model, which would have to answer gold turns too"
        if all(env.horizon(env.make_task(fresh_seed(one.seed, n), "train")) is None for n in range(TASKS)):
            return "its tasks have no gold solution"
    return None


def each_env(rollout: RolloutConfig, ref: EnvRef) -> Iterator[ToolEnv]:
    """The environment with each set of parameters that the sampler may choose; closed when the next is asked for."""
    for params in make_sampler(rollout.sampler).variants():
        with closing(ref.with_params(params).build()) as env:
            yield env


# Demonstrations


def check_demonstrations(one: TrainConfig, ref: EnvRef) -> None:
    """Raise ConfigError, naming the obstacle, if there is no gold solution that an update could show.

    Reads: algorithm.demonstrations, rollout.context, rollout.sampler, env, tools.sets, tools.mcp, agent, seed.
    """
    if one.algorithm.demonstrations is None or not trained_at_all(one.envs[0].weight):
        return
    why = _gold_obstacle(
        one,
        ref,
        "writes prompts of its own, which a gold solution does not have",
        "a gold solution has no summaries, which the policy would write",
        played=False,
    )
    if why is not None:
        raise ConfigError(f"algorithm.demonstrations ({one.envs[0].called}): {why}; leave algorithm.demonstrations out")


# Remote environments


def check_remote(config: TrainConfig) -> None:
    """Raise a UserError if the environment's server cannot be reached, speaks another protocol, has another environment, refuses
    its parameters, wrappers or tool sets, or takes fewer episodes at once than the run plays; or if an
    agent of the user's would play there.

    Reads: env, tools, agent, rollout.max_episodes, sft.
    """
    ref = EnvRef.of(config)
    if ref.at is None:
        return
    if not ref.at.ours:
        PROTOCOLS[ref.at.protocol].describe(ref.at)
        return
    if config.tools.mcp:
        raise ConfigError(
            f"tools.mcp: the tools of an environment elsewhere run on its server, {ref.at.url}, which starts no programs for its "
            "clients; put the tools into its tool sets (tools.sets)"
        )
    if config.tools.args:
        raise ConfigError(
            f"tools.args: the tools of an environment elsewhere run on its server, {ref.at.url}, which reads no files that its "
            "clients name; leave it out, and give the set to the environment there"
        )
    if config.agent is not None:
        raise ConfigError(
            f"[agent]: its calls go to the tools one by one, and an environment elsewhere ({ref.at.url}) answers whole turns; "
            "run where the environment is (without env.url)"
        )
    card = ref.card(fresh=True)
    assert card is not None
    most = card["limits"]["episodes"]
    if config.rollout.max_episodes > most:
        raise ConfigError(
            f"rollout.max_episodes = {config.rollout.max_episodes}: {ref.at.url} takes {most} episodes at once; lower it, or "
            f"start the server with --max-episodes {config.rollout.max_episodes} or more"
        )
    if config.sft is not None and not card["teacher"]:
        raise ConfigError(f"env.id: {card['env']['id']} at {ref.at.url} has no teacher, so [sft] cannot warm a model up on it")


def remote_lines(config: TrainConfig) -> list[str]:
    """Lines about the environment's server, for `--dry-run`; nothing for environments that are here."""
    lines = []
    for ref in map(EnvRef.of, each(config)):
        if ref.at is not None and not ref.at.ours:
            lines.append(PROTOCOLS[ref.at.protocol].describe(ref.at))
        elif ref.at is not None:
            card = ref.card()
            assert card is not None
            limits, tools = card["limits"], ", ".join(row["function"]["name"] for row in card["toolbox"]["rows"]) or "none"
            has = " and ".join(
                what for what, there in (("gold solutions", card["gold"]), ("a teacher", card["teacher"])) if there
            )
            lines += [
                f"environment: {ref.at.url} (agentrl {card['agentrl']}) has {card['env']['id']}, with "
                f"{has or 'no gold solutions'}",
                f"  tools: {tools}",
                f"  at most {limits['episodes']} episodes at once, each closed after {limits['idle']:g} s without a request",
            ]
    return lines


# Suites


def suite_notes(config: TrainConfig) -> list[str]:
    """The files that changed since a suite was installed, by name; a line each suite.

    Reads: env.
    """
    built = [suite_env(EnvRef.of(alone(config, env))) for env in config.envs]
    return [note for env in built if env is not None for note in env.source_notes()]


# Agents

_ANSWERS_WITHIN = 10.0


def check_agent(config: TrainConfig, env: EnvRef) -> None:
    """Raise a UserError if [agent] names no agent that is there, or something else of the config cannot go with one.

    Reads: agent, env, engine, rollout.context, rollout.summary_model.
    """
    if config.agent is None:
        return
    agents_of(config, read_inputs(config))
    if config.agent.url is not None:
        address = resolve_references(config.agent.url, "agent.url")
        exempt_own(address)
        try:
            httpx.get(address, timeout=_ANSWERS_WITHIN)  # whatever it answers: only a POST is an episode
        except httpx.HTTPError as problem:
            fault = f"{type(problem).__name__}: {problem}{through_proxy(address)}"
            raise ResourceError(f"agent.url: {config.agent.url} does not answer: {fault}") from problem
    if config.rollout.context != RolloutConfig().context or config.rollout.summary_model is not None:
        raise ConfigError(
            f"rollout.context = {config.rollout.context.name!r}: with [agent] the agent itself decides what the policy sees; "
            "leave rollout.context and rollout.summary_model out"
        )
    if "messages" in engine_of(config).traits:
        raise ConfigError("[agent]: an API model has an endpoint of its own; point the agent there")
    built = env.build()
    try:
        _check_calls(built)
        run_sync(_check_user(config.agent, built))
    finally:
        built.close()


def rehearse(config: TrainConfig) -> str:
    """One episode of the agent of a config with one environment, on a scripted policy, which plays the task's gold turns if
    there are any: what came of it, in a line. Raises ConfigError, with what the agent wrote, if it failed by itself."""
    inputs, env = read_inputs(config), EnvRef.of(config).build()
    agents, renderer, turns = agents_of(config, inputs), renderer_of(config.model, inputs.tokenizer), _gold(env)
    assert agents is not None
    policy = Policy(Scripted(renderer, turns), renderer)
    spec = EpisodeSpec(0, env.splits[0], config.seed, 0, "rehearsal")
    limits, began = Limits.of(config.rollout, inputs.context), time.monotonic()

    async def play() -> Trajectory:
        try:
            return await agents.play(env, policy, spec, limits, scorer_of(config, inputs.specs[0]), Watch())
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


def _gold(env: ToolEnv) -> list[Message]:
    try:
        return env.gold_turns(env.make_task(0, env.splits[0]))
    except (NotImplementedError, AgentrlError):
        return [Message("assistant", "This is a rehearsal.")]


class Scripted(Engine):
    """Samples the given turns one after the other, and then the last one again."""

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
    """An agent makes its calls one by one, so what an environment does with whole steps would never happen."""
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


async def _check_user(agent: AgentConfig, env: ToolEnv) -> None:
    """Some environments have a user only once a task is set up."""
    try:
        if not env.has_user:
            await env.areset(seed=0, options={"split": env.splits[0]})
        if env.has_user and not agent.user:
            raise ConfigError(
                f"[agent]: {env.id} has a user who answers, and an agent that is given a task does not hear it; set agent.user = "
                "true if the agent talks with it (AGENTRL_USER_URL, docs/agents.md)"
            )
    finally:
        await env.aclose()
