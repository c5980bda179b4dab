"""Config sections of episodes: environments, tools, engines, rewards, rollout."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from agentrl.config.schema.base import (
    ApiArgs,
    Choice,
    Fraction,
    Frozen,
    JudgeArgs,
    NotNegative,
    NotNegativeInt,
    Positive,
    PositiveInt,
    Prices,
    Seconds,
    Temperature,
    Tokens,
    Turns,
    Unit,
    Weight,
)


class SandboxConfig(Frozen):
    """Sandbox in which an environment runs the policy's code (docs/sandboxes.md)."""

    provider: str = "auto"
    """Provider of sandboxes: "local", "bubblewrap", "docker", "podman", one of a plug-in, or "auto": bubblewrap where it works,
    else the local one, as also with `args`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the provider, such as `packages`."""
    warm: Annotated[NotNegativeInt, Unit("sandboxes")] = 0
    """Number of sandboxes started in advance, so that an episode does not wait for a start."""
    limit: Annotated[PositiveInt, Unit("sandboxes")] = 64
    """Maximum number that run at once in each process that runs episodes; further requests wait."""

    @model_validator(mode="after")
    def _warm_ones_run_too(self) -> SandboxConfig:
        if self.warm > self.limit:
            raise ValueError(f"warm = {self.warm} is more than limit = {self.limit}: warm sandboxes count as running")
        return self


class McpServerConfig(Frozen):
    """One Model Context Protocol server: the `command` that starts it, or the `url` of a running one."""

    command: list[str] = Field(default_factory=list)
    """Command that starts the server, as a list of words."""
    url: str | None = None
    """Address of a running server."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, by name."""
    tools: list[str] | None = None
    """Only these tools of the server; by default all."""
    prefix: str = ""
    """Prefix of the name of each of its tools."""
    timeout: Seconds = 30.0
    """Time limit of the start and of every call."""
    max_output: Tokens | None = None
    """Token limit of every answer; a longer one is truncated with a note. By default the environment's."""
    check: Literal["strict", "off"] = "strict"
    """"strict": check arguments against the server's published schema before the call; "off": pass on the policy's arguments, so
    that the server's own errors reach the policy."""
    late: Literal["infrastructure", "policy"] = "infrastructure"
    """Blame for a call that times out: "infrastructure" (the episode ends unscored and is retried), or "policy", for servers that
    run code of the policy (the episode ends and is scored)."""


class ToolsConfig(Frozen):
    """Tools in addition to the environment's own."""

    sets: list[str] = Field(default_factory=list)
    """Tool sets: names on the shelves, or file paths."""
    args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of stateful tool sets (`files`, `sqlite`, ...), by set name. Texts that begin with `./` or `../` are paths."""
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    """Model Context Protocol servers, by a name of your choice."""


class AgentConfig(Frozen):
    """A user's existing agent that runs the episodes instead of the built-in loop (docs/agents.md): exactly one of `command`,
    `python` and `url`."""

    command: list[str] = Field(default_factory=list)
    """Program started for each episode, as a list of words."""
    python: str | None = None
    """"module:function" of an async function that runs one episode."""
    url: str | None = None
    """Address that receives a POST per episode and answers it when the episode is done."""
    tools: Literal["mcp", "own"] = "mcp"
    """"mcp": the agent gets the environment's tools by an MCP server (a function also by a method); "own": it has only its own
    tools, whose calls and results are read from its requests."""
    user: bool = False
    """The agent can talk with the environment's simulated user; otherwise an environment with one is refused."""
    answer: Literal["last_message", "output"] = "last_message"
    """Final answer of the episode: the policy's "last_message", or the agent's "output" (printed by the command, returned by the
    function, or "answer" in the URL's response)."""
    blame: Literal["infrastructure", "policy"] = "infrastructure"
    """Blame for a failure of the agent itself (nonzero exit code, exception, HTTP status): "infrastructure" (the episode is
    unscored and retried), or "policy" (it ends and is scored)."""
    idle_timeout: Seconds = 120.0
    """Time without a request, a tool call or its end after which the agent counts as failed."""
    concurrency: Annotated[PositiveInt, Unit("agents")] = 32
    """Maximum number of agents that run at once in each process that runs episodes."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of environment variables that a command inherits from the run, in addition to PATH, HOME, locale and time zone."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of a command, with values."""
    host: str = "127.0.0.1"
    """Address at which the agent reaches the process that runs episodes."""


class EnvLimits(Frozen):
    """Limits of one environment's episodes; each overrides the key of the same name in [rollout]."""

    max_turns: Turns | None = None
    """Overrides `rollout.max_turns` for this environment."""
    max_turn_tokens: Tokens | None = None
    """Overrides `rollout.max_turn_tokens` for this environment."""
    max_episode_tokens: Tokens | None = None
    """Overrides `rollout.max_episode_tokens` for this environment."""
    episode_timeout: Seconds | None = None
    """Overrides `rollout.episode_timeout` for this environment."""


class EnvEval(Frozen):
    """Evaluation of one environment: keys override those of the same name in [eval]; and its `weight`."""

    tasks: Annotated[PositiveInt, Unit("tasks")] | None = None
    """Overrides `eval.tasks` for this environment."""
    split: str | None = None
    """Overrides `eval.split` for this environment."""
    temperature: Temperature | None = None
    """Overrides `eval.temperature` for this environment."""
    weight: Annotated[Weight, Unit("1")] | None = None
    """Weight in the mean success (and reward) over environments, which decides on the best checkpoint and `stop_at_success`; by
    default equal weights."""


class EnvSft(Frozen):
    """One environment's part in the warm start; each key overrides the one of the same name in [sft]."""

    teacher: dict[str, Any] | None = None
    """Overrides `sft.teacher` for this environment."""
    params: dict[str, Any] | None = None
    """Overrides `sft.params` for this environment."""
    gate: Fraction | None = None
    """Overrides `sft.gate` for this environment."""
    gate_params: dict[str, Any] | None = None
    """Overrides `sft.gate_params` for this environment."""


ONE, SEVERAL = "(one)", "(several)"
BY_KIND = Discriminator(lambda given: SEVERAL if isinstance(given, list) else ONE)
"""For a value or a list of values: report only errors of the form that was given."""
WeightAt = Annotated[tuple[Annotated[int, Field(ge=0)], Weight], Field(strict=False)]


Steps = Annotated[Annotated[Weight, Tag(ONE)] | Annotated[list[WeightAt], Tag(SEVERAL)], BY_KIND]
"""A number, or points (step, number) with linear interpolation."""


class EnvConfig(Frozen):
    """An environment, its parameters and reward spec: `[env]` alone, or one of several `[[env]]` (docs/mixtures.md)."""

    id: str
    """Id or short name of the environment (`agentrl env list`)."""
    name: Annotated[str, Field(pattern=r"^[\w-]*[A-Za-z_-][\w-]*$")] | None = None
    """Name in metrics, tables and overrides (`env.NAME.params.calls=3`); by default the id."""
    weight: Annotated[Steps, Unit("1")] | None = None
    """Share of the training groups, as interpreted by `rollout.mixture`: a number, or points `[[step, weight], ...]` with linear
    interpolation; 0: evaluated only. By default 1."""
    url: str | None = None
    """Address of the environment's server, if it is remote ("http://HOST:PORT", docs/remote_environments.md)."""
    protocol: Literal["agentrl", "openenv"] = "agentrl"
    """Protocol of the server at `url`: "agentrl" (`agentrl env serve ID --http`) or "openenv"."""
    token_env: str | None = None
    """Environment variable with the token of the server at `url`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the environment, by name (`agentrl env show ID` lists them)."""
    sandbox: SandboxConfig | None = None
    """Sandbox for the policy's code, for environments that run it."""
    reward: str | None = None
    """Reward spec: an id or a file path; by default the environment's own."""
    max_output: Tokens | None = None
    """Token limit of answers of its tools without one of their own (`@tool(max_output=...)`, `tools.mcp.NAME.max_output`); a
    longer answer is truncated with a note. By default the environment's own limit, else 2048."""
    wrappers: list[Choice] = Field(default_factory=list)
    """Wrappers around the environment, the innermost first."""
    system: str | None = None
    """Text prepended to the environment's system message; without one, it becomes the system message."""
    tools: ToolsConfig | None = None
    """Overrides the run's [tools]."""
    agent: AgentConfig | None = None
    """Overrides the run's [agent]."""
    limits: EnvLimits | None = None
    """Overrides the limits in [rollout]."""
    sampler: Choice | None = None
    """Overrides `rollout.sampler` for this environment."""
    advantage: Choice | None = None
    """Overrides `algorithm.advantage` for this environment."""
    eval: EnvEval | None = None
    """Overrides keys of [eval]."""
    sft: EnvSft | None = None
    """Overrides keys of [sft]."""

    @property
    def called(self) -> str:
        """The name, by default the id with "_" for all characters except letters, digits, "_" and "-"."""
        return self.name or re.sub(r"[^\w-]", "_", self.id)

    @property
    def trains(self) -> bool:
        """True if updates of a run draw tasks of it; otherwise it is only evaluated."""
        return any(value for _, value in self.weight) if isinstance(self.weight, list) else self.weight != 0.0


def entry_name(number: int, name: str) -> str:
    """Return the name of an entry of `[[env]]` in messages."""
    return f"env[{number}] ({name})"


class VllmConfig(Frozen):
    """The vLLM engine (`engine = "vllm"`): one Ray actor per replica (docs/engines.md)."""

    replicas: Annotated[PositiveInt, Unit("replicas")] = 1
    """Number of replicas."""
    max_respawns: Annotated[NotNegativeInt, Unit("replicas")] = 3
    """Maximum number of dead replicas that are replaced per run. On a CPU the new one serves at once, with the newest weights
    from Ray's object store (spilled to disk if full); on a GPU it waits for the actors to publish again (with
    `rollout.max_staleness`: after their next update)."""
    call_timeout: Seconds = 300.0
    """Time without an answer to a call (other than sampling) after which a replica counts as dead."""
    startup_timeout: Seconds = 600.0
    """Time limit of a replica's start, including model loading and CUDA graph capture."""
    tensor_parallel: Annotated[PositiveInt, Unit("GPUs")] = 1
    """GPUs per replica, which split each matrix."""
    kv_cache_mib: Annotated[PositiveInt, Unit("MiB")] | None = None
    """KV cache memory per device; must hold a sequence of `max_model_len` tokens. By default vLLM's fraction of a GPU's memory
    (`args.gpu_memory_utilization`); on a CPU the size of 64 sequences (or `args.max_num_seqs`), at most 4096 MiB unless one
    sequence needs more."""
    max_model_len: Tokens = 16384
    """Maximum sequence length; lowered to the model's context length if that is less."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, by name: `max_num_seqs`, `max_num_batched_tokens`, `enforce_eager` (no CUDA
    graphs; by default only on a CPU), ..."""


class SglangConfig(Frozen):
    """Running SGLang servers (`engine = "sglang"`). All serve the run's model; they load its weights at the start of the run, and
    new ones after each update, from files in `weights.folder`, which they must see under the same path."""

    servers: list[str] = Field(default_factory=list)
    """Addresses of the servers: `["http://10.0.0.5:30000"]`."""
    seeds: bool = True
    """Require servers to sample with the seeds of requests (`--enable-deterministic-inference`); otherwise a run is not
    reproducible."""
    timeout: Seconds = 120.0
    """Time without an answer (five times that while loading weights) after which a server counts as dead, and its requests go to
    another one."""
    api_key_env: str | None = None
    """Environment variable with the servers' API key."""


class WeightsConfig(Frozen):
    """Transfer of new weights to the engine (docs/weights.md)."""

    route: str = "auto"
    """Route: "memory" (engine and trainer in one process), "ipc" (same GPUs), "nccl" (broadcast to vLLM on other GPUs), "shared"
    (same machine), "disk" (files in `folder`), a name in `plugins/` of a shelf, or "auto": the first of these five that works."""
    bucket_mib: Annotated[Positive, Unit("MiB")] | None = None
    """Bucket size of the transfer, of which two are in memory at once; by default 256 on GPUs and 64 on CPUs."""
    folder: str | None = None
    """Folder of the route "disk" and of SGLang's files, which all machines must see; by default the run folder."""
    lora: Literal["merged", "adapter"] = "merged"
    """Weights published for a model with adapters: with the adapter "merged" into them, or only the "adapter", which the engine
    applies to its initial weights."""


class ApiConfig(Frozen):
    """Calls of `--model api:NAME` (NAME in litellm's form). API keys come from the environment variables that litellm reads."""

    base: str | None = None
    """URL of your own server; by default the provider's."""
    args: ApiArgs = Field(default_factory=dict)
    """Further arguments of litellm's calls, passed unchanged: `drop_params = true` (omit what the model does not support),
    `reasoning_effort = "low"`, `extra_headers`, `extra_body`, ... Arguments that have a key of agentrl are refused."""
    concurrency: Annotated[PositiveInt, Unit("calls")] = 32
    """Maximum number of calls at once."""
    timeout: Seconds = 120.0
    """Time limit of each attempt."""
    retries: Annotated[NotNegativeInt, Unit("attempts")] = 3
    """Retries after an outage or a rate limit, with growing waits, or the server's Retry-After; if that exceeds a minute, the
    call fails."""
    usd_per_million: Prices | None = None
    """Prices of prompt tokens and of sampled tokens, if litellm has none."""


class JudgeEngineConfig(Frozen):
    """A judge model with fixed weights, for judge leaves with `"model": "engine:NAME"`, on an engine that runs next to the
    policy's during the whole run. It samples greedily; an engine that can restricts sampling to the form of a verdict. Of
    `reward.judge` only `cache`, `timeout` and `retries` apply; it spends no budget."""

    path: str
    """Model folder or hub name, with its own chat template; it need not have the policy's tokenizer."""
    engine: str = "embedded"
    """Engine: "embedded" (in the driver's process), "vllm" (in separate processes), or one in `plugins/` of a shelf with the
    trait "judges"."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine without a section here."""
    concurrency: Annotated[PositiveInt, Unit("verdicts")] = 64
    """Maximum number of verdicts sampled at once, as one batch."""
    reasoning: bool = False
    """Allow reasoning before the verdict, within the leaf's `max_tokens`."""
    max_model_len: Tokens = 16384
    """Maximum length of prompt and verdict; lowered to the model's context length and `vllm.max_model_len` if that is less."""
    vllm: VllmConfig = VllmConfig()
    """Engine settings, as in the section `vllm` of the policy."""


class JudgeConfig(Frozen):
    """Calls of judge models; the spec names model and prompt. API keys come from the environment variables that litellm reads. A
    run that has spent a budget (`calls`, `usd`) stops with a checkpoint."""

    engines: dict[str, JudgeEngineConfig] = Field(default_factory=dict)
    """Judges on engines of the run, by the name that a leaf uses: "engine:NAME"."""

    api_base: str | None = None
    """URL of your own server; by default the provider's."""
    args: JudgeArgs = Field(default_factory=dict)
    """Further arguments of litellm's calls, as `api.args`; also `temperature` (by default 0) and `drop_params` (by default
    true)."""
    cache: str | None = None
    """Folder of cached verdicts: a repeated question is not asked again, also in other runs."""
    calls: Annotated[PositiveInt, Unit("calls")] | None = 10_000
    """Budget of the run in calls; a run that certainly needs more is refused."""
    usd: Annotated[Positive, Unit("USD")] | None = None
    """Budget of the run in US dollars; by default unlimited."""
    usd_per_million: Prices | None = None
    """Prices of prompt tokens and of sampled tokens, if litellm has none."""
    concurrency: Annotated[PositiveInt, Unit("calls")] = 8
    """Maximum number of calls at once."""
    timeout: Seconds = 60.0
    """Time limit of each attempt."""
    retries: Annotated[NotNegativeInt, Unit("attempts")] = 3
    """Retries of a failed call; after the last one the episode is unscored."""


class RewardConfig(Frozen):
    """Functions and judges that a reward spec may use in addition to the episode."""

    python: dict[str, str] = Field(default_factory=dict)
    """Functions for `python` leaves, by name, each as "module:function"."""
    judge: JudgeConfig = JudgeConfig()
    """Calls of judge models."""


class RewardModelConfig(Frozen):
    """A sequence classifier whose score, times `weight`, is added to each episode's reward."""

    path: str
    """Model folder or hub name; must have the policy's tokenizer."""
    weight: Annotated[float, Unit("1")] = 1.0
    """Factor of its score."""


Factor = Annotated[float, Field(ge=1.0, le=8.0), Unit("1")]


class StartConfig(Frozen):
    """Reverse curriculum: training episodes begin late in the gold solution, and earlier as the policy succeeds
    (docs/howto/long_horizon.md).

    The solution's earlier calls are executed in the environment and part of the prompt, untrained; all members of a group begin
    at the same point. Success is that of the whole task; rewards of the earlier turns do not count for the policy.
    """

    left: Annotated[PositiveInt, Unit("calls")] = 2
    """Calls of the solution initially left to the policy."""
    step: Annotated[PositiveInt, Unit("calls")] = 2
    """Calls added once the policy mostly succeeds, separately per number of calls in a task's solution."""
    threshold: Annotated[float, Field(gt=0.0, le=1.0), Unit("share")] = 0.7
    """Success rate over the last `window` groups from which `step` more calls are left."""
    window: Annotated[PositiveInt, Unit("groups")] = 8
    """Groups in that success rate, of tasks with solutions of equal length."""
    whole: Annotated[float, Field(ge=0.0, lt=1.0), Unit("share")] = 0.2
    """Share of groups that begin at the start of the task; samplers and mixtures learn only from these."""


class BranchConfig(Frozen):
    """Trees of episodes: some group members branch off others, with a forked environment, before a later turn
    (docs/howto/branching.md).

    The prefix that a branch shares with its parent is untrained context, so each sampled token is trained once. With
    `algorithm.advantage` "tree", turns are credited by the outcomes of the episodes that continue from them.
    """

    at: Literal["entropy", "depth", "failure"] = "entropy"
    """Branch turns: those with the least expected tokens (mean surprisal -log p, an estimate of the entropy), those that cut the
    episode into equal parts (or `turns`), or those with a failed tool call. Never the first turn: a branch without such a turn
    begins at the start."""
    roots: Annotated[PositiveInt, Unit("episodes")] = 4
    """Members of a group that begin at the start; the other `group_size` - `roots` are distributed over them as branches."""
    width: Annotated[PositiveInt, Unit("episodes")] = 1
    """Branches per turn before the next turn is chosen."""
    turns: list[Turns] = Field(default_factory=list)
    """For `at` "depth": the turns to branch before, counted from 0. Each branch has its own, so that no place depends on tokens
    sampled after it."""


class RolloutConfig(Frozen):
    """Episodes and their limits. docs/rollouts.md explains how to choose them."""

    groups: Annotated[PositiveInt, Unit("groups")] = 16
    """Groups per update: the number of tasks, each tried `group_size` times."""
    group_size: Annotated[PositiveInt, Unit("episodes")] = 8
    """Episodes per group: attempts at the same task, compared with each other."""
    oversample: Factor = 1.0
    """Start this many times the groups of an update, and cancel the slowest once enough have finished."""
    oversample_members: Factor = 1.0
    """Start this many times the members of a group, and cancel the slowest once enough have finished."""
    max_staleness: Annotated[NotNegativeInt, Unit("updates")] = 0
    """Maximum age in updates of the weights that sampled a trained token; 0: rollouts and updates alternate."""
    colocate: bool = False
    """Free the engine's memory (weights and cache) during updates, and allocate it again in two stages, around the publish; for
    engine and actors on the same device, with `max_staleness` 0."""
    sampler: Choice = Choice(name="uniform")
    """Sampler that picks the task of each group."""
    start: StartConfig | None = None
    """Starting point of training episodes; by default the start of the task."""
    branch: BranchConfig | None = None
    """Let group members branch off others; by default all begin at the start."""
    mixture: Choice = Choice(name="fixed")
    """Mixture that picks the environment of each group (docs/mixtures.md)."""
    context: Choice = Choice(name="stop")
    """Policy for a conversation that outgrows the model's context."""
    summary_model: str | None = None
    """API model (in litellm's form) that writes the summaries of `context` instead of the policy."""
    max_episodes: Annotated[PositiveInt, Unit("episodes")] = 256
    """Maximum number of episodes at once; others wait."""
    workers: Annotated[NotNegativeInt, Unit("processes")] = 0
    """Processes on the run's nodes that run episodes (environment, tools, rendering, scoring); 0: the driver does. With vLLM, as
    many as `vllm.replicas` run inside the replicas. A worker silent for a minute counts as dead: its episodes are repeated
    elsewhere, and up to 8 dead workers are replaced."""
    max_turns: Turns = 16
    """Maximum turns of the policy per episode."""
    max_turn_tokens: Tokens = 2048
    """Maximum tokens that the policy samples per turn."""
    max_episode_tokens: Tokens = 16384
    """Maximum tokens per episode: prompts, tool results and sampled tokens."""
    temperature: Annotated[Steps, Unit("1")] = 1.0
    """Temperature of sampling and of the trained policy, softmax(logits / temperature): a number, or points
    `[[update, temperature], ...]` with linear interpolation. A training run needs at least 0.01; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), Unit("1")] = 1.0
    """Sample only from the most likely tokens with this total probability (nucleus sampling)."""
    top_k: Annotated[NotNegativeInt, Unit("tokens")] = 0
    """Sample only from this many most likely tokens; 0 is all."""
    turn_timeout: Seconds = 300.0
    """Time without any token or answer of the engine, for any episode, after which waiting turns fail: unscored, and retried. A
    slow engine that still samples is waited for."""
    episode_timeout: Seconds = 600.0
    """Limit of an episode's time: of the policy's own code in tools (cut and scored), and separately of the environment and agent
    together (unscored and retried). The engine's time does not count."""
    env_timeout: Seconds = 120.0
    """Time limit of an environment's setup, of its teardown, and of scoring an episode (judges have their own)."""
    stall_timeout: Seconds = 900.0
    """Time without a token, a tool's answer or a finished episode after which training stops and names the awaited event."""
    retries: Annotated[NotNegativeInt, Unit("attempts")] = 1
    """Retries of an episode that failed by an infrastructure fault; after the last one it is unscored."""
    min_survivors: Annotated[int, Field(ge=2), Unit("episodes")] = 2
    """Minimum scored members of a group (at most all); a group with fewer is replaced."""
    filter_zero_variance: bool = False
    """Replace groups whose members all have the same score, which carry no learning signal."""
    router_replay: bool = False
    """For a mixture of experts: the trainer routes each token to the experts that the engine used (docs/moe.md)."""
    max_filtered: Annotated[NotNegative, Unit("1")] = 4.0
    """Maximum number of groups that `filter_zero_variance` replaces, as a multiple of an update's groups; further ones are
    accepted."""
    accept: Choice | None = None
    """Filter of finished groups: a function of the group, in `plugins/` or given in Python; rejected groups are replaced
    (docs/python.md)."""
