"""What `agentrl eval` and `agentrl rollout` play on: a model or an API, live, recorded, or from a record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agentrl.backends.litellm import ApiRenderer, Transcript
from agentrl.catalog import EnvRef, find_reward
from agentrl.cluster.runtime import start_ray, stop_ray
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError
from agentrl.render.base import Renderer
from agentrl.reward import Scorer, compile_spec, load_spec, make_context
from agentrl.rollout.engine import Engine
from agentrl.rollout.episode import Policy
from agentrl.rollout.recording import Recorder
from agentrl.rollout.replay import Replayer
from agentrl.rollout.stage import Stage
from agentrl.run.engines import API, api_name, check_api, make_api_engine, make_engine, resolve_engine
from agentrl.run.policy import check_rollout, longest, make_policy
from agentrl.run.recordings import RecordFolder
from agentrl.run.reward_checks import check_decided
from agentrl.run.sizes import check_heads
from agentrl.run.tool_parser import renderer_of
from agentrl.train.pretrained import load_tokenizer
from agentrl.trajectory import Json

API_CONTEXT = 2**31 - 1
"""An API model's ids are messages: their number bounds nothing, its own limit does."""


@dataclass(slots=True)
class Scene:
    """The parts that episodes need; `close` ends them all."""

    stage: Stage
    policy: Policy
    scorer: Scorer
    context: int
    ray: bool = False

    async def start(self, config: TrainConfig) -> None:
        """Start the engines. Raises UserError or EngineError; what was started is closed by `close`."""
        if self.ray:
            start_ray(config.cluster)
        await self.policy.engine.start()
        if self.policy.writer is not None:
            await self.policy.writer.engine.start()

    async def close(self) -> None:
        """Free everything."""
        await self.policy.engine.close()
        if self.policy.writer is not None:
            await self.policy.writer.engine.close()
        self.stage.close()
        if self.ray:
            stop_ray()


def check_scene(config: TrainConfig) -> None:
    """Raise a UserError for whatever is wrong before a folder is made or a process started. Not for a replay."""
    env = EnvRef.of(config)
    env.build().close()
    check_decided(make_scorer(config, env, Stage(), reward_spec(config, env)))
    check_rollout(config, env)
    assert config.model.path is not None
    if api_name(config.model.path) is not None:
        check_api(config)
        return
    load_tokenizer(config.model.path)
    check_heads(config, resolve_engine(config.engine))


def reward_spec(config: TrainConfig, env: EnvRef) -> dict[str, Any]:
    """The run's reward spec: `env.reward`, or the environment's own. Raises ConfigError where there is none."""
    name = config.env.reward or env.default_reward()
    if name is None:
        raise ConfigError(f"env.reward: {config.env.id} names no reward spec of its own; set env.reward=NAME_OR_PATH")
    return load_spec(find_reward(name))


def make_scorer(config: TrainConfig, env: EnvRef, stage: Stage, spec: dict[str, Any]) -> Scorer:
    """The compiled spec, whose judge and gold replays play on `stage`."""
    context = make_context(config.reward)
    assert context.judge is not None
    context = replace(context, judge=stage.judge(context.judge), twin=stage.twin(lambda task: env.build()))
    return compile_spec(spec, context=context, timeout=config.rollout.env_timeout)


def open_live(config: TrainConfig, temperature: float, record: RecordFolder | None) -> Scene:
    """The parts, live; with `record` everything that is asked is written down there."""
    env = EnvRef.of(config)
    spec = reward_spec(config, env)
    path = config.model.path
    assert path is not None
    api = api_name(path) is not None
    name = "api" if api else resolve_engine(config.engine)
    context = API_CONTEXT if api else longest(config, name, path)
    tokenizer = None if api else load_tokenizer(path)
    recorder = None if record is None else record.open(config, spec, tokenizer, context)
    stage: Stage = recorder or Stage()
    scorer = make_scorer(config, env, stage, spec)
    engine: Engine
    renderer: Renderer
    if api:
        engine = api_engine = make_api_engine(config, _transcript(record, recorder, "policy"))
        renderer = api_engine.renderer
    else:
        engine, renderer = make_engine(name, path, config), renderer_of(config.model, tokenizer)
    heard = engine if recorder is None else recorder.engine(engine)
    policy = make_policy(_without_writer(config), heard, renderer, temperature)
    writer = config.rollout.summary_model
    if writer is not None:
        asked_as = config.model_copy(update={"model": config.model.model_copy(update={"path": API + writer})})
        summaries = make_api_engine(asked_as, _transcript(record, recorder, "writer"))
        asked = summaries if recorder is None else recorder.engine(summaries)
        policy = replace(policy, writer=Policy(asked, summaries.renderer, temperature=0.0))
    return Scene(stage, policy, scorer, context, ray=name == "vllm")


def open_replay(config: TrainConfig, temperature: float, folder: RecordFolder) -> Scene:
    """The parts, all of them from the record. Raises ReplayError where it is none, or was changed."""
    record = folder.read()
    stage = Replayer(record)
    scorer = make_scorer(config, EnvRef.of(config), stage, load_spec(folder.spec()))

    def transcript(owner: str) -> ApiRenderer:
        entries: dict[int, dict[str, Json]] = record.transcripts.get(owner, {})
        return ApiRenderer(Transcript(entries))

    api = api_name(config.model.path) is not None
    renderer: Renderer = transcript("policy") if api else renderer_of(config.model, load_tokenizer(str(folder.tokenizer)))
    policy = make_policy(_without_writer(config), stage.engine(), renderer, temperature)
    if config.rollout.summary_model is not None:
        policy = replace(policy, writer=Policy(stage.engine(), transcript("writer"), temperature=0.0))
    return Scene(stage, policy, scorer, folder.manifest()["context"])


def _transcript(record: RecordFolder | None, recorder: Recorder | None, owner: str) -> Transcript:
    if record is None or recorder is None:
        return Transcript()
    # A record that goes on has numbered messages already.
    return Transcript(record.read().transcripts.get(owner, {}), recorder.transcript(owner))


def _without_writer(config: TrainConfig) -> TrainConfig:
    """Who writes summaries is made here, so that it too can be recorded and replayed."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"summary_model": None})})
