"""Lint a reward spec before a run, by the spec alone and by probe episodes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl.data.trajectory import Json, Message, StopReason, Task, Trajectory
from agentrl.reward.explain import reasons
from agentrl.reward.nodes import LINEAR, TRUE, GateNode, LeafNode, Node, OpNode, walk
from agentrl.reward.score import Score, Scorer
from agentrl.reward.values import evidence_nodes

# Probe episodes

_COPIES = 3
_SPAM_TURNS = 12
_EVERY_NUMBER = ", ".join(str(number) for number in range(200))
_DECOY = "987654321.5"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\$([^$\n]+)\$|\\\((.+?)\\\)"
    r"|((?:\\[a-z]+(?:\{[^{}]*\})*|[0-9(√∫∑]|\b[a-z](?=\s?[-+*/^=]))"
    r"(?:\\[a-z]+|[-0-9a-z.,+*/^_=(){}×·÷√!% ](?![a-z]{3}| ?(?:is|to|of|in|at|or|by)\b))*)",
    re.DOTALL,
)


ENOUGH = 59
"""Number of tasks that all miss a fault in 5 % of tasks with probability below 5 %: 0.95^59 = 0.0485."""


def probe_episodes(
    build: Callable[[], Any], tasks: int, seed: int = 0, *, enough: Callable[[], bool] = lambda: False, gold_needed: bool = True
) -> dict[str, list[Trajectory]]:
    """Play probe episodes, one per kind and task; see `lint_probes` for the kinds.

    `build` makes a new ToolEnv. No episode starts once `enough()`. Tasks are spread evenly over a finite split, so that each
    family of tasks has its share. Raises NotImplementedError if the environment has no gold policy, unless not `gold_needed`:
    then the kinds that are made from gold are left out.
    """
    episodes: dict[str, list[Trajectory]] = {}
    for number in range(tasks):
        env = build()
        count = env.task_count("train")
        place = number if count is None or count <= tasks else number * count // tasks
        task = env.make_task(seed + place, "train")
        try:
            gold = env.gold_turns(task)
        except NotImplementedError:
            if gold_needed:
                raise
            gold = None
        env.close()
        kinds = _turns(build, task, gold, seed, number)
        while not (over := enough()) and (found := next(kinds, None)) is not None:
            episodes.setdefault(found[0], []).append(play_turns(build(), task, found[1]))
        if over:
            break
    return episodes


Turns = Sequence[Message | str]


def tasks_tried(probes: Probes) -> int:
    """Count the tasks that have an episode of every possible kind (fewer kinds without gold)."""
    return len(probes.get("shuffled" if "gold" in probes else "spam", ()))


def bound_text(tasks: int) -> str:
    """Describe the 95 % bound on the share of tasks with a fault that `tasks` tasks do not show."""
    return f"what none of them shows, fewer than {1 - 0.05 ** (1 / tasks) if tasks else 1.0:.0%} of all do (95 %)"


def _turns(
    build: Callable[[], Any], task: Task, gold: list[Message] | None, seed: int, number: int
) -> Iterator[tuple[str, Turns]]:
    """Yield a task's kinds of episodes, each with its turns, made lazily."""
    if gold is not None:
        yield "gold", gold
    yield "empty", [Message("assistant", "")]
    yield "silent", []
    env = build()
    env.reset(seed=task.seed, options={"task": task})
    opening = list(env.trajectory.messages)
    env.action_space.seed(seed + number)
    sampled = [env.action_space.sample() for _ in range(_SPAM_TURNS)]
    env.close()
    yield "question", [Message("assistant", copied_question(opening))]
    # Random schema-valid calls, then an answer with every number.
    yield "spam", [*sampled, Message("assistant", _EVERY_NUMBER)]
    if gold is None:
        return
    if len(gold) > 1 and not gold[-1].tool_calls:  # gold ends in a text: replaced by all tool results, and by none
        played = play_turns(build(), task, gold[:-1])
        said = "\n".join(message.content for message in played.messages if message.role == "tool")
        # The last number is a decoy, since the last tool result may be the answer.
        yield "listing", [*gold[:-1], Message("assistant", f"{said}\n{', '.join([*_NUMBER.findall(said), _DECOY])}")]
        yield "mute", [*gold[:-1], Message("assistant", "Done.")]
    yield "padded", [message for message in gold for _ in range(_COPIES if message.tool_calls else 1)]
    # The same calls in another order, with the same number of calls per turn.
    calls = [call for message in gold for call in message.tool_calls]
    order, rng = list(range(len(calls))), random.Random(f"{seed}/{number}")
    while len(order) > 1 and order == sorted(order):
        rng.shuffle(order)
    moved = iter([calls[i] for i in order])
    yield "shuffled", [replace(message, tool_calls=tuple(next(moved) for _ in message.tool_calls)) for message in gold]


def gold_episode(build: Callable[[], Any], seed: int, split: str = "train") -> Trajectory:
    """Play the gold solution of a task. Raises NotImplementedError if the environment has none."""
    env = build()
    task = env.make_task(seed, split)
    return play_turns(env, task, env.gold_turns(task))


def play_turns(env: Any, task: Task, turns: Turns) -> Trajectory:
    """Play fixed assistant turns on a ToolEnv; an episode that does not end gets the stop reason max_turns."""
    env.reset(seed=task.seed, options={"task": task})
    over = any(any(env.step(turn)[2:4]) for turn in turns)  # `any` stops at the turn that ends the episode
    trajectory: Trajectory = env.trajectory
    if not over:
        trajectory.stop, trajectory.truncated = StopReason.MAX_TURNS, True
    env.close()
    return trajectory


def copied_question(messages: Iterable[Message]) -> str:
    """Copy the question of an opening as an answer: the user's text, and its formula in a box."""
    question = "\n".join(message.content for message in messages if message.role == "user")
    formulas = [next(filter(None, found.groups()), "").strip(" .,?") for found in _FORMULA.finditer(question)]
    worth = max(formulas, key=len, default="")
    # A single number is no formula, and in a box it would become the last number of the text.
    return f"{question}\n\\boxed{{{worth}}}" if re.search(r"[0-9a-z)}]\s?[-+*/^=!×÷·]|[√\\]", worth) else question


# Findings

_EPS = 1e-9
SAMPLED = frozenset({"cost.tokens", "cost.seconds", "cost.usd"})
"""Leaves that are meaningful only for a model's episodes: scripts sample no tokens and take no time."""
_IDLE = (("empty", "an empty answer"), ("silent", "doing nothing"))


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A fault (`error`: the spec cannot work as intended), a suspicious detail (`warning`) or an unchecked part (`note`)."""

    level: Literal["error", "warning", "note"]
    code: str
    at: str
    message: str


def lint_spec(scorer: Scorer) -> list[LintFinding]:
    """Find faults without episodes: dead weights, unreachable gates, constants, modifiers without effect."""
    low, high = scorer.range
    findings = [] if high - low > _EPS else [LintFinding("error", "constant-output", "/root", f"the reward is always {low:g}")]
    if scorer.success is None:
        message = 'nothing decides whether an episode succeeded (costs and sums over turns have no best value); add a "success"'
        findings.append(LintFinding("error", "no-success", "/root", message))
    elif scorer.success.range()[1] < TRUE:
        message = f"reaches at most {scorer.success.range()[1]:g}, so no episode ever succeeds"
        findings.append(LintFinding("error", "never-true", "/success", message))
    stated = [scorer.success] if scorer.success is not None and scorer.rule is not None and not scorer.rule.derived else []
    if scorer.root.mods.missing == "skip":
        message = "the root cannot be skipped; it stays unscored"
        findings.append(LintFinding("warning", "dead-missing", scorer.root.pointer, message))
    for top in (scorer.root, *scorer.metrics, *stated):
        if top.mods.weight != 1.0:
            where = "the root" if top is scorer.root else "a top-level node"
            message = f"{where} has no parent, so its weight has no effect"
            findings.append(LintFinding("error", "dead-weight", top.pointer, message))
        for node in walk(top):
            findings += _lint_node(node)
    return findings


def _lint_node(node: Node) -> Iterator[LintFinding]:
    """Find children that cannot affect a node's value, its modifiers without effect, and a leaf's own warning."""
    linear = isinstance(node, OpNode) and node.label in LINEAR
    for child in node.children:
        if linear and child.mods.weight == 0.0:
            yield LintFinding("error", "dead-weight", child.pointer, f"a weight of 0 takes it out of the {node.label}")
        elif not linear and child.mods.weight != 1.0:
            yield LintFinding("error", "dead-weight", child.pointer, f"{node.label!r} does not use weights (sum and mean do)")
    if isinstance(node, GateNode):
        low, high = node.test.range()
        if high < node.gte - _EPS:
            message = f"`if` reaches at most {high:g}, below gte {node.gte:g}: `then` is never taken"
            yield LintFinding("error", "unreachable-gate", node.pointer, message)
        elif low >= node.gte - _EPS:
            message = f"`if` is at least {low:g}, gte is {node.gte:g}: `else` is never taken"
            yield LintFinding("error", "unreachable-gate", node.pointer, message)
    ranges = [(child, *child.range()) for child in node.children] if isinstance(node, OpNode) else []
    for child, low, high in ranges:
        if node.label in ("all", "any") and high < TRUE:
            message = f"reaches at most {high:g}, so it never counts as true in {node.label!r}"
            yield LintFinding("error", "never-true", child.pointer, message)
        others = [(a, b) for other, a, b in ranges if other is not child]
        if node.label == "max" and any(high <= a + _EPS for a, _ in others):
            yield LintFinding("error", "never-decides", child.pointer, "another part is never below it, so it never is the max")
        if node.label == "min" and any(low >= b - _EPS for _, b in others):
            yield LintFinding("error", "never-decides", child.pointer, "another part is never above it, so it never is the min")
        if node.label == "product" and high - low <= _EPS and abs(low) <= _EPS:
            yield LintFinding("error", "constant-output", child.pointer, "is always 0, and so is the product")
    scale, clip = node.mods.scale, node.mods.clip
    if scale is not None and scale[0] == scale[1]:
        yield LintFinding("error", "constant-output", node.pointer, f"scale maps every value to {scale[0]:g}")
    if clip is not None:
        low, high = node.raw_range()
        if scale is not None:
            ends = [scale[0] + end * (scale[1] - scale[0]) for end in (low, high)]
            low, high = min(ends), max(ends)
        if clip[0] <= low + _EPS and clip[1] >= high - _EPS:
            yield LintFinding("warning", "dead-clip", node.pointer, f"the value is within [{low:g}, {high:g}] anyway")
        elif clip[0] >= high - _EPS or clip[1] <= low + _EPS:
            message = f"the value is within [{low:g}, {high:g}], so the clip {list(clip)} makes it a constant"
            yield LintFinding("error", "constant-output", node.pointer, message)
    if isinstance(node, LeafNode) and (warning := node.leaf.lint()) is not None:
        yield LintFinding("warning", warning[0], node.pointer, warning[1])


Probes = Mapping[str, Sequence[Trajectory]]


def lint_probes(scorer: Scorer, probes: Probes, order_free: bool | None = None, idle_share: float = 0.0) -> list[LintFinding]:
    """Find faults by probe episodes: lists by kind, one episode per task, tasks in the same order.

    Kinds: `gold` (the scripted solution), `empty` (an empty answer), `silent` (no turn), `question` (the question as the
    answer), `spam` (random calls and every number as the answer), `listing` (the gold calls, and all tool results as the
    answer), `mute` (the gold calls and "Done." as the answer), `padded` (every gold call three times), `shuffled` (the gold
    calls in another order). `order_free` and `idle_share`: as the environment's class declares them; with an `idle_share`
    above 0, rewards of idle episodes are not reported.
    """
    scores = {kind: [scorer.score(trajectory) for trajectory in episodes] for kind, episodes in probes.items()}
    if scorer.compares:
        message = "the spec compares the members of a group, so the scores of single probe episodes say nothing"
        return [LintFinding("warning", "not-probed", "/root", message), *_lint_success(scorer, probes, scores)]
    unscored = next((score for score in scores.get("gold", ()) if score.value is None), None)
    if unscored is not None:  # the spec does not fit the environment, so other findings would be meaningless
        why = next(reasons(unscored.evidence), "no reason given")
        return [LintFinding("error", "gold-unscored", "/root", f"the gold solution could not be scored: {why}")]
    findings = list(_lint_floor(scorer, {} if idle_share > 0 else scores))
    gold, high = [score.value for score in scores.get("gold", ()) if score.value is not None], scorer.range[1]
    if math.isfinite(high) and min(gold, default=high) < high - 1e-6:
        level: Literal["error", "warning"] = "warning" if all(score.success for score in scores["gold"]) else "error"
        message = f"the gold solution earns {min(gold):g}, the maximum is {high:g}"  # a deduction for costs is legitimate
        findings.append(LintFinding(level, "gold-below-maximum", "/root", message))
    spam, moved = (
        [(score.value, best) for score, best in zip(scores.get(kind, ()), gold, strict=False)] for kind in ("spam", "shuffled")
    )
    if passed := sum(one is not None and one >= best - _EPS for one, best in spam):
        message = f"spam earns as much as the gold solution in {passed} of {len(spam)} tasks"
        findings.append(LintFinding("error", "spam-passes", "/root", message))
    findings += [*_lint_padded(probes, scores), *_lint_success(scorer, probes, scores)]
    if order_free and any(one is not None and one < best - _EPS for one, best in moved):
        message = "the environment declares that the order of calls is free, but the reordered gold calls earn less"
        findings.append(LintFinding("warning", "order-matters", "/root", message))
    return [*findings, *_never_varies(scorer, scores)]


def lint_any_verdict(scorer: Scorer, probes: Probes, lint: Callable[[Scorer], list[LintFinding]]) -> list[LintFinding]:
    """Return the findings of `lint` that hold for any answers of the spec's services.

    No service is called. Kept are findings in four cases, with best answers for all episodes, none, only gold, and all but
    gold; a note `not-judged` is added per leaf that was not judged. For a spec without services, all findings of `lint`.
    """
    if not scorer.asks:
        return lint(scorer)
    good = {id(episode) for kind in ("gold", "padded", "shuffled") for episode in probes.get(kind, ())}
    cases: list[Callable[[Trajectory], bool]] = [
        lambda _: True, lambda episode: id(episode) in good, lambda episode: id(episode) not in good, lambda _: False,
    ]  # fmt: skip
    first, *others = (lint(scorer.assuming(best)) for best in cases)
    kept = [item for item in first if all((item.code, item.at) in {(o.code, o.at) for o in other} for other in others)]
    why = "not judged, since that would call a model; what else is said holds in any case"
    return [*kept, *(LintFinding("note", "not-judged", at, why) for at in scorer.judged)]


def _lint_floor(scorer: Scorer, scores: Mapping[str, Sequence[Score]]) -> Iterator[LintFinding]:
    low = scorer.range[0]
    for kind, what in (*_IDLE, ("spam", "spam")):
        values = [score.value for score in scores.get(kind, ())]
        known = [value for value in values if value is not None]
        floor = max(known, default=-math.inf)
        if kind != "spam" and floor > max(low, 0.0) + _EPS:
            yield LintFinding("error", "do-nothing-floor", "/root", f"{what} earns {floor:g}; it should earn nothing")
        if len(known) < len(values):
            share = f"{len(values) - len(known)} of {len(values)} tasks"
            message = f"{what} is unscored in {share}: a policy could escape a low reward that way"
            yield LintFinding("warning", "escapes-scoring", "/root", message)


def _lint_success(scorer: Scorer, probes: Probes, scores: Mapping[str, Sequence[Score]]) -> Iterator[LintFinding]:
    if scorer.rule is None:
        return
    for trajectory, score in zip(probes.get("gold", ()), scores.get("gold", ()), strict=True):
        if score.success is not True:
            yield LintFinding("error", "gold-no-success", "/success", gold_fault(scorer, trajectory, score))
            break
    for kind, what in (*_IDLE, ("question", "the question, copied as the answer,"), ("spam", "spam")):
        lucky = sum(score.success is True for score in scores.get(kind, ()))
        if lucky:
            message = f"{what} is a success by {scorer.rule} in {lucky} of {len(scores[kind])} tasks"
            # In up to one task of twenty, the question or a listed number may be the answer by chance.
            by_chance = (kind, what) not in _IDLE and lucky <= 0.05 * len(scores[kind])
            yield LintFinding("note" if by_chance else "error", "cheap-success", "/success", message)
    # A task that the calls alone solve ("mute") says nothing about the listing.
    pairs = list(zip(scores.get("listing", ()), scores.get("mute", ()), strict=False))
    if lucky := sum(score.success is True and mute.success is not True for score, mute in pairs):
        message = f"an answer that lists all that the tools said is a success by {scorer.rule} in {lucky} of {len(pairs)} tasks"
        yield LintFinding("error", "cheap-success", "/success", message)


def lint_idle(scorer: Scorer, probes: Probes, idle_share: float = 0.0) -> list[LintFinding]:
    """Report `idle-paid` if idling or an empty answer equals gold or succeeds in every task: then there is nothing to learn. No
    finding if the environment declares an `idle_share`."""
    if idle_share > 0 or scorer.compares:
        return []
    scores = {kind: [scorer.score(trajectory) for trajectory in probes.get(kind, ())] for kind in ("gold", "empty", "silent")}
    gold = [score.value for score in scores["gold"] if score.value is not None]
    comparable = not reads_samples(scorer)
    for kind, what in _IDLE:
        idle = scores[kind]
        values = [score.value for score in idle if score.value is not None]
        if idle and all(score.success is True for score in idle):
            return [LintFinding("error", "idle-paid", "/success", f"{what} is a success in each of {len(idle)} tasks")]
        if comparable and gold and values and len(values) == len(idle) and min(values) >= max(gold) - _EPS:
            paid = f"{what} earns {min(values):g} in each of {len(idle)} tasks, as much as the gold solution"
            return [LintFinding("error", "idle-paid", "/root", paid)]
    return []


def reads_samples(scorer: Scorer) -> bool:
    """Return True if the reward depends on sampled tokens, time or cost, which scripts lack."""
    return any(isinstance(node, LeafNode) and node.leaf.kind in SAMPLED for node in walk(scorer.root))


def gold_fault(scorer: Scorer, trajectory: Trajectory, score: Score) -> str:
    """Return the message for a gold solution that is not a success: spec, task, value and fix."""
    value = "unscored" if score.value is None else f"{score.value:g}"
    decided = "could not be scored" if score.success is None else "is not 1"
    why = next(reasons(score.evidence), None) if score.success is None else None
    task = trajectory.task.id
    return (
        f"reward spec {scorer.name!r}: the gold solution of task {task!r} is not a success: {scorer.rule} {decided} "
        f'(reward {value}{f": {why}" if why else ""}). If the gold turns are right, define success by a top-level "success" '
        "in the spec (docs/rewards.md)"
    )


def _lint_padded(probes: Probes, scores: Mapping[str, Sequence[Score]]) -> Iterator[LintFinding]:
    """Find call matching in which making every call three times costs nothing."""
    matched: dict[str, list[bool]] = {}
    for row, (right, more) in enumerate(zip(scores.get("gold", ()), scores.get("padded", ()), strict=False)):
        if len(probes["padded"][row].turns) <= len(probes["gold"][row].turns):
            continue  # the environment ended the episode before the calls could be made again
        before, after = _values(right.evidence.get("root")), _values(more.evidence.get("root"))
        for at, (node, value) in before.items():
            if node == "calls.match" and value is not None and at in after and after[at][1] is not None:
                matched.setdefault(at, []).append((after[at][1] or 0.0) >= value - _EPS)
    for at, same in matched.items():
        if all(same):
            message = "making every call three times costs nothing here (compare: exact would count them)"
            yield LintFinding("warning", "permissive-match", at, message)


def _never_varies(scorer: Scorer, scores: Mapping[str, Sequence[Score]]) -> Iterator[LintFinding]:
    """Find gates that no probe opens, and nodes with one value in all probes (`never-fires`: their lowest)."""
    if "gold" not in scores:
        return  # no good episode was probed
    trees = [_values(score.evidence.get("root")) for row in scores.values() for score in row]
    lowest = {node.pointer: low for node in walk(scorer.root) for low, high in [node.range()] if low < high}
    reached = set[str]().union(*trees)
    for at in sorted(reached):
        values = {tree[at][1] for tree in trees if at in tree}
        if len(values) == 1 and len(trees) > 1 and all(at in tree for tree in trees):
            value = values.pop()
            shown = "unscored" if value is None else f"{value:g}"
            if trees[0][at][0] in SAMPLED:
                continue
            code = "never-fires" if value is None or value <= lowest.get(at, -math.inf) + _EPS else "never-varies"
            yield LintFinding("warning", code, at, f"{trees[0][at][0]} is {shown} in every probe, good or bad")
    for node in walk(scorer.root):
        if isinstance(node, GateNode) and node.pointer in reached and node.then.pointer not in reached:
            yield LintFinding("warning", "gate-never-opens", node.pointer, "no probe, not even gold, opens this gate")


def _values(evidence: Json) -> dict[str, tuple[str, float | None]]:
    """Map pointers to (kind, value) of the nodes of an evidence tree, without skipped nodes and parts."""
    return {str(node["at"]): (str(node["node"]), node.get("value")) for node in evidence_nodes(evidence, skipped=False)}
