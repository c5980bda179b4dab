"""From a worker's rows to micro-batches that the model takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from agentrl.algorithm.ragged import sampled_offsets
from agentrl.batch import pack, plan
from agentrl.batch.plan import check_cap
from agentrl.batch.prefix import share
from agentrl.batch.rows import lengths
from agentrl.batch.sharing import planned_columns, trees_of
from agentrl.train.attention import packed_rows, packed_trees
from agentrl.train.engine import BaseEngine
from agentrl.train.modules import Micro


def split(engine: BaseEngine, batch: TensorDict, parts: Sequence[np.ndarray], cap: int) -> list[list[list[int]]]:
    """Micro-batches of each part: `[part][micro]` -> row numbers; equally many on all ranks.

    An empty list is a dummy. The cap counts the tokens that are computed: a shared prefix once. Raises
    ConfigError, on all ranks alike, where a row is longer than `cap` tokens.
    """
    tokens = lengths(batch).numpy()
    longest = engine.reduce(torch.tensor([int(tokens.max()) if len(tokens) else 0]), "max")
    check_cap(longest.numpy(), cap)
    bins: list[list[list[int]]] = []
    for part in parts:
        groups, prefix = planned_columns(batch, part)
        made = plan(tokens[part], 1, cap, groups=groups, prefix=prefix)
        bins.append([part[micro].tolist() for micro in made.rows[0]])
    counts = engine.reduce(torch.tensor([len(micros) for micros in bins], dtype=torch.int64), "max")
    return [micros + [[]] * (int(most) - len(micros)) for micros, most in zip(bins, counts, strict=True)]


def has(batch: TensorDict, name: str) -> bool:
    """Whether a batch has a column of that name."""
    return name in set(batch.keys())


class Pack:
    """Some rows of a batch, end to end, on the engine's device: `micro` for the model, `compact` offsets
    of the sampled tokens, and `column(name)` -> that column at the sampled tokens [M]. `tokens` of the rows,
    of which `computed` go through the model: fewer where the batch's columns say that rows share a prefix."""

    def __init__(self, batch: TensorDict, rows: list[int], device: torch.device) -> None:
        self.flat = pack(batch, rows)
        self.device = device
        offsets = self.flat["cu_seqlens"].to(torch.int64)
        self.mask = self.flat["sampled"]
        if bool(self.mask[offsets[:-1]].any()):
            raise ValueError("a row begins with a sampled token: nothing precedes it that could predict it")
        self.compact = sampled_offsets(self.mask, offsets)
        ids, positions = self.flat["token_ids"], self.flat["position_ids"]
        places, last = self.mask.nonzero().squeeze(1), offsets[1:] - 1
        before, targets = places - 1, ids[places]
        packed = packed_rows(offsets, device)
        trees = trees_of(batch, rows)
        if trees:
            made = share(batch, rows, trees)
            ids, positions = made.token_ids, made.position_ids
            before, last = made.at[before], made.at[last]
            packed = packed_trees(made.spans, packed.longest, device)
        self.tokens, self.computed = len(self.mask) if rows else 0, len(ids) if rows else 0
        self.micro = Micro(ids.to(device), positions.to(device), packed, before.to(device), targets.to(device), last.to(device))

    def column(self, name: str) -> Tensor:
        values: Tensor = self.flat[name]
        return values[self.mask].to(self.device)

    def row(self, name: str) -> Tensor:
        """A row column, [N]."""
        values: Tensor = self.flat[name]
        return values.to(self.device)

    def spread(self, values: Tensor) -> Tensor:
        """Inverse of `column`: [M] -> [T] on the host, 0 where not sampled."""
        out = torch.zeros(len(self.mask), dtype=torch.float32)
        out[self.mask] = values.detach().float().cpu()
        return out


class Meter:
    """Sums and maxima of per-token numbers over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._tops: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add the sum of `values`."""
        total = values.detach().double().sum().cpu()
        self._sums[name] = self._sums.get(name, torch.zeros((), dtype=torch.float64)) + total

    def top(self, name: str, values: Tensor) -> None:
        """Keep the largest of `values` (0 where there is none)."""
        zero = torch.zeros((), dtype=torch.float64)
        largest = values.detach().double().max().cpu() if values.numel() else zero
        self._tops[name] = torch.maximum(self._tops.get(name, largest), largest)

    def totals(self, engine: BaseEngine) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all ranks, by name. Every rank must have met the same names."""
        return _reduced(engine, self._sums, "sum"), _reduced(engine, self._tops, "max")


def _reduced(engine: BaseEngine, values: dict[str, Tensor], how: str) -> dict[str, float]:
    if not values:
        return {}
    names = sorted(values)
    joined = engine.reduce(torch.stack([values[name] for name in names]), "sum" if how == "sum" else "max")
    return dict(zip(names, joined.tolist(), strict=True))
