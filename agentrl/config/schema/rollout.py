"""How episodes are run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.schema.base import (
    Choice,
    Frozen,
    NotNegative,
    NotNegativeInt,
    PositiveInt,
    Seconds,
    Tokens,
    Turns,
    Unit,
)
from agentrl.config.schema.env import Steps

Factor = Annotated[float, Field(ge=1.0, le=8.0), Unit("1")]


class StartConfig(Frozen):
    """A reverse curriculum: episodes of training begin after so many calls of the gold solution that few are left to the policy,
    and more are left as it succeeds (docs/howto/long_horizon.md).

    The calls before are made in the environment and stand in the prompt, untrained; all members of a group begin at the same
    place. Success is that of the whole task, and rewards of the turns before are not the policy's.
    """

    left: Annotated[PositiveInt, Unit("calls")] = 2
    """Calls of the solution that are left to the policy at first."""
    step: Annotated[PositiveInt, Unit("calls")] = 2
    """So many more are left once it mostly succeeds: of tasks with as many calls as these, which go on by themselves."""
    threshold: Annotated[float, Field(gt=0.0, le=1.0), Unit("share")] = 0.7
    """The success of the last `window` groups at which that is so."""
    window: Annotated[PositiveInt, Unit("groups")] = 8
    """Over so many groups of tasks with as many calls."""
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
    """So many of the `group_size` members begin at the beginning; the others are dealt out to them as branches."""
    width: Annotated[PositiveInt, Unit("episodes")] = 1
    """Branches of one turn, before the next is taken."""
    turns: list[Turns] = Field(default_factory=list)
    """With `at` "depth": before these turns, counted from 0. Each branch has its own, so that no place depends on what was
    sampled after it."""


class RolloutConfig(Frozen):
    """How episodes are run. docs/rollouts.md says how to choose."""

    groups: Annotated[PositiveInt, Unit("groups")] = 16
    """Groups of an update: so many tasks, each tried `group_size` times."""
    group_size: Annotated[PositiveInt, Unit("episodes")] = 8
    """Episodes of a group: all of one task, compared with one another."""
    oversample: Factor = 1.0
    """Start this many times the groups of an update, and cancel the slowest once enough have finished."""
    oversample_members: Factor = 1.0
    """Start this many times the members of a group, and cancel the slowest once enough have finished."""
    grow: Factor = 1.0
    """A group whose scored members all have the same score once all have ended gets `group_size` more of the same task, up to
    this many times `group_size`, before it is filtered, refused or trained; 1: never."""
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
    """So many processes on the run's nodes play the episodes (environment, tools, rendering, scoring), beside the driver; 0: the
    driver does. With vLLM, as many as `vllm.replicas` live in the replicas themselves."""
    worker_timeout: Seconds = 60.0
    """A worker that is not heard of for so long counts as dead; its episodes are played again elsewhere."""
    worker_respawns: Annotated[NotNegativeInt, Unit("workers")] = 8
    """So many dead workers are replaced, in total, before a run goes on with fewer."""
    max_turns: Turns = 16
    """Turns of the policy in an episode."""
    max_turn_tokens: Tokens = 2048
    """What the policy may sample in one turn."""
    max_episode_tokens: Tokens = 16384
    """All of an episode: prompts, tool results and what is sampled."""
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
    """`filter_zero_variance` replaces at most so many times the groups of an update; after that the update accepts such groups
    too."""
    accept: Choice | None = None
    """Which finished groups are trained: a function of the group, in `plugins/` or given in Python; those that it refuses are
    replaced (docs/python.md)."""
    slow_loop: Annotated[NotNegative, Unit("seconds")] = 0.2
    """A call that keeps the event loop from turning for longer is named (docs/rollouts.md); 0 looks for none."""
