"""Inputs and outputs of advantage estimators and losses, on flat ragged columns.

Types, aggregation of token losses, statistics of groups, turns of episodes, and hashes of states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from agentrl.data.rows import credit, row_counts, row_ids, row_sum, sampled_offsets, spread
from agentrl.utils.errors import ConfigError, is_users, place_of, user_code

Mode = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """A whole batch on the driver: N rows, T tokens.

    Shapes: `token_rewards`, `mask`, `turns` [T]; `offsets` [N + 1]; `group`, `reward` [N]; `values` [T] if there is a critic.
    `member` [N]: the row's episode within its group (an episode may have several ledgers and still counts once in its group);
    without it every row is an episode. The rows of an episode are in the order of its ledgers (see `data.rows.collate`), possibly
    with rows of other episodes between them; recursions over time follow `turns`, then that order. `reward` is equal on all rows
    of an episode and NaN if it is unscored: it then takes part in no baseline, recursion or whitening, and gets advantage 0.
    `baseline` [N]: reward of the greedy rollout of the same task (ReMax). `terms` [N, K]: reward terms that are normalized one by
    one; NaN is an unscored term. `anchors` [T]: hash of the state in which the token's turn was taken (turn-level credit).
    `parent`, `branch_turn` [N] int64: as in `Trajectory`; -1 and 0 without a parent.

    Floating point columns are float32 or float64; advantages have the dtype of `reward`.
    """

    token_rewards: Tensor
    mask: Tensor
    offsets: Tensor
    group: Tensor
    reward: Tensor
    values: Tensor | None = None
    turns: Tensor | None = None
    member: Tensor | None = None
    baseline: Tensor | None = None
    terms: Tensor | None = None
    anchors: Tensor | None = None
    parent: Tensor | None = None
    branch_turn: Tensor | None = None

    def of(self, rows: Tensor, terms: int) -> tuple[AdvantageInput, Tensor]:
        """Select rows (bool [N]) and the first `terms` terms. Returns the input and the mask of its tokens, bool [T]."""
        tokens = spread(rows, self.offsets, len(self.mask))
        lengths = self.offsets.diff()[rows]
        per_token = {"token_rewards", "mask", "values", "turns", "anchors"}
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        part: dict[str, Any] = {
            name: None if column is None else column[tokens if name in per_token else rows]
            for name, column in columns.items()
            if name != "offsets"
        }
        part["terms"] = None if self.terms is None or not terms else self.terms[rows][:, :terms]
        return AdvantageInput(**part, offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])), tokens


@dataclass(frozen=True, slots=True)
class AdvantageOutput:
    """`advantages` [T], 0 on tokens that were not sampled; `returns` [T] if the estimator defines a value target.

    On unscored episodes `returns` are the values themselves for `gae` and `gae_turns` (so the value error is 0), otherwise 0.
    """

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossInput:
    """One micro-batch: all columns [T], `offsets` [N + 1].

    `logprobs`: log pi under the current weights, with gradient; `old_logprobs`: under the proximal policy (the weights at the
    start of the update); `behaviour_logprobs`: under the policy that sampled the token. `picked`: tokens that the loss treats
    differently (`trainer.minibatch.with_selection`).
    """

    logprobs: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    offsets: Tensor
    picked: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` [T] per token, before any mean; `metrics` [T] each, averaged over trained tokens."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of one optimizer step over all ranks: trained tokens, and episodes with trained tokens.

    A token is trained if the policy sampled it and its weight is not 0 (off-policy correction, masked truncated episodes). An
    episode counts once, however many ledgers it has, even if its advantages are 0. `length`: the constant number of tokens of
    `seq_mean_token_sum_norm`.
    """

    tokens: float
    episodes: float
    length: float = 1.0


def aggregate(
    loss: Tensor, mask: Tensor, offsets: Tensor, mode: Mode, denominators: Denominators, episode_tokens: Tensor | None = None
) -> Tensor:
    """Return a part's share of the global mean loss, a scalar; the shares of all parts sum to the mean.

    `loss` [T], `mask` [T], `offsets` [N + 1]; `denominators` count the whole optimizer step. With E episodes of n_e
    masked tokens each, over all rows of the episode:

    - token_mean: sum / all tokens (DAPO, Yu et al. 2025, arXiv:2503.14476);
    - seq_mean_token_mean: 1/E sum_e (1/n_e sum over the episode's tokens) (GRPO, Shao et al. 2024, arXiv:2402.03300);
    - seq_mean_token_sum: 1/E sum_e sum;
    - seq_mean_token_sum_norm: the same / `denominators.length`, a constant (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    `episode_tokens` [N]: n_e of each row's episode; without it every row is an episode. Raises ConfigError for an
    unknown mode.
    """
    # Not a product: a token outside the mask may have an infinite or undefined loss, and 0 x NaN is NaN.
    kept = torch.where(mask, loss, torch.zeros_like(loss))
    # Without any trained token the sum is 0, and must not become 0 / 0.
    tokens, episodes = max(denominators.tokens, 1.0), max(denominators.episodes, 1.0)
    if mode == "token_mean":
        return kept.sum() / tokens
    if mode == "seq_mean_token_sum":
        return kept.sum() / episodes
    if mode == "seq_mean_token_sum_norm":
        return kept.sum() / (episodes * denominators.length)
    if mode == "seq_mean_token_mean":
        count = row_sum(mask.to(loss.dtype), offsets) if episode_tokens is None else episode_tokens.to(loss.dtype)
        return (row_sum(kept, offsets) / count.clamp(min=1)).sum() / episodes
    raise ConfigError(f"algorithm.aggregate = {mode!r}: expected one of {', '.join(get_args(Mode))}")


def call_component(name: str, component: Callable[..., Any], *given: Any) -> Any:
    """Call an estimator, a loss or a correction with tensors or dataclasses of tensors.

    A user's component gets copies of the columns without gradient, so that it cannot write into the batch. Raises CallbackError
    if it raises, ConfigError if it changes an input in place, which would have no effect."""
    inputs, seen = list[Any](), dict[str, tuple[Tensor, int]]()
    for number, one in enumerate(given if is_users(component) else (), 1):
        several = isinstance(one, AdvantageInput | LossInput)
        whole = {field.name: getattr(one, field.name) for field in fields(one)} if several else {f"number {number}": one}
        columns = {key: values for key, values in whole.items() if isinstance(values, Tensor)}
        columns = {key: values if values.requires_grad else values.clone() for key, values in columns.items()}
        seen |= {key: (values, values._version) for key, values in columns.items()}
        inputs.append(replace(one, **columns) if several else columns.popitem()[1])
    with user_code(name, component):
        answer = component(*(inputs or given))
    if changed := [key for key, (values, version) in seen.items() if values._version != version]:
        raise ConfigError(
            f"{name} changes its input {changed[0]} in place, which changes nothing in the run. Correct it at "
            f"{place_of(component)}: compute with a copy (.clone()), and return the result"
        )
    return answer


def check_output(name: str, answer: Any, kind: type[Any], column: str, like: Tensor) -> None:
    """Raise ConfigError unless component `name` returned a `kind` with a tensor like `like`, also with its gradient: in `column`,
    or itself."""
    found = (getattr(answer, column, None) if column else answer) if isinstance(answer, kind) else None
    if isinstance(found, Tensor) and found.shape == like.shape:
        if like.requires_grad and not found.requires_grad:
            raise ConfigError(f"{name} returned a {column} without gradient: nothing is trained. Compute it from given.logprobs")
        return
    shown, inside = (answer, "") if found is None or not column else (found, f" as {column}")
    given = f"a tensor of shape {list(shown.shape)}" if isinstance(shown, Tensor) else f"{shown!r:.60}"
    made = f"{kind.__name__}({column}=...) with a tensor" if column else "a tensor"
    form = f"{made} of shape {list(like.shape)}, one number per token"
    raise ConfigError(f"{name} returned {given}{inside}; expected {form}")


def call_loss(name: str, loss: Callable[..., Any], given: LossInput) -> LossOutput:
    """Call a loss, and return its output with the metrics as tensors. Raises as `call_component` and `check_output`, also for a
    metric that is neither a number nor like the loss."""
    answer = call_component(name, loss, given)
    check_output(name, answer, LossOutput, "loss", given.logprobs)
    found, metrics, like = dict[str, Tensor](), answer.metrics, given.logprobs
    for key, values in metrics.items() if isinstance(metrics, Mapping) else [("metrics", metrics)]:
        with suppress(TypeError, ValueError, RuntimeError):
            found[key] = torch.as_tensor(values)
        if not isinstance(key, str) or key not in found or found[key].numel() not in (1, like.numel()):
            form = f"a number or a tensor of shape {list(like.shape)}, by a text"
            raise ConfigError(f"{name}: its metric {key!r} is {values!r:.60}; expected {form}")
    return replace(answer, metrics=found)  # type: ignore[no-any-return]


# Groups and episodes


def group_total(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sum over each group: [S], int64 [S] -> [G]."""
    return values.new_zeros(groups).index_add(0, group, values)


def center_in_groups(values: Tensor, group: Tensor, groups: int, weights: Tensor | None = None) -> Tensor:
    """Subtract from values the (weighted) mean of their group, float64 [S]; exactly 0 if a group's values are equal."""
    values = values.double()
    least = values.new_full((groups,), torch.inf).scatter_reduce(0, group, values, "amin")
    above = values - least[group]
    scale = torch.ones_like(above) if weights is None else weights.double()
    total = group_total(scale, group, groups)
    mean = group_total(scale * above, group, groups) / torch.where(total > 0, total, 1.0)
    return above - mean[group]


def deviation(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the unbiased standard deviation of each value's group, float64 [S]; 0 in a group of one."""
    count = group_total(torch.ones_like(values, dtype=torch.float64), group, groups)
    squares = group_total(center_in_groups(values, group, groups).square(), group, groups)
    return (squares / (count - 1).clamp(min=1)).sqrt()[group]


def standardize_in_groups(values: Tensor, group: Tensor, groups: int, eps: float) -> Tensor:
    """(value - mean) / (std + eps) within each group, float64 [S]; exactly 0 if all are equal, even with eps = 0."""
    scale = deviation(values, group, groups) + eps
    return center_in_groups(values, group, groups) / torch.where(scale > 0, scale, 1.0)


@dataclass(frozen=True, slots=True)
class Episodes:
    """The U scored episodes of a batch in G groups, ordered by (group, member).

    [U]: `reward` (float64), `group` (0..G-1), `tokens` (sampled tokens over all ledgers, float64), `first` (the episode's first
    row). `episode` [N]: the row's episode, -1 if unscored.
    """

    reward: Tensor
    group: Tensor
    groups: int
    tokens: Tensor
    first: Tensor
    episode: Tensor

    def center(self, weights: Tensor | None = None) -> Tensor:
        """Return rewards minus the (weighted) mean of their group, [U]."""
        return center_in_groups(self.reward, self.group, self.groups, weights)

    def size(self) -> Tensor:
        """Return the number of scored episodes in each episode's group, float64 [U]."""
        return group_total(torch.ones_like(self.reward), self.group, self.groups)[self.group]


def episodes(batch: AdvantageInput) -> Episodes:
    """Collect the scored episodes of a batch."""
    rows = len(batch.group)
    scored = ~torch.isnan(batch.reward)
    # Unique by (group, member): an episode of several ledgers counts once in its group's mean.
    unique, index = torch.unique(_keys(batch)[scored], dim=0, return_inverse=True)
    first = torch.full((len(unique),), rows).scatter_reduce(0, index, torch.arange(rows)[scored], reduce="amin")
    sampled = row_counts(batch.mask, batch.offsets)[scored]
    tokens = group_total(sampled, index, len(unique))
    names, group = torch.unique(unique[:, 0], return_inverse=True)
    episode = torch.full((rows,), -1)
    episode[scored] = index
    return Episodes(batch.reward[first].double(), group, len(names), tokens.double(), first, episode)


def row_advantages(batch: AdvantageInput, rule: Callable[[Episodes], Tensor]) -> Tensor:
    """Spread a rule's value per episode over the episode's rows, [N]; 0 on unscored rows."""
    units = episodes(batch)
    per_row = torch.zeros_like(batch.reward)
    scored = units.episode >= 0
    if units.groups:
        per_row[scored] = rule(units)[units.episode[scored]].to(per_row.dtype)
    return per_row


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """The tokens of a batch by episode, then by turn, then in batch order (ledger order).

    `order` int64 [T]: position of each token in the batch; `mask` [T], in that order: sampled tokens of scored episodes (M);
    `offsets` int64 [E + 1] cut all tokens by episode, `compact` int64 [E + 1] cut the M masked ones.
    """

    order: Tensor
    mask: Tensor
    offsets: Tensor
    compact: Tensor

    @property
    def indices(self) -> Tensor:
        """Positions of the M tokens in the batch, int64 [M]."""
        return self.order[self.mask]

    def credit(self, token_rewards: Tensor) -> Tensor:
        """Return the reward of each masked token, float64 [M]; rewards on other tokens are moved (`data.rows.credit`)."""
        return credit(token_rewards[self.order].double(), self.mask, self.offsets)

    def put(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Scatter values of masked tokens to the order of the batch: [M] -> [T], 0 elsewhere."""
        full = torch.zeros(len(self.order), dtype=dtype, device=values.device)
        full[self.indices] = values.to(dtype)
        return full


def episode_tokens(batch: AdvantageInput) -> EpisodeTokens:
    """Order the tokens of a batch by episode and time."""
    names, episode = torch.unique(_keys(batch), dim=0, return_inverse=True)
    rows = torch.argsort(episode, stable=True)  # stable: the rows of an episode keep their ledger order
    lengths = batch.offsets.diff()[rows]
    ends = lengths.cumsum(0)
    shift = torch.repeat_interleave(batch.offsets[:-1][rows] - (ends - lengths), lengths)
    order = shift + torch.arange(len(shift))
    offsets = torch.cat([batch.offsets[:1], group_total(batch.offsets.diff(), episode, len(names)).cumsum(0)])
    if batch.turns is not None:
        time = row_ids(offsets) * (1 << 16) + batch.turns[order]  # int16 turns
        if bool((time.diff() < 0).any()):  # an agent's conversations alternate
            order = order[torch.argsort(time, stable=True)]
    mask = (batch.mask & spread(~torch.isnan(batch.reward), batch.offsets))[order]
    return EpisodeTokens(order, mask, offsets, sampled_offsets(mask, offsets))


def _keys(batch: AdvantageInput) -> Tensor:
    """Return (group, member) of each row, int64 [N, 2]."""
    member = batch.member if batch.member is not None else torch.arange(len(batch.group))
    return torch.stack([batch.group.to(torch.int64), member.to(torch.int64)], dim=1)


# Turns


@dataclass(frozen=True, slots=True)
class Turns:
    """The S turns of the scored episodes, by episode.

    [S]: `group`, `index` (turn number), `reward` (float64), `first` (position of the turn's first sampled token in the batch).
    `offsets` int64 [E + 1] cut the turns by episode; `segment` int64 [M]: the turn of each masked token of `tokens`.
    """

    group: Tensor
    index: Tensor
    reward: Tensor
    first: Tensor
    offsets: Tensor
    segment: Tensor
    tokens: EpisodeTokens

    def put(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Spread values of turns over their sampled tokens: [S] -> [T], 0 elsewhere."""
        return self.tokens.put(values[self.segment], dtype)


def turns_of(batch: AdvantageInput) -> Turns:
    """Find the turns of a batch: consecutive sampled tokens of an episode with the same turn number.

    A turn may continue in the next ledger. A summary written by the policy is at the end of the old ledger, under the number of
    the turn that it makes room for. The environment does not change between the two, so they are one turn, with one reward-to-go
    and no discount in between, in the state in which the summary was requested. Raises ConfigError without turn numbers.
    """
    if batch.turns is None:
        raise ConfigError("turn-level advantages need the column `turns`")
    tokens = episode_tokens(batch)
    indices = tokens.indices
    episode, turns = row_ids(tokens.compact), batch.turns[indices].to(torch.int64)
    fresh = torch.ones(len(indices), dtype=torch.bool)
    fresh[1:] = (episode[1:] != episode[:-1]) | (turns[1:] != turns[:-1])
    segment = fresh.to(torch.int64).cumsum(0) - 1
    # A reward on a tool result belongs to the turn that called the tool, so move it to a sampled token first.
    earned = tokens.credit(batch.token_rewards)
    reward = group_total(earned, segment, int(fresh.sum()))
    offsets = torch.cat([tokens.compact[:1], segment + 1])[tokens.compact]
    first = indices[fresh]
    group = batch.group.to(torch.int64)[torch.searchsorted(batch.offsets, first, right=True) - 1]
    return Turns(group, turns[fresh], reward, first, offsets, segment, tokens)


EPS = 1e-6


def normalize_by_key(values: Tensor, keys: Tensor, divide: bool) -> Tensor:
    """Center values [S] by key and, with `divide`, divide by the unbiased std + EPS of the key; float64.

    `keys` int64 [S, K]. A value that is alone with its key, or equal to all others of it, becomes exactly 0.
    """
    _, group = torch.unique(keys, dim=0, return_inverse=True)
    size = int(group.max()) + 1 if len(group) else 0
    return standardize_in_groups(values, group, size, EPS) if divide else center_in_groups(values, group, size)


# States

# Not Python's hash, which differs between processes: all runs and ranks must give a state the same number.
_PRIME, _MODULUS = 1_000_003, (1 << 31) - 1


def anchors_of(token_ids: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Hash the context since the last turn (the answer of tools or user): int64 [T], equal on a turn's tokens.

    `token_ids`, `mask` (true where sampled) are [T].
    """
    out = torch.zeros(len(token_ids), dtype=torch.int64)
    ids, sampled = token_ids.tolist(), mask.tolist()
    values = out.tolist()
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        state, fresh = 0, True
        for place in range(start, stop):
            if not sampled[place]:
                state = (0 if fresh else state) * _PRIME % _MODULUS + ids[place] + 1
                fresh = False
            else:
                fresh = True
            values[place] = state
    return torch.tensor(values, dtype=torch.int64)
