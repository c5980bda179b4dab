"""Gold that a grader cannot read is found in the tasks before a run starts, and not when an episode of one is scored."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.config.envs import trained
from agentrl.errors import ConfigError
from agentrl.reward import Scorer
from agentrl.reward.leaf import Leaf, UnscorableError
from agentrl.reward.node import LeafNode, Node
from agentrl.reward.ops import GateNode
from agentrl.reward.view import View, episode_view
from agentrl.trajectory import Task, Trajectory

log = logging.getLogger(__name__)

MOST, ENDLESS = 20_000, 20
"""Tasks of a split that are looked at: of finitely many, and of those that have no end."""
SECONDS = 60.0
"""No further task is looked at after so long; the log then says how many were."""


def check_gold(config: TrainConfig, env: EnvRef, scorer: Scorer) -> None:
    """Raise ConfigError, which names the task, if a leaf that reads gold (`Leaf.gold_fault`) cannot read that of a task to train
    or to be evaluated on. Leaves that an episode may do without are not asked: in a gate's branch, with a `when` or `missing`.

    Reads: env, eval.split.
    """
    nodes = list(_sure(scorer))
    if not nodes or env.at is not None:
        return
    seen: set[str] = set()
    until = time.monotonic() + SECONDS
    splits = dict.fromkeys((*(["train"] if trained(config) else []), config.eval.split))
    for looked, task in enumerate(_tasks(env, splits), start=1):
        view = episode_view(Trajectory(env.id, task))
        for node in nodes:
            if (why := _fault(node, view, seen)) is not None:
                raise ConfigError(
                    f"env ({env.id}): task {task.id!r} of the split {task.split!r}: at {node.pointer} of reward spec "
                    f"{scorer.name!r}: {why}. Correct the task, or leave it out"
                )
        if time.monotonic() > until:
            log.warning(
                "%s: the gold of the first %d tasks was read in %g s, and no more before the start", env.id, looked, SECONDS
            )
            return


def _fault(node: LeafNode, view: View, seen: set[str]) -> str | None:
    try:
        args = node.args_for(view)
        key = json.dumps([node.pointer, dict(args)], sort_keys=True, default=str)
        if key in seen:
            return None
        seen.add(key)
        return node.leaf.gold_fault(args)
    except UnscorableError as fault:
        return str(fault)


def _sure(scorer: Scorer) -> Iterator[LeafNode]:
    """The leaves that read gold, in whatever episode."""
    tops: Sequence[Node] = [scorer.root, *([scorer.success] if scorer.success is not None else [])]

    def visit(node: Node) -> Iterator[LeafNode]:
        if node.mods.when is not None or node.mods.missing != "invalid" or node.mods.scope is not None:
            return
        if isinstance(node, LeafNode) and type(node.leaf).gold_fault is not Leaf.gold_fault:
            yield node
        for child in [node.test] if isinstance(node, GateNode) else node.children():
            yield from visit(child)

    for top in tops:
        yield from visit(top)


def _tasks(env: EnvRef, splits: Iterable[str]) -> Iterator[Task]:
    built = replace(env, wrappers=()).build()
    try:
        for name in splits:
            count = built.task_count(name)
            for seed in range(ENDLESS if count is None else min(count, MOST)):
                yield built.make_task(seed, name)
    finally:
        built.close()
