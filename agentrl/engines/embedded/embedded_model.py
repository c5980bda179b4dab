"""Model of the embedded engine: loading, the check of slot attention, and the forward pass.

Models without a usable cache, and models that take images, recompute each prefix."""

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
from agentrl.utils.threads import setting

# With cache slots

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types, as in configs, whose only state of earlier tokens is keys and values."""
# Allowed difference between the logits of eager attention and of slot attention at each position of the probe: its norm relative
# to the norm of the position's centered logits. Not the maximum: over a vocabulary of 150,000 in bfloat16, in which logits of 30
# resolve 0.125, it exceeds 0.25 between two correct kernels.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}

SHAPES = "agentrl_shapes"
"""Name in transformers of an attention function that only records its arguments' shapes."""
CACHE_ADVICE = "use engine = vllm, or engine_args = { cache = false }, with which each token costs a pass over its whole prefix"


class EmbeddedModel:
    """Causal language model that runs over cache slots. `never_drawn`: ids that a policy must not sample."""

    never_drawn: tuple[int, ...] = ()

    def __init__(self, path: str, dtype: str, device: torch.device, trust: bool = False, router_replay: bool = False) -> None:
        """`trust`: allow the model's own code to run. `router_replay`: record which experts tokens go to.

        Raises ModelError if the folder cannot be loaded, or if the model's attention cannot be reproduced or its experts
        recorded."""
        self.device = device
        self.module = load(path, getattr(torch, dtype), device, trust)
        self.expected = expected_parameters(path, trust=trust)
        self.vocab, self.positions = self.expected.vocab, self.expected.positions
        self.base: dict[str, Tensor] = {}
        """Original weights of the layers that an adapter has changed."""
        self.experts: npt.NDArray[Any] | None = None
        """Experts of the last pass's tokens, [tokens, routers, k]; None if not recorded."""
        self._watch = router_code().watch(self.module) if router_replay else None
        try:
            self._check(getattr(torch, dtype))
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # any error of the family's code
            for name, weight in self.module.named_parameters():
                if not weight.isfinite().all():
                    fix = "Fetch the model again, or take an earlier checkpoint"
                    raise ModelError(f"{path}: its weight {name} has numbers that are not finite. {fix}") from None
            raise ModelError(f"the embedded engine cannot run {path}: {problem}; {CACHE_ADVICE}") from problem

    @torch.inference_mode()
    def forward(self, token_ids: list[int], spans: Sequence[Span], last: list[int]) -> Tensor:
        """Return float32 logits [len(last), V] after the flat tokens at the indices `last`."""
        with setting(attention.SPANS, spans), nullcontext() if self._watch is None else self._watch.watching():
            output = self.module(
                input_ids=torch.tensor([token_ids], device=self.device),
                position_ids=torch.cat([span.positions for span in spans]).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor(last, device=self.device),
            )
        self.experts = None if self._watch is None else self._watch.experts()
        logits: Tensor = output.logits[0].float()
        return logits

    def prompt(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Return a prompt's tokens as stored in the cache. Raises EngineError for images that do not fit the model or prompt."""
        if images:
            raise EngineError(f"a prompt with {len(images)} images for a model of text")
        return list(token_ids)

    def drop_images(self) -> None:
        """Drop cached images; called when no stored prompt has any."""
        return None

    @torch.inference_mode()
    def _check(self, dtype: torch.dtype) -> None:
        """Compare slot attention with eager attention on a few tokens, in prefill and decode. So a model with state outside of a
        KV cache (recurrent layers, convolutions) fails here, not in training."""
        ids = [(7 * i + 3) % self.vocab for i in range(9)]
        given = torch.tensor([ids], device=self.device)
        # Not torch's SDPA, the default of models, which has neither sinks nor caps.
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
        """Determine the cache's shape from the arguments of the layers' attention function, since configs name it in many ways,
        and for latent attention in none."""
        found: dict[int, tuple[int, int, int]] = {}

        def note(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            found[module.layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

        AttentionInterface.register(SHAPES, note)
        self.module.set_attn_implementation(SHAPES)
        self.module(input_ids=ids, use_cache=False)
        self.module.set_attn_implementation(attention.NAME)
        # The numeric check would miss state with a small effect, such as an untrained convolution's.
        text = self.module.config.get_text_config()
        others = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENDING)
        layers = getattr(text, "num_hidden_layers", len(found))
        if others or len(found) != layers:
            kinds = f" (its layers are of the types {', '.join(others)})" if others else ""
            raise ModelError(f"{len(found)} of its {layers} layers attend over keys that a KV cache could hold{kinds}")
        heads, keys, values = (max(sizes) for sizes in zip(*found.values(), strict=True))
        return KvShape(max(found) + 1, heads, max(keys, values), dtype, self.device)


def load(path: str, dtype: torch.dtype, device: torch.device, trust: bool) -> Any:
    """Load a model onto the device, frozen and in evaluation mode. Raises ModelError."""
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
        # A loaded parameter is a slice of the memory-mapped file at any alignment, on which the rounding of a single token's
        # product depends. Memory that torch allocates is aligned to 64 bytes, as after a sleep.
        parameter.data = parameter.data.clone()
    return module


# Without a cache


class RecomputedModel(EmbeddedModel):
    """Causal language model that recomputes the whole sequence for each token."""

    def __init__(self, path: str, dtype: str, device: torch.device, trust: bool = False, router_replay: bool = False) -> None:
        """Raises ModelError if the folder cannot be loaded, or for `router_replay`."""
        if router_replay:
            raise ModelError("rollout.router_replay: experts are not recorded without a cache. Unset it, or engine_args.cache")
        super().__init__(path, dtype, device, trust)

    def _check(self, dtype: torch.dtype) -> None:
        # Eager, the reference of every family: transformers' other functions leave out the caps of some.
        self.module.set_attn_implementation("eager")
        # The cache holds one number per token, its id: float32 is exact up to 2^24.
        self.shape = KvShape(layers=1, heads=1, head_dim=1, dtype=torch.float32, device=self.device)

    @torch.inference_mode()
    def forward(self, token_ids: list[int], spans: Sequence[Span], last: list[int]) -> Tensor:
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
        """Return float32 logits [V] after the ids [T]."""
        logits: Tensor = self.module(input_ids=ids[None], use_cache=False).logits[0, -1]
        return logits.float()
