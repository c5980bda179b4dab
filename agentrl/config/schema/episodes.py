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
    """The maker of the sandboxes: "local", "bubblewrap", "docker", "podman", a plug-in's, or "auto": bubblewrap where it
    works, else the local one, as also with `args`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The provider's own arguments, such as `image`."""
    warm: Annotated[NotNegativeInt, Unit("sandboxes")] = 0
    """This many are started before anybody asks, so that an episode does not wait for a start."""
    limit: Annotated[PositiveInt, Unit("sandboxes")] = 64
    """How many run at once in each process that plays episodes; who comes later waits."""

    @model_validator(mode="after")
    def _warm_ones_run_too(self) -> SandboxConfig:
        if self.warm > self.limit:
            raise ValueError(f"warm = {self.warm} is more than limit = {self.limit}: warm sandboxes count as running")
        return self


class McpServerConfig(Frozen):
    """One Model Context Protocol server: the `command` that starts it, or the `url` of one that runs."""

    command: list[str] = Field(default_factory=list)
    """The words of the command that starts the server."""
    url: str | None = None
    """The address of a server that runs already."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, by name."""
    tools: list[str] | None = None
    """Only these of its tools; by default all."""
    prefix: str = ""
    """Text that is put before the name of each of its tools."""
    timeout: Seconds = 30.0
    """Limit of the start, and of every call."""
    max_output: Tokens | None = None
    """Limit of every answer; a longer one is cut, and says so. By default the environment's."""
    check: Literal["strict", "off"] = "strict"
    """"strict": arguments are checked against the schema that the server publishes, before it gets them; "off": it gets what the
    policy wrote, and its own words about it reach the policy."""
    late: Literal["infrastructure", "policy"] = "infrastructure"
    """Who is to blame if a call is late: the "infrastructure" (the episode ends unscored and is tried again), or the "policy",
    for servers that run code that the policy wrote (the episode ends there and is scored)."""


class ToolsConfig(Frozen):
    """Tools in addition to the environment's own."""

    sets: list[str] = Field(default_factory=list)
    """Tool sets: names on the shelves, or paths of files."""
    args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of those sets that have a state (`files`, `sqlite`, ...), by the set's name. Texts that begin with `./` or `../`
    are paths."""
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    """Model Context Protocol servers, by a name of your choice."""


class AgentConfig(Frozen):
    """An agent that a user already has and that plays the episodes in place of the built-in loop (docs/agents.md): exactly
    one of `command`, `python` and `url`."""

    command: list[str] = Field(default_factory=list)
    """The words of a program, started for each episode."""
    python: str | None = None
    """"module:function", an async function that plays one episode."""
    url: str | None = None
    """An address that gets a POST for each episode, and answers it when it is done."""
    tools: Literal["mcp", "own"] = "mcp"
    """"mcp": the agent is given the environment's tools, by an MCP server (a function also by a method); "own": it has only tools
    of its own, whose calls and results are read from its requests."""
    user: bool = False
    """The agent can talk with the environment's simulated user; without it an environment that has one is refused."""
    answer: Literal["last_message", "output"] = "last_message"
    """The episode's last word is the policy's "last_message", or the agent's "output": what the command printed, the function
    returned, or the URL answered as "answer"."""
    blame: Literal["infrastructure", "policy"] = "infrastructure"
    """Who is to blame if the agent fails by itself (an exit code other than 0, an exception, an HTTP status): the
    "infrastructure" (the episode is unscored and tried again), or the "policy" (it ends there and is scored)."""
    idle_timeout: Seconds = 120.0
    """Time without a request, a tool call or its end, after which the agent counts as failed."""
    concurrency: Annotated[PositiveInt, Unit("agents")] = 32
    """How many agents run at once in each process that plays."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of the environment variables that a command gets from the run's own, next to PATH, HOME and those of language and
    time zone."""
    env: dict[str, str] = Field(default_factory=dict)
    """Other environment variables of a command, by value."""
    host: str = "127.0.0.1"
    """The address on which the agent reaches the process that plays."""


class EnvLimits(Frozen):
    """Limits of one environment's episodes, each instead of the key of the same name in [rollout]."""

    max_turns: Turns | None = None
    """Instead of `rollout.max_turns`."""
    max_turn_tokens: Tokens | None = None
    """Instead of `rollout.max_turn_tokens`."""
    max_episode_tokens: Tokens | None = None
    """Instead of `rollout.max_episode_tokens`."""
    episode_timeout: Seconds | None = None
    """Instead of `rollout.episode_timeout`."""


class EnvEval(Frozen):
    """Evaluation of one environment: each key instead of the one of the same name in [eval], and its `weight`."""

    tasks: Annotated[PositiveInt, Unit("tasks")] | None = None
    """Instead of `eval.tasks`."""
    split: str | None = None
    """Instead of `eval.split`."""
    temperature: Temperature | None = None
    """Instead of `eval.temperature`."""
    weight: Annotated[Weight, Unit("1")] | None = None
    """Its part in the mean success (and reward) over the environments, which decides about the best checkpoint and
    `stop_at_success`; by default all have the same."""


class EnvSft(Frozen):
    """One environment's part in the warm start, each instead of the key of the same name in [sft]."""

    teacher: dict[str, Any] | None = None
    """Instead of `sft.teacher`."""
    params: dict[str, Any] | None = None
    """Instead of `sft.params`."""
    gate: Fraction | None = None
    """Instead of `sft.gate`."""
    gate_params: dict[str, Any] | None = None
    """Instead of `sft.gate_params`."""


ONE, SEVERAL = "(one)", "(several)"
BY_KIND = Discriminator(lambda given: SEVERAL if isinstance(given, list) else ONE)
"""Of a value or a list of them: report only the mistakes of the intended form."""
WeightAt = Annotated[tuple[Annotated[int, Field(ge=0)], Weight], Field(strict=False)]


Steps = Annotated[Annotated[Weight, Tag(ONE)] | Annotated[list[WeightAt], Tag(SEVERAL)], BY_KIND]
"""A number, or points (step, number) with straight lines between them."""


class EnvConfig(Frozen):
    """An environment, its parameters, and the reward spec.

    `[env]` is the only environment of a run, `[[env]]` one of several (docs/mixtures.md).
    """

    id: str
    """Which environment: an id or a short name of `agentrl env list`."""
    name: Annotated[str, Field(pattern=r"^[\w-]*[A-Za-z_-][\w-]*$")] | None = None
    """By which metrics, tables and overrides (`env.NAME.params.calls=3`) call it; by default its id."""
    weight: Annotated[Steps, Unit("1")] | None = None
    """Its share of the training groups, as `rollout.mixture` reads it: a number, or points `[[step, weight], ...]` with straight
    lines between them; 0 only evaluates it. By default 1."""
    url: str | None = None
    """Of the server that has the environment, if it is elsewhere ("http://HOST:PORT", docs/remote_environments.md)."""
    protocol: Literal["agentrl", "openenv"] = "agentrl"
    """What the server at `url` speaks: "agentrl" (`agentrl env serve ID --http`) or "openenv"."""
    token_env: str | None = None
    """The environment variable that has the token of the server at `url`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The environment's own parameters, by name (`agentrl env show ID` lists them)."""
    sandbox: SandboxConfig | None = None
    """Where it runs what the policy wrote, for environments that do; by default "local"."""
    reward: str | None = None
    """The reward spec: an id, or the path of a file; by default the environment's own."""
    max_output: Tokens | None = None
    """Limit of every answer of its tools that have no limit of their own (`@tool(max_output=...)`, `tools.mcp.NAME.max_output`);
    a longer one is cut, and says so. By default the environment's own, else 2048."""
    wrappers: list[Choice] = Field(default_factory=list)
    """Wrappers around the environment, the innermost first."""
    system: str | None = None
    """Text that is put before the environment's own system message, or is one if it has none."""
    tools: ToolsConfig | None = None
    """Its own tools, instead of the run's [tools]."""
    agent: AgentConfig | None = None
    """Its own agent, instead of the run's [agent]."""
    limits: EnvLimits | None = None
    """Its own limits, instead of those in [rollout]."""
    sampler: Choice | None = None
    """Its own sampler, instead of `rollout.sampler`."""
    advantage: Choice | None = None
    """Its own advantage estimator, instead of `algorithm.advantage`."""
    eval: EnvEval | None = None
    """How it is evaluated, instead of [eval]."""
    sft: EnvSft | None = None
    """Its part in the warm start, instead of what [sft] says of an environment."""

    @property
    def called(self) -> str:
        """The name, by default the id with "_" for all but letters, digits, "_" and "-"."""
        return self.name or re.sub(r"[^\w-]", "_", self.id)

    @property
    def trains(self) -> bool:
        """Return True if some update of a run draws tasks of it; else it is only evaluated."""
        return any(value for _, value in self.weight) if isinstance(self.weight, list) else self.weight != 0.0


def entry_name(number: int, name: str) -> str:
    """Name of an entry of `[[env]]` in messages."""
    return f"env[{number}] ({name})"


class VllmConfig(Frozen):
    """The vLLM engine (`engine = "vllm"`): one Ray actor per replica (docs/engines.md)."""

    replicas: Annotated[PositiveInt, Unit("replicas")] = 1
    """How many there are."""
    max_respawns: Annotated[NotNegativeInt, Unit("replicas")] = 3
    """How many dead replicas are replaced in a run, in total. On a CPU one takes requests at once, with the newest weights from
    Ray's object store (spilled to disk if that is full); on a GPU it waits for the actors to publish again, or, with
    `rollout.max_staleness`, for their next update."""
    call_timeout: Seconds = 300.0
    """A replica that does not answer a call (other than to sample) for so long counts as dead."""
    startup_timeout: Seconds = 600.0
    """In which a replica must be up, with its model loaded and its CUDA graphs captured."""
    tensor_parallel: Annotated[PositiveInt, Unit("GPUs")] = 1
    """GPUs of each replica, which split each matrix."""
    kv_cache_mib: Annotated[PositiveInt, Unit("MiB")] | None = None
    """Memory of the KV cache on each device; it must hold a sequence of `max_model_len` tokens. By default a GPU has vLLM's own
    fraction of its memory (`args.gpu_memory_utilization`), and on a CPU it is what 64 sequences (or `args.max_num_seqs`) take, at
    most 4096 unless one needs more."""
    max_model_len: Tokens = 16384
    """The longest sequence; lowered to the model's context if that is less."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of vLLM's AsyncEngineArgs, by name: `max_num_seqs`, `max_num_batched_tokens`, `enforce_eager` (no CUDA
    graphs; by default only on a CPU), ..."""


class SglangConfig(Frozen):
    """SGLang servers that are already running (`engine = "sglang"`). All serve the run's model; they load its weights when the
    run starts, and new ones after each update, from files in `weights.folder`, which they must see under the same path."""

    servers: list[str] = Field(default_factory=list)
    """Their addresses: `["http://10.0.0.5:30000"]`."""
    seeds: bool = True
    """A server must draw with the seeds of its requests (`--enable-deterministic-inference`), without which no run can be
    repeated."""
    timeout: Seconds = 120.0
    """A server that does not answer for so long (five times that while it loads weights) counts as dead, and its requests go to
    another one."""
    api_key_env: str | None = None
    """The environment variable with the servers' API key."""


class WeightsConfig(Frozen):
    """Route of new weights to the engine (docs/weights.md)."""

    route: str = "auto"
    """"memory" (engine and trainer in one process), "ipc" (on the same GPUs), "nccl" (a broadcast to vLLM on other GPUs),
    "shared" (on one machine), "disk" (files in `folder`), the name of one in `plugins/` of a shelf, or "auto": the first of those
    five that works."""
    bucket_mib: Annotated[Positive, Unit("MiB")] | None = None
    """Size of the buckets in which they are sent; two are in memory at once; by default 256 on GPUs and 64 on CPUs."""
    folder: str | None = None
    """A folder for the route "disk" (by default the run's; and SGLang's files), which all machines must see."""
    lora: Literal["merged", "adapter"] = "merged"
    """What a model with adapters publishes: its weights with the adapter "merged" into them, or only the "adapter", which the
    engine applies to the weights that it started with."""


class ApiConfig(Frozen):
    """Calls of `--model api:NAME` (NAME in litellm's form). Keys come from the environment variables that litellm reads."""

    base: str | None = None
    """URL of your own server; by default the provider's."""
    args: ApiArgs = Field(default_factory=dict)
    """Any other argument of litellm's calls, by name, handed over as it is: `drop_params = true` (what the model does not take is
    left out), `reasoning_effort = "low"`, `extra_headers`, `extra_body`, ... Arguments with a key of agentrl are refused."""
    concurrency: Annotated[PositiveInt, Unit("calls")] = 32
    """How many run at once."""
    timeout: Seconds = 120.0
    """Limit of each attempt."""
    retries: Annotated[NotNegativeInt, Unit("attempts")] = 3
    """Further attempts after an outage or a rate limit, with growing waits, or what the server's Retry-After says; if that is
    more than a minute, the call is given up."""
    usd_per_million: Prices | None = None
    """Prices of prompt and of sampled tokens, if litellm has none."""


class JudgeEngineConfig(Frozen):
    """A judge of the run's own, which a judge leaf asks as `"model": "engine:NAME"`: a model whose weights stay as they are, on
    an engine next to the policy's, from the start of the run to its end. It samples greedily; of an engine that can, only what
    fits the form of a verdict. Of `reward.judge` it heeds `cache`, `timeout` and `retries`; no budget is spent."""

    path: str
    """Its folder or hub name, with a chat template of its own; it need not have the policy's tokenizer."""
    engine: str = "embedded"
    """What samples: "embedded" (in the driver's process), "vllm" (in processes of its own), or an engine in `plugins/` of a shelf
    with the trait "judges"."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine that has no section here."""
    concurrency: Annotated[PositiveInt, Unit("verdicts")] = 64
    """How many are sampled at once; they are computed together."""
    reasoning: bool = False
    """It may reason before the verdict, within the leaf's `max_tokens`."""
    max_model_len: Tokens = 16384
    """The longest prompt with its verdict; lowered to the model's context, and to `vllm.max_model_len`, if that is less."""
    vllm: VllmConfig = VllmConfig()
    """As the section `vllm` is for the policy."""


class JudgeConfig(Frozen):
    """Calls of the models of judge leaves; model and prompt are in the spec. Keys come from the environment variables that
    litellm reads. A run that has spent a budget (`calls`, `usd`) stops with a checkpoint."""

    engines: dict[str, JudgeEngineConfig] = Field(default_factory=dict)
    """Judges on engines of the run's own, by the name with which a leaf asks them: "engine:NAME"."""

    api_base: str | None = None
    """URL of your own server; by default the provider's."""
    args: JudgeArgs = Field(default_factory=dict)
    """Any other argument of litellm's calls, by name, as `api.args`; `temperature` (0 by default) and `drop_params` (true by
    default) too."""
    cache: str | None = None
    """A folder for verdicts: an earlier question is not asked again, also in other runs."""
    calls: Annotated[PositiveInt, Unit("calls")] | None = 10_000
    """Budget of the whole run; a run that certainly needs more calls is refused."""
    usd: Annotated[Positive, Unit("USD")] | None = None
    """Budget of the whole run; by default none."""
    usd_per_million: Prices | None = None
    """Prices of prompt and of sampled tokens, if litellm has none."""
    concurrency: Annotated[PositiveInt, Unit("calls")] = 8
    """How many run at once."""
    timeout: Seconds = 60.0
    """Limit of each attempt."""
    retries: Annotated[NotNegativeInt, Unit("attempts")] = 3
    """Further attempts at a call that failed; after the last one the episode is unscored."""


class RewardConfig(Frozen):
    """Functions and judges that a reward spec may use in addition to the episode."""

    python: dict[str, str] = Field(default_factory=dict)
    """Functions that `python` leaves may call, by name, each as "module:function"."""
    judge: JudgeConfig = JudgeConfig()
    """How judges are called."""


class RewardModelConfig(Frozen):
    """A sequence classifier whose score, times `weight`, is added to the reward of each episode."""

    path: str
    """Its folder or hub name; it must read the policy's token ids (the same tokenizer)."""
    weight: Annotated[float, Unit("1")] = 1.0
    """What its score is multiplied by."""


Factor = Annotated[float, Field(ge=1.0, le=8.0), Unit("1")]


class StartConfig(Frozen):
    """A reverse curriculum: episodes of training begin after this many calls of the gold solution that few are left to the
    policy, and more are left as it succeeds (docs/howto/long_horizon.md).

    The calls before are made in the environment and stand in the prompt, untrained; all members of a group begin at the same
    place. Success is that of the whole task, and rewards of the turns before are not the policy's.
    """

    left: Annotated[PositiveInt, Unit("calls")] = 2
    """Calls of the solution that are left to the policy at first."""
    step: Annotated[PositiveInt, Unit("calls")] = 2
    """This many more are left once it mostly succeeds: of tasks with as many calls as these, which go on by themselves."""
    threshold: Annotated[float, Field(gt=0.0, le=1.0), Unit("share")] = 0.7
    """The success of the last `window` groups at which that is so."""
    window: Annotated[PositiveInt, Unit("groups")] = 8
    """Over this many groups of tasks with as many calls."""
    whole: Annotated[float, Field(ge=0.0, lt=1.0), Unit("share")] = 0.2
    """Share of the groups that begin at the beginning all the same; samplers and mixtures learn from these alone."""


class BranchConfig(Frozen):
    """Trees of episodes: some members of a group are played from the beginning, the others branch off them, with a fork of their
    environment, before a turn of theirs (docs/howto/branching.md).

    What a branch shares with the episode that it left is context of it, so each sampled token is trained once. With
    `algorithm.advantage` "tree", turns are credited by how the episodes that follow from them end.
    """

    at: Literal["entropy", "depth", "failure"] = "entropy"
    """Before which turns: those whose tokens were the least expected (the mean of their surprisal, -log p, which estimates the
    entropy), those that cut the episode into equal parts (or `turns`), or those with a failed tool call. Never before the first:
    a branch for which an episode has no such turn begins at the beginning."""
    roots: Annotated[PositiveInt, Unit("episodes")] = 4
    """This many of the `group_size` members begin at the beginning; the others are dealt out to them as branches."""
    width: Annotated[PositiveInt, Unit("episodes")] = 1
    """Branches of one turn, before the next is taken."""
    turns: list[Turns] = Field(default_factory=list)
    """With `at` "depth": before these turns, counted from 0. Each branch has its own, so that no place depends on what was
    sampled after it."""


class RolloutConfig(Frozen):
    """Episodes and their limits. docs/rollouts.md says how to choose."""

    groups: Annotated[PositiveInt, Unit("groups")] = 16
    """Groups of an update: this many tasks, each tried `group_size` times."""
    group_size: Annotated[PositiveInt, Unit("episodes")] = 8
    """Episodes of a group: all of one task, compared with one another."""
    oversample: Factor = 1.0
    """Start this many times the groups of an update, and cancel the slowest once enough have finished."""
    oversample_members: Factor = 1.0
    """Start this many times the members of a group, and cancel the slowest once enough have finished."""
    max_staleness: Annotated[NotNegativeInt, Unit("updates")] = 0
    """How many updates old the weights that sampled a token may be when it is trained; 0: rollouts and updates take turns."""
    colocate: bool = False
    """The engine frees its memory (weights and cache) while the actors update, and allocates it again in two stages, around the
    publish; for one device that both use, with `max_staleness` 0."""
    sampler: Choice = Choice(name="uniform")
    """Which task a group gets."""
    start: StartConfig | None = None
    """Where episodes of training begin; by default at the beginning."""
    branch: BranchConfig | None = None
    """Members of a group branch off others; by default all are played from the beginning."""
    mixture: Choice = Choice(name="fixed")
    """Which of several environments a group is of (docs/mixtures.md)."""
    context: Choice = Choice(name="stop")
    """What happens to a conversation that outgrows the model's context."""
    summary_model: str | None = None
    """An API model (in litellm's form) that writes the summaries of `context` instead of the policy."""
    max_episodes: Annotated[PositiveInt, Unit("episodes")] = 256
    """How many run at once; the others wait."""
    workers: Annotated[NotNegativeInt, Unit("processes")] = 0
    """This many processes on the run's nodes play the episodes (environment, tools, rendering, scoring), next to the driver;
    0: the driver does. With vLLM, as many as `vllm.replicas` live in the replicas themselves. One that is not heard of for a
    minute counts as dead: its episodes are played again elsewhere, and up to 8 dead ones are replaced."""
    max_turns: Turns = 16
    """Turns of the policy in an episode."""
    max_turn_tokens: Tokens = 2048
    """What the policy may sample in one turn."""
    max_episode_tokens: Tokens = 16384
    """All of an episode: prompts, tool results and sampled tokens."""
    temperature: Annotated[Steps, Unit("1")] = 1.0
    """Of sampling and of the policy that is trained, softmax(logits / temperature), so a training run needs at least 0.01 (0 is
    greedy): a number, or points `[[update, temperature], ...]` with straight lines between them."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), Unit("1")] = 1.0
    """Only the most likely tokens that have this probability together may be drawn."""
    top_k: Annotated[NotNegativeInt, Unit("tokens")] = 0
    """Only this many most likely tokens may be drawn; 0 is all."""
    turn_timeout: Seconds = 300.0
    """Time without a token or an answer of the engine, to any episode, after which the turns that wait for one are given up:
    unscored, and tried again. An engine that is slow but samples is waited for."""
    episode_timeout: Seconds = 600.0
    """Limit of an episode, of the run time of the policy's own code in tools (cut and scored) and, by itself, of its environment
    and agent (unscored and tried again). The engine's time does not count."""
    env_timeout: Seconds = 120.0
    """Limit of an environment's setup, of its teardown, and of scoring an episode (judges have a timeout of their own)."""
    stall_timeout: Seconds = 900.0
    """Time without a token, a tool's answer or a finished episode, after which the run stops and says what it waited for."""
    retries: Annotated[NotNegativeInt, Unit("attempts")] = 1
    """Further attempts at an episode that failed by a fault of the infrastructure; after the last one it is unscored."""
    min_survivors: Annotated[int, Field(ge=2), Unit("episodes")] = 2
    """Scored members that a group needs (at most all); with fewer it is replaced by another group."""
    filter_zero_variance: bool = False
    """Replace groups whose members all have the same score, which teach nothing."""
    router_replay: bool = False
    """Of a mixture of experts: the trainer sends each token to the experts that the engine sent it to (docs/moe.md)."""
    max_filtered: Annotated[NotNegative, Unit("1")] = 4.0
    """`filter_zero_variance` replaces at most this many times the groups of an update; after that the update accepts such groups
    too."""
    accept: Choice | None = None
    """Which finished groups are trained: a function of the group, in `plugins/` or given in Python; those that it refuses are
    replaced (docs/python.md)."""
