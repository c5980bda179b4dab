"""Runs inside vLLM's worker processes: makes it report log softmax(z / T) over the whole vocabulary.

Of vLLM's logprobs_modes, "raw_logprobs" is log softmax(z) at any temperature, and "processed_logprobs" is
renormalized over the top-k / top-p set; a trainer can compute neither if both temperature and truncation are on.
"processed_logits" reports what the sampler draws from: the logits after temperature and truncation, where truncation
sets the dropped tokens to -inf and leaves the others unchanged. Shifting a row by a constant changes neither
the draw nor the kept set. So these processors shift each row so that its logits are log probabilities: after the temperature,
and if there are greedy requests before it too (the only one of a batch of nothing else; their temperature counts as 1).

Ids without a token must not be drawn, and their probability still counts: the last shift of a row drops them after it. So it
is with tokens that a request's grammar does not take. (vLLM's own structured outputs mask the logits before any processor, which
would renormalize the log probabilities, and need a tokenizer in its front end.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from agentrl.engines.token_text import Constraint, Words
from agentrl.engines.vllm.options import GRAMMAR, UNUSED_IDS
from agentrl.rollout.engine import Sampling

GREEDY = 1e-5
"""vLLM takes requests with a lower temperature for greedy ones."""


@dataclass(eq=False, slots=True)
class _Bound:
    """A request's grammar, and its tokens, a list that vLLM appends to; `taken` of them have been taken by the grammar."""

    constraint: Constraint
    sampled: list[int]
    taken: int = 0

    def mask(self) -> torch.Tensor:
        """Mask [V] of what may be drawn next."""
        for number in self.sampled[self.taken :]:
            self.constraint.take(number)
        self.taken = len(self.sampled)
        return torch.from_numpy(self.constraint.mask())


class _Normalizer(LogitsProcessor):
    """log_softmax of each row. It knows which rows are greedy: those have only the shift before the temperature. `greedy`:
    whether it restricts those by grammars, or the others."""

    greedy = False

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        unused = (vllm_config.additional_config or {}).get(UNUSED_IDS)
        self._unused = None if not unused else torch.tensor(unused, device=device)
        self._greedy: dict[int, bool] = {}
        model = vllm_config.model_config
        self._words, self._vocab = Words(model.model, trust=model.trust_remote_code), model.get_vocab_size()
        self._bound: dict[int, _Bound] = {}

    def is_argmax_invariant(self) -> bool:
        """The argmax never changes; the answer decides when vLLM applies the processor, and to which requests."""
        return not self.greedy

    def update_state(self, batch_update: Any) -> None:
        """Set the greedy rows of the batch, and the rows that have a grammar."""
        process_dict_updates(self._bound, batch_update, self._bind)
        process_dict_updates(self._greedy, batch_update, lambda params, *_: True if params.temperature < GREEDY else None)

    def _bind(self, params: Any, prompt: list[int] | None, sampled: list[int]) -> _Bound | None:
        extra = params.extra_args or {}
        if GRAMMAR not in extra or (params.temperature < GREEDY) != self.greedy:
            return None
        sampling = Sampling(1, stop_token_ids=tuple(params.stop_token_ids or ()), grammar=extra[GRAMMAR])
        constraint = self._words.constraint(sampling, self._vocab)
        return None if constraint is None else _Bound(constraint, sampled)

    def _fitting(self, found: torch.Tensor) -> torch.Tensor:
        """The rows without what their grammars do not take."""
        for row, bound in self._bound.items():
            if row < len(found):
                mask = bound.mask().to(found.device)
                found[row, : len(mask)].masked_fill_(~mask, float("-inf"))
        return found

    def _rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask [B, 1] of the greedy rows."""
        rows = torch.zeros(len(logits), 1, dtype=torch.bool)
        rows[[row for row in self._greedy if row < len(rows)]] = True
        return rows.to(logits.device)


class BeforeTemperature(_Normalizer):
    """vLLM applies processors that may change the argmax before the temperature, and to greedy requests too."""

    greedy = True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits [B, V] to log probabilities if a row is greedy; of greedy rows those without a token are dropped."""
        if not self._greedy:  # the shift after the temperature does: a pass over the vocabulary less in each step
            return logits
        found = logits.log_softmax(dim=-1)
        if self._unused is not None:
            found = torch.where(self._rows(found), found.index_fill(1, self._unused, float("-inf")), found)
        return self._fitting(found)


class AfterTemperature(_Normalizer):
    """vLLM applies processors that keep the argmax between the temperature and the truncation."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits [B, V] to log probabilities, without those that have no token; greedy rows are so already."""
        found = logits.log_softmax(dim=-1)
        if self._unused is not None:
            found = found.index_fill(1, self._unused, float("-inf"))
        if self._greedy:
            found = torch.where(self._rows(found), logits, found)
        return self._fitting(found)
