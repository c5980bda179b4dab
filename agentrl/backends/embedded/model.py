"""The embedded engine's model: loading, checking that slot attention reproduces it, the forward pass, new weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.backends.adapters import apply_adapter
from agentrl.backends.embedded import attention
from agentrl.backends.embedded.attention import AttentionPlan, Span
from agentrl.backends.embedded.kv_cache import KvShape, Slots
from agentrl.backends.parameters import Arrivals, expected_parameters
from agentrl.errors import ModelError
from agentrl.weights.target import Adapter

# Allowed difference between the logits of the model's own attention and of ours on the probe tokens: its norm, as a part of the
# norm of what a position's logits differ among themselves. Not the largest difference: over a vocabulary of 150,000 in bfloat16,
# in which logits of 30 resolve 0.125, it exceeds 0.25 between two right kernels.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


@dataclass(frozen=True, slots=True)
class Writing:
    """A write of new weights in progress; `arrivals.complete()` ends it."""

    weights: dict[str, Tensor]
    arrivals: Arrivals

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            target = self.weights[self.arrivals.check(name, tuple(tensor.shape))]
            with torch.no_grad():
                target.copy_(tensor)


class EmbeddedModel:
    """A causal language model that runs over cache slots."""

    def __init__(self, path: str, dtype: str, device: torch.device) -> None:
        """Raises ModelError if the folder cannot be loaded or the model's attention cannot be reproduced."""
        self.device = device
        self.module = _load(path, getattr(torch, dtype), device)
        text = self.module.config.get_text_config()
        heads = getattr(text, "num_attention_heads", None)
        if not isinstance(heads, int):
            raise ModelError(f"{path} has no attention heads that a KV cache could serve; use engine = vllm")
        self._expected = expected_parameters(path)
        self.vocab, self.positions = self._expected.vocab, self._expected.positions
        self.shape = KvShape(
            layers=text.num_hidden_layers,
            heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            dtype=getattr(torch, dtype),
            device=device,
        )
        self._base: dict[str, Tensor] = {}
        self._check(path)

    @torch.inference_mode()
    def forward(self, token_ids: list[int], plan: AttentionPlan, last: list[int]) -> Tensor:
        """Float32 logits [len(last), V] after the flat tokens at the indices `last`."""
        positions = torch.cat([span.positions for span in plan.spans])
        output = self.module(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(last, device=self.device),
            slot_plan=plan,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    def begin_write(self) -> Writing:
        """Start to receive new weights, one bucket at a time."""
        self._base.clear()
        return Writing(self.module.state_dict(), Arrivals(self._expected))

    def unload(self) -> None:
        """Free the parameters' memory, and on a GPU whatever this process has freed before."""
        self._base.clear()
        for parameter in self.module.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)
        # Without it, the memory is free for this process alone: a trainer in another one would not get it. Does nothing without
        # CUDA.
        torch.cuda.empty_cache()

    def allocate(self) -> None:
        """Allocate the parameters' memory again, uninitialized."""
        for name, parameter in self.module.named_parameters():
            parameter.data = torch.empty(self._expected.shapes[name], dtype=self.shape.dtype, device=self.device)

    def adapt(self, adapter: Adapter) -> None:
        """Apply a low-rank adapter to the weights as last written, replacing the previous adapter. Raises EngineError
        if it does not fit; nothing is changed then."""
        apply_adapter(dict(self.module.named_parameters()), self._base, adapter)

    @torch.inference_mode()
    def _check(self, path: str) -> None:
        """Compare our attention with the model's own on a few tokens, prefill and decode: a model with state
        or masks that a KV cache does not hold (recurrent layers, attention sinks) fails here, not in training."""
        ids = [(7 * i + 3) % self.vocab for i in range(9)]
        reference = self.module(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()
        try:
            self.module.set_attn_implementation(attention.NAME)
        except ValueError as problem:
            raise ModelError(f"the embedded engine cannot run {path}: {problem}; use engine = vllm") from None
        slots = Slots(self.shape, 16, 2**40)
        sequence = slots.new("probe", ids)
        if sequence is None:
            raise ModelError("no memory for a probe of 9 tokens")
        rows = []
        for count in (len(ids) - 1, 1):
            plan = AttentionPlan([Span(sequence.pool, 0, [(sequence, count)], self.device)])
            chunk = ids[sequence.computed : sequence.computed + count]
            rows.append(self.forward(chunk, plan, list(range(count))))
            sequence.computed += count
        centered = [logits - logits.mean(-1, keepdim=True) for logits in (torch.cat(rows), reference)]
        error = ((centered[0] - centered[1]).norm() / centered[1].norm()).item()
        # Not `error > ...`: NaN must fail too.
        if not error <= _TOLERANCE[self.shape.dtype]:
            raise ModelError(
                f"the embedded engine does not reproduce {path} (its logits are off by {error:.2g} of "
                f"what they differ among themselves): its layers keep state that a KV cache does not hold; use engine = vllm"
            )


def _load(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).expanduser().is_dir():
        raise ModelError(f"no model folder at {path}")
    try:
        module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as problem:
        raise ModelError(f"cannot load the model {path}: {problem}") from problem
    attention.register_slot_attention()
    module = module.to(device).eval().requires_grad_(False)
    for parameter in module.parameters():
        # A loaded parameter is a slice of the memory-mapped file at any alignment, and how the product of a single token
        # rounds depends on the alignment. Memory that torch allocates starts at a multiple of 64 bytes, as after a sleep.
        parameter.data = parameter.data.clone()
    return module
