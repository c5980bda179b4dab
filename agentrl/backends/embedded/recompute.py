"""The embedded engine without a cache: every sampled token costs a pass over its whole prefix, by the model's own code.

For families whose layers keep what no KV cache holds (recurrent states, convolutions), and for comparisons: what is sampled is
what transformers alone computes. A slot holds a sequence's token ids in the place of its keys and values, so that batching,
prefixes and evictions are those of the engine with a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.backends.embedded.attention import AttentionPlan, Span
from agentrl.backends.embedded.kv_cache import KvShape
from agentrl.backends.embedded.model import EmbeddedModel, load
from agentrl.backends.parameters import expected_parameters
from agentrl.errors import ModelError


class RecomputedModel(EmbeddedModel):
    """A causal language model that runs over whole sequences."""

    def __init__(self, path: str, dtype: str, device: torch.device, trust: bool = False, router_replay: bool = False) -> None:
        """Raises ModelError if the folder cannot be loaded, or experts are to be noted."""
        if router_replay:
            raise ModelError("rollout.router_replay: the experts of a prefix that is computed again for each token are not noted")
        self.device = device
        # Eager, the reference of every family: some are computed without their caps by transformers' other functions.
        self.module = load(path, getattr(torch, dtype), device, trust)
        self.module.set_attn_implementation("eager")
        self._expected = expected_parameters(path, trust=trust)
        self.vocab, self.positions = self._expected.vocab, self._expected.positions
        # One number a token, its id: float32 holds those up to 2^24.
        self.shape = KvShape(layers=1, heads=1, head_dim=1, dtype=torch.float32, device=device)
        self._base: dict[str, Tensor] = {}
        self._watch = None

    def allocate(self) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.data = torch.empty(self._expected.shapes[name], dtype=self.module.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, token_ids: list[int], plan: AttentionPlan, last: list[int]) -> Tensor:
        """As EmbeddedModel's: float32 logits [len(last), V] after the flat tokens at the indices `last`."""
        ids = torch.tensor(token_ids, dtype=torch.float32, device=self.device)
        wanted, found = set(last), {}
        for span in plan.spans:
            held = span.pool.kv[0, 0, :, 0, :, 0]
            held[span.token_slots, span.positions] = ids[span.offset : span.offset + span.tokens]
            for place in _ends(span):
                if place in wanted:
                    slot, stop = span.token_slots[place - span.offset], int(span.positions[place - span.offset]) + 1
                    found[place] = self.after(held[slot, :stop].long())
        return torch.stack([found[place] for place in last])

    def after(self, ids: Tensor) -> Tensor:
        """Float32 logits [V] after the ids [T]."""
        logits: Tensor = self.module(input_ids=ids[None], use_cache=False).logits[0, -1]
        return logits.float()


def _ends(span: Span) -> list[int]:
    """The flat index of the last token of each of a span's sequences."""
    slots = span.token_slots
    final = torch.ones(len(slots), dtype=torch.bool)
    final[:-1] = (slots[1:] != slots[:-1]).cpu()
    ends: list[int] = (final.nonzero().squeeze(1) + span.offset).tolist()
    return ends
