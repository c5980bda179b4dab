"""Is a model's family computed right? Tried on the model itself, cut to a few small layers of every kind, in float32 on the CPU.

The reference is transformers alone: each row by itself, the model's own eager attention and its own logits. Compared with it are
what the trainer would compute: packed rows of different lengths, rows that share a prefix, and one row a pass. All parameters
are drawn at random, because many begin as 0 or 1 (sinks, norms, scales), which hides what they do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agentrl.batch.prefix import Tree, share
from agentrl.batch.rows import Ragged, build, jagged
from agentrl.errors import AgentrlError, ModelError
from agentrl.train.attention import PACKED, packed_rows, packed_trees, register_packed_attention
from agentrl.train.families.cut import cut, keep_layers, kinds_needed
from agentrl.train.families.mixers import keep_rows_apart
from agentrl.train.head import backbone
from agentrl.train.modules import Micro, PolicyModule, ScoreModule, ValueModule, layers_of, positions

Kind = Literal["policy", "value", "score"]
TOLERANCE = 3e-3
"""The largest error of a logprob that passes; if logprobs differ by less than 1 among themselves, as a part of that. Rounding
gives 1e-6 to 1e-5, and 1e-3 in Gemma 4, whose attention has no scale; rows that see each other 0.1 to 5, a soft cap that is
left out 7e-3."""
TEMPERATURE = 0.7
PREFIX, ENDS, ALONE = 17, (9, 14, 3), 11
"""Rows: three that begin alike, with ends of those lengths, and a shorter one. Longer than the windows of `cut`."""
LARGEST = 1 << 27
"""Parameters of a cut model, at most (half a GiB in float32)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The largest error of a way to compute rows, or why it cannot be computed (its error is then infinite)."""

    error: float
    why: str = ""

    @property
    def right(self) -> bool:
        return self.error <= TOLERANCE  # NaN is not

    def __str__(self) -> str:
        return f"cannot be computed ({self.why})" if self.why else f"is off by {self.error:.1e}"


class Sample:
    """A model's family on a few rows: the reference, and the ways to compute them."""

    def __init__(self, config: Any, kind: Kind = "policy") -> None:
        """Raises ModelError if no small model of that config can be built, or its own forward pass fails."""
        self.kind = kind
        self.config = small(config, kind)
        self.rows, self.view = rows_of(_vocabulary(self.config))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = guarded(lambda: _built(self.config, kind, "eager"))
            perturb(model)
            self.head = torch.randn(1, model.config.get_text_config().hidden_size) / 8
        self.state = model.state_dict()
        self.model = model
        self.reference = [guarded(lambda row=row: self._alone(row)) for row in self.rows]  # type: ignore[misc]

    @torch.no_grad()
    def _alone(self, row: Tensor) -> Tensor:
        """By transformers alone: the logprobs of a row's tokens after the first, its values, or its score."""
        if self.kind == "value":
            hidden = backbone(self.model)(input_ids=row[None], use_cache=False).last_hidden_state[0]
            values: Tensor = (hidden @ self.head.T)[:-1, 0].float()
            return values
        logits: Tensor = self.model(input_ids=row[None], use_cache=False).logits[0].float()
        if self.kind == "score":
            return logits.reshape(-1)
        return (logits[:-1] / TEMPERATURE).log_softmax(-1).gather(1, row[1:, None])[:, 0]

    def looks_ahead(self) -> Measured:
        """How much a row's end changes what is computed of its beginning."""
        row, whole = self.rows[1], self.reference[1]
        if self.kind == "score":
            return Measured(0.0)
        return _compared(lambda: self._alone(row[: PREFIX + 2]), whole[: PREFIX + 1])

    def packed(self) -> Measured:
        """All rows in one pass."""
        return _compared(lambda: self._ours(PACKED, [(0, 1, 2, 3)], ()), torch.cat(self.reference))

    def shared(self) -> Measured:
        """All rows in one pass, and their common beginning once."""
        trees = (Tree((0, 1, 3), PREFIX), Tree((2,), 0))
        return _compared(lambda: self._ours(PACKED, [(0, 1, 2, 3)], trees), torch.cat(self.reference))

    def one_row(self, attention: str | None = None) -> Measured:
        """Each row in a pass of its own, with an attention function of transformers, by default the one that it chooses."""
        return _compared(lambda: self._ours(attention, [(0,), (1,), (2,), (3,)], ()), torch.cat(self.reference))

    @torch.no_grad()
    def _ours(self, attention: str | None, passes: list[tuple[int, ...]], trees: tuple[Tree, ...]) -> Tensor:
        module = self.module(attention)
        results = []
        for rows in passes:
            micro = micro_of(self.view, rows, trees)
            out = module(micro, TEMPERATURE, True)[0] if self.kind == "policy" else module(micro)
            results.append(out.float())
        return torch.cat(results)

    def module(self, attention: str | None) -> nn.Module:
        """The module that the trainer would compute with, with the reference's weights."""
        register_packed_attention()
        model = _built(self.config, self.kind, attention)
        model.load_state_dict(self.state, assign=True)
        if attention == PACKED:
            keep_rows_apart(backbone(model))
        module: nn.Module = {"policy": PolicyModule, "value": ValueModule, "score": ScoreModule}[self.kind](model)
        if isinstance(module, ValueModule):
            module.head.weight.data.copy_(self.head)
        return module.train()


def micro_of(view: Ragged, rows: tuple[int, ...], trees: tuple[Tree, ...]) -> Micro:
    """The rows as the model's input, end to end or as trees; all their tokens but the first of a row are wanted."""
    ids, lengths = view.tokens("token_ids"), view.lengths
    parts = [ids[int(view.offsets[row]) : int(view.offsets[row + 1])] for row in rows]
    offsets = torch.tensor([0, *torch.tensor([len(part) for part in parts]).cumsum(0).tolist()])
    flat, place, packed = torch.cat(parts), positions(offsets), packed_rows(offsets)
    inner = torch.ones(len(flat), dtype=torch.bool)
    inner[offsets[:-1]] = False
    indices, last = inner.nonzero().squeeze(1), offsets[1:] - 1
    before, targets = indices - 1, flat[indices]
    if trees:
        made = share(view, rows, trees)
        flat, place = made.token_ids, made.position_ids
        before, last = made.at[before], made.at[last]
        packed = packed_trees(made.spans, int(lengths.max()), flat.device)
    return Micro(flat, place, packed, before, targets, last)


def rows_of(vocabulary: int) -> tuple[list[Tensor], Ragged]:
    """The probe's rows, and as a batch."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, vocabulary, (PREFIX + sum(ENDS) + ALONE,), generator=draw)
    begin, *parts = torch.split(ids, [PREFIX, *ENDS, ALONE])
    rows = [torch.cat([begin, parts[0]]), torch.cat([begin, parts[1]]), parts[3], torch.cat([begin, parts[2]])]
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    group = torch.zeros(len(rows), dtype=torch.int64)
    return rows, Ragged.of(build({"token_ids": jagged(torch.cat(rows), offsets), "group": group}, len(rows)))


def small(config: Any, kind: Kind) -> Any:
    """The config of a model that is small enough to try. Raises ModelError if there is none."""
    return guarded(lambda: _small(config, kind))


def _small(config: Any, kind: Kind) -> Any:
    shrunk = cut(config)
    with torch.device("meta"):
        layers = layers_of(backbone(_built(shrunk, kind, "eager")))
        few = keep_layers(shrunk, kinds_needed(layers), len(layers))
        size = sum(p.numel() for p in _built(few, kind, "eager").parameters())
    if size > LARGEST:
        raise ModelError(f"cut to its kinds of layers it still has {size} parameters")
    return few


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Draw every parameter, and the biases that are buffers (of routers), so that none is without effect."""
    parts = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith("bias") and b.dim() == 1}}
    for tensor in parts.values():
        if not tensor.is_floating_point():
            continue
        if tensor.dim() < 2:
            tensor.add_(0.3 * torch.randn_like(tensor))
        else:
            tensor.normal_(0.0, 1.3 / math.sqrt(tensor[0].numel() if tensor.dim() != 3 else tensor.shape[-1]))


def guarded(call: Callable[[], Any]) -> Any:
    """The call's result. Raises ModelError for whatever the model's code raises."""
    try:
        return call()
    except AgentrlError:
        raise
    except Exception as error:
        raise ModelError(brief(error)) from error


def brief(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _compared(call: Callable[[], Tensor], reference: Tensor) -> Measured:
    try:
        found = call()
    except ModelError as error:
        return Measured(math.inf, str(error))
    except Exception as error:
        return Measured(math.inf, brief(error))
    if found.shape != reference.shape:
        return Measured(math.inf, f"{tuple(found.shape)} numbers in place of {tuple(reference.shape)}")
    # Some families scale their logits down, and what is wrong in them with it.
    spread = float(reference.std()) if len(reference) > 1 else 1.0
    return Measured(float((found - reference).abs().max()) / min(spread, 1.0))


def _built(config: Any, kind: Kind, attention: str | None) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if kind == "score" else AutoModelForCausalLM
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    # A copy: a model writes its attention function into its config.
    options["trust_remote_code"] = hasattr(config, "auto_map")  # `load_model_config` leaves it to those that are trusted
    return auto.from_config(copy.deepcopy(config), dtype=torch.float32, **options).train()


def _vocabulary(config: Any) -> int:
    return int(config.get_text_config(decoder=True).vocab_size)
