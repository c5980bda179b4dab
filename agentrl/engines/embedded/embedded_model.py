"""The model of the embedded engine: loading, the check that slot attention reproduces it, the forward pass, new weights.

Models without a usable cache and models that take images recompute each prefix."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface

from agentrl.data.expert_routing import router_code
from agentrl.data.images import Image
from agentrl.engines.embedded import kv_cache as attention
from agentrl.engines.embedded.kv_cache import CachedSequence, KvShape, Slots, Span
from agentrl.engines.weights.parameters import expected_parameters
from agentrl.render.modality import auto_class
from agentrl.utils.errors import EngineError, ModelError

# With cache slots

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers, as configs name them, that keep nothing of earlier tokens but keys and values."""
# Allowed difference between the logits of the model's own attention and of ours at each of the probe's positions: its norm, as a
# part of the norm of what the position's logits differ among themselves. Not the largest difference: over a vocabulary of
# 150,000 in bfloat16, in which logits of 30 resolve 0.125, it exceeds 0.25 between two right kernels.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}

SHAPES = "agentrl_shapes"
"""transformers' name of an attention that computes nothing, but notes what layers hand to it."""
INSTEAD = "use engine = vllm, or engine_args = { cache = false }, with which each token costs a pass over its whole prefix"


class EmbeddedModel:
    """A causal language model that runs over cache slots. `never_drawn`: ids that a policy must not sample."""

    never_drawn: tuple[int, ...] = ()

    def __init__(self, path: str, dtype: str, device: torch.device, trust: bool = False, router_replay: bool = False) -> None:
        """`trust`: code of the model's own may run. `router_replay`: note which experts tokens go to.

        Raises ModelError if the folder cannot be loaded, the model's attention cannot be reproduced, or its experts cannot be
        noted."""
        self.device = device
        self.module = load(path, getattr(torch, dtype), device, trust)
        self.expected = expected_parameters(path, trust=trust)
        self.vocab, self.positions = self.expected.vocab, self.expected.positions
        self.base: dict[str, Tensor] = {}
        """Weights of the layers that an adapter has changed, without it."""
        self.experts: npt.NDArray[Any] | None = None
        """Those of the tokens of the last pass, [tokens, routers, k]; None if they are not noted."""
        self._watch = router_code().watch(self.module) if router_replay else None
        try:
            self._check(getattr(torch, dtype))
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # whatever the family's own code raises
            for name, weight in self.module.named_parameters():
                if not weight.isfinite().all():
                    fix = "Fetch the model again, or take an earlier checkpoint"
                    raise ModelError(f"{path}: its weight {name} has numbers that are not finite. {fix}") from None
            raise ModelError(f"the embedded engine cannot run {path}: {problem}; {INSTEAD}") from problem

    @torch.inference_mode()
    def forward(self, token_ids: list[int], spans: Sequence[Span], last: list[int]) -> Tensor:
        """Float32 logits [len(last), V] after the flat tokens at the indices `last`."""
        under_way = attention.SPANS.set(spans)
        try:
            with nullcontext() if self._watch is None else self._watch.watching():
                output = self.module(
                    input_ids=torch.tensor([token_ids], device=self.device),
                    position_ids=torch.cat([span.positions for span in spans]).unsqueeze(0),
                    use_cache=False,
                    logits_to_keep=torch.tensor(last, device=self.device),
                )
        finally:
            attention.SPANS.reset(under_way)
        self.experts = None if self._watch is None else self._watch.experts()
        logits: Tensor = output.logits[0].float()
        return logits

    def prompt(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """A prompt as its tokens are kept here. Raises EngineError for images, or for a prompt that is not as its images are."""
        if images:
            raise EngineError(f"a prompt with {len(images)} images for a model of text")
        return list(token_ids)

    def drop_images(self) -> None:
        """Nothing that is kept has images any more."""
        return None

    @torch.inference_mode()
    def _check(self, dtype: torch.dtype) -> None:
        """Compare our attention with the model's own on a few tokens, prefill and decode: a model with state
        that a KV cache does not hold (recurrent layers, convolutions) fails here, not in training."""
        ids = [(7 * i + 3) % self.vocab for i in range(9)]
        given = torch.tensor([ids], device=self.device)
        # Not torch's attention, which is a model's default and knows neither sinks nor caps.
        self.module.set_attn_implementation("eager")
        reference = self.module(input_ids=given, use_cache=False).logits[0].float()
        self.shape = self._cache_shape(given, dtype)
        slots = Slots(self.shape, 16, 2**40)
        room = slots.take(len(ids))
        assert room is not None, "the limit is far above what a probe takes"
        sequence, rows = CachedSequence("probe", ids, *room), []
        for count in (len(ids) - 2, 1, 1):
            span = Span(0, [sequence], [count], self.device)
            chunk = ids[sequence.computed : sequence.computed + count]
            rows.append(self.forward(chunk, [span], list(range(count))))
            sequence.computed += count
        centered = [logits - logits.mean(-1, keepdim=True) for logits in (torch.cat(rows), reference)]
        error = ((centered[0] - centered[1]).norm(dim=-1) / centered[1].norm(dim=-1)).max().item()
        # Not `error > ...`: NaN must fail too.
        if not error <= _TOLERANCE[self.shape.dtype]:
            raise ModelError(
                f"its slot attention does not reproduce the model's own (logits are off by {error:.2g} of what they differ among "
                f"themselves): its layers keep state that a KV cache does not hold"
            )

    def _cache_shape(self, ids: Tensor, dtype: torch.dtype) -> KvShape:
        """Arguments that the layers hand to their attention function: configs name it in many ways, and latent attention in
        none."""
        found: dict[int, tuple[int, int, int]] = {}

        def note(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            found[module.layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

        AttentionInterface.register(SHAPES, note)
        self.module.set_attn_implementation(SHAPES)
        self.module(input_ids=ids, use_cache=False)
        self.module.set_attn_implementation(attention.NAME)
        # The check of numbers alone would not see state that changes them little, as that of an untrained convolution.
        text = self.module.config.get_text_config()
        others = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENDING)
        layers = getattr(text, "num_hidden_layers", len(found))
        if others or len(found) != layers:
            kinds = f" (its layers are of the types {', '.join(others)})" if others else ""
            raise ModelError(f"{len(found)} of its {layers} layers attend over keys that a KV cache could hold{kinds}")
        heads, keys, values = (max(sizes) for sizes in zip(*found.values(), strict=True))
        return KvShape(max(found) + 1, heads, max(keys, values), dtype, self.device)


def load(path: str, dtype: torch.dtype, device: torch.device, trust: bool) -> Any:
    """The model in evaluation mode, frozen, on the device. Raises ModelError."""
    from transformers import AutoConfig

    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).expanduser().is_dir():
        raise ModelError(f"no model folder at {path}")
    try:
        kind = auto_class(AutoConfig.from_pretrained(path, trust_remote_code=trust))
        module = kind.from_pretrained(path, dtype=dtype, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as problem:
        raise ModelError(f"cannot load the model {path}: {problem}") from problem
    attention.register_slot_attention()
    module = module.to(device).eval().requires_grad_(False)
    for parameter in module.parameters():
        # A loaded parameter is a slice of the memory-mapped file at any alignment, and how the product of a single token
        # rounds depends on the alignment. Memory that torch allocates starts at a multiple of 64 bytes, as after a sleep.
        parameter.data = parameter.data.clone()
    return module


# Without a cache


class RecomputedModel(EmbeddedModel):
    """A causal language model that runs over whole sequences."""

    def __init__(self, path: str, dtype: str, device: torch.device, trust: bool = False, router_replay: bool = False) -> None:
        """Raises ModelError if the folder cannot be loaded, or experts are to be noted."""
        if router_replay:
            raise ModelError("rollout.router_replay: the experts of a prefix that is computed again for each token are not noted")
        super().__init__(path, dtype, device, trust)

    def _check(self, dtype: torch.dtype) -> None:
        # Eager, the reference of every family: some are computed without their caps by transformers' other functions.
        self.module.set_attn_implementation("eager")
        # One number a token, its id: float32 holds those up to 2^24.
        self.shape = KvShape(layers=1, heads=1, head_dim=1, dtype=torch.float32, device=self.device)

    @torch.inference_mode()
    def forward(self, token_ids: list[int], spans: Sequence[Span], last: list[int]) -> Tensor:
        """As EmbeddedModel's: float32 logits [len(last), V] after the flat tokens at the indices `last`."""
        ids = torch.tensor(token_ids, dtype=torch.float32, device=self.device)
        found = {}
        for span in spans:
            held = span.pool.kv[0, 0, :, 0, :, 0]
            held[span.token_slots, span.positions] = ids[span.offset : span.offset + span.tokens]
            for place in last:
                if 0 <= (at := place - span.offset) < span.tokens:
                    found[place] = self.after(held[span.token_slots[at], : int(span.positions[at]) + 1].long())
        return torch.stack([found[place] for place in last])

    def after(self, ids: Tensor) -> Tensor:
        """Float32 logits [V] after the ids [T]."""
        logits: Tensor = self.module(input_ids=ids[None], use_cache=False).logits[0, -1]
        return logits.float()
