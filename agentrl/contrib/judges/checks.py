"""Checks of judges before a run: budget, models on the run's own engines, and models behind an API."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec

from agentrl.config.envs import weight_at
from agentrl.config.schema import JudgeConfig
from agentrl.contrib.judges.client import judge_call
from agentrl.contrib.judges.engines import OwnJudge
from agentrl.contrib.judges.leaf import PREFIX, JudgeLeaf, VerdictRequest
from agentrl.data.trajectory import Json, Message, Task
from agentrl.env.catalog import EnvRef
from agentrl.env.official import WHOLE
from agentrl.render import make_renderer
from agentrl.render.modality import modality_of
from agentrl.reward import Scorer
from agentrl.reward.nodes import GateNode, LeafNode, Node, walk
from agentrl.reward.values import decider, follow, parse_pointer, references
from agentrl.rollout.samplers import make_sampler
from agentrl.run.assembly import RunStart
from agentrl.run.checks import RUN_CHECKS
from agentrl.run.checks.model_checks import check_side_model
from agentrl.run.checks.reward_checks import evaluations_of
from agentrl.run.checks.size_checks import check_heads
from agentrl.run.digests import suite_env
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.services import QUESTION, ApiModel, RunServices
from agentrl.trainer.estimator_inputs import needs_greedy
from agentrl.trainer.pretrained import load_model_config, load_tokenizer, model_context
from agentrl.utils.errors import ConfigError, ModelError, RenderError, hint_text

log = logging.getLogger(__name__)

# Budget


Paid = tuple[LeafNode, JudgeLeaf, list[Mapping[str, Json]], bool, bool]


def paid_nodes(scorer: Scorer) -> Iterator[Paid]:
    """Yield a spec's nodes that ask judges behind an API: node, leaf, enclosing `when`s, whether it asks per turn, and whether it
    is in a branch of a gate."""

    def visit(node: Node, whens: list[Mapping[str, Json]], parts: bool, gated: bool) -> Iterator[Paid]:
        whens = whens if node.mods.when is None else [*whens, node.mods.when]
        parts = parts or node.mods.scope in ("round", "turn")
        if isinstance(node, LeafNode) and isinstance(node.leaf, JudgeLeaf) and node.leaf.own is None:
            yield node, node.leaf, whens, parts, gated
        for child in node.children:
            yield from visit(child, whens, parts, gated or (isinstance(node, GateNode) and child is not node.test))

    for top in scorer.tops:
        yield from visit(top, [], False, False)


def questions(scorer: Scorer, max_turns: int) -> tuple[int, int]:
    """Bound the number of distinct paid questions per episode of `max_turns` turns: the minimum of a scored episode unlike any
    other (verdicts are cached), and the maximum with every branch taken."""
    least, most = Counter[str](), Counter[str]()  # by key: equal nodes ask the same question, once
    for node, _, whens, parts, gated in paid_nodes(scorer):
        most[node.key] = max(most[node.key], max_turns if parts else 1)
        least[node.key] = max(least[node.key], int(not whens and not gated))
    return least.total(), most.total()


def check_budget(start: RunStart) -> None:
    """Raise ConfigError if `reward.judge.calls` is too low for the run; log a warning if it may be. With several environments,
    training may be only on the one that asks least, or most."""
    config = start.config
    if (budget := config.reward.judge.calls) is None:
        return
    steps, least_evaluated, most_evaluated = [], 0, 0
    evaluations = evaluations_of(config.steps, config.eval)
    for env, one in zip(config.envs, config.each(), strict=True):
        rollout, tasks = one.rollout, one.eval.tasks
        fewest, most = questions(start.scorers[env.called], rollout.max_turns)
        episodes = rollout.groups * (rollout.group_size + needs_greedy(one.algorithm.advantage))
        if any(weight_at(env.weight, step) > 0 for step in range(config.steps)):
            steps.append((fewest * episodes, most * episodes))
        least_evaluated, most_evaluated = least_evaluated + fewest * tasks, most_evaluated + most * tasks
    least_step, most_step = min((low for low, _ in steps), default=0), max((high for _, high in steps), default=0)
    least = config.steps * least_step + evaluations * least_evaluated
    most = config.steps * most_step + evaluations * most_evaluated
    if least > budget:
        spent = f", so they are spent at about step {max(0, budget - least_evaluated) // least_step}" if least_step else ""
        raise ConfigError(
            f"reward.judge.calls: {budget} calls are not enough: judges are asked at least {least} times ({config.steps} steps x "
            f"{least_step} + {evaluations} evaluations x {least_evaluated}){spent}. Set reward.judge.calls={most}, or fewer steps"
        )
    if most > budget:
        log.warning(
            "reward.judge.calls: %d calls may not be enough: up to %d (%d steps x %d + %d evaluations x %d); the run stops "
            "with a checkpoint if they are spent",
            *(budget, most, config.steps, most_step, evaluations, most_evaluated),
        )


# The run's own engines


def leaves_on_engines(judge: JudgeConfig, scorers: Iterable[Scorer]) -> dict[str, list[tuple[str, JudgeLeaf]]]:
    """Map the run's own judges to the leaves that ask them, with their places. Raises ConfigError for a judge that the config
    lacks."""
    found: dict[str, list[tuple[str, JudgeLeaf]]] = {}
    for scorer in scorers:
        for node in (node for top in scorer.tops for node in walk(top)):
            leaf = node.leaf if isinstance(node, LeafNode) else None
            if not isinstance(leaf, JudgeLeaf) or leaf.own is None:
                continue
            at = f"{scorer.name}#{node.pointer}"
            if leaf.own not in judge.engines:
                known = f"it has {', '.join(sorted(judge.engines)) or 'none'}{hint_text(leaf.own, judge.engines)}"
                raise ConfigError(
                    f"{at}: model = {PREFIX + leaf.own!r}: reward.judge.engines (--judge-model NAME=MODEL) has no judge of that "
                    f"name; {known}"
                )
            found.setdefault(leaf.own, []).append((at, leaf))
    return found


@RUN_CHECKS.register("judge")
def check_judges(start: RunStart) -> list[str]:
    """Raise ConfigError for a too low budget, a leaf whose judge is not in the config, a judge that no leaf asks (in training; an
    evaluation may be of other environments), an engine without judges, and a prompt that leaves no room for a verdict;
    ModelError for an unusable model. In a plan a model folder may lack its weights."""
    if start.purpose == "train":
        check_budget(start)
    engines, leaves = start.config.reward.judge.engines, leaves_on_engines(start.config.reward.judge, start.scorers.values())
    if start.purpose == "train" and (idle := sorted(set(engines) - leaves.keys())):
        specs = " or ".join(sorted({repr(scorer.name) for scorer in start.scorers.values()}))
        raise ConfigError(
            f"reward.judge.engines.{idle[0]} (--judge-model {idle[0]}=...): no judge leaf of {specs} asks it, with "
            f'"model": "engine:{idle[0]}"; remove it, or set env.reward to a spec that does'
        )
    for name, asking in leaves.items():
        _check_engine(OwnJudge(start.config, name), asking, start.planned)
    if not leaves or find_spec("llguidance") is not None:
        return []
    return [
        "reward.judge.engines: verdicts are not held to their form, which takes llguidance, and those that do not fit it leave "
        "their episodes unscored: pip install 'agentrl[server]'"
    ]


def _check_engine(judge: OwnJudge, leaves: list[tuple[str, JudgeLeaf]], planned: bool) -> None:
    own, key, maker = judge.as_policy(), judge.key, judge.maker()
    path, trust = str(own.model.path), own.model.trust_remote_code
    check_side_model(own.engine, own.model, f"{key}.path", planned)
    if modality_of(load_model_config(path, trust)) is not None:
        raise ConfigError(f"{key}.path = {path}: it is a vision model, and judges read only text; use a text model")
    with judge.name_in_errors():
        maker.check_installed()
        maker.check()
        check_heads(EngineChoice(own, own.engine))
    context = maker.context(min(model_context(path, trust), own.rollout.max_episode_tokens))
    try:
        renderer = make_renderer(load_tokenizer(path, trust))
        for at, leaf in leaves:
            # A prompt is shortest with empty placeholders.
            messages = [Message("system", leaf.system()), Message("user", leaf.args["prompt"])]
            prompt, most = len(renderer.start(messages, [])), leaf.max_tokens
            if prompt + most > context:
                raise ConfigError(
                    f"{key}: the judge takes {context} tokens (its model's context, {key}.max_model_len), and {at} needs "
                    f"{prompt} for its prompt alone and max_tokens = {most} for the verdict; lower max_tokens, raise "
                    f"{key}.max_model_len, or take a model with a longer context"
                )
    except (ModelError, RenderError) as problem:
        raise ModelError(f"{key}.path = {path}: {problem}") from problem


# Models behind an API


def paid_models(run: RunServices, scorers: Mapping[str, Scorer]) -> Iterator[ApiModel]:
    """Yield the judges behind an API with a verdict's parameters; for a benchmark only if a task's `when` allows the leaf."""
    judge = run.config.reward.judge
    for one in run.config.each():
        scorer = scorers[one.the_env.called]
        # None, unless it is a suite with fixed parameters: then all of its tasks.
        suite = suite_env(EnvRef.of(one.the_env, one.tools)) if scorer.asks else None
        fixed = suite is not None and not any(make_sampler(one.rollout.sampler).variants())
        tasks = [suite.make_task(seed, WHOLE) for seed in range(suite.task_count(WHOLE))] if suite and fixed else None
        for _, leaf, whens, *_ in paid_nodes(scorer):
            if tasks is None or any(all(_may_hold(when, task) for when in whens) for task in tasks):
                verdict = VerdictRequest(str(leaf.args["model"]), (QUESTION,), leaf.verdict_schema, leaf.max_tokens)
                yield ApiModel(
                    f"the judge of reward spec {scorer.name!r}",
                    "reward.judge.api_base",
                    judge.api_base,
                    judge_call(judge, verdict),
                    "reward.judge.args",
                    judge.args,
                    {"temperature": "reward.judge.args.temperature"},
                )


def _may_hold(when: Mapping[str, Json], task: Task) -> bool:
    """Return True if `when` can be true for a task; also if it reads more than the task."""
    places = [parse_pointer(str(ref["$"])) for _, ref in references(when)]
    if any(place[:2] not in (("task", "data"), ("task", "gold")) for place in places):
        return True
    document = {"task": {"data": task.data, "gold": task.gold}}
    return decider(when)(lambda ref: follow(document, parse_pointer(str(ref["$"])))) is not False
