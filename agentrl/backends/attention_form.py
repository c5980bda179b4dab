"""What a layer of a transformers model asks of its attention function, in one form for the trainer and the embedded engine.

A layer says it by keyword arguments, by attributes and by its config; what is here is read from the modeling files of
transformers 5.19. Whatever else a layer asks for is refused by name: swallowed, it would be a wrong result without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ModelError

_ROWS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Where packed rows end, which the attention functions here know from plans of their own."""
_RETURNS = ("output_attentions", "output_hidden_states", "output_router_logits", "use_cache", "cache_position")
"""What a model is to return or keep."""
HARMLESS = frozenset({*_ROWS, *_RETURNS, "num_items_in_batch", "deterministic"})  # of a loss and a kernel that are not used
"""Arguments that reach attention functions and change no result."""


class NotGiven:
    """In place of an argument that a layer may leave out, which is not the same as None."""


NOT_GIVEN = NotGiven()


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """softmax over the keys that a query sees of cap tanh(scale q k / cap), without a cap of scale q k.

    A query sees the keys up to its own position: with a `window` w the last w of them, with a `chunk` c those of its own run of
    c positions. `sinks` [H]: a score for each head that takes part in the softmax and has no value. `tuning`: see `at_positions`.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    tuning: tuple[float, float] | None = None

    def at_positions(self, query: Tensor, positions: Tensor) -> Tensor:
        """`query` [T, H, D], with the scales of their positions if those are others than of their places 0, 1, ... in it.

        Llama 4 multiplies the queries of layers without rotary embeddings by s(i) = 1 + a log(1 + floor((i + 1) / f)), i being
        a token's place in the input: of several rows only the first one's are then right."""
        if self.tuning is None:
            return query
        floor, factor = self.tuning
        places = torch.arange(len(query), device=query.device)
        right, given = (1 + factor * torch.log1p(torch.floor((at.double() + 1) / floor)) for at in (positions, places))
        return query * (right / given).to(query.dtype)[:, None, None]

    def plain_up_to(self, length: int) -> bool:
        """Whether it is plain causal attention for rows of so many tokens, but for the scale."""
        # A window that no row exceeds hides nothing.
        return self.cap is None and self.sinks is None and (self.window is None or self.window >= length)


def attention_form(
    module: nn.Module,
    query: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    sliding_window: int | NotGiven | None,
    others: Mapping[str, Any],
) -> AttentionForm:
    """The form for `module`, a layer's attention, from the arguments of an attention function of transformers.

    `query` [1, H, T, D]. Raises ModelError, which names the layer's class and the argument, for what has no place in the form.
    """
    asked = {name: value for name, value in others.items() if value is not None and name not in HARMLESS}
    layer, sinks, cap = type(module).__name__, asked.pop("s_aux", None), asked.pop("softcap", None)
    if dropout:
        raise ModelError(f"{layer}: dropout in attention is not supported; set attention_dropout to 0 in its config.json")
    if mask is not None:
        raise ModelError(f"{layer}: its model makes an attention mask of its own, which is not supported")
    if not asked.pop("is_causal", True) or not getattr(module, "is_causal", True):
        raise ModelError(f"{layer}: its attention is not causal, which is not supported")
    if asked:
        raise ModelError(f"{layer}: attention with {', '.join(sorted(asked))} is not supported")
    kind = _kind(module)
    return AttentionForm(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=_window(module, kind, sliding_window),
        chunk=_chunk(module, kind),
        cap=cap,
        sinks=sinks,
        tuning=_tuning(module),
    )


def _tuning(module: nn.Module) -> tuple[float, float] | None:
    asked = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    return (float(module.floor_scale), float(module.attn_scale)) if asked else None  # type: ignore[arg-type]


def _kind(module: nn.Module) -> str | None:
    kinds, at = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[at] if kinds is not None and at is not None and at < len(kinds) else None


def _window(module: nn.Module, kind: str | None, given: int | NotGiven | None) -> int | None:
    if isinstance(given, NotGiven):
        # Some families (Phi-3.5-MoE, Doge, Qwen2-MoE) put the window only into the mask that they have transformers make.
        of_config = getattr(getattr(module, "config", None), "sliding_window", None)
        given = getattr(module, "sliding_window", of_config if kind in (None, "sliding_attention") else None)
    return int(given) if given else None


def _chunk(module: nn.Module, kind: str | None) -> int | None:
    """Llama 4's layers say it by their type alone."""
    return int(module.config.attention_chunk_size) if kind == "chunked_attention" else None  # type: ignore[union-attr, arg-type]
