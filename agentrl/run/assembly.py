"""Make the parts that play and score a config's episodes, for training, evaluations, rollouts and their checks.

    environments  config.envs, config.tools                  `EnvRef.of`
    scorers       their reward, config.reward                `make_scorer`
    renderer      tokenizer, config.model.tool_parser        `renderer_of`
    engine        config.engine or an API model              run/engine_choice.py
    policy        all of these, config.rollout               `Inputs.policy`: sampling, context policy, summary writer
    limits        config.rollout, the model's context length

With several environments each has its own `EnvRef`, scorer and limits, and all share one policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from agentrl.config import ModelConfig, TrainConfig
from agentrl.config.envs import weight_at
from agentrl.config.schema import AgentConfig, EnvConfig, OptimConfig
from agentrl.engines.makers import API
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.render import make_renderer
from agentrl.render.base import Renderer
from agentrl.render.modality import make_modality
from agentrl.render.syntaxes import SYNTAXES
from agentrl.render.template_text import Placeholders
from agentrl.render.tool_calls import ForTools, Parser, Syntax
from agentrl.reward import Scorer
from agentrl.rollout.context import make_context_policy
from agentrl.rollout.engine import Engine, EngineMaker
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.player import AGENTS, Agents, LocalPlayer, Player, RunEnv
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.services import RunServices
from agentrl.trainer.pretrained import load_tokenizer, model_config, model_context, packaged_tokenizer, unused_ids
from agentrl.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools

Purpose = Literal["train", "eval", "rollout"]


@dataclass(frozen=True)
class RunStart:
    """Config and purpose of a command before its start. `scorers`: by environment, once they are made. `planned`: only plan;
    start nothing and try nothing that costs money."""

    config: TrainConfig
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    purpose: Purpose = "train"
    planned: bool = False

    @cached_property
    def engine(self) -> EngineChoice:
        return EngineChoice(self.config)

    @cached_property
    def env(self) -> EnvRef:
        return EnvRef.of(self.config.the_env, self.config.tools)

    @property
    def scorer(self) -> Scorer:
        return self.scorers[self.config.the_env.called]

    def inputs(self, model: str | None = None, temperature: float | None = None) -> Inputs:
        """Read the run's reward specs, tokenizer and context length.

        Raises ConfigError, CatalogError, RewardSpecError or ModelError if one is missing or unsuitable.
        """
        config, specs = self.config, []
        for env in config.envs:
            with config.name_entry_in_errors(env):
                specs.append(find_spec(EnvRef.of(env, config.tools), env.reward))
        counts = "messages" not in self.engine.traits
        context = self.engine.maker().context(model_length(config.model, model) if counts else 0)
        return Inputs(config, tuple(specs), tokenizer_of(config.model, model) if counts else None, context, model, temperature)

    @contextmanager
    def alone(self, env: EnvConfig) -> Iterator[RunStart]:
        """Yield a copy with `env` as the only environment. If there are several, a UserError raised inside names its entry."""
        with self.config.name_entry_in_errors(env) as one:
            yield replace(self, config=one)


PROGRAM = "program"
"""Name in `AGENTS` of the player for [agent]."""

VLLM_PARSER = "vllm:"
"""Prefix of the names of tool parsers from vLLM."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts that play and score a config's episodes, and the player that uses them; `start` starts them.

    All environments share one policy."""

    envs: tuple[RunEnv, ...]
    player: Player
    services: RunServices

    @property
    def policy(self) -> Policy:
        return self.envs[0].policy

    def starting(self) -> str:
        """Describe the engine's progress of starting, for the display; "" if unknown."""
        stage = self.policy.engine.starting()
        return f"> {stage}" if stage else ""

    async def start(self) -> None:
        """Start the engines, then the player. Raises UserError or EngineError; `close` then ends the started parts."""
        policy = self.policy
        await policy.engine.start()
        if policy.writer is not None:
            await policy.writer.engine.start()
        await self.services.start([env.scorer for env in self.envs])
        await self.player.start()

    async def close(self) -> None:
        """Close the player, then the engines, each even if another fails."""
        policy = self.policy
        async with AsyncExitStack() as closing:  # runs from the last callback to the first
            closing.push_async_callback(self.services.close)
            if policy.writer is not None:
                closing.push_async_callback(policy.writer.engine.close)
            closing.push_async_callback(policy.engine.close)
            closing.push_async_callback(self.player.close)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a run that are read from files, before this process or a worker makes parts of them.

    `specs`: reward spec of each environment, in order. `tokenizer` is None for an API model. `context`: maximum tokens of a
    prompt together with its turn. `model` and `temperature`, if given, replace `model.path` and `rollout.temperature`.
    """

    config: TrainConfig
    specs: tuple[dict[str, Any], ...]
    tokenizer: Any
    context: int
    model: str | None = None
    temperature: float | None = None

    def assemble(
        self, *, pools: Pools | None = None, connected: Engine | None = None, asks: bool = True, room: int | None = None
    ) -> Assembly:
        """Make all parts. `pools`: of the run; `connected`: for a process other than the driver, its client of the engine;
        `asks`: as in `LocalPlayer`; `room`: as in `EngineChoice.make`. Raises ConfigError, ModelError, DependencyError or
        RewardSpecError if parts do not fit together."""
        config, path, choice = self.config, self.model or self.config.model.path, EngineChoice(self.config)
        assert path is not None
        if self.tokenizer is None:
            engine, renderer = _api_model(choice.maker())
        else:
            renderer = renderer_of(config.model, self.tokenizer, sees="vision" in choice.traits)
            trust = config.model.trust_remote_code
            engine = connected or choice.make(path, pools, unused_ids(self.tokenizer, path, trust), room)
        policy, envs, services = self.policy(engine, renderer), [], RunServices(config, pools)
        for env, spec in zip(config.envs, self.specs, strict=True):
            with config.name_entry_in_errors(env) as one:
                ref, limits = EnvRef.of(env, config.tools), Limits.of(one.rollout, self.context)
                scorer = make_scorer(spec, one.reward, ref, timeout=one.rollout.env_timeout, services=services)
                envs.append(RunEnv(env.called, ref, policy, scorer, limits, agents_of(one.agent, self.tokenizer)))
        return Assembly(tuple(envs), LocalPlayer(envs, asks=asks), services if asks else RunServices(config))

    def policy(self, engine: Engine, renderer: Renderer) -> Policy:
        """Make the policy of a run's episodes.

        `rollout.summary_model` writes summaries (greedily, with the settings of [api]); without it the policy does.
        """
        config, rollout, writer = self.config, self.config.rollout, None
        if rollout.summary_model is not None:
            model = config.model.model_copy(update={"path": API + rollout.summary_model})
            writer = Policy(*_api_model(EngineChoice(config.model_copy(update={"model": model})).maker()), temperature=0.0)
        return Policy(
            engine,
            renderer,
            weight_at(rollout.temperature, 0) if self.temperature is None else self.temperature,
            rollout.top_p,
            rollout.top_k,
            make_context_policy(rollout.context),
            writer,
            rollout.router_replay,
        )


def _api_model(maker: EngineMaker) -> tuple[Engine, Renderer]:
    from agentrl.engines.api_models import ApiRenderer, Transcript

    # Shared: episodes consist of token ids, so the renderer numbers the messages, and the engine maps the numbers back.
    transcript = Transcript()
    return maker.make_with(transcript), ApiRenderer(transcript)


def agents_of(agent: AgentConfig | None, tokenizer: Any) -> Agents | None:
    """Make the player of [agent], which replaces the built-in loop; None without [agent]. Raises ConfigError or
    DependencyError."""
    return None if agent is None else AGENTS[PROGRAM](agent, None if tokenizer is None else tokenizer.decode)


def renderer_of(config: ModelConfig, tokenizer: Any, sees: bool = True) -> Renderer:
    """Make the renderer for a tokenizer, with the tool parser `model.tool_parser`. `sees`: give images to a model that takes
    them, instead of lines of text. Raises ConfigError for an unknown parser, DependencyError if vLLM is missing, ModelError if
    the parser does not fit the chat template."""
    modality = make_modality(config.path or "", model_config(config)) if sees else None
    pictures = None
    if modality is not None:
        begin, pad, end = tokenizer.convert_ids_to_tokens(modality.around)
        pictures = Placeholders(begin, pad, end, modality.tokens)
    name = config.tool_parser
    parser: Parser | ForTools | Syntax | None = None if name == "auto" else SYNTAXES.get(name)
    if name.startswith(VLLM_PARSER):
        from agentrl.engines.vllm.tool_parsers import vllm_parser

        parser = ForTools(partial(vllm_parser, name.removeprefix(VLLM_PARSER), tokenizer))
        parser.bind(())  # an unsuitable parser fails here, not in the first episode
    elif parser is None and name != "auto":
        hint = did_you_mean(name, SYNTAXES, f"a parser of vLLM is written '{VLLM_PARSER}{name}'")
        known = ", ".join(map(repr, SYNTAXES))
        raise ConfigError(f"model.tool_parser = {name!r}: expected 'auto', {known} or '{VLLM_PARSER}NAME'; {hint}")
    return make_renderer(tokenizer, parser, pictures, config.date)


def tokenizer_of(model_config: ModelConfig, model: str | None = None) -> Any:
    """Load the tokenizer of `model`, else of `model.path` or [model.init]. Raises ModelError if it has none."""
    path, init = model or model_config.path, model_config.init
    if path is not None:
        return load_tokenizer(path, model_config.trust_remote_code, model_config.chat_template)
    assert init is not None
    return packaged_tokenizer(init.context, init.vision, model_config.chat_template)


def model_length(model_config: ModelConfig, model: str | None = None) -> int:
    """Return the context length in tokens of `model`, else of `model.path` or [model.init]."""
    path, init = model or model_config.path, model_config.init
    if path is not None:
        return model_context(path, model_config.trust_remote_code)
    assert init is not None
    return init.context


def longest_row(optim: OptimConfig, model: ModelConfig) -> int:
    """Return the maximum tokens of a transcript: those of a micro-batch, but at most the model's context length."""
    return min(optim.micro_tokens, model_length(model))
