"""Supervised warm start: train on transcripts of a scripted teacher until a gate on held-out tasks opens.

A fixed number of steps is not enough: RL does not teach a model to copy from the prompt if it cannot yet (measured; see
docs/quickstart.md). So the warm start continues until greedy success on easy held-out tasks reaches `sft.gate`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, StopReason, Trajectory
from agentrl.env import Teacher, ToolEnv
from agentrl.env.authoring import GoldTeacher
from agentrl.env.catalog import EnvRef
from agentrl.env.wrappers import WRAPPERS
from agentrl.render.base import Renderer
from agentrl.rollout.context import ContextPolicy, Moment
from agentrl.rollout.engine import derive
from agentrl.rollout.episode import Limits
from agentrl.rollout.mixtures import pick
from agentrl.rollout.starts import scripted_ids
from agentrl.utils.errors import ConfigError, raised_text

log = logging.getLogger(__name__)

TRIES = 8
"""Maximum number of transcripts drawn for one index until one is short enough."""


async def _ask_nobody(instruction: Message, tokens: int) -> str | None:
    """Return no summary: gold solutions have none (the check of demonstrations rejects context policies that need them)."""
    return None


def without_random_faults(ref: EnvRef) -> EnvRef:
    """Return the environment as gold solutions expect it: no random tool faults, and their own user."""
    kept = [choice for choice in ref.wrappers if "chance_faults" not in WRAPPERS.entry(choice.name).traits]
    return replace(ref, wrappers=kept).with_gold_user()


async def transcript(
    env: ToolEnv,
    renderer: Renderer,
    seed: int,
    split: str = "train",
    context: ContextPolicy | None = None,
    limits: Limits | None = None,
    *,
    teacher: dict[str, Any] | None = None,
) -> Trajectory:
    """Play a task's gold solution, or the environment's `teacher` with these arguments, as a policy would have sampled it.

    The episode has several ledgers if the chat template rewrites earlier turns. A `context` policy with the run's `limits`
    rewrites the conversation as in an episode. `sampled` marks the teacher's tokens (logprob 0, version 0). The episode is not
    scored. Raises NotImplementedError without a gold solution, ConfigError for bad `teacher` arguments, EnvError if it cannot
    be played.
    """
    observation, _ = await env.areset(seed=seed, options={"split": split})
    try:
        draw = random.Random(seed)
        if teacher is None:
            policy: Teacher = GoldTeacher(env.gold_turns(env.task), draw)
        else:
            try:
                policy = env.teacher(env.trajectory.task, draw, **teacher)
            except (TypeError, ValueError) as problem:
                raise ConfigError(f"sft.teacher = {teacher}: {problem}") from problem
        ledgers, shown, opening, begun = [TokenLedger()], list(observation), len(observation), len(observation)
        renderer = renderer.with_tools(offered := env.toolbox.schemas())
        ledgers[-1].append_context(renderer.start(observation, offered), turn=0)
        turn, seen, rest = 0, list(observation), list[list[int]]()
        while True:
            if not rest:
                try:
                    said = policy.act(seen)
                except (TypeError, ValueError) as problem:
                    if not teacher:
                        raise
                    fault = raised_text(problem, type(policy).act)
                    raise ConfigError(f"sft.teacher = {teacher}: its teacher {fault}") from problem
                if said is None:
                    break
                rest, seen = scripted_ids(renderer, said), []
            ids = rest.pop(0)
            ledgers[-1].append_sampled(ids, [0.0] * len(ids), [0] * len(ids), turn)
            # Parsed from the tokens, so that the environment sees what it would see from a policy.
            message = renderer.parse(ids, "stop")
            observation, _, terminated, truncated, _ = await env.astep(message)
            seen += observation
            if terminated or truncated:
                break
            turn += 1
            tools = env.toolbox.schemas()
            kept = tools == offered and renderer.keeps(message, observation, shown, begun)
            shown += [message, *observation]
            more = renderer.extend("stop", observation, ids[-1]) if kept else renderer.start(shown, tools)
            tokens = len(more) + (len(ledgers[-1]) if kept else 0)
            if context is not None and limits is not None:
                moment = Moment(shown, opening, len(observation), tokens, limits.max_turn_tokens, limits.context, _ask_nobody)
                if (other := await context.rewrite(moment)) is not None:
                    kept, shown, more = False, other, renderer.start(other, tools)
            if not kept:
                ledgers.append(TokenLedger())
                begun, offered, renderer = len(shown), tools, renderer.with_tools(tools)
            ledgers[-1].append_context(more, turn)
    finally:
        await env.aclose()
    trajectory = env.trajectory
    trajectory.ledgers, trajectory.stop = ledgers, StopReason.DONE
    return trajectory


class MixedTranscripts:
    """Teacher transcripts of several environments by weight: transcript i uses the environment of training group i."""

    def __init__(self, sources: Mapping[str, Transcripts], weights: Mapping[str, float], seed: int) -> None:
        self.sources, self.weights, self.seed = sources, weights, seed

    @property
    def skipped(self) -> int:
        """Number of transcripts left out because they are too long."""
        return sum(source.skipped for source in self.sources.values())

    async def take(self, first: int, count: int) -> Sequence[Trajectory]:
        """Return transcripts `first` .. `first + count - 1`. Raises ConfigError like `Transcripts.take`."""
        names = [pick(self.weights, self.seed, index) for index in range(first, first + count)]
        return [one for at, name in enumerate(names) for one in await self.sources[name].take(first + at, 1)]


class Transcripts:
    """Endless seeded source of teacher transcripts: transcript i is equal in every run with the same seed.

    A transcript of more than `most` tokens (None: no limit) fits in no micro-batch, and rows are never cut, so the next draw
    for its index replaces it. `skipped` counts these.
    """

    def __init__(self, env: EnvRef, renderer: Renderer, teacher: dict[str, Any], seed: int, most: int | None = None) -> None:
        self.env, self.renderer, self.teacher, self.seed, self.most = env, renderer, teacher, seed, most
        self.skipped = 0

    async def take(self, first: int, count: int) -> Sequence[Trajectory]:
        """Return transcripts `first` .. `first + count - 1`. Raises ConfigError if there is no teacher, or if none of the
        `TRIES` draws for an index is short enough."""
        try:
            found = []
            for index in range(first, first + count):
                found.append(await self._draw(index))
                await asyncio.sleep(0)  # give way to other tasks: environments rarely wait, and a call makes tens of transcripts
            return found
        except NotImplementedError as problem:
            raise ConfigError(f"env.id: {problem}, so [sft] cannot warm a model up on it") from problem

    async def _draw(self, index: int) -> Trajectory:
        lengths: list[int] = []
        limit = (
            f"tokens, and a row, which is never cut, may have {self.most} (the lesser of optim.micro_tokens and the model's "
            "context): raise optim.micro_tokens, or make the tasks shorter (sft.params)"
        )
        for draw in range(TRIES):
            seed = derive(self.seed, "sft", index, *([draw] if draw else []))
            made = await transcript(self.env.build(), self.renderer, seed, teacher=self.teacher)
            if self.most is None or made.tokens <= self.most:
                return made
            lengths.append(made.tokens)
            if not self.skipped:  # the metric `transcripts_skipped` counts them all
                log.warning("[sft]: transcript %d, of task %s, is left out: %d %s", index, made.task.id, made.tokens, limit)
            self.skipped += 1
        raise ConfigError(
            f"[sft]: transcript {index}, of task {made.task.id!r}: {lengths[-1]} {limit}; all {TRIES} tasks drawn for it "
            f"are too long (the shortest: {min(lengths)} tokens)"
        )
