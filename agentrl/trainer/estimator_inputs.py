"""Advantages of an update: estimator inputs in addition to those of `collate`, estimators by environment, KL in the reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from agentrl.config.schema import AlgorithmConfig, Choice
from agentrl.data.rows import Ragged, row_ids, select
from agentrl.data.trajectory import Group
from agentrl.reward import Scorer
from agentrl.trainer.algorithms import advantages
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput, anchors_of, call_component, check_output, group_total
from agentrl.trainer.algorithms.losses import kl_estimate
from agentrl.trainer.minibatch import kl_kind, proximal_of
from agentrl.trainer.update_hooks import UpdateHook, call_hook
from agentrl.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from tensordict import TensorDict


def with_advantages(
    view: Ragged,
    algorithm: AlgorithmConfig,
    kl_coef: float,
    by_env: Mapping[str, Choice] = MappingProxyType({}),
    estimator: Callable[[AdvantageInput], AdvantageOutput] | None = None,
    hooks: Sequence[UpdateHook] = (),
) -> tuple[Ragged, dict[str, float]]:
    """Add `advantages` to a batch (and `returns`, if an estimator defines them). Returns it and metrics.

    An estimator of `by_env` gets the rows of its environment, `algorithm.advantage` all others together; the function `estimator`
    replaces both and gets all rows. If `algorithm.kl.where` is "reward", the penalty is first subtracted from token and episode
    rewards. Then the `hooks` change the advantages.
    """
    mask = view.tokens("sampled")
    rewards, reward = view.tokens("rewards"), view.row("reward")
    metrics: dict[str, float] = {}
    if "ref_logprobs" in view and algorithm.kl.where == "reward":
        # KL of the proximal policy to the reference: R_t = r_t - coef (log pi_old - log pi_ref) with k1.
        kl = kl_estimate(kl_kind(algorithm.kl), proximal_of(view), view.tokens("ref_logprobs")) * mask
        metrics["kl_reward"] = float(kl.sum() / mask.sum().clamp(min=1))
        rewards = rewards - kl_coef * kl
        # The sum over all rows of an episode, on each of its rows.
        episode = torch.from_numpy(view.episode)
        sums = group_total(kl.double(), episode[row_ids(view.offsets)], len(view))
        reward = reward - kl_coef * sums[episode].to(kl.dtype)
    given = AdvantageInput(
        token_rewards=rewards,
        mask=mask,
        offsets=view.offsets,
        group=view.row("group"),
        reward=reward,
        values=view.tokens("values") if "values" in view else None,
        turns=view.tokens("turns"),
        member=view.row("member"),
        **{name: view.row(name) for name in ("baseline", "terms", "parent", "branch_turn") if name in view},
    )
    if any("anchors" in ADVANTAGES.entry(choice.name).needs for choice in (algorithm.advantage, *by_env.values())):
        given = replace(given, anchors=anchors_of(view.tokens("token_ids"), mask, view.offsets))
    if estimator is None and by_env:
        out = estimate_advantages(given, view, algorithm.advantage, by_env)
    else:
        out = estimate(algorithm.advantage, given, estimator)
    view = view.with_tokens(advantages=out.advantages)
    view = view if out.returns is None else view.with_tokens(returns=out.returns)
    for hook in hooks:
        view, changed = call_hook(hook, UpdateHook.change_advantages, view)
        metrics |= changed
    if len(found := view.tokens("advantages")[mask].double()):  # tokens with an A of exactly 0 have no policy gradient
        metrics |= {"advantage_abs": float(found.abs().mean()), "advantage_zero": float((found == 0).double().mean())}
    return view, metrics


def with_estimator_inputs(
    batch: TensorDict, groups: Sequence[Group], advantage: Choice, by_env: Mapping[str, Choice] = MappingProxyType({})
) -> TensorDict:
    """Add the columns that estimators read to a batch of scored group members.

    Its rows are in the order of `groups`. The estimator of a row is that of its environment in `by_env`, else `advantage`.
    `baseline` float32 [N]: reward of the group's greedy episode, 0 if unused; `terms` float32 [N, K]: values of reward spec
    nodes, NaN if unscored or beyond those that the estimator reads; with `by_env`, `estimator` int64 [N]: 0 for `advantage`, then
    numbers of `by_env` from 1; with branches, `parent` and `branch_turn` int64 [N] as in `AdvantageInput`. Raises ConfigError if
    a needed greedy episode is not scored."""
    row = batch.get("trajectory")
    out: TensorDict = batch.copy()
    choices, members = [advantage, *by_env.values()], [(group, member) for group in groups for member in group.scored()]
    which = [list(by_env).index(group.env) + 1 if group.env in by_env else 0 for group, _ in members]
    needs = [ADVANTAGES.entry(choice.name).needs for choice in choices]
    wanted = frozenset[str]().union(*needs)
    if by_env:
        out["estimator"] = torch.tensor(which, dtype=torch.int64)[row]
    if "baseline" in wanted:
        baseline = []
        for number, (group, _) in zip(which, members, strict=True):
            greedy = group.baseline.reward if group.baseline is not None else None
            if greedy is None and "baseline" in needs[number]:
                raise ConfigError(f"algorithm.advantage: group {group.index} has no scored greedy episode for a baseline")
            baseline.append(greedy if greedy is not None and "baseline" in needs[number] else 0.0)
        out["baseline"] = torch.tensor(baseline)[row]
    if "terms" in wanted:
        pairs = zip(choices, needs, strict=True)
        names = [list[str](choice.args["terms"]) if "terms" in words else [] for choice, words in pairs]
        most = max(map(len, names))
        values = [[m.metrics.get(name) for name in names[n]] for n, (_, m) in zip(which, members, strict=True)]
        terms = [[math.nan if v is None else v for v in (row + [None] * most)[:most]] for row in values]
        out["terms"] = torch.tensor(terms).reshape(len(terms), most)[row]
    if any(member.parent is not None for _, member in members):
        out["parent"] = torch.tensor([-1 if m.parent is None else m.parent for _, m in members], dtype=torch.int64)[row]
        out["branch_turn"] = torch.tensor([m.branch_turn for _, m in members], dtype=torch.int64)[row]
    return out


def estimate(
    choice: Choice, given: AdvantageInput, estimator: Callable[[AdvantageInput], AdvantageOutput] | None = None
) -> AdvantageOutput:
    """Run the estimator `choice`, or the function `estimator` instead, and check its output. Raises as `call_component`."""
    called = getattr(estimator, "__name__", "given")
    name = f"algorithm.advantage {choice.name!r}" if estimator is None else f"advantage {called!r}"
    estimator = estimator or advantages(choice.name, choice.args)
    out: AdvantageOutput = call_component(name, estimator, given)
    for column in ("advantages", "returns"):
        if column == "advantages" or out.returns is not None:
            check_output(name, out, AdvantageOutput, column, given.mask)
    return out


def estimate_advantages(given: AdvantageInput, view: Ragged, advantage: Choice, by_env: Mapping[str, Choice]) -> AdvantageOutput:
    """Run each estimator on its rows (column `estimator` of `view`) and merge outputs; `returns` only with values."""
    found = torch.zeros(len(given.mask), dtype=given.reward.dtype)
    returns = None if given.values is None else torch.zeros_like(found)
    for number, choice in enumerate([advantage, *by_env.values()]):
        rows = view.row("estimator") == number
        if not bool(rows.any()):
            continue
        terms = len(choice.args["terms"]) if "terms" in ADVANTAGES.entry(choice.name).needs else 0
        part, tokens = given.of(rows, terms)
        out = estimate(choice, part)
        found[tokens] = out.advantages
        if returns is not None and out.returns is not None:
            returns[tokens] = out.returns
    return AdvantageOutput(found, returns)


def critic_rows(batch: TensorDict, advantage: Choice, by_env: Mapping[str, Choice]) -> TensorDict:
    """Select the rows that train the critic: those of estimators that read values."""
    reads = torch.tensor(["values" in ADVANTAGES.entry(choice.name).needs for choice in (advantage, *by_env.values())])
    return batch if bool(reads.all()) else select(batch, torch.nonzero(reads[batch.get("estimator")]).reshape(-1))


def needs_greedy(advantage: Choice) -> bool:
    """Return True if the estimator's baseline is a greedy episode per group."""
    return "baseline" in ADVANTAGES.entry(advantage.name).needs


def check_estimator_inputs(advantage: Choice, scorer: Scorer) -> None:
    """Raise ConfigError if the reward spec lacks an input of the estimator."""
    needs = ADVANTAGES.entry(advantage.name).needs
    if "baseline" in needs and scorer.compares:
        raise ConfigError(
            f'algorithm.advantage "{advantage.name}" compares each group with a greedy episode, but reward spec {scorer.name!r} '
            "compares the members of a group with each other, so it cannot score an episode outside of the group"
        )
    check_terms(advantage, scorer.ids, f"reward spec {scorer.name!r} has no node with id")


def check_terms(advantage: Choice, known: Collection[str], lacks: str) -> None:
    """Raise ConfigError for wrong arguments of an estimator, or an unknown term. `lacks`: begins the message on such a term."""
    given = ADVANTAGES.arguments(advantage.name, advantage.args)
    if "terms" not in ADVANTAGES.entry(advantage.name).needs:
        return
    terms, weights = given["terms"], given.get("weights")
    if weights is not None and len(weights) != len(terms):
        raise ConfigError(
            f"algorithm.advantage.args.weights: {len(weights)} weights for {len(terms)} terms; expected one per term"
        )
    for name in terms:
        if name not in known:
            hint = did_you_mean(name, known, f"its ids: {', '.join(known) or 'none'}")
            raise ConfigError(f"algorithm.advantage.args.terms: {lacks} {name!r}; {hint}")
