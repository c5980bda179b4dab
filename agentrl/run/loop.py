"""The training loop, as a table of contents.

    groups    <- collector.collect()          episodes under the group ledger  (rollout/collector)
    batch     <- make_batch(groups)           one row per ledger               (data/rows)
    metrics   <- learner.step(batch)          advantages, critic, actor        (trainer/learner)
    version+1 <- collector.trained(groups)    the ledger counts the update     (rollout/group_ledger)
    engine    <- session.publish()            weights under the new version    (trainer/publish)

One loop serves every staleness bound: with `rollout.max_staleness = 0` episodes run only within `collect`; above 0 they also
run during updates, evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from agentrl.config import Choice
from agentrl.config.envs import eval_weights, own_advantages
from agentrl.data.rows import collate
from agentrl.data.trajectory import Group
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.player import Evaluation, combine_evaluations
from agentrl.rollout.stats import EngineMeter
from agentrl.run.display import Count, percent
from agentrl.run.interrupt import Interrupt
from agentrl.run.outcomes import Row, kinds_of
from agentrl.run.run_log import RunLog, episodes_row, evaluation_row, shown_of, train_row, unscored_finding
from agentrl.run.session import Session, evaluate_env, forget_evaluation, republish_to_new_replicas
from agentrl.trainer.estimator_inputs import with_estimator_inputs
from agentrl.trainer.update_hooks import prepare_batch
from agentrl.utils.errors import ConfigError
from agentrl.utils.spans import in_span, span
from agentrl.utils.threads import in_thread

if TYPE_CHECKING:
    from tensordict import TensorDict

EMPTY: Mapping[str, Choice] = MappingProxyType({})


async def train_loop(session: Session, run_log: RunLog, interrupt: Interrupt) -> None:
    """Run updates until `steps`, an early stop or an interrupt, and save a checkpoint at the end."""
    config, collector, doing = session.config, session.collector, session.display.doing
    session.display.phase("train", config.steps, first=collector.ledger.version)
    interrupt.in_step = True
    meter, advantages, kinds = EngineMeter(session.engine), own_advantages(config.envs), kinds_of(session.envs)
    resumed_at = collector.ledger.version
    rows = run_log.folder.read_metrics() if resumed_at else []
    evaluated = next((row for row in rows if row["phase"] == "eval" and row["step"] == resumed_at), None)
    done = resumed_at >= config.steps or interrupt.requested
    goal = config.stop_at_success
    sound = evaluated is not None and unscored_finding([evaluated], config.health, None) is None
    if not done and evaluated is not None and sound and _reaches(evaluated.get("success"), goal):
        # The run had already reached its goal: do not train one more update.
        done = True
        session.display.say(
            f"held-out success {percent(evaluated['success'])} has reached stop_at_success = {goal} at update "
            f"{evaluated['step']}: no more updates; to continue: stop_at_success=false, or a higher one"
        )
    # Updates after which the weights are evaluated; the final weights are evaluated after the loop.
    due = range(config.eval.every, config.steps, config.eval.every) if config.eval.every else ()
    if not done and evaluated is None and resumed_at in due:
        # The run stopped here before this evaluation, which an uninterrupted run has: make it now.
        missed = await evaluate_now(session, run_log, "eval")
        await session.saver.rate(missed)
        done = _reaches(missed.success, goal) or interrupt.requested
    if config.rollout.max_staleness == 0:  # do not count tokens sampled before the first step
        await meter.read()  # above 0 they may belong to it: the first row then has no speed, rather than a wrong one
    while not done:
        if session.tracing is not None:
            await session.tracing.begin(collector.ledger.version + 1)
        with doing("rollout", collector.ahead, collector.watch.waiting), span("rollout"):
            groups = await republish_to_new_replicas(session, collector.collect())
        with doing("batch"), span("batch"):
            batch = await in_thread("batch", make_batch, groups, config.algorithm.advantage, advantages)
            ages = await in_thread("batch", staleness, batch, collector.ledger.version)
            for hook in session.learner.hooks.values():
                batch = await prepare_batch(hook, batch, groups, session.envs)
        with doing("update"), span("update"):
            if config.rollout.colocate:
                await session.rest()  # until `publish`
            number = collector.ledger.version + 1
            keep = number % config.trajectories_every == 0 or number == config.steps  # write the episodes to disk
            update: Row = await session.learner.step(batch, collector.ledger.version, keep) | ages
        del batch  # also frees its space in the object store, which the next episodes need
        with doing("publish"), span("publish"):
            # First, because `publish` sends the weights under the ledger's version.
            collector.trained(groups)
            await session.publish()
        update |= await meter.read() | session.watchdog.read()
        step = collector.ledger.version
        with span("log"):
            played = await in_thread("batch", episodes_row, groups, kinds, len(session.envs) > 1)
            figures = train_row(session, played, update)
            run_log.row("train", step, figures)
            if keep:
                # Bind no variable to the episodes: it would keep them in memory during the next steps.
                await run_log.trajectories(
                    f"step_{step:06d}", [t for group in groups for t in group.trajectories], session.learner.tokens
                )
            session.display.step(step, *shown_of(figures, [env.name for env in session.envs]))
        row = {"step": step, "phase": "train", **figures}
        await session.callbacks.call("on_step", row, session)
        found = None
        if step in due and not interrupt.requested:
            found = await evaluate_now(session, run_log, "eval")
        # Check at each step, so that a failed write ends the run at once and not after all its steps.
        await session.saver.check()
        await run_log.writes.check()
        # Read `requested` once for both the save and the end: else Ctrl-C in between ends the loop without a checkpoint.
        reached = found is not None and _reaches(found.success, goal)
        done = step >= config.steps or reached or interrupt.requested
        if done or step % config.checkpoint.every == 0 or (found is not None and session.saver.is_new_best(found)):
            with doing("checkpoint"):
                await run_log.writes.wait()  # a resume from this checkpoint needs the files of all earlier steps
                await session.saver.save(found)
            done = done or interrupt.requested  # requested during the save: another step may take an hour
        if session.tracing is not None:
            await session.tracing.end()
    with doing("writing the checkpoint"):
        await session.saver.wait()
    interrupt.in_step = False


def _reaches(success: float | None, goal: float | None) -> bool:
    return goal is not None and success is not None and success >= goal


@in_span("evaluation", root=True)
async def evaluate_now(session: Session, run_log: RunLog, phase: str) -> Evaluation:
    """Evaluate the engine's current weights on held-out tasks, and log the result as `phase`. Success and reward are unknown to
    the caller if most episodes are unscored: the rest must not decide on the best checkpoint or an early end."""
    began = time.monotonic()
    config = session.config
    found: dict[str, Evaluation] = {}
    count, watch = Count(sum(config.alone(env).eval.tasks for env in config.envs)), Watch()
    with session.display.doing("evaluation", count.__str__, watch.waiting):
        for env in config.envs:
            settings = config.alone(env).eval
            found[env.called] = await evaluate_env(session, env.called, settings, on_episode=count, watch=watch)
    result = next(iter(found.values())) if len(found) == 1 else combine_evaluations(found, eval_weights(config.envs))
    await forget_evaluation(session)
    row = evaluation_row(result, kinds_of(session.envs), time.monotonic() - began, session.services.values())
    sound = await run_log.evaluation(phase, session.collector.ledger.version, result, row)
    return result if sound else replace(result, success=None, reward=None)


def make_batch(groups: list[Group], advantage: Choice, own: Mapping[str, Choice] = EMPTY) -> TensorDict:
    """Collate scored members into a TensorDict, one row per ledger, with the columns that their advantage estimators read.
    `own`: estimator of an environment in place of `advantage`."""
    batch = collate(
        [t for group in groups for t in group.scored()], groups=[group.index for group in groups for _ in group.scored()]
    )
    return with_estimator_inputs(batch, groups, advantage, own)


def staleness(batch: TensorDict, version: int) -> dict[str, float]:
    """Compute mean and maximum over sampled tokens of `version` minus the version that sampled the token. Raises ConfigError
    if the batch has no sampled token, because no prompt left room for one."""
    ages = version - batch["versions"].values()[batch["sampled"].values()]
    if not len(ages):
        raise ConfigError(
            f"step {version + 1}: none of its {len(batch)} episodes has a token of the policy, so there is nothing to train on. "
            "If they stop with context_full, their prompts leave no room for a turn: raise rollout.max_episode_tokens and the "
            "context (model.init.context, vllm.max_model_len), or make prompts shorter (env.params, fewer tools)"
        )
    return {"staleness_mean": ages.double().mean().item(), "staleness_max": ages.max().item()}
