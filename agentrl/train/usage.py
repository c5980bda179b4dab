"""What an update takes of the cards it runs on: memory, tokens a second and model FLOPs utilization, for the rows of a run.

FLOPs are those of the model, counted from its config and its matrices (Chowdhery et al. 2022, PaLM, appendix B): what
checkpointing computes again is none of them, and attention is causal over whole rows.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from agentrl.batch.rows import Ragged, offsets_of
from agentrl.batch.schedule import trees_of
from agentrl.train.engine import BaseEngine, Flops
from agentrl.train.modules import PolicyModule

TERA, GIB = 1e12, 2**30
PEAKS = {
    "A10": 125, "A10G": 70, "A100": 312, "A800": 312, "L4": 121, "L40": 181, "L40S": 362, "H20": 148, "H100": 989.5,
    "H100 NVL": 835, "H100 PCIe": 756, "H200": 989.5, "H800": 989.5, "B200": 2250, "RTX 3090": 71, "RTX 4090": 165.2,
    "RTX 5090": 209.5, "MI300X": 1307,
}  # fmt: skip
"""TFLOP/s of dense products in bfloat16 by their makers' data sheets, by a part of the card's name."""
_OUTSIDE = re.compile(r"embed|lm_head|visual|output\.weight")


def flops_of(module: nn.Module, config: Any) -> Flops | None:
    """What a model computes for each token, from its matrices and its config; None if the config does not name its heads."""
    text = config.get_text_config()
    heads, layers = (getattr(text, key, None) for key in ("num_attention_heads", "num_hidden_layers"))
    if not heads or not layers:
        return None
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    matrices, trained = 0.0, True
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2 and not _OUTSIDE.search(name):
            matrices += parameter.numel() * (chosen / parameter.shape[0] if parameter.ndim == 3 else 1)
            trained = trained and parameter.requires_grad
    head = 2.0 * text.hidden_size * text.vocab_size if isinstance(module, PolicyModule) else 0.0
    # A frozen matrix has no gradient of its own: of the two products of the backward pass one is left.
    return Flops(2.0 * matrices, 2.0 * heads * width * layers, head, 3 if trained else 2)


def peak_of(card: str) -> float | None:
    """FLOP/s of dense products in bfloat16 of a card by its name; None if it is not known."""
    names = [name for name in PEAKS if name in card]
    return PEAKS[max(names, key=len)] * TERA if names else None


@dataclass(frozen=True, slots=True)
class Card:
    """The device of a rank: its name, and the most bytes that tensors held on it since the last question."""

    name: str
    peak: int


def card_of(device: torch.device) -> Card | None:
    """The card of a device, once it has done all it was asked; None if it is none. Its peak is counted anew from here on."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    found = Card(torch.cuda.get_device_name(device), torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return found


class CardUsage:
    """What one role's steps take of its ranks' cards, from its making to `metrics`."""

    def __init__(self, engine: BaseEngine, view: Ragged) -> None:
        self._engine, self._view = engine, view
        self._card = card_of(engine.device)
        self._began, self._tokens, self._flops = time.monotonic(), 0.0, 0.0
        self._counted = self._card is not None
        if self._counted:
            self._model = engine.flops()
            offsets = offsets_of(view.batch["token_ids"])
            self._lengths = offsets.diff().numpy()
            before = np.concatenate([[0], np.cumsum(view.tokens("sampled").numpy())])
            self._predicted = np.diff(before[offsets.numpy()])

    def add(self, micros: list[list[int]]) -> None:
        """Count a forward and a backward pass of these rows."""
        if not self._counted:
            return
        for rows in micros:
            lengths, predicted = self._lengths[rows], self._predicted[rows]
            self._tokens += float(lengths.sum())
            if self._model is not None:
                self._flops += self._model.of(lengths, float(predicted.sum()))
            if trees_of(self._view, rows):  # less is computed than the rows have
                self._model = None

    def metrics(self) -> dict[str, float]:
        """Of the ranks' cards: `gpu/memory_gib` of the fullest, `gpu/tokens_per_s` and `gpu/mfu` of each; nothing on a CPU."""
        card = card_of(self._engine.device)
        if not self._counted or card is None:
            return {}
        seconds, peak, unknown = self._engine.reduce(
            torch.tensor([time.monotonic() - self._began, card.peak, float(self._model is None)], dtype=torch.float64), "max"
        ).tolist()
        tokens, flops = self._engine.reduce(torch.tensor([self._tokens, self._flops], dtype=torch.float64), "sum").tolist()
        each = seconds * (dist.get_world_size() if dist.is_initialized() else 1)
        found = {"gpu/memory_gib": peak / GIB, "gpu/tokens_per_s": tokens / each}
        most = peak_of(card.name)
        if unknown or most is None or self._engine.cfg.computes_in(True) != "bfloat16":
            return found
        return {**found, "gpu/mfu": flops / each / most}
