"""Runs inside vLLM's worker processes: makes it report log softmax(z / T) over the whole vocabulary.

Of vLLM's logprobs_modes, "raw_logprobs" is log softmax(z) at any temperature, and "processed_logprobs" is
renormalized over the top-k / top-p set; a trainer can compute neither if both temperature and truncation are on.
"processed_logits" reports what the sampler draws from: the logits after temperature and truncation, where truncation
sets the dropped tokens to -inf and leaves the others unchanged. Shifting a row by a constant changes neither
the draw nor the kept set. So these processors shift each row so that its logits are log probabilities, once before
the temperature (the only one vLLM applies to a batch of greedy requests, whose temperature counts as 1) and once after it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor


class _Normalizer(LogitsProcessor):
    """log_softmax of each row; independent of the request's options."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits [B, V] to log probabilities."""
        return logits.log_softmax(dim=-1)

    def update_state(self, batch_update: Any) -> None:
        """There is no state."""


class BeforeTemperature(_Normalizer):
    """vLLM applies processors that may change the argmax before the temperature, and to greedy requests too."""

    def is_argmax_invariant(self) -> bool:
        """False although it never changes the argmax, because the answer decides when vLLM applies it."""
        return False


class AfterTemperature(_Normalizer):
    """vLLM applies processors that keep the argmax between the temperature and the truncation."""

    def is_argmax_invariant(self) -> bool:
        return True
