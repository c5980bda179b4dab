"""Objectives of training on data (SFT, DPO, reward model): the loss of a step and its value on held-out examples."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.worker import Broadcast, Strategy
from agentrl.config.schema import DataConfig, ModelConfig, OptimConfig
from agentrl.contrib.offline.store import RowStore
from agentrl.data.rows import Ragged, row_ids
from agentrl.data.schedule import Mode, plan_micro_batches
from agentrl.run.display import Count
from agentrl.run.sft import steps_batch
from agentrl.trainer.actor import Actor, sft_steps
from agentrl.trainer.checkpoint import MANIFEST, check_model, seal
from agentrl.trainer.minibatch import MINIBATCHES, cut_steps
from agentrl.trainer.optim import optim_of, rate
from agentrl.trainer.pretrained import is_classifier, load_tokenizer
from agentrl.trainer.roles import RewardModel, TrainedRole
from agentrl.trainer.train_engine import BaseEngine
from agentrl.trainer.update import Pack, Steps
from agentrl.utils.errors import ModelError
from agentrl.utils.threads import in_thread

if TYPE_CHECKING:
    from tensordict import TensorDict

# The roles


class OfflineActor(Actor):
    """One rank of a policy that also trains on transcripts (SFT) and on pairs (DPO)."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"supervise": MINIBATCHES, "prefer": MINIBATCHES}

    def supervise(self, batch: TensorDict) -> dict[str, float]:
        """Take one supervised optimizer step with the optimizer and schedule of [optim]."""
        optim, lr = self._optim, self._set_rate()
        rate_at = partial(rate, warmup=optim.warmup, schedule=optim.schedule, total=self._total_steps)
        [metrics] = sft_steps(self._ready(), Ragged.of(batch), rate_at, self._updates, optim.micro_tokens)
        self._updates += 1
        return {**metrics, "lr": lr}

    def prefer(self, batch: TensorDict, reference: Tensor, beta: float) -> dict[str, float]:
        """Take one DPO step over the rows of P pairs (row column `trajectory`). `reference`: as for `preference`."""
        engine, lr = self._ready(), self._set_rate()
        metrics = pair_step(engine, Ragged.of(batch), self._optim.micro_tokens, reference, policy_totals, beta)
        self._updates += 1
        return {**metrics, "lr": lr}


class RewardTrainer(TrainedRole, RewardModel):
    """One rank of a sequence classifier that is trained. All ranks run every method together."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"prefer": MINIBATCHES, "export_hf": Broadcast()}

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig, total_steps: int | None = None) -> None:
        """Load the classifier from a folder. `total_steps`, errors: as for `_open_engine`."""
        self._open_engine(path, model, optim_of(optim, model, "reward"), total_steps, "score")
        self._cap = optim.micro_tokens

    def prefer(self, batch: TensorDict, pairs: int) -> dict[str, float]:
        """Take one optimizer step over `pairs` pairs; an episode's score is that of its last row (column `whole`)."""
        engine, lr, nothing = self._ready(), self._set_rate(), torch.zeros(pairs, 2, dtype=torch.float64)
        metrics = pair_step(engine, Ragged.of(batch), self._cap, nothing, lambda engine, piece: engine.scores(piece.micro), 1.0)
        self._updates += 1
        return {**metrics, "lr": lr}

    def export_hf(self, folder: str) -> None:
        """Write a folder that plain transformers and [reward_model] can load."""
        self._ready().export(Path(folder))


def classifier_of(path: str, folder: Path, model: ModelConfig) -> str:
    """Return the path of the sequence classifier to train: `path`, or a classifier made from it once in `folder`.

    Loads the whole model in this process. Raises ModelError if transformers has no classifier of its family."""
    if is_classifier(path, model):
        return path
    if os.path.lexists(folder / MANIFEST):
        check_model(folder)
        return str(folder)
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    tokenizer = load_tokenizer(path, model.trust_remote_code, model.chat_template)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    options = {"num_labels": 1, "pad_token_id": pad, "dtype": torch.float32, "trust_remote_code": model.trust_remote_code}
    said = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn of the missing head, which is created here
    try:
        made = AutoModelForSequenceClassification.from_pretrained(path, **options)
    except (OSError, ValueError) as problem:
        raise ModelError(
            f'model.path = {path}: data.loss = "reward": no sequence classifier can be made of it: {problem}'
        ) from None
    finally:
        logging.set_verbosity(said)
    if not isinstance(getattr(made, "score", None), torch.nn.Linear):
        raise ModelError(
            f'model.path = {path}: data.loss = "reward" needs a family whose classifier has a linear head `score`, and '
            f"{type(made).__name__} has none"
        )
    torch.nn.init.zeros_(made.score.weight)  # every episode's initial score is 0
    shutil.rmtree(folder, ignore_errors=True)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seal(folder, 0)
    return str(folder)


Found = dict[str, float]


class Objective(ABC):
    """One loss over the examples of a store. `group`: the processes of `role`."""

    role: ClassVar[type[TrainedRole]] = OfflineActor

    def __init__(self, data: DataConfig, store: RowStore, group: WorkerGroup[Any], sharing: Mode) -> None:
        self.data, self.store, self.group, self.sharing = data, store, group, sharing

    async def begin(self, ended: Count) -> None:  # noqa: B027 - most losses need nothing
        """Compute constants with the initial weights; `ended` counts finished examples."""

    @abstractmethod
    async def step(self, examples: np.ndarray) -> Found:
        """Take one optimizer step and return its metrics."""

    @abstractmethod
    async def measure(self, examples: np.ndarray) -> tuple[float, Found]:
        """Return the weight of the examples in an average, and their metrics, without a step."""

    async def view(self, examples: np.ndarray) -> Ragged:
        """Load the rows of examples."""

        def made() -> Ragged:
            episodes = self.store.load(examples)
            return Ragged.of(steps_batch(episodes, len(episodes), self.sharing))

        return await in_thread("batch", made)

    async def train(self, method: Callable[..., Found], view: Ragged, *given: Any) -> Found:
        """Take one optimizer step of the group on the rows."""
        batch = await in_thread("batch", cut_steps, view.batch, 1, self.group.mesh.size("dp"))
        return await self.group.arun(method, batch, *given)


class Supervised(Objective):
    """Mean of -log pi over the trained tokens of a step."""

    async def step(self, examples: np.ndarray) -> Found:
        found = await self.train(OfflineActor.supervise, await self.view(examples))
        return {name: value for name, value in found.items() if name != "lr_factor"}

    async def measure(self, examples: np.ndarray) -> tuple[float, Found]:
        view = await self.view(examples)
        logprobs = (await self.group.arun(Actor.compute_logprob, view.batch))["logprobs"].values()
        tokens = float(view.tokens("sampled").sum())
        return tokens, {"loss": -float(logprobs.double().sum()) / max(tokens, 1.0)}


class Preferring(Objective):
    """DPO against the start model, whose log probabilities are computed before the first step."""

    _reference: Tensor

    async def begin(self, ended: Count) -> None:
        count, at = self.store.about.examples, 0
        self._reference = torch.zeros(count, 2, dtype=torch.float64)
        while at < count:
            examples = np.arange(at, min(at + self.data.batch, count))
            self._reference[examples] = await self._totals(await self.view(examples), len(examples))
            at = ended.done = at + len(examples)

    async def step(self, examples: np.ndarray) -> Found:
        return await self.train(OfflineActor.prefer, await self.view(examples), self._reference[examples], self.data.beta)

    async def measure(self, examples: np.ndarray) -> tuple[float, Found]:
        totals = await self._totals(await self.view(examples), len(examples))
        return float(len(examples)), preference(totals, self._reference[examples], self.data.beta)[1]

    async def _totals(self, view: Ragged, pairs: int) -> Tensor:
        """Sum the log probabilities of each episode's sampled tokens: float64 [P, 2]."""
        logprobs = (await self.group.arun(Actor.compute_logprob, view.batch))["logprobs"].values().double()
        episode = torch.repeat_interleave(view.row("trajectory"), torch.from_numpy(view.lengths))
        return torch.zeros(2 * pairs, dtype=torch.float64).index_add(0, episode, logprobs).view(pairs, 2)


class Scoring(Objective):
    """A reward model: an episode's score is read at the last token of its last row."""

    role: ClassVar[type[TrainedRole]] = RewardTrainer

    async def step(self, examples: np.ndarray) -> Found:
        view = await self.view(examples)
        whole = torch.zeros(len(view), dtype=torch.bool)
        whole[_last_rows(view)] = True
        return await self.train(RewardTrainer.prefer, view.with_rows(whole=whole), len(examples))

    async def measure(self, examples: np.ndarray) -> tuple[float, Found]:
        view = await self.view(examples)
        scores = (await self.group.arun(RewardTrainer.compute_scores, view.batch))["score"].double()
        totals = scores[_last_rows(view)].view(-1, 2)
        return float(len(examples)), preference(totals, torch.zeros_like(totals), 1.0)[1]


OBJECTIVES: dict[str, type[Objective]] = {"sft": Supervised, "dpo": Preferring, "reward": Scoring}
"""Objectives by `data.loss`."""


def _last_rows(view: Ragged) -> Tensor:
    """Return the index of each episode's last row, by episode number."""
    episode = view.row("trajectory")
    rows = torch.zeros(int(episode.max()) + 1, dtype=torch.int64)
    return rows.scatter_reduce(0, episode, torch.arange(len(episode)), reduce="amax", include_self=False)


# Losses of pairs, one episode chosen and one rejected
#
# Such a loss depends on an episode only through one number: the sum of its tokens' log probabilities, or its score. So a step
# first computes these numbers for all episodes, without gradient, and sums them over rows and ranks; then the loss and its
# derivative d with respect to each number; then, per micro-batch, the gradient of d times the number. By the chain rule this
# is the gradient of the loss. So the rows of a pair may be in different micro-batches and on different ranks, at the cost of
# one more forward pass.


RowValues = Callable[[BaseEngine, Pack], Tensor]
"""Returns one number per row, float32 [N] ([1] for a dummy without rows), with gradient if grad mode is on."""


def preference(totals: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Found]:
    """Return the mean over pairs of -log sigmoid(beta ((r - ref)(chosen) - (r - ref)(rejected))), and metrics. `totals`
    float64 [P, 2]: r of the chosen and the rejected episode of each pair; `reference` [P, 2]: ref of both.

    With sums of log probabilities, and those of the start model as `reference`, this is DPO (Rafailov et al. 2023,
    arXiv:2305.18290, eq. 7); with scores, reference 0 and beta = 1, the loss of a reward model (Bradley and Terry 1952; Ouyang
    et al. 2022, arXiv:2203.02155, eq. 1). Metrics: means of the loss, of `accuracy` (share of pairs whose chosen episode has
    the higher reward), and of the rewards, beta (r - ref).
    """
    chosen, rejected = (beta * (totals - reference)).unbind(1)
    margin = chosen - rejected
    loss = -logsigmoid(margin).mean()
    found = {"loss": loss, "accuracy": (margin > 0).double(), "reward_chosen": chosen, "reward_rejected": rejected}
    return loss, {name: float(values.detach().mean()) for name, values in {**found, "reward_margin": margin}.items()}


def policy_totals(engine: BaseEngine, piece: Pack) -> Tensor:
    """Sum the log probabilities of each row's sampled tokens."""
    logprobs, _ = engine.logprobs(piece.micro, 1.0, False)
    rows = row_ids(piece.compact).to(logprobs.device)
    return torch.zeros(len(piece.compact) - 1, device=logprobs.device).index_add(0, rows, logprobs)


def pair_step(engine: BaseEngine, view: Ragged, cap: int, reference: Tensor, values: RowValues, beta: float) -> dict[str, float]:
    """Take one optimizer step on the loss `preference`; every rank calls it with its own rows. Row columns: `trajectory` (2 i:
    chosen, 2 i + 1: rejected), and `whole` (bool: the row's number is added to its episode's; default: every row's).

    Raises NonFiniteError if the weights are not finite afterwards.
    """
    [micros] = plan_micro_batches(view, cap, engine)
    place, part = view.row("trajectory"), torch.ones(len(view), dtype=torch.float64)
    if "whole" in view:
        part = view.row("whole").double()
    with torch.no_grad():
        own = [values(engine, Pack(view, rows, engine.device)).double().cpu() for rows in micros]
    totals = torch.zeros(reference.numel(), dtype=torch.float64)
    for rows, numbers in zip(micros, own, strict=True):
        if rows:
            totals.index_add_(0, place[rows], numbers * part[rows])
    totals = engine.reduce(totals, "sum").view_as(reference).requires_grad_(True)
    loss, found = preference(totals, reference, beta)
    [slopes] = torch.autograd.grad(loss, totals)
    by_row = slopes.flatten()[place] * part

    def share(rows: list[int]) -> Tensor:
        now = values(engine, Pack(view, rows, engine.device))
        weights = by_row[rows] if rows else torch.zeros(len(now), dtype=torch.float64)
        return (now * weights.to(now)).sum()

    steps = Steps(engine, view, "a step of pairs")
    steps.take(0, micros, share)
    return {**steps.finish(), **found, "tokens_trained": view.batch["counts"][0].tokens}
