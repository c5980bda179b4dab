"""The trainer once more, in plain float64: what each key of [algorithm], [optim] and [critic] does to the weights.

Written from the papers and the docstrings of the config: plain transformers, whole rows, AdamW by its formula (Loshchilov
and Hutter 2019, arXiv:1711.05101). Nothing of it comes from agentrl.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

Rows = list[int]


def padded(batch: Any, rows: Rows) -> Tensor:
    """Token ids [N, longest]; what follows a row's end is not read, as attention is causal."""
    return torch.nn.utils.rnn.pad_sequence([batch["token_ids"][row] for row in rows], batch_first=True)


class Batch:
    """One batch in plain numbers: sampled positions of each row, and its episode."""

    def __init__(self, batch: Any) -> None:
        self.given = batch
        keys = [(int(g), int(m)) for g, m in zip(batch["group"], batch["member"], strict=True)]
        order = list(dict.fromkeys(keys))
        self.group = [key[0] for key in order]
        self.rows = [[row for row, key in enumerate(keys) if key == wanted] for wanted in order]
        self.where = [torch.nonzero(batch["sampled"][row]).flatten() for row in range(len(keys))]
        self.reward = [float(batch["reward"][rows[0]]) for rows in self.rows]

    def column(self, name: str) -> list[Tensor]:
        """A ragged column at the sampled tokens of each row, float64."""
        return [self.given[name][row][where].double() for row, where in enumerate(self.where)]


class AdamW:
    """By the formula: w (1 - lr decay) - lr m^ / (sqrt(v^) + 1e-8); matrices alone are decayed."""

    def __init__(self, parameters: list[Tensor], lr: float, betas: tuple[float, float], decay: float) -> None:
        self.parameters, self.lr, self.betas, self.decay = parameters, lr, betas, decay
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, grads: list[Tensor], factor: float) -> None:
        self.steps += 1
        lr, (one, two) = self.lr * factor, self.betas
        for p, g, m, v in zip(self.parameters, grads, self.first, self.second, strict=True):
            m.mul_(one).add_((1 - one) * g)
            v.mul_(two).add_((1 - two) * g * g)
            if p.ndim > 1:
                p.mul_(1 - lr * self.decay)
            p.sub_(lr * (m / (1 - one**self.steps)) / ((v / (1 - two**self.steps)).sqrt() + 1e-8))


def factor_of(step: int, warmup: int, schedule: str, total: int) -> float:
    """The share of the learning rate in training step `step`."""
    if step < warmup:
        return (step + 1) / warmup
    left = 1 - (step - warmup) / (total - warmup)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[schedule]


class Trainer:
    """AdamW steps with the gradient's norm cut; the norms before the cut are kept."""

    def __init__(self, model: Any, optim: Any, lr: float, total: int) -> None:
        self.model, self.optim, self.total = model.double(), optim, total
        self.adam = AdamW(list(model.parameters()), lr, optim.betas, optim.weight_decay)
        self.updates = 0
        self.norms: list[float] = []
        self.losses: list[float] = []

    def take(self, loss: Tensor) -> None:
        grads = torch.autograd.grad(loss, self.adam.parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        self.norms.append(norm)
        self.losses.append(loss.item())
        share = min(1.0, self.optim.max_grad_norm / max(norm, 1e-12))
        optim = self.optim
        if norm:  # without a gradient no step: momentum waits
            self.adam.step([g * share for g in grads], factor_of(self.updates, optim.warmup, optim.schedule, self.total))

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class PlainActor(Trainer):
    """dr_grpo or grpo advantages, ppo_clip or gspo, every other key of [algorithm] as given; all at one temperature."""

    def __init__(
        self, folder: str, algorithm: Any, optim: Any, total: int = 100, seed: int = 0, temperature: float = 1.0
    ) -> None:
        super().__init__(load(folder), optim, optim.lr, total)
        self.reference = load(folder)
        self.algorithm, self.seed, self.temperature = algorithm, seed, temperature

    def step(self, given: Any, number: int) -> None:
        """One training step: advantages, then every optimizer step."""
        batch, cfg = Batch(given), self.algorithm
        behaviour, at = batch.column("logprobs"), {"temperature": self.temperature}
        bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, **cfg.loss.args}
        with torch.no_grad():
            old = tokens_of(self.model, batch, **at)[0] if cfg.proximal == "recompute" else behaviour
            reference = tokens_of(self.reference, batch, **at)[0]
        advantages = self.advantages(batch, old, reference)
        for part in minibatches(len(batch.rows), cfg, self.seed, number):
            rows = [row for episode in part for row in batch.rows[episode]]
            now, entropy = tokens_of(self.model, batch, rows, **at)
            losses: dict[int, Tensor] = {}
            for row, logprobs, spread in zip(rows, now, entropy, strict=True):
                advantage = next(a for a, mine in zip(advantages, batch.rows, strict=True) if row in mine)
                change = logprobs - old[row]
                if cfg.loss.name == "gspo":
                    change = change.detach().mean() + logprobs - logprobs.detach()
                ratio = torch.exp(change)
                near = ratio.clamp(1 - bounds["clip_low"], 1 + bounds["clip_high"])
                clipped = -torch.minimum(ratio * advantage, near * advantage)
                losses[row] = clipped.clamp(max=-bounds["dual_clip"] * advantage) if advantage < 0 else clipped
                losses[row] = losses[row] - cfg.entropy_bonus * spread
                if cfg.kl.where == "loss" and cfg.kl.coef:
                    losses[row] = losses[row] + cfg.kl.coef * self.kl(logprobs, reference[row])
            cut = given["truncated"] if cfg.truncated == "mask" else torch.zeros(len(given), dtype=torch.bool)
            kept = [e for e in part if not cut[batch.rows[e][0]]]
            loss = aggregated([torch.cat([losses[row] for row in batch.rows[e]]) for e in kept or part], cfg)
            self.take(loss if kept else 0 * loss)
        self.updates += 1

    def advantages(self, batch: Batch, old: list[Tensor], reference: list[Tensor]) -> list[float]:
        """Reward less the group's mean, an episode; with the KL in the reward, all of its k1 is taken off first."""
        kl = self.algorithm.kl
        cost = kl.coef if kl.where == "reward" else 0.0
        reward = [
            r - cost * sum(float((old[row] - reference[row]).sum()) for row in rows)
            for r, rows in zip(batch.reward, batch.rows, strict=True)
        ]
        groups = {one: [r for r, g in zip(reward, batch.group, strict=True) if g == one] for one in batch.group}
        scale = {one: np.std(all_, ddof=1) if self.algorithm.advantage.name == "grpo" else 1.0 for one, all_ in groups.items()}
        return [(r - float(np.mean(groups[g]))) / float(scale[g]) for r, g in zip(reward, batch.group, strict=True)]

    def kl(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        """Schulman 2020: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d; straight through: the gradient of k2."""
        kind, d = self.algorithm.kl.kind or "k3", logprobs - reference
        value = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[kind.rstrip("+")]
        return value.detach() + d * d / 2 - (d * d / 2).detach() if kind.endswith("+") else value


class PlainCritic(Trainer):
    """A backbone with a linear head that starts at 0; half the squared error, clipped around the old values."""

    def __init__(self, folder: str, critic: Any, optim: Any, total: int = 100) -> None:
        model = torch.nn.ModuleDict(
            {
                "backbone": AutoModel.from_pretrained(folder, attn_implementation="eager"),
                "head": torch.nn.Linear(32, 1, bias=False),
            }
        )
        torch.nn.init.zeros_(model["head"].weight)  # type: ignore[arg-type]
        super().__init__(model, optim, critic.lr, total)
        self.critic = critic

    def values(self, batch: Batch, rows: Rows | None = None) -> list[Tensor]:
        rows = list(range(len(batch.where))) if rows is None else rows
        hidden = self.model["backbone"](padded(batch.given, rows)).last_hidden_state
        found = self.model["head"](hidden).squeeze(-1)
        return [found[index, batch.where[row] - 1] for index, row in enumerate(rows)]

    def step(self, given: Any, algorithm: Any, number: int) -> None:
        """One training step on the columns `values` and `returns`."""
        batch, clip = Batch(given), self.critic.clip
        old, returns = batch.column("values"), batch.column("returns")
        for part in minibatches(len(batch.rows), algorithm.model_copy(update={"epochs": self.critic.epochs}), 0, number):
            rows = [row for episode in part for row in batch.rows[episode]]
            losses: dict[int, Tensor] = {}
            for row, value in zip(rows, self.values(batch, rows), strict=True):
                error = (value - returns[row]).square()
                if clip is not None:
                    near = torch.maximum(torch.minimum(value, old[row] + clip), old[row] - clip)
                    error = torch.maximum(error, (near - returns[row]).square())
                losses[row] = error / 2
            self.take(aggregated([torch.cat([losses[row] for row in batch.rows[e]]) for e in part], algorithm))
        self.updates += 1


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()


def tokens_of(model: Any, batch: Batch, rows: Rows | None = None, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Logprob and entropy of the sampled tokens of each row."""
    rows = list(range(len(batch.where))) if rows is None else rows
    ids = padded(batch.given, rows)
    tables = torch.log_softmax(model(ids).logits / temperature, -1)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for index, row in enumerate(rows):
        table = tables[index, batch.where[row] - 1]
        found[0].append(table.gather(1, ids[index, batch.where[row]][:, None]).squeeze(1))
        found[1].append(-(table.exp() * table).sum(-1))
    return found


def norm_of(model: Any) -> float:
    """Of the gradient of all parameters."""
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


def minibatches(count: int, cfg: Any, seed: int, step: int) -> list[list[int]]:
    """Episodes of each optimizer step: the least number of nearly equal parts of a permutation by (seed, step); later
    epochs take the same parts in an order by (seed, step, epoch)."""
    parts = np.array_split(np.random.default_rng([seed, step]).permutation(count), math.ceil(count / cfg.minibatch))
    found = []
    for epoch in range(cfg.epochs):
        order = np.random.default_rng([seed, step, epoch]).permutation(len(parts)) if epoch else range(len(parts))
        found += [parts[number].tolist() for number in order]
    return found


def aggregated(episodes: list[Tensor], cfg: Any) -> Tensor:
    """Token losses of each episode to one number."""
    if cfg.aggregate == "token_mean":
        return torch.cat(episodes).mean()
    each = [e.mean() if cfg.aggregate == "seq_mean_token_mean" else e.sum() for e in episodes]
    return torch.stack(each).mean() / (cfg.length_norm if cfg.aggregate == "seq_mean_token_sum_norm" else 1)
