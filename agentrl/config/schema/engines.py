"""What samples, and how new weights get there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.schema.base import ApiArgs, Frozen, NotNegativeInt, Positive, PositiveInt, Prices, Seconds, Tokens, Unit

GpusPerReplica = Annotated[PositiveInt, Unit("GPUs")]
Replicas = Annotated[PositiveInt, Unit("replicas")]


class VllmConfig(Frozen):
    """The vLLM engine (`engine = "vllm"`): one Ray actor per replica (docs/engines.md)."""

    replicas: Replicas = 1
    """How many there are."""
    max_replicas: Replicas | None = None
    """Up to so many run as the cluster has room, on machines that join in mid-run too; those that leave with a machine do not
    count as respawns. By default always `replicas`."""
    max_respawns: Annotated[NotNegativeInt, Unit("replicas")] = 3
    """How many dead replicas are replaced in a run, in total."""
    call_timeout: Seconds = 300.0
    """A replica that does not answer a call (other than to sample) for so long counts as dead."""
    startup_timeout: Seconds = 600.0
    """In which a replica must be up, with its model loaded and its CUDA graphs captured."""
    keep_weights: bool | None = None
    """The newest weights stay in Ray's object store (spilled to disk if that is full), so that a replacement takes requests at
    once; else it waits for the actors to publish again, or, with `rollout.max_staleness`, for their next update. By default
    only for replicas on CPUs, since no route from GPU to GPU brings weights to the driver, which keeps them."""
    tensor_parallel: GpusPerReplica = 1
    """GPUs of each replica, which split each matrix."""
    kv_cache_mib: Annotated[PositiveInt, Unit("MiB")] | None = None
    """Memory of the KV cache on each device; it must hold a sequence of `max_model_len` tokens. By default a GPU has vLLM's own
    fraction of its memory (`args.gpu_memory_utilization`), and on a CPU it is what 64 sequences (or `max_num_seqs`) take, at
    most 4096 unless one needs more."""
    max_model_len: Tokens = 16384
    """The longest sequence; lowered to the model's context if that is less."""
    max_num_seqs: Annotated[PositiveInt, Unit("sequences")] | None = None
    """Of how many sequences one step computes tokens at most; by default vLLM's own limit."""
    max_num_batched_tokens: Tokens | None = None
    """How many tokens one step computes at most; by default vLLM's own limit."""
    enforce_eager: bool | None = None
    """No CUDA graphs; by default only on a CPU."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of vLLM's AsyncEngineArgs, by name."""


class SglangConfig(Frozen):
    """SGLang servers that are already running (`engine = "sglang"`). All serve the run's model; they load its weights when the
    run starts, and new ones after each update."""

    servers: list[str] = Field(default_factory=list)
    """Their addresses: `["http://10.0.0.5:30000"]`."""
    update: Literal["files", "http"] = "files"
    """How they get weights: "files" (they read files in `weights.folder`, which they must see under the same path, as the model's
    folder) or "http" (in the bodies of requests, which takes no common folder)."""
    seeds: bool = True
    """A server must draw with the seeds of its requests (`--enable-deterministic-inference`), without which no run can be
    repeated."""
    timeout: Seconds = 120.0
    """A server that does not answer for so long counts as dead, and its requests go to another one."""
    load_timeout: Seconds = 600.0
    """The same while it loads weights."""
    api_key_env: str | None = None
    """The environment variable with the servers' API key."""


class WeightsConfig(Frozen):
    """How new weights reach the engine (docs/weights.md)."""

    route: str = "auto"
    """"memory" (engine and trainer in one process), "ipc" (on the same GPUs), "nccl" (a broadcast to vLLM on other GPUs),
    "in_place" (those of a trainer on this machine's CPU, which the engine maps), "shared" (on one machine), "collective"
    (a broadcast to other machines, through host memory), "disk" (files in `folder`), the name of one in `plugins/` of a shelf, or
    "auto": the first of those seven that works."""
    bucket_mib: Annotated[Positive, Unit("MiB")] | None = None
    """Size of the buckets in which they are sent, two of which are in memory at once; by default 256 on GPUs and 64 on CPUs."""
    folder: str | None = None
    """A folder for the route "disk" (and SGLang's files), which all machines must see."""
    lora: Literal["merged", "adapter"] = "merged"
    """What a model with adapters publishes: its weights with the adapter "merged" into them, or only the "adapter", which the
    engine applies to the weights that it started with."""


class ApiConfig(Frozen):
    """How `--model api:NAME` is called (NAME in litellm's form). Keys come from the environment variables that litellm reads."""

    base: str | None = None
    """URL of your own server; by default the provider's."""
    args: ApiArgs = Field(default_factory=dict)
    """Any other argument of litellm's calls, by name, handed over as it is: `drop_params = true` (what the model does not take is
    left out), `reasoning_effort = "low"`, `extra_headers`, `extra_body`, ... Those of which agentrl has a key are refused."""
    concurrency: Annotated[PositiveInt, Unit("calls")] = 32
    """How many run at once."""
    timeout: Seconds = 120.0
    """Limit of each attempt."""
    retries: Annotated[NotNegativeInt, Unit("attempts")] = 3
    """Further attempts after an outage or a rate limit, with growing waits, or what the server's Retry-After says."""
    max_wait: Seconds = 60.0
    """The longest wait between two attempts; if a server asks for more, the call is given up."""
    usd_per_million: Prices | None = None
    """Prices of prompt and of sampled tokens, if litellm has none."""
