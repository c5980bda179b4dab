"""The warm start of a run: supervised steps until the gate opens, then the model is saved."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from agentrl.cluster.group import check_arrived
from agentrl.config.envs import warm_start_envs, weight_at
from agentrl.config.schema import EnvConfig, SftConfig
from agentrl.data.rows import Ragged, collate
from agentrl.data.schedule import Mode, with_trees
from agentrl.data.trajectory import Trajectory
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.player import Evaluation, combine_evaluations, summarize
from agentrl.rollout.warm_start import MixedTranscripts, Transcripts
from agentrl.run.assembly import longest_row
from agentrl.run.display import Count
from agentrl.run.interrupt import Interrupt
from agentrl.run.outcomes import kinds_of
from agentrl.run.run_log import RunLog, evaluation_row
from agentrl.run.session import Session, play_tasks
from agentrl.trainer.actor import Actor
from agentrl.trainer.checkpoint import seal
from agentrl.trainer.minibatch import cut_steps
from agentrl.utils.errors import AgentrlError
from agentrl.utils.event_loop import OwnedTasks
from agentrl.utils.processor import TINY
from agentrl.utils.threads import in_thread

if TYPE_CHECKING:
    from tensordict import TensorDict

STEPS_PER_CALL = 10
"""Supervised steps of a tiny model per call of the actors, which then takes less than a second."""


async def warm_start(session: Session, run_log: RunLog, interrupt: Interrupt) -> None:
    """Train on teacher transcripts until greedy success on the gate's tasks reaches `sft.gate`.

    Raises AgentrlError if the gate is still closed after `sft.max_steps`.
    """
    config = session.config.sft
    assert config is not None
    await session.publisher.prove()  # test the weight route now, because the gate's first publish comes after many steps
    source = transcripts_of(session)
    await session.actors.arun(Actor.begin_sft, config, session.sft_threads)
    session.display.phase("warm start", config.max_steps)
    step, closed = 0, "not measured"
    success: float | None = None
    while step < config.max_steps and not interrupt.requested:
        async with aclosing(_train_to_gate(session, source, step, interrupt)) as calls:
            async for rows in calls:
                for step, metrics in enumerate(rows, step + 1):  # noqa: B020 - continues from the last step
                    session.display.step(step, {"loss": metrics["loss"], "gate": success})
                    run_log.row("sft", step, metrics)
        if _is_measured(step, config):
            began, ended, watch = time.monotonic(), Count(sum(one.gate_tasks for _, one in _warm_start_parts(session))), Watch()
            with session.display.doing("gate", ended.__str__, watch.waiting):
                found, closed = await _gate(session, ended, watch)
            success = found.success
            services = session.services.values()
            run_log.row("gate", step, evaluation_row(found, kinds_of(session.envs), time.monotonic() - began, services))
            if not closed:
                break
    if interrupt.requested:
        return
    if closed:
        raise AgentrlError(
            f"the warm start did not open its gate: greedy success {closed} after {step} steps; "
            "raise sft.max_steps, try another seed, or lower sft.gate"
        )
    await session.actors.arun(Actor.end_sft, str(session.folder.warm_start))
    await check_arrived(session.actors, session.folder.warm_start, "the warmed-up model")
    await in_thread("files", seal, session.folder.warm_start, 0)


def _is_measured(step: int, config: SftConfig) -> bool:
    return step >= config.max_steps or (step >= config.min_steps and step % config.gate_every == 0)


async def _train_to_gate(
    session: Session, source: Transcripts | MixedTranscripts, step: int, interrupt: Interrupt
) -> AsyncGenerator[list[dict[str, float]], None]:
    """Train from `step` to the next measurement of the gate or an interrupt; yields the metrics of each call's steps.

    Makes the transcripts of the next call while the actors compute this one. A call for a tiny model has several steps,
    since its overhead is as long as a step; the results are the same."""
    config, most = session.config.sft, STEPS_PER_CALL if session.config.model.size() <= TINY else 1
    assert config is not None

    async def draw_batch(first: int) -> tuple[TensorDict, list[int]]:
        # A call ends at the last step or at a step at which the gate is measured.
        last = min(first + most, config.max_steps, first - first % config.gate_every + config.gate_every)
        rows, skipped = list[Trajectory](), list[int]()
        for number in range(first, last):
            rows += await source.take(number * config.batch, config.batch)
            skipped.append(source.skipped)
        batch = await in_thread("batch", steps_batch, rows, config.batch, session.learner.sharing)
        return await in_thread("batch", cut_steps, batch, len(skipped), session.actors.mesh.size("dp")), skipped

    async with OwnedTasks() as tasks:
        drawing = tasks.start(draw_batch(step), "transcripts")
        while not interrupt.requested:
            batch, skipped = await drawing
            step += len(skipped)
            if not _is_measured(step, config):  # else the gate may end the warm start here
                drawing = tasks.start(draw_batch(step), "transcripts")
            with session.display.doing("supervised steps"):
                steps = await session.actors.arun(Actor.sft_steps, batch)
            yield [one | {"transcripts_skipped": float(left_out)} for one, left_out in zip(steps, skipped, strict=True)]
            if _is_measured(step, config):
                return


def steps_batch(rows: Sequence[Trajectory], per_step: int, sharing: Mode) -> TensorDict:
    """Collate the transcripts of several steps, `per_step` of each. Transcripts of one step share the environment's prompt and
    tools, computed once according to `sharing` (`optim.prefix_sharing`)."""
    # One group per step, because rows of different steps cannot share a prefix.
    batch = collate(rows, [place // per_step for place in range(len(rows))], allow_unscored=True)
    return with_trees(Ragged.of(batch), sharing).batch


def transcripts_of(session: Session) -> Transcripts | MixedTranscripts:
    """Make the transcript source of the warm start, mixed by the environments' weights at step 0 (equal if all are 0)."""
    config, sources = session.config, {}
    longest = longest_row(config.optim, config.model)
    parts = {part.name: part for part in session.envs}
    for env, section in _warm_start_parts(session):
        part = parts[env.called]
        ref = part.env.with_params(section.params)
        sources[env.called] = Transcripts(ref, part.policy.renderer, section.teacher, config.seed, longest)
    if len(sources) == 1:
        return next(iter(sources.values()))
    weights = {env.called: weight_at(env.weight, 0) for env, _ in _warm_start_parts(session)}
    return MixedTranscripts(sources, weights if any(weights.values()) else dict.fromkeys(weights, 1.0), config.seed)


def _warm_start_parts(session: Session) -> Iterator[tuple[EnvConfig, SftConfig]]:
    """Yield the environments of the warm start, each with its [sft] section."""
    for env in warm_start_envs(session.config.envs, session.config.sft):
        section = session.config.alone(env).sft
        assert section is not None
        yield env, section


async def _gate(session: Session, ended: Count, watch: Watch) -> tuple[Evaluation, str]:
    """Evaluate greedily in each environment of the warm start; returns the mean result, and a text of the closed gates.
    Environments have equal weights. An unknown success opens no gate above 0."""
    config, closed = session.config, list[str]()
    found: dict[str, Evaluation] = {}
    await session.publish()
    for env, section in _warm_start_parts(session):
        tasks, params = [(index, 0) for index in range(section.gate_tasks)], section.gate_params
        episodes = await play_tasks(
            session, env.called, tasks, split="train", params=params, temperature=0.0, on_episode=ended, watch=watch
        )
        found[env.called] = summarize(episodes)
        success, lost = found[env.called].success, sum(one.success is None for one in episodes)
        of = f" in {env.called}" if len(config.envs) > 1 else ""
        if success is None or lost > config.health.max_unscored * len(episodes):
            closed += [f"unknown{of}, as {lost} of {len(episodes)} episodes were not scored"] if section.gate > 0 else []
        elif success < section.gate:
            closed.append(f"{success} < sft.gate={section.gate}{of}")
    if config.rollout.colocate:
        await session.rest()
    one = next(iter(found.values()))
    return one if len(found) == 1 else combine_evaluations(found, dict.fromkeys(found, 1.0)), ", ".join(closed)
