"""Runs in vLLM's worker processes: makes vLLM report log softmax(z / T) over the whole vocabulary.

Of vLLM's logprobs_modes, "raw_logprobs" is log softmax(z) at any temperature, and "processed_logprobs" is renormalized over the
top-k / top-p set; a trainer can use neither if both temperature and truncation are on. "processed_logits" reports the logits that
the sampler draws from, after temperature and truncation; truncation sets dropped tokens to -inf and leaves the others unchanged.
Shifting a row by a constant changes neither the draw nor the kept set. So these processors shift each row until its logits are
log probabilities: after the temperature, and, if there are greedy requests, also before it (the only shift in an all-greedy
batch; their temperature counts as 1).

Ids without a token must not be drawn, but their probability still counts: they are dropped after the last shift of a row, and so
are tokens that a request's grammar rejects. (vLLM's structured outputs mask the logits before any processor, which would
renormalize the log probabilities, and need a tokenizer in its front end.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from agentrl.engines.token_text import Constraint, LazyTokenizer
from agentrl.engines.vllm.options import GRAMMAR, UNUSED_IDS
from agentrl.rollout.engine import Sampling

GREEDY = 1e-5
"""vLLM treats requests with a lower temperature as greedy."""


@dataclass(eq=False, slots=True)
class _ActiveGrammar:
    """Grammar of a request, and its tokens, a list that vLLM appends to; the grammar has consumed `taken` of them."""

    constraint: Constraint
    sampled: list[int]
    taken: int = 0

    def mask(self) -> torch.Tensor:
        """Return the mask [V] of the tokens allowed next."""
        for number in self.sampled[self.taken :]:
            self.constraint.take(number)
        self.taken = len(self.sampled)
        return torch.from_numpy(self.constraint.mask())


class _Normalizer(LogitsProcessor):
    """Applies log_softmax to each row. Greedy rows are only shifted before the temperature. `greedy`: whether this processor
    applies the grammars of greedy requests or of the others."""

    greedy = False

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        unused = (vllm_config.additional_config or {}).get(UNUSED_IDS)
        self._unused = None if not unused else torch.tensor(unused, device=device)
        self._greedy: dict[int, bool] = {}
        model = vllm_config.model_config
        self._words, self._vocab = LazyTokenizer(model.model, trust=model.trust_remote_code), model.get_vocab_size()
        self._grammars: dict[int, _ActiveGrammar] = {}

    def is_argmax_invariant(self) -> bool:
        """Decide when vLLM applies the processor, and to which requests; in fact neither changes the argmax."""
        return not self.greedy

    def update_state(self, batch_update: Any) -> None:
        """Update the batch's greedy rows and its rows with a grammar."""
        process_dict_updates(self._grammars, batch_update, self._start_grammar)
        process_dict_updates(self._greedy, batch_update, lambda params, *_: True if params.temperature < GREEDY else None)

    def _start_grammar(self, params: Any, prompt: list[int] | None, sampled: list[int]) -> _ActiveGrammar | None:
        extra = params.extra_args or {}
        if GRAMMAR not in extra or (params.temperature < GREEDY) != self.greedy:
            return None
        sampling = Sampling(1, stop_token_ids=tuple(params.stop_token_ids or ()), grammar=extra[GRAMMAR])
        constraint = self._words.constraint(sampling, self._vocab)
        return None if constraint is None else _ActiveGrammar(constraint, sampled)

    def _mask_rows(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Drop the tokens that the rows' grammars reject."""
        for row, active in self._grammars.items():
            if row < len(logprobs):
                mask = active.mask().to(logprobs.device)
                logprobs[row, : len(mask)].masked_fill_(~mask, float("-inf"))
        return logprobs

    def _rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the mask [B, 1] of the greedy rows."""
        rows = torch.zeros(len(logits), 1, dtype=torch.bool)
        rows[[row for row in self._greedy if row < len(rows)]] = True
        return rows.to(logits.device)


class BeforeTemperature(_Normalizer):
    """Processor before the temperature, where vLLM applies those that may change the argmax, also to greedy requests."""

    greedy = True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn float32 logits [B, V] into log probabilities if any row is greedy; in greedy rows, drop ids without a token."""
        if not self._greedy:  # the shift after the temperature suffices: saves a pass over the vocabulary per step
            return logits
        logprobs = logits.log_softmax(dim=-1)
        if self._unused is not None:
            logprobs = torch.where(self._rows(logprobs), logprobs.index_fill(1, self._unused, float("-inf")), logprobs)
        return self._mask_rows(logprobs)


class AfterTemperature(_Normalizer):
    """Processor between temperature and truncation, where vLLM applies those that keep the argmax."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn float32 logits [B, V] into log probabilities and drop ids without a token; greedy rows are done already."""
        logprobs = logits.log_softmax(dim=-1)
        if self._unused is not None:
            logprobs = logprobs.index_fill(1, self._unused, float("-inf"))
        if self._greedy:
            logprobs = torch.where(self._rows(logprobs), logits, logprobs)
        return self._mask_rows(logprobs)
