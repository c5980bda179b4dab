"""Checks of rewards: success of gold solutions, gold that graders can read, and lint of the specs."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from typing import TypeVar

from agentrl.config.schema import EvalConfig
from agentrl.data.trajectory import Task, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import spec_word
from agentrl.reward import Scorer
from agentrl.reward.leaf import Leaf, episode_view
from agentrl.reward.lint import (
    ENOUGH,
    LintFinding,
    bound_text,
    gold_episode,
    gold_fault,
    lint_any_verdict,
    lint_idle,
    lint_probes,
    lint_spec,
    probe_episodes,
    reads_samples,
    tasks_tried,
)
from agentrl.reward.nodes import GateNode, LeafNode, Node
from agentrl.reward.values import UnscorableError
from agentrl.rollout.mixtures import TaskSource
from agentrl.rollout.samplers import make_sampler
from agentrl.rollout.warm_start import without_random_faults
from agentrl.run.assembly import RunStart
from agentrl.utils.errors import ConfigError, UserError, exception_for
from agentrl.utils.files import shown_path
from agentrl.utils.search_path import PRIVATE

# Success of gold

log = logging.getLogger(__name__)
T = TypeVar("T")

TASKS = 3
"""Minimum number of gold solutions played before a run."""


def check_decided(scorer: Scorer) -> None:
    """Raise ConfigError if the spec does not define success."""
    if scorer.rule is None:
        raise ConfigError(
            f"env.reward: reward spec {scorer.name!r} does not define success, and it cannot be derived "
            '(costs and sums over turns have no best value); give it a top-level "success" (docs/rewards.md)'
        )


def check_success(start: RunStart) -> None:
    """Raise ConfigError if a gold solution of a training task is not a success, or the environment fails or hangs on it.

    Success rates would be meaningless. Without training environments the tasks are those of the evaluation. Without a scripted
    gold solution the check is skipped, with a log line. Services, which may cost money, are not asked: gold must be a success
    with either the best or the worst answers, and the log names the leaves. Wrappers with random faults are left out.
    """
    config, env, scorer = start.config, start.env, start.scorer
    check_decided(scorer)
    word, rollout = spec_word(env, config.the_env.reward, scorer), config.rollout
    if scorer.compares and config.checkpoint.best == "reward":
        raise ConfigError(
            f"checkpoint.best: reward spec {scorer.name!r} compares the members of a group; an evaluation plays "
            'one episode per task, which has success and no reward; use checkpoint.best = "success"'
        )
    if scorer.asks:
        log.warning(
            "%s: whether the gold solution is a success is checked without %s, which asks a service; with it: "
            "agentrl reward lint %s --env %s --ask-judge",
            scorer.name,
            ", ".join(scorer.judged),
            word,
            env.id,
        )
    try:
        # At least TASKS tasks, and at least one for each set of parameters of the sampler.
        split, sound = "train" if config.trained_envs else config.eval.split, without_random_faults(env)
        source = TaskSource(sound, make_sampler(rollout.sampler), rollout.sampler.name, config.seed)
        if start.planned and config.the_env.trains:
            source.fill()  # reports missing tasks, as the start does
        kinds = [sound.with_params(params) for params in source.sampler.variants()]
        fault: str | None = None
        limit = rollout.env_timeout + rollout.episode_timeout
        for number in range(max(TASKS, len(kinds))):
            play = partial(gold_episode, kinds[number % len(kinds)].build, number, split)
            trajectory = in_daemon_thread(play, limit)
            score = scorer.assuming(lambda _: True).score(trajectory)
            if score.success is not True and scorer.assuming(lambda _: False).score(trajectory).success is not True:
                fault = gold_fault(scorer, trajectory, score)
                break
    except NotImplementedError as error:
        log.warning("%s: not checked whether the gold solution is a success: %s", scorer.name, error)
        return
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # from code of the environment, which may even call sys.exit
        log.debug("the gold solution could not be played", exc_info=True)
        frames = list(walk_tb(error.__traceback__))
        lines = [(f.f_code.co_filename, n) for f, n in frames if f.f_globals.get("__name__", "").startswith(PRIVATE)]
        at = f"{shown_path(lines[-1][0])}:{lines[-1][1]}: " if lines else ""  # innermost line of a shelf's file
        raise ConfigError(
            f"env.id: the gold solution of a task of {env.id!r} cannot be played: {at}{type(error).__name__}: "
            f"{error}; agentrl env check {env.id} shows more"
        ) from error
    if fault is not None:
        raise ConfigError(f"env.reward: {fault}; agentrl reward lint {word} --env {env.id} shows more")


def in_daemon_thread(work: Callable[[], T], limit: float) -> T:
    """Run `work` in a daemon thread and return its result. Raises TimeoutError after `limit` seconds.

    Not in this thread, where a notebook already runs an event loop; not in an executor, whose thread would keep the process from
    exiting if the environment hangs.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as fault:  # sys.exit or KeyboardInterrupt of that code would end the command without a message
            answer.set_exception(exception_for(fault, "its code").with_traceback(fault.__traceback__))

    threading.Thread(target=copy_context().run, args=(run,), name="agentrl-gold", daemon=True).start()
    if not wait([answer], limit).done:
        raise TimeoutError(f"not finished within {limit:g} s (rollout.env_timeout + rollout.episode_timeout)")
    return answer.result()


def evaluations_of(steps: int, evaluation: EvalConfig) -> int:
    """Count the evaluations of a run: one before it, one after it, and those every `every` steps in between."""
    return 2 + ((steps - 1) // evaluation.every if evaluation.every else 0)


# Gold that graders read

MAX_TASKS, MAX_ENDLESS = 20_000, 20
"""Maximum tasks of a split to read: of a finite split, and of an endless one (for gold)."""
GOLD_SECONDS = 60.0
"""Seconds after which no further task is read; the log then has the number read."""


def check_gold(start: RunStart) -> None:
    """Raise ConfigError with the task if a leaf (`Leaf.gold_fault`) cannot read the gold of a training or evaluation task.
    Skips leaves that an episode may not reach: in a gate's branch, with `when` or `missing`.
    """
    env, scorer = start.env, start.scorer
    tops: list[Node] = [scorer.root, *([scorer.success] if scorer.success is not None else [])]
    nodes = [node for top in tops for node in _gold_leaves(top)]
    if not nodes or env.at is not None:
        return
    seen: set[str] = set()
    until = time.monotonic() + GOLD_SECONDS
    splits = dict.fromkeys((*(["train"] if start.config.trained_envs else []), start.config.eval.split))
    with closing(replace(env, wrappers=()).build()) as built:
        for looked, task in enumerate((task for name in splits for task in tasks_of(built, name, MAX_ENDLESS)), start=1):
            view = episode_view(Trajectory(env.id, task))
            for node in nodes:
                try:
                    args = node.args_for(view)
                    key = json.dumps([node.pointer, dict(args)], sort_keys=True, default=str)
                    why = None if key in seen else node.leaf.gold_fault(args)
                    seen.add(key)
                except UnscorableError as fault:
                    why = str(fault)
                if why is not None:
                    raise ConfigError(
                        f"env ({env.id}): task {task.id!r} of the split {task.split!r}: at {node.pointer} of reward spec "
                        f"{scorer.name!r}: {why}. Correct the task, or leave it out"
                    )
            if time.monotonic() > until:
                text = "%s: only the gold of the first %d tasks was checked before the start, in %g s"
                log.warning(text, env.id, looked, GOLD_SECONDS)
                return


def _gold_leaves(node: Node) -> Iterator[LeafNode]:
    """Yield the leaves below a node that read gold in every episode."""
    if node.mods.when is not None or node.mods.missing != "invalid" or node.mods.scope is not None:
        return
    if isinstance(node, LeafNode) and type(node.leaf).gold_fault is not Leaf.gold_fault:
        yield node
    for child in [node.test] if isinstance(node, GateNode) else node.children:
        yield from _gold_leaves(child)


def tasks_of(env: ToolEnv, split: str, endless: int) -> Iterator[Task]:
    """Yield the first `MAX_TASKS` tasks of a split; of an endless split the first `endless`."""
    count = env.task_count(split)
    for seed in range(endless if count is None else min(count, MAX_TASKS)):
        yield env.make_task(seed, split)


# Lint

LINT_SECONDS = {"start": 2.0, "dry run": 30.0}
"""Seconds after which no further probe begins, so that a slow environment does not delay the start."""

UNINFORMATIVE = frozenset({"never-varies", "escapes-scoring"})
"""Codes that are not informative before a run: a part that every probe satisfies, such as a format that no script violates; and
an unscored episode without turns, which no policy can play."""
COMPARISONS = frozenset({"gold-below-maximum", "spam-passes", "do-nothing-floor"})
"""Codes that compare rewards of episodes."""
REFUSING = frozenset({"gold-unscored", "gold-no-success", "idle-paid"})
"""Codes of probe findings that refuse a run."""


def check_lint(start: RunStart) -> list[str]:
    """Return findings about the reward spec, one line each. Raises ConfigError, with the places in the spec, for faults.

    Remote environments and agents with their own tools are linted without episodes, with a note. Judges are not asked: the
    findings hold for any verdict, and name their leaves.
    """
    config, env, scorer = start.config, start.env, start.scorer
    if not config.health.lint:
        return []
    findings = lint_spec(scorer)
    word = spec_word(env, config.the_env.reward, scorer)
    _refuse(scorer, f"{word} --env {env.id}", [item for item in findings if item.level == "error"])
    why = None if env.at is None else f"the environment is at {env.at.url}"
    if config.agent is not None and config.agent.tools == "own":
        why = why or "the agent has tools of its own, which no script plays"
    seconds = LINT_SECONDS["dry run" if start.planned else "start"]
    until = time.monotonic() + seconds

    def probe() -> tuple[list[LintFinding], int]:
        sound = without_random_faults(env)
        built = sound.build()
        order_free, idle_share = built.order_free, built.idle_share
        built.close()
        probes = probe_episodes(sound.build, ENOUGH, enough=lambda: time.monotonic() > until, gold_needed=False)
        unsaid = UNINFORMATIVE | (COMPARISONS if reads_samples(scorer) else frozenset())

        def lint(one: Scorer) -> list[LintFinding]:
            found = lint_probes(one, probes, order_free, idle_share)
            return [
                *lint_idle(one, probes, idle_share),
                *(item for item in found if item.code not in unsaid and (item.level, item.code) != ("note", "cheap-success")),
            ]

        return lint_any_verdict(scorer, probes, lint), tasks_tried(probes)

    untried = [] if why is None else [f"reward spec {scorer.name!r} was not tried on episodes before the start: {why}"]
    if why is None:
        try:
            probed, count = in_daemon_thread(probe, seconds + config.rollout.env_timeout + config.rollout.episode_timeout)
        except Exception as error:  # from code of the environment; `check_success` reports faults of gold
            untried = [f"reward spec {scorer.name!r}: probe episodes of {env.id} failed: {error}"]
        else:
            _refuse(scorer, f"{word} --env {env.id}", [item for item in probed if item.code in REFUSING])
            findings = [*findings, *probed]
            if start.planned and count < ENOUGH:
                untried = [
                    f"reward spec {scorer.name!r} was tried on {count} tasks of {env.id} in {seconds:g} s: {bound_text(count)}; "
                    f"agentrl reward lint {word} --env {env.id} --tasks {ENOUGH} tries more"
                ]
    return [*(f"reward spec {scorer.name!r} at {item.at}: {item.message}" for item in findings), *untried]


def _refuse(scorer: Scorer, words: str, faults: Iterable[LintFinding]) -> None:
    if lines := [f"{item.at}: {item.message}" for item in faults]:
        raise ConfigError(
            f"env.reward: reward spec {scorer.name!r}: {'; '.join(lines)}. `agentrl reward lint {words}` "
            "shows more; health.lint = false starts the run anyway"
        )
