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
    """A named pool of processes for roles."""

    nodes: Annotated[PositiveInt, Unit("nodes")] = 1
    """Number of nodes."""
    per_node: Annotated[PositiveInt, Unit("processes")] = 1
    """Processes per node."""
    cpus: Annotated[Positive, Unit("CPU slots")] = 1.0
    """CPU slots per process."""
    gpus: Annotated[NotNegative, Unit("GPUs")] = 0.0
    """GPUs per process."""


class ClusterConfig(Frozen):
    """Placement of the roles (docs/cluster.md)."""

    backend: Literal["ray", "inline"] = "ray"
    """Run roles as Ray actors ("ray"), or all in the driver process ("inline"), for one device or a debugger."""
    address: str | None = None
    """Ray cluster to join: HEAD:6379, or "auto" for the one that this machine belongs to; by default `RAY_ADDRESS`, else only
    this machine."""
    actors: Ranks = 1
    """Processes of a role that is not in `roles`."""
    startup_timeout: Seconds = 180.0
    """Time limit for placing and starting workers, and for starting a local Ray."""
    call_timeout: Seconds = 3600.0
    """Time limit of every call to a worker; one that hangs is reported by name."""
    max_restarts: Annotated[NotNegativeInt, Unit("restarts")] = 2
    """Maximum restarts of the run from the newest checkpoint after a worker died."""
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    """Pools of processes, by a name of your choice."""
    roles: dict[Role, str] = Field(default_factory=dict)
    """Pool of each role; roles in the same pool share its processes and take turns."""


class TracesConfig(Frozen):
    """OpenTelemetry traces, one per step (needs the extra `otel`). The standard environment variables OTEL_* set their
    destination (docs/observability.md)."""

    every: Annotated[PositiveInt, Unit("updates")] = 1
    """Interval of traced updates; evaluations outside of updates are always traced."""
    episodes: Fraction = 1.0
    """Share of a traced step's episodes whose spans are exported."""


class PrometheusConfig(Frozen):
    """An endpoint for Prometheus during the run: http://HOST:PORT/metrics (needs the extra `prometheus`)."""

    port: Annotated[int, Field(ge=0, le=65_535), Unit("1")] = 9464
    """Port to listen on; 0 is any free one."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no authentication: keep the default, this machine only, unless the network is yours."""


class ProfileConfig(Frozen):
    """Timelines of single steps, `profile/step_NNNNNN.json.gz` in the run folder, for ui.perfetto.dev: episodes, calls of the
    training roles, weight transfers; next to it a torch profile per call of a rank."""

    steps: Annotated[list[PositiveInt], Field(min_length=1), Unit("updates")]
    """Profiled updates, counted from 1. Each takes somewhat longer than usual."""


class EvalConfig(Frozen):
    """Evaluation before, during and after training."""

    tasks: Annotated[PositiveInt, Unit("tasks")] = 100
    """Number of tasks, one episode each."""
    split: str = "heldout"
    """Split of the tasks."""
    every: Annotated[NotNegativeInt, Unit("updates")] = 0
    """Interval of evaluations during training; 0: only before and after."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 is greedy."""


class CheckpointConfig(Frozen):
    """Checkpoints: contents, and number kept. An evaluation that beats all earlier ones also saves the weights, even between
    regular checkpoints."""

    every: Annotated[PositiveInt, Unit("updates")] = 10
    """Interval of checkpoints; one is saved at the end too."""
    keep: Annotated[PositiveInt, Unit("checkpoints")] = 2
    """Number of newest checkpoints kept."""
    keep_best: Annotated[NotNegativeInt, Unit("checkpoints")] = 1
    """Number of best checkpoints by held-out evaluation kept in addition."""
    best: Literal["success", "reward"] = "success"
    """Metric that decides which are best: success rate or mean reward."""
    asynchronous: bool = True
    """Write files in the background while updates continue (needs a copy of the state in host memory). [data] waits for them."""


class KeepConfig(Frozen):
    """Retention of files that grow with a run's length (checkpoints: `checkpoint.keep`)."""

    trajectories: Annotated[NotNegativeInt, Unit("steps")] = 0
    """Number of newest steps whose episodes (of updates and evaluations) stay in `trajectories/` and `tokens/`; 0: all. Those
    before and after training always stay."""


class HealthConfig(Frozen):
    """Checks that stop a run that cannot learn at its start, and flag one that did not learn (docs/debugging.md)."""

    lint: bool = True
    """Before the start, try the reward spec on gold, empty and spam episodes of its environment, for a few seconds at most."""
    preflight: bool = True
    """Before the start, start every MCP server once, and call every model behind an API (judges, summary writers, users) once."""
    max_unsolvable: Fraction = 0.05
    """Maximum share of tasks whose gold solution may need more turns or tokens than an episode has (`rollout.max_turns`,
    `max_turn_tokens`, `max_episode_tokens`, the model's context), for each set of parameters trained on, and for the held-out
    tasks; a run with more does not start. 1: it starts with a warning."""
    idle_updates: Annotated[PositiveInt, Unit("updates")] = 5
    """Consecutive updates without training after which the run warns, with the cause; one that ends so "trained nothing", with
    exit code 1, unless its episodes succeed more often than at first, or `stop_at_success` is reached."""
    max_unscored: Fraction = 0.5
    """Maximum share of unscored episodes, over `idle_updates` updates or in an evaluation, before the run warns; more make it
    "mostly unscored", with exit code 1. An evaluation with more ends no run, rates no checkpoint and opens no `sft.gate`."""


class TrainConfig(Frozen):
    """A whole run: `agentrl train CONFIG.toml [a.b=c ...]` (docs/configuration.md)."""

    name: FolderName = "run"
    """Name of the run; its folder is `out`/`name`."""
    out: str = "runs"
    """Parent folder of the run folder."""
    seed: Annotated[NotNegativeInt, Unit("1")] = 0
    """Seed of all random draws: tasks, tokens, initial weights, minibatches."""
    steps: Annotated[PositiveInt, Unit("updates")] = 50
    """Updates of the run. A resume may change it; `optim.schedule` then decays over the new number."""
    stop_at_success: Fraction | None = None
    """Success rate of an evaluation (`eval.every`) that ends the run early; by default never. A resume of a run that has reached
    it makes more updates only with a higher value, or false."""
    trajectories_every: Annotated[PositiveInt, Unit("updates")] = 1
    """Interval of updates whose episodes are written to `trajectories/`; those of update `steps` always are."""
    engine: str = "auto"
    """Inference engine: "embedded", "vllm", "sglang", a name in `plugins/` of a shelf, or "auto": the one for this machine."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine without a section here."""
    env: (
        Annotated[Annotated[EnvConfig, Tag(ONE)] | Annotated[list[EnvConfig], Field(min_length=1), Tag(SEVERAL)], BY_KIND] | None
    ) = None
    """The environment, `[env]`, or several, `[[env]]`; only a config with [data] may have none."""
    tools: ToolsConfig = ToolsConfig()
    """Tools in addition to the environment's own."""
    agent: AgentConfig | None = None
    """Agent that runs the episodes instead of the built-in loop."""
    model: ModelConfig = ModelConfig()
    """The trained model."""
    sft: SftConfig | None = None
    """Supervised warm start before the first update; by default none."""
    data: DataConfig | None = None
    """Existing data for `agentrl sft`; by default none."""
    rollout: RolloutConfig = RolloutConfig()
    """Execution of episodes."""
    reward: RewardConfig = RewardConfig()
    """Functions and judges of reward specs."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage estimator, policy loss and averaging of token losses."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and micro-batching."""
    critic: CriticConfig | None = None
    """Value function; by default none."""
    reward_model: RewardModelConfig | None = None
    """Sequence classifier whose score is added to the reward; by default none."""
    cluster: ClusterConfig = ClusterConfig()
    """Placement of the roles."""
    vllm: VllmConfig = VllmConfig()
    """The vLLM engine."""
    sglang: SglangConfig = SglangConfig()
    """Running SGLang servers."""
    weights: WeightsConfig = WeightsConfig()
    """Transfer of new weights to the engine."""
    eval: EvalConfig = EvalConfig()
    """Evaluation before, during and after training."""
    api: ApiConfig = ApiConfig()
    """Calls of API models."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saved state, and how much of it is kept."""
    keep: KeepConfig = KeepConfig()
    """Retention of files that grow with the run's length."""
    health: HealthConfig = HealthConfig()
    """Checks of whether a run can learn, and has learned."""
    trackers: list[Choice] = Field(default_factory=lambda: [Choice(name="tensorboard")])
    """Outputs of metrics in addition to metrics.jsonl: "tensorboard", "wandb", "mlflow", "trackio"
    (docs/observability.md), or one in `plugins/`."""
    callbacks: list[Choice] = Field(default_factory=list)
    """Classes in `plugins/` that are called for each update and each finished group (docs/python.md)."""

    traces: TracesConfig | None = None
    """OpenTelemetry traces of steps; by default none."""
    prometheus: PrometheusConfig | None = None
    """Endpoint for Prometheus; by default none."""
    profile: ProfileConfig | None = None
    """Timelines of single steps; by default none."""

    @property
    def envs(self) -> tuple[EnvConfig, ...]:
        """All environments of the run, one for `[env]`; read this instead of `env`."""
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
        """The environments whose tasks updates draw; the others are only evaluated."""
        return [env for env in self.envs if env.trains]

    def alone(self, env: EnvConfig) -> Self:
        """Return the config as if `env` were its only environment: its own settings replace the run's sections.

        Code that runs, scores or checks one environment reads such a config, whose `envs` has only this one.
        """
        own = dict.fromkeys(("tools", "agent", "limits", "sampler", "advantage", "eval", "sft"))
        rest = {**own, "weight": None if env.trains else 0.0}
        if env.trains:
            drawn: dict[str, Any] = {"sampler": env.sampler or self.rollout.sampler}
        else:  # only evaluated: the run's curriculum and branching do not apply to its tasks
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
        """Return the config with a date for chat templates: its own, else `day`."""
        if self.model.date is not None or day is None:
            return self
        return self.model_copy(update={"model": self.model.model_copy(update={"date": day})})

    def each(self) -> list[Self]:
        """Return the config of each environment, as `alone` makes it."""
        return [self.alone(env) for env in self.envs]

    @contextmanager
    def name_entry_in_errors(self, env: EnvConfig) -> Iterator[Self]:
        """Prefix a UserError with its entry of `[[env]]`, if there are several. Yields the config of `env` `alone`."""
        try:
            yield self.alone(env)
        except UserError as problem:
            if len(self.envs) == 1:
                raise
            entry, text = entry_name(self.envs.index(env), env.called), str(problem)
            raise type(problem)(entry + text[3:] if text.startswith("env.") else f"{entry}: {text}") from problem

    def widest(self, of: Sequence[EnvConfig] = ()) -> Self:
        """Return the config with the widest limits of the environments `of` (default: all) in [rollout], for shared resources
        such as the engine's cache."""
        if not self.envs:
            return self
        rollouts = [self.alone(env).rollout for env in of or self.envs]
        names = ("max_turns", "max_turn_tokens", "max_episode_tokens")
        limits = {name: max(getattr(rollout, name) for rollout in rollouts) for name in names}
        return self.model_copy(update={"rollout": self.rollout.model_copy(update=limits)})

    def longest_sample(self) -> int:
        """Return the most tokens that an episode may sample in any trained environment."""
        rollouts = [self.alone(env).rollout for env in self.trained_envs]
        return max(min(rollout.max_turns * rollout.max_turn_tokens, rollout.max_episode_tokens) for rollout in rollouts)

    def settled_algorithm(self) -> AlgorithmConfig:
        """Return the algorithm section with the default `length_norm` of `seq_mean_token_sum_norm` filled in."""
        algorithm = self.algorithm
        if algorithm.aggregate != "seq_mean_token_sum_norm" or algorithm.length_norm is not None:
            return algorithm
        return algorithm.model_copy(update={"length_norm": self.longest_sample()})

    def other_models(self) -> dict[str, str]:
        """Return the models (folders or hub names) of roles other than the policy, by config key. A critic that starts from the
        policy's model has none."""
        roles = {"critic": self.critic, "reward_model": self.reward_model, "algorithm.distillation": self.algorithm.distillation}
        return {f"{at}.path": one.path for at, one in roles.items() if one is not None and one.path is not None}


def _with(section: Any, own: Any, but: str = "") -> Any:
    """Override a section by the values that the environment's own part sets."""
    given = {} if own is None else {key: value for key, value in own if value is not None and key != but}
    return section.model_copy(update=given)
