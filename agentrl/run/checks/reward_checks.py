"""Checks of rewards: gold succeeds, graders can read it, and lint of the specs."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing
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
"""The fewest gold solutions that are played before a run."""


def check_decided(scorer: Scorer) -> None:
    """Raise ConfigError if the spec does not say whether an episode is a success."""
    if scorer.rule is None:
        raise ConfigError(
            f"env.reward: reward spec {scorer.name!r} does not say what a success is, and it cannot be derived "
            '(costs and sums over turns have no best value); give it a top-level "success" (docs/rewards.md)'
        )


def check_success(start: RunStart) -> None:
    """Raise ConfigError if the gold solution of a training task is not a success (success rates would then mean nothing), or
    if it cannot be played because the environment fails or hangs. Of an environment that is only evaluated: of a task of that.

    If the environment has no scripted gold solution, this is not checked, and the log says so. A service, which may cost money,
    is not asked: gold must be a success if it says the best, or the worst, of everything, and the log names its leaves.
    The gold solution is played without wrappers that inject random faults.
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
        # The gold of at least TASKS tasks, and of one with each set of parameters of the sampler.
        split, sound = "train" if config.trained_envs else config.eval.split, without_random_faults(env)
        source = TaskSource(sound, make_sampler(rollout.sampler), rollout.sampler.name, config.seed)
        if start.planned and config.the_env.trains:
            source.fill()  # which says if it has fewer tasks than it is to have, as the start does when it makes it
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
    except BaseException as error:  # it comes from the environment's own code, which may even call sys.exit
        log.debug("the gold solution could not be played", exc_info=True)
        frames = list(walk_tb(error.__traceback__))
        lines = [(f.f_code.co_filename, n) for f, n in frames if f.f_globals.get("__name__", "").startswith(PRIVATE)]
        at = f"{shown_path(lines[-1][0])}:{lines[-1][1]}: " if lines else ""  # the innermost line of a shelf that raised
        raise ConfigError(
            f"env.id: the gold solution of a task of {env.id!r} cannot be played: {at}{type(error).__name__}: "
            f"{error}; agentrl env check {env.id} shows more"
        ) from error
    if fault is not None:
        raise ConfigError(f"env.reward: {fault}; agentrl reward lint {word} --env {env.id} shows more")


def in_daemon_thread(work: Callable[[], T], limit: float) -> T:
    """The result of `work`, run in a daemon thread. Raises TimeoutError after `limit` seconds.

    In a notebook an event loop is already running in this thread. And an environment that hangs must not keep the process
    from exiting, as the thread of an executor would.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as fault:  # sys.exit, and a Ctrl-C of that code's own, would end the command without a word
            answer.set_exception(exception_for(fault, "its code").with_traceback(fault.__traceback__))

    threading.Thread(target=run, name="agentrl-gold", daemon=True).start()
    if not wait([answer], limit).done:
        raise TimeoutError(f"not finished within {limit:g} s (rollout.env_timeout + rollout.episode_timeout)")
    return answer.result()


def evaluations_of(steps: int, evaluation: EvalConfig) -> int:
    """One evaluation before the run, one after it, and those between steps; none is added after the last step."""
    return 2 + ((steps - 1) // evaluation.every if evaluation.every else 0)


# Gold that graders read

MOST, ENDLESS = 20_000, 20
"""Tasks of a split that are read: of finitely many, and, for their gold, of those that have no end."""
GOLD_SECONDS = 60.0
"""No further task is looked at after so long; the log then says how many were."""


def check_gold(start: RunStart) -> None:
    """Raise ConfigError, which names the task, if a leaf that reads gold (`Leaf.gold_fault`) cannot read that of a task to train
    or to be evaluated on. Leaves that an episode may do without are not asked: in a gate's branch, with a `when` or `missing`.
    """
    env, scorer = start.env, start.scorer
    tops: list[Node] = [scorer.root, *([scorer.success] if scorer.success is not None else [])]
    nodes = [node for top in tops for node in _sure(top)]
    if not nodes or env.at is not None:
        return
    seen: set[str] = set()
    until = time.monotonic() + GOLD_SECONDS
    splits = dict.fromkeys((*(["train"] if start.config.trained_envs else []), start.config.eval.split))
    with closing(replace(env, wrappers=()).build()) as built:
        for looked, task in enumerate((task for name in splits for task in tasks_of(built, name, ENDLESS)), start=1):
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
                said = "%s: the gold of the first %d tasks was read in %g s, and no more before the start"
                log.warning(said, env.id, looked, GOLD_SECONDS)
                return


def _sure(node: Node) -> Iterator[LeafNode]:
    """The leaves below a node that read gold, in whatever episode."""
    if node.mods.when is not None or node.mods.missing != "invalid" or node.mods.scope is not None:
        return
    if isinstance(node, LeafNode) and type(node.leaf).gold_fault is not Leaf.gold_fault:
        yield node
    for child in [node.test] if isinstance(node, GateNode) else node.children:
        yield from _sure(child)


def tasks_of(env: ToolEnv, split: str, endless: int) -> Iterator[Task]:
    """The first `MOST` tasks of a split; of one without an end the first `endless`."""
    count = env.task_count(split)
    for seed in range(endless if count is None else min(count, MOST)):
        yield env.make_task(seed, split)


# Lint

LINT_SECONDS = {"start": 2.0, "dry run": 30.0}
"""No probe is begun after this many seconds, so that an environment that starts slowly costs a run little more than its gold."""

UNSAID = frozenset({"never-varies", "escapes-scoring"})
"""Codes that say little before a run: a part is at its best in every probe, as a format that no script violates; an episode
without a single turn is unscored, which no policy can play."""
AMOUNTS = frozenset({"gold-below-maximum", "spam-passes", "do-nothing-floor"})
"""Codes that compare what episodes earn."""
REFUSED = frozenset({"gold-unscored", "gold-no-success", "idle-paid"})
"""Codes of findings in probes that end a run before it starts."""


def check_lint(start: RunStart) -> list[str]:
    """Findings about the reward spec, a line each. Raises ConfigError, with the places in the spec, for faults.

    Environments elsewhere and agents with tools of their own are linted without episodes, and that is said. Judges are not asked:
    the findings hold whatever they say, and their leaves are named.
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
        unsaid = UNSAID | (AMOUNTS if reads_samples(scorer) else frozenset())

        def lint(one: Scorer) -> list[LintFinding]:
            found = lint_probes(one, probes, order_free, idle_share)
            return [
                *lint_idle(one, probes, idle_share),
                *(item for item in found if item.code not in unsaid and (item.level, item.code) != ("note", "cheap-success")),
            ]

        return lint_any_verdict(scorer, probes, lint), tasks_tried(probes)

    untried = [] if why is None else [f"reward spec {scorer.name!r} is not tried on episodes before the start: {why}"]
    if why is None:
        try:
            probed, count = in_daemon_thread(probe, seconds + config.rollout.env_timeout + config.rollout.episode_timeout)
        except Exception as error:  # the environment's own code; where gold is played, `check_success` has named its fault
            untried = [f"reward spec {scorer.name!r}: probe episodes of {env.id} failed: {error}"]
        else:
            _refuse(scorer, f"{word} --env {env.id}", [item for item in probed if item.code in REFUSED])
            findings = [*findings, *probed]
            if start.planned and count < ENOUGH:
                untried = [
                    f"reward spec {scorer.name!r} was tried on {count} tasks of {env.id} in {seconds:g} s: {bound_text(count)}; "
                    f"agentrl reward lint {word} --env {env.id} --tasks {ENOUGH} tries more"
                ]
    return [*(f"reward spec {scorer.name!r} at {item.at}: {item.message}" for item in findings), *untried]


def _refuse(scorer: Scorer, words: str, faults: Iterable[LintFinding]) -> None:
    if told := [f"{item.at}: {item.message}" for item in faults]:
        raise ConfigError(
            f"env.reward: reward spec {scorer.name!r}: {'; '.join(told)}. `agentrl reward lint {words}` "
            "shows more; health.lint = false starts the run all the same"
        )
