"""The whole config of a run: cluster, observation, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag

from agentrl.config.schema.base import (
    Choice,
    FolderName,
    Fraction,
    Frozen,
    NotNegative,
    NotNegativeInt,
    Positive,
    PositiveInt,
    Ranks,
    Seconds,
    Temperature,
    Unit,
)
from agentrl.config.schema.episodes import (
    BY_KIND,
    ONE,
    SEVERAL,
    AgentConfig,
    ApiConfig,
    EnvConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    SglangConfig,
    ToolsConfig,
    VllmConfig,
    WeightsConfig,
    entry_name,
)
from agentrl.config.schema.learning import AlgorithmConfig, CriticConfig, DataConfig, ModelConfig, OptimConfig, SftConfig
from agentrl.utils.errors import ConfigError, UserError

Role = Literal["actor", "rollout", "reference", "critic", "reward_model", "teacher", "judge"]


class PoolConfig(Frozen):
    """A named set of processes for roles."""

    nodes: Annotated[PositiveInt, Unit("nodes")] = 1
    """On how many nodes."""
    per_node: Annotated[PositiveInt, Unit("processes")] = 1
    """How many on each node."""
    cpus: Annotated[Positive, Unit("CPU slots")] = 1.0
    """CPU slots of each process."""
    gpus: Annotated[NotNegative, Unit("GPUs")] = 0.0
    """GPUs of each process."""


class ClusterConfig(Frozen):
    """Placement of the roles (docs/cluster.md)."""

    backend: Literal["ray", "inline"] = "ray"
    """Roles are Ray actors, or all in the driver process ("inline"), for one device or a debugger."""
    address: str | None = None
    """Of the Ray cluster to join: HEAD:6379, or "auto" for the one that this machine belongs to; by default `RAY_ADDRESS`, else
    this machine alone."""
    actors: Ranks = 1
    """Processes of a role that `roles` does not list."""
    startup_timeout: Seconds = 180.0
    """In which workers must be placed and started; a local Ray itself has as long to start."""
    call_timeout: Seconds = 3600.0
    """Limit of every call to a worker: one that hangs is reported by name, not waited for."""
    max_restarts: Annotated[NotNegativeInt, Unit("restarts")] = 2
    """How often the run starts again from the newest checkpoint after a worker died."""
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    """Sets of processes, by a name of your choice."""
    roles: dict[Role, str] = Field(default_factory=dict)
    """Which pool a role uses; roles in the same pool share its processes and take turns."""


class TracesConfig(Frozen):
    """OpenTelemetry traces, one a step (needs the extra `otel`). Where they go is said by the standard environment variables
    OTEL_* (docs/observability.md)."""

    every: Annotated[PositiveInt, Unit("updates")] = 1
    """Of how many updates one is traced; evaluations outside of updates always are."""
    episodes: Fraction = 1.0
    """The share of a traced step's episodes whose spans are exported."""


class PrometheusConfig(Frozen):
    """An endpoint that Prometheus scrapes while the run goes on: http://HOST:PORT/metrics (needs the extra `prometheus`)."""

    port: Annotated[int, Field(ge=0, le=65_535), Unit("1")] = 9464
    """The port at which it listens; 0 is any that is free."""
    host: str = "127.0.0.1"
    """The address at which it listens. Nobody is asked who he is: leave it at this machine's own, unless the network is yours."""


class ProfileConfig(Frozen):
    """Timelines of single steps, `profile/step_NNNNNN.json.gz` in the run folder, for ui.perfetto.dev: episodes, calls of the
    training roles, weights under way; next to it, a file by torch for each call of a rank."""

    steps: Annotated[list[PositiveInt], Field(min_length=1), Unit("updates")]
    """The updates, counted from 1. Each takes somewhat longer than it would."""


class EvalConfig(Frozen):
    """Evaluation before, during and after training."""

    tasks: Annotated[PositiveInt, Unit("tasks")] = 100
    """How many are played, once each."""
    split: str = "heldout"
    """The split of the tasks."""
    every: Annotated[NotNegativeInt, Unit("updates")] = 0
    """How often it happens during training; 0 is never, so only before and after."""
    temperature: Temperature = 1.0
    """At which it samples; 0 is greedy."""


class CheckpointConfig(Frozen):
    """Checkpoints: contents, and number kept. After an evaluation that beats all earlier ones the weights are saved even
    between two regular saves."""

    every: Annotated[PositiveInt, Unit("updates")] = 10
    """How often a checkpoint is saved; one is saved at the end too."""
    keep: Annotated[PositiveInt, Unit("checkpoints")] = 2
    """How many of the newest are kept."""
    keep_best: Annotated[NotNegativeInt, Unit("checkpoints")] = 1
    """How many of the best by held-out evaluation are kept next to them."""
    best: Literal["success", "reward"] = "success"
    """The metric that decides which are best: success rate or mean reward."""
    asynchronous: bool = True
    """Write files in the background while training continues (needs a copy of the state in host memory)."""


class KeepConfig(Frozen):
    """Retention of files that grow with a run's length (checkpoints: `checkpoint.keep`)."""

    trajectories: Annotated[NotNegativeInt, Unit("steps")] = 0
    """Of this many of the newest steps the episodes of updates and evaluations stay in `trajectories/` and `tokens/`; 0: of all.
    Those before and after training always stay."""


class HealthConfig(Frozen):
    """Checks that keep a run from starting if it cannot learn, and from ending as if it had learned (docs/debugging.md)."""

    lint: bool = True
    """Before the start, try the reward spec on gold, empty and spam episodes of its environment, for a few seconds at most."""
    preflight: bool = True
    """Before the start, start every MCP server once, and ask every model behind an API (judges, writers of summaries,
    users) once."""
    max_unsolvable: Fraction = 0.05
    """The largest share of tasks whose gold solution may need more turns or tokens than an episode has (`rollout.max_turns`,
    `max_turn_tokens`, `max_episode_tokens`, the model's context), with each set of parameters that is trained on, and of the
    held-out ones; a run with more does not start. 1: it starts, and says so."""
    idle_updates: Annotated[PositiveInt, Unit("updates")] = 5
    """After this many in a row that trained nothing the run says so, with the cause; one that ends so "trained nothing", with
    exit code 1, unless its episodes succeed more often than at first, or `stop_at_success` is reached."""
    max_unscored: Fraction = 0.5
    """The largest share of episodes that may be unscored, over as many updates or in an evaluation, before the run says so;
    more make it "mostly unscored", with exit code 1."""


class TrainConfig(Frozen):
    """A whole run: `agentrl train CONFIG.toml [a.b=c ...]` (docs/configuration.md)."""

    name: FolderName = "run"
    """What the run is called; its folder is `out`/`name`."""
    out: str = "runs"
    """The folder in which the run's folder is made."""
    seed: Annotated[NotNegativeInt, Unit("1")] = 0
    """Of everything that is drawn: tasks, tokens, initial weights, minibatches."""
    steps: Annotated[PositiveInt, Unit("updates")] = 50
    """Updates of the run. A resume may change it; `optim.schedule` then decays over the new number."""
    stop_at_success: Fraction | None = None
    """The run ends early once an evaluation (`eval.every`) reaches this success; by default it never does. A resume of a run that
    has reached it makes more updates only with a higher one, or false."""
    trajectories_every: Annotated[PositiveInt, Unit("updates")] = 1
    """Of how many updates the episodes of one are written to `trajectories/`; the last one's always are."""
    engine: str = "auto"
    """What samples: "embedded", "vllm", "sglang", the name of one in `plugins/` of a shelf, or "auto": the one that suits the
    machine."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine that has no section here."""
    env: (
        Annotated[Annotated[EnvConfig, Tag(ONE)] | Annotated[list[EnvConfig], Field(min_length=1), Tag(SEVERAL)], BY_KIND] | None
    ) = None
    """The environment, `[env]`, or several, `[[env]]`; only a config with [data] may have none."""
    tools: ToolsConfig = ToolsConfig()
    """Tools in addition to the environment's own."""
    agent: AgentConfig | None = None
    """An agent that plays the episodes in place of the built-in loop."""
    model: ModelConfig = ModelConfig()
    """The model that is trained."""
    sft: SftConfig | None = None
    """A supervised warm start before the first update; by default none."""
    data: DataConfig | None = None
    """Data that is there already, for `agentrl sft`; by default none."""
    rollout: RolloutConfig = RolloutConfig()
    """How episodes are run."""
    reward: RewardConfig = RewardConfig()
    """What a reward spec may use in addition to the episode."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage estimator, policy loss and how token losses are averaged."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and micro-batching."""
    critic: CriticConfig | None = None
    """A value function next to the policy; by default none."""
    reward_model: RewardModelConfig | None = None
    """A sequence classifier whose score is added to the reward; by default none."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the roles run."""
    vllm: VllmConfig = VllmConfig()
    """The vLLM engine."""
    sglang: SglangConfig = SglangConfig()
    """SGLang servers that are already running."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the engine."""
    eval: EvalConfig = EvalConfig()
    """Evaluation before, during and after training."""
    api: ApiConfig = ApiConfig()
    """How API models are called."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saved state, and how much of it is kept."""
    keep: KeepConfig = KeepConfig()
    """How much stays of what grows with the run's length."""
    health: HealthConfig = HealthConfig()
    """What keeps a run that cannot learn from starting, and from ending as if it had learned."""
    trackers: list[Choice] = Field(default_factory=lambda: [Choice(name="tensorboard")])
    """Where metrics are written in addition to metrics.jsonl: "tensorboard", "jsonl", "wandb", "mlflow", "trackio"
    (docs/observability.md), or one in `plugins/`."""
    callbacks: list[Choice] = Field(default_factory=list)
    """What hears of each update and of each finished group: classes in `plugins/` (docs/python.md)."""

    traces: TracesConfig | None = None
    """OpenTelemetry traces of steps; by default none."""
    prometheus: PrometheusConfig | None = None
    """An endpoint for Prometheus; by default none."""
    profile: ProfileConfig | None = None
    """Timelines of single steps; by default none."""

    @property
    def envs(self) -> tuple[EnvConfig, ...]:
        """The environments of the run, one for `[env]`: read this instead of `env`."""
        if self.env is None:
            return ()
        return tuple(self.env) if isinstance(self.env, list) else (self.env,)

    @property
    def the_env(self) -> EnvConfig:
        """The only environment. Raises ConfigError if there are several, or none."""
        if not self.envs:
            raise ConfigError("env: this takes an environment, and the config has none; it trains on [data] (agentrl sft)")
        if len(self.envs) > 1:
            names = ", ".join(env.called for env in self.envs)
            raise ConfigError(f"env: this takes one environment, and the config has {len(self.envs)}: {names}")
        return self.envs[0]

    @property
    def trained_envs(self) -> list[EnvConfig]:
        """The environments that some update of a run draws tasks of; the others are only evaluated."""
        return [env for env in self.envs if env.trains]

    def alone(self, env: EnvConfig) -> Self:
        """The config as if `env` were its only environment: what it sets itself takes the place of the run's sections.

        All that plays, scores and checks one environment reads such a config, whose `envs` is this one.
        """
        own = dict.fromkeys(("tools", "agent", "limits", "sampler", "advantage", "eval", "sft"))
        rest = {**own, "weight": None if env.trains else 0.0}
        if env.trains:
            drawn: dict[str, Any] = {"sampler": env.sampler or self.rollout.sampler}
        else:  # it is only evaluated: neither the run's curriculum nor its forks are of its tasks
            drawn = {"sampler": env.sampler or type(self.rollout)().sampler, "start": None, "branch": None}
        advantage = env.advantage or self.algorithm.advantage
        update = {
            "env": env.model_copy(update=rest),
            "tools": env.tools or self.tools,
            "agent": env.agent or self.agent,
            "rollout": _with(self.rollout, env.limits).model_copy(update=drawn),
            "algorithm": self.algorithm.model_copy(update={"advantage": advantage}),
            "eval": _with(self.eval, env.eval, but="weight"),
            "sft": self.sft and _with(self.sft, env.sft),
        }
        return self.model_copy(update=update)

    def with_date(self, day: str | None) -> Self:
        """The config with a date for chat templates: its own, else `day`."""
        if self.model.date is not None or day is None:
            return self
        return self.model_copy(update={"model": self.model.model_copy(update={"date": day})})

    def each(self) -> list[Self]:
        """The config of each environment, as `alone` makes it."""
        return [self.alone(env) for env in self.envs]

    @contextmanager
    def name_entry_in_errors(self, env: EnvConfig) -> Iterator[Self]:
        """Begins a UserError with the entry of `[[env]]` that it is about, if there are several. Yields the config of it
        `alone`."""
        try:
            yield self.alone(env)
        except UserError as problem:
            if len(self.envs) == 1:
                raise
            entry, text = entry_name(self.envs.index(env), env.called), str(problem)
            raise type(problem)(entry + text[3:] if text.startswith("env.") else f"{entry}: {text}") from problem

    def widest(self, of: Sequence[EnvConfig] = ()) -> Self:
        """The config with the widest limits of the environments `of`, by default all, in [rollout], for what they share, such as
        the engine's cache."""
        if not self.envs:
            return self
        rollouts = [self.alone(env).rollout for env in of or self.envs]
        names = ("max_turns", "max_turn_tokens", "max_episode_tokens")
        limits = {name: max(getattr(rollout, name) for rollout in rollouts) for name in names}
        return self.model_copy(update={"rollout": self.rollout.model_copy(update=limits)})

    def longest_sample(self) -> int:
        """The most tokens that an episode may sample in any of the environments that updates draw tasks of."""
        rollouts = [self.alone(env).rollout for env in self.trained_envs]
        return max(min(rollout.max_turns * rollout.max_turn_tokens, rollout.max_episode_tokens) for rollout in rollouts)

    def settled_algorithm(self) -> AlgorithmConfig:
        """The algorithm section, with the constant length of `seq_mean_token_sum_norm` filled in."""
        algorithm = self.algorithm
        if algorithm.aggregate != "seq_mean_token_sum_norm" or algorithm.length_norm is not None:
            return algorithm
        return algorithm.model_copy(update={"length_norm": self.longest_sample()})

    def other_models(self) -> dict[str, str]:
        """By the key that names them, the folders or hub names of the models of other roles than the policy's. A critic that
        starts from the policy's model has none."""
        roles = {"critic": self.critic, "reward_model": self.reward_model, "algorithm.distillation": self.algorithm.distillation}
        return {f"{at}.path": one.path for at, one in roles.items() if one is not None and one.path is not None}


def _with(section: Any, own: Any, but: str = "") -> Any:
    """The section with what the environment's own part of it sets."""
    given = {} if own is None else {key: value for key, value in own if value is not None and key != but}
    return section.model_copy(update=given)
