"""Rare successes, kept for later updates (`algorithm.experience`), and added to an update's own episodes.

    rare         which members are kept: successes of groups in which few succeeded          (when the batch is made)
    Experience   the episodes that are kept: as rows, with their advantages and the log probabilities that sampled them
    joined       the rows of an update with those that are added, for the actor alone

Advantages, values and every statistic of a group are of an update's own rows: nothing is added before those are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agentrl.config.envs import own_advantages
from agentrl.config.schema import AlgorithmConfig, EnvConfig, ExperienceConfig, RolloutConfig
from agentrl.data.expert_routing import free
from agentrl.data.rows import TRUNCATED, Ragged, build, concat, is_ragged, nested_tensor, offsets_of, select
from agentrl.data.schedule import FRESH, IMITATED, KEPT, ORIGIN, SHOWN, Mode, with_trees
from agentrl.data.trajectory import Group
from agentrl.rollout.player import success_rate
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from agentrl.trainer.minibatch import SOURCE
from agentrl.utils.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict

RARE = "rare"
FILE = "experience.safetensors"
DRAW = 2
"""Tells the random numbers by which kept episodes are drawn from those that shuffle an update's episodes."""
_STORED = ("token_ids", "sampled", "logprobs", "advantages", "experts", "group", "member")
_TRAINED = (*_STORED, "old_logprobs", "ref_logprobs", SOURCE, TRUNCATED)
"""Of an update's columns, those that are kept, and those that the actor reads."""


def check_experience(envs: tuple[EnvConfig, ...], rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError if kept episodes could not be used as the section says.

    Reads: algorithm, env.advantage, rollout.max_staleness.
    """
    experience = algorithm.experience
    if experience is None:
        return
    if experience.max_age <= rollout.max_staleness:
        raise ConfigError(
            f"algorithm.experience.max_age = {experience.max_age}: an episode may be rollout.max_staleness = "
            f"{rollout.max_staleness} updates old when it is first trained on, so it would be forgotten before it is "
            f"drawn; set max_age to at least {rollout.max_staleness + 1}"
        )
    if experience.term != "policy":
        return
    why, loss = None, POLICY_LOSSES.entry(algorithm.loss.name)
    names = {choice.name for choice in (algorithm.advantage, *own_advantages(envs).values())}
    valued = sorted(name for name in names if "values" in ADVANTAGES.entry(name).needs)
    if valued:
        why = f'algorithm.advantage "{valued[0]}" is of a critic, and what that says of an old episode has changed since'
    elif algorithm.correction is None and "own_samples" in loss.traits:
        why = (
            f'algorithm.loss "{loss.name}" has no ratio to the policy that sampled; set a loss with one, as "ppo_clip", or '
            'algorithm.proximal = "recompute" with an algorithm.correction'
        )
    elif algorithm.proximal == "recompute" and algorithm.correction is None and "importance_weighted" not in loss.traits:
        why = (
            'algorithm.proximal = "recompute" takes ratios to the weights at the start of the update, so nothing corrects for '
            'those that sampled an old episode; set an algorithm.correction, the loss "decoupled_ppo", or proximal = "behaviour"'
        )
    if why is not None:
        raise ConfigError(f'algorithm.experience.term = "policy": {why}; or set term = "supervised"')


def with_rare(batch: TensorDict, groups: Sequence[Group], rare: float) -> TensorDict:
    """The batch of the scored members of `groups`, in this order, with the row column `rare`, bool [N]: successes of groups in
    which at most the share `rare` succeeded, of the members whose success is known."""
    found = []
    for group in groups:
        share = success_rate(group.scored())
        found += [bool(member.success) and share is not None and share <= rare + 1e-9 for member in group.scored()]
    out: TensorDict = batch.copy()
    out[RARE] = torch.tensor(found)[batch.get("trajectory")]
    return out


@dataclass(frozen=True, slots=True)
class KeptEpisode:
    """All rows of an episode; `oldest`: the version of the oldest weights that sampled one of its tokens."""

    oldest: int
    rows: TensorDict


class Experience:
    """At most `size` rare successes, the newest; none stays for longer than `max_age` updates. `masked`: truncated episodes are
    not trained (`algorithm.truncated`), so none of them is kept."""

    def __init__(self, config: ExperienceConfig, seed: int, masked: bool = False) -> None:
        self.config, self.seed, self.masked = config, seed, masked
        self._kept: list[KeptEpisode] = []

    def __len__(self) -> int:
        return len(self._kept)

    def draw(self, step: int, fresh: int) -> tuple[TensorDict | None, dict[str, float]]:
        """Rows for update `step` (0 is the first), which has `fresh` episodes of its own, and metrics; None if nothing is kept.

        Without replacement, by the run's seed and the step. An episode whose oldest weights are more than `max_age` updates
        behind is forgotten."""
        self._kept = [one for one in self._kept if step - one.oldest <= self.config.max_age]
        count = min(int(self.config.share * fresh + 0.5), len(self._kept))
        found = {"experience/held": float(len(self._kept)), "experience/episodes": float(count)}
        if not count:
            return None, found
        chosen = np.sort(np.random.default_rng([self.seed, step, DRAW]).choice(len(self._kept), count, replace=False))
        drawn = [self._kept[place] for place in chosen.tolist()]
        rows = concat([one.rows for one in drawn])
        ages = [step - one.oldest for one in drawn]
        found |= {"experience/tokens": float(rows["sampled"].values().sum())}
        found |= {"experience/age_mean": sum(ages) / count, "experience/age_max": float(max(ages))}
        return with_origin(rows, KEPT if self.config.term == "policy" else IMITATED), found

    def keep(self, view: Ragged) -> None:
        """Keep the rare ones of an update's own episodes, which have advantages: from the next update on they may be drawn."""
        rare = view.numbers(RARE) & ~view.numbers(TRUNCATED) if self.masked else view.numbers(RARE)
        for number in np.unique(view.episode[rare]).tolist():
            rows = select(view.batch, np.flatnonzero(view.episode == number))
            sampled = rows["sampled"].values()
            # Nothing to learn from: no token, or, in the policy loss, no advantage.
            teaches = sampled if self.config.term == "supervised" else sampled & (rows["advantages"].values() != 0)
            if bool(teaches.any()):
                oldest = int(rows["versions"].values()[sampled].min())
                self._kept.append(KeptEpisode(oldest, rows.select(*(name for name in _STORED if name in rows.keys()))))  # noqa: SIM118
        del self._kept[: -self.config.size]

    def save(self, path: Path) -> None:
        """Write all episodes to one file."""
        tensors = {"oldest": torch.tensor([one.oldest for one in self._kept], dtype=torch.int64)}
        if self._kept:
            rows = concat([one.rows for one in self._kept])
            counts = torch.tensor([len(one.rows) for one in self._kept])
            tensors["episode"] = torch.arange(len(counts)).repeat_interleave(counts)
            tensors["offsets"] = offsets_of(rows["token_ids"])
            for name, column in rows.items():
                tensors[f"rows/{name}"] = (column.values() if is_ragged(column) else column).contiguous()
        save_file(tensors, path)

    def load(self, path: Path) -> None:
        """Inverse of `save`. Raises CheckpointError if there is no such file."""
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; the checkpoint is of a run without algorithm.experience")
        tensors = load_file(path)
        self._kept = []
        if not len(tensors["oldest"]):
            return
        offsets, dense = tensors["offsets"], ("group", "member")
        columns = {name.removeprefix("rows/"): value for name, value in tensors.items() if name.startswith("rows/")}
        whole = build({k: v if k in dense else nested_tensor(v, offsets) for k, v in columns.items()}, len(offsets) - 1)
        for number, oldest in enumerate(tensors["oldest"].tolist()):
            self._kept.append(KeptEpisode(oldest, select(whole, np.flatnonzero(tensors["episode"].numpy() == number))))


def demonstration_rows(batch: TensorDict) -> TensorDict:
    """Transcripts (a batch from `collate`) as rows that can be added: every sampled token is a demonstration's."""
    sampled = batch["sampled"]
    none = nested_tensor(torch.zeros(len(sampled.values())), offsets_of(sampled))
    out = batch.select(*(name for name in _STORED if name in batch.keys()))  # noqa: SIM118 - `in` of a batch asks for an item
    return with_origin(out.update({"advantages": none}), SHOWN)


def with_origin(rows: TensorDict, origin: int) -> TensorDict:
    """The rows with the column `origin`."""
    out: TensorDict = rows.copy()
    out[ORIGIN] = torch.full((len(rows),), origin, dtype=torch.int64)
    return out


def join_rows(view: Ragged, added: Sequence[TensorDict], sharing: Mode) -> Ragged:
    """The rows of an update, and behind them those that are added, with the columns that the actor reads.

    What added rows lack: their proximal policy is the one that sampled them unless they have `old_logprobs`; a reference is not
    asked about them; experts that nobody recorded are free."""
    names = [name for name in _TRAINED if name in view]
    fresh = with_origin(view.batch.select(*names), FRESH)
    return with_trees(Ragged.of(concat([fresh, *(_like(rows, fresh) for rows in added)])), sharing)


def _like(rows: TensorDict, fresh: TensorDict) -> TensorDict:
    offsets = offsets_of(rows["token_ids"])
    tokens = int(offsets[-1])
    there, columns = set(rows.keys()), {}
    for name in fresh.keys():  # noqa: SIM118 - `in` of a batch asks for an item
        if name in there:
            columns[name] = rows[name]
        elif name == "old_logprobs":
            columns[name] = rows["logprobs"]
        elif name == "experts":
            columns[name] = nested_tensor(free(fresh[name].values()[:0], tokens), offsets)
        elif name == TRUNCATED:  # what is added is never masked
            columns[name] = torch.zeros(len(rows), dtype=torch.bool)
        else:
            columns[name] = torch.full((len(rows),), -1) if name == SOURCE else nested_tensor(torch.zeros(tokens), offsets)
    return build(columns, len(rows))
