"""Checks of the reward: gold solutions succeed by the reward spec, and the budget for judges lasts to the end."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from agentrl.catalog import EnvRef
from agentrl.catalog.scoring import spec_word
from agentrl.config import TrainConfig
from agentrl.config.envs import alone, each, the_env, trained, weight_at
from agentrl.env.wrapper import WRAPPERS
from agentrl.errors import ConfigError, UserError
from agentrl.reward import Scorer
from agentrl.reward.judge.own import own_name
from agentrl.reward.lint import gold_fault
from agentrl.reward.node import LeafNode, Node, walk
from agentrl.reward.ops import GateNode
from agentrl.reward.probes import gold_episode
from agentrl.rollout.grow import largest
from agentrl.rollout.sampler.base import make_sampler
from agentrl.rollout.sampler.source import TaskSource
from agentrl.train.estimator_inputs import needs_greedy

log = logging.getLogger(__name__)
T = TypeVar("T")

TASKS = 3
"""The fewest gold solutions that are played before a run."""


def check_decided(scorer: Scorer) -> None:
    """Raise ConfigError if the spec does not say whether an episode is a success.

    Reads: env.reward.
    """
    if scorer.rule is None:
        raise ConfigError(
            f"env.reward: reward spec {scorer.name!r} does not say what a success is, and it cannot be derived "
            '(costs and sums over turns have no best value); give it a top-level "success" (docs/rewards.md)'
        )


def check_success(config: TrainConfig, env: EnvRef, scorer: Scorer) -> None:
    """Raise ConfigError if the gold solution of a training task is not a success (success rates would then mean nothing), or
    if it cannot be played because the environment fails or hangs. Of an environment that is only evaluated: of a task of that.

    If the environment has no scripted gold solution, this is not checked, and the log says so. A judge, which would cost money,
    is not asked: gold must be a success if it says the best, or the worst, of everything, and the log names its leaves.
    The gold solution is played without wrappers that inject random faults.

    Reads: env, tools, checkpoint.best, eval.split, rollout.sampler, rollout.env_timeout, rollout.episode_timeout, seed.
    """
    check_decided(scorer)
    if scorer.compares and config.checkpoint.best == "reward":
        raise ConfigError(
            f"checkpoint.best: reward spec {scorer.name!r} compares the members of a group; an evaluation plays "
            'one episode per task, which has success and no reward; use checkpoint.best = "success"'
        )
    if scorer.asks:
        log.warning(
            "%s: whether the gold solution is a success is checked without %s, which would call a judge; with it: "
            "agentrl reward lint %s --env %s --ask-judge",
            scorer.name,
            ", ".join(scorer.judged),
            spec_word(env, the_env(config).reward, scorer),
            env.id,
        )
    # A script cannot try again if a tool fails at random, as a policy can.
    kept = [choice for choice in env.wrappers if "chance_faults" not in WRAPPERS.entry(choice.name).traits]
    sound = replace(env, wrappers=kept)
    try:
        split = "train" if trained(config) else config.eval.split
        fault = _first_fault(_tasks(config, sound), split, scorer, config.rollout.env_timeout + config.rollout.episode_timeout)
    except NotImplementedError as error:
        log.warning("%s: not checked whether the gold solution is a success: %s", scorer.name, error)
        return
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # it comes from the environment's own code, which may even call sys.exit
        log.debug("the gold solution could not be played", exc_info=True)
        raise ConfigError(
            f"env.id: the gold solution of a task of {env.id!r} cannot be played: {type(error).__name__}: {error}; "
            f"agentrl env check {env.id} shows more"
        ) from error
    if fault is not None:
        raise ConfigError(
            f"env.reward: {fault}; agentrl reward lint {spec_word(env, the_env(config).reward, scorer)} --env {env.id} shows more"
        )


def _first_fault(tasks: Iterable[tuple[EnvRef, int]], split: str, scorer: Scorer, limit: float) -> str | None:
    for ref, seed in tasks:
        trajectory = in_daemon_thread(partial(gold_episode, ref.build, seed, split), limit)
        score = scorer.assuming(lambda _: True).score(trajectory)
        if score.success is not True and scorer.assuming(lambda _: False).score(trajectory).success is not True:
            return gold_fault(scorer, trajectory, score)
    return None


def in_daemon_thread(work: Callable[[], T], limit: float) -> T:
    """The result of `work`, run in a daemon thread. Raises TimeoutError after `limit` seconds.

    In a notebook an event loop is already running in this thread. And an environment that hangs must not keep the process
    from exiting, as the thread of an executor would.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as fault:
            answer.set_exception(fault)

    threading.Thread(target=run, name="agentrl-gold", daemon=True).start()
    if not wait([answer], limit).done:
        raise TimeoutError(f"not finished within {limit:g} s (rollout.env_timeout + rollout.episode_timeout)")
    return answer.result()


def _tasks(config: TrainConfig, env: EnvRef) -> Iterator[tuple[EnvRef, int]]:
    """At least TASKS tasks, and at least one with each set of parameters that the sampler may choose."""
    source = TaskSource(env, make_sampler(config.rollout.sampler), config.rollout.sampler.name, config.seed)
    kinds = [env.with_params(params) for params in source.sampler.variants()]
    for number in range(max(TASKS, len(kinds))):
        yield kinds[number % len(kinds)], number


@dataclass(frozen=True, slots=True)
class Questions:
    """How many questions one episode asks its judges: `least` unless it is unscored or identical to another
    episode (verdicts are cached), `most` if every branch is taken."""

    least: int
    most: int


def questions(scorer: Scorer, max_turns: int) -> Questions:
    """Bounds on the number of distinct questions of an episode of `max_turns` turns, to judges that are paid."""
    least: dict[str, int] = {}
    most: dict[str, int] = {}

    # By key, because equal nodes ask the same question, which is answered once.
    def visit(node: Node, parts: int, sure: bool) -> None:
        parts = max_turns if node.mods.scope in ("round", "turn") else parts
        sure = sure and node.mods.when is None
        if isinstance(node, LeafNode) and node.leaf.kind == "judge" and own_name(str(node.leaf.args["model"])) is None:
            most[node.key] = max(parts, most.get(node.key, 0))
            least[node.key] = max(int(sure), least.get(node.key, 0))
        for child in node.children():
            visit(child, parts, sure and not (isinstance(node, GateNode) and child is not node.test))

    for top in (scorer.root, *scorer.metrics, *([scorer.success] if scorer.success is not None else [])):
        visit(top, 1, True)
    return Questions(sum(least.values()), sum(most.values()))


def check_judge(config: TrainConfig, scorers: Mapping[str, Scorer]) -> None:
    """Raise ConfigError if `reward.judge.calls` cannot last to the end of the run; warn in the log if it may not. `scorers`: of
    each environment. Of several, training may be on that which asks least, or on that which asks most.

    Reads: env, reward.judge.calls, algorithm.advantage, steps, eval.every, eval.tasks, rollout.groups, rollout.group_size,
    rollout.max_turns.
    """
    if len(scorers) > 1:
        _check_judges(config, scorers)
        return
    (scorer,) = scorers.values()
    config = alone(config, config.envs[0])
    budget = config.reward.judge.calls
    if budget is None or not scorer.asks:
        return
    rollout, asked = config.rollout, questions(scorer, config.rollout.max_turns)
    step = rollout.groups * (rollout.group_size + needs_greedy(config.algorithm.advantage))
    evaluations = evaluations_of(config)
    episodes = config.steps * step + evaluations * config.eval.tasks
    grown = episodes + config.steps * rollout.groups * (largest(rollout) - rollout.group_size)
    sums = f"{config.steps} steps x {step} episodes + {evaluations} evaluations x {config.eval.tasks}"
    if asked.least * episodes > budget:
        last = max(0, budget // asked.least - config.eval.tasks) // step
        raise ConfigError(
            f"reward.judge.calls: {budget} calls are not enough: reward spec {scorer.name!r} asks its judges about "
            f"{asked.least * episodes} times ({sums}, {asked.least} per episode), so they are spent at about step "
            f"{last}; set reward.judge.calls={asked.most * grown}, or fewer steps"
        )
    if asked.most * grown > budget:
        log.warning(
            "reward.judge.calls: %d calls may not be enough: up to %d (%s, up to %d per episode); the run stops with a "
            "checkpoint if they are spent",
            budget,
            asked.most * grown,
            sums,
            asked.most,
        )


def _check_judges(config: TrainConfig, scorers: Mapping[str, Scorer]) -> None:
    budget = config.reward.judge.calls
    if budget is None or not any(scorer.asks for scorer in scorers.values()):
        return
    steps, evaluated, evaluations = [], Questions(0, 0), evaluations_of(config)
    for env, one in zip(config.envs, each(config), strict=True):
        scorer, rollout = scorers[env.called], one.rollout
        asked = questions(scorer, rollout.max_turns) if scorer.asks else Questions(0, 0)
        episodes = rollout.groups * (rollout.group_size + needs_greedy(one.algorithm.advantage))
        if any(weight_at(env.weight, step) > 0 for step in range(config.steps)):
            grown = episodes + rollout.groups * (largest(rollout) - rollout.group_size)
            steps.append(Questions(asked.least * episodes, asked.most * grown))
        tasks = one.eval.tasks
        evaluated = Questions(evaluated.least + asked.least * tasks, evaluated.most + asked.most * tasks)
    least = config.steps * min(step.least for step in steps) + evaluations * evaluated.least
    most = config.steps * max(step.most for step in steps) + evaluations * evaluated.most
    if least > budget:
        raise ConfigError(
            f"reward.judge.calls: {budget} calls are not enough: the environments' reward specs ask their judges at least "
            f"{least} times ({config.steps} steps, {evaluations} evaluations); set reward.judge.calls={most}, or fewer steps"
        )
    if most > budget:
        log.warning(
            "reward.judge.calls: %d calls may not be enough: up to %d, if all groups are of the environment that asks most; the "
            "run stops with a checkpoint if they are spent",
            budget,
            most,
        )


def evaluations_of(config: TrainConfig) -> int:
    """One evaluation before the run, one after it, and those between steps; none is added after the last step."""
    return 2 + ((config.steps - 1) // config.eval.every if config.eval.every else 0)


def check_scoring_time(config: TrainConfig, scorer: Scorer) -> None:
    """Raise ConfigError if the leaves of a spec may take longer by their own limits than an episode's scoring may: whoever wrote
    what takes so long would be unscored, in place of a 0.

    Reads: rollout.env_timeout, env.reward.
    """
    tops = [scorer.root, *scorer.metrics, *([] if scorer.success is None else [scorer.success])]
    leaves = [node for top in tops for node in walk(top) if isinstance(node, LeafNode)]
    takes: dict[Hashable, tuple[LeafNode, float]] = {}
    for node in leaves:
        if (found := node.leaf.longest()) is not None:
            takes.setdefault(found[0], (node, found[1]))
    total = sum(seconds for _, seconds in takes.values())
    if total > config.rollout.env_timeout:
        parts = ", ".join(f"{node.leaf.kind} at {node.pointer} {seconds:g} s" for node, seconds in takes.values())
        raise ConfigError(
            f"rollout.env_timeout = {config.rollout.env_timeout:g} s: scoring an episode by reward spec {scorer.name!r} may take "
            f"{total:g} s by the limits of its leaves ({parts}), and what takes longer than that has no reward, in place of 0; "
            f"raise it to {math.ceil(total)}, or lower total_seconds or seconds in the spec"
        )
