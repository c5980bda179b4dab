"""Continuous batching: token sampling, and the scheduling of requests and cache slots for each model step."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.engines.embedded.embedded_model import EmbeddedModel
from agentrl.engines.embedded.kv_cache import CachedSequence as Sequence
from agentrl.engines.embedded.kv_cache import PrefixIndex, Slots, Span, common_prefix
from agentrl.engines.token_text import DEAD_END, Constraint, StopStrings
from agentrl.rollout.engine import Finish, Generation, OnTokens, Sampling
from agentrl.utils.errors import EngineError

# Sampling


def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    unused: Tensor | None = None,
    fitting: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    `logits` [B, V] float32; `temperature` [B] (0: greedy), `top_k` [B] int (0: off), `top_p` [B] (1: off), `uniform` [B]
    float64 in [0, 1), `unused` [N]: ids without a token, `fitting` [B, V]: tokens allowed by the row's grammar. Returns ids [B]
    and logprobs [B].

    The logprob is the policy's (see `Generation`): `unused`, `fitting`, then top-k and top-p only restrict which tokens may be
    drawn, in proportion to their probability. A row's result depends on that row only.
    """
    greedy = temperature == 0
    logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature).unsqueeze(1), dim=-1)
    allowed = logp if unused is None else logp.index_fill(1, unused, float("-inf"))
    if fitting is not None:
        allowed = allowed.masked_fill(~fitting, float("-inf"))
        # Of tokens that are all this unlikely, exp would leave none. Other rows keep their bits.
        top = allowed.amax(dim=-1, keepdim=True)
        allowed = allowed - torch.where((top < -64) & top.isfinite(), top, 0.0)
    drawable = torch.exp(allowed)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        drawable.masked_fill_(~kept_set(allowed, top_k, top_p), 0.0)
    # float64, since a float32 sum over a vocabulary of 150k loses tokens of probability below 1e-7. Scaling the draw by `total`
    # renormalizes the kept set.
    cumulative = drawable.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    # Strictly below `total`, and `right=True`: a draw on a boundary never lands on a token of probability 0.
    ids = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    ids = torch.where(greedy, allowed.argmax(dim=-1), ids).clamp_(max=logits.shape[1] - 1)
    return ids, logp.gather(1, ids.unsqueeze(1)).squeeze(1)


def kept_set(logp: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the mask [B, V] of the tokens that may be drawn. Of the `top_k` most likely (and ties with the k-th), that is the
    smallest set whose renormalized probability reaches `top_p`, at least one."""
    vocab = logp.shape[1]
    ordered, order = logp.sort(dim=-1, descending=True)
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    kth = ordered.gather(1, (k - 1).unsqueeze(1))
    ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    probability = torch.softmax(ordered, dim=-1)
    before = probability.cumsum(dim=-1) - probability
    keep = (before < top_p.unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    keep[:, 0] = True
    keep &= ordered > float("-inf")
    return torch.zeros_like(keep).scatter_(1, order, keep)


# The scheduler


@dataclass(eq=False, slots=True)
class Request:
    """A running `generate` call. `tokens`: the prompt and the tokens sampled so far; `uniforms`: one random number per token that
    may be sampled. `experts`: of tokens whose cache was dropped, as first computed. `emit` receives each token as it is sampled;
    `stops`, `constraint`: stop strings and grammar of the turn's text."""

    key: str
    tokens: list[int]
    prompt: int
    sampling: Sampling
    uniforms: npt.NDArray[np.float64]
    done: asyncio.Future[Generation]
    sequence: Sequence | None = None
    admitted: bool = False
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[npt.NDArray[Any]] = field(default_factory=list)
    emit: OnTokens | None = None
    stops: StopStrings | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that a pass drew for the requests with complete prompts. `refused`: a request that does not fit in the cache."""

    ready: Seq[Request] = ()
    ids: Seq[int] = ()
    logprobs: Seq[float] = ()
    refused: Request | None = None


class Batcher:
    """Admission, prefix reuse, eviction and preemption over a fixed number of slots and bytes.

    `advance` may run in a thread; no other method may be called during it.
    """

    def __init__(self, model: EmbeddedModel, slots: Slots, max_slots: int, step_tokens: int, unused: list[int]) -> None:
        """`unused`: ids that must never be drawn."""
        self.version = 0
        self.cached_tokens = 0
        self.sampled_tokens = 0
        self.steps = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.idle: OrderedDict[str, Sequence] = OrderedDict()
        """Episode -> its cache, kept for the next turn; oldest first."""
        self.slots, self._model = slots, model
        self._max_slots, self._step_tokens = max_slots, step_tokens
        self._index = PrefixIndex()
        self._poisoned = False
        self._unused = torch.tensor(unused, device=model.device) if unused else None

    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def advance(self) -> Drawn:
        """Admit requests that fit, run the model once, and draw a token for each request with a complete prompt."""
        self._admit()
        # If nothing runs, nothing will free room, and the request would wait forever.
        refused = self.waiting[0] if self.waiting and not self.running else None
        # Group sequences of one pool with similar counts (up to the same power of two, which bounds padding).
        groups: dict[tuple[int, int], list[tuple[Request, Sequence, int]]] = {}
        for request, sequence, count in self._schedule():
            key = sequence.pool.capacity, (count - 1).bit_length()
            groups.setdefault(key, []).append((request, sequence, count))
        if not groups:
            return Drawn(refused=refused)
        token_ids: list[int] = []
        last: list[int] = []
        ready: list[Request] = []
        spans: list[Span] = []
        for group in groups.values():
            group.sort(key=lambda item: item[1].slot)
            _, sequences, counts = zip(*group, strict=True)
            spans.append(Span(len(token_ids), sequences, counts, self._model.device))
            for request, sequence, count in group:
                stop = sequence.computed + count
                token_ids += request.tokens[sequence.computed : stop]
                if stop == len(request.tokens):
                    ready.append(request)
                    last.append(len(token_ids) - 1)
        logits = self._model.forward(token_ids, spans, last or [0])
        experts = self._model.experts
        for _, sequence, count in chain.from_iterable(groups.values()):
            # Only after the pass: if it raises, the cache does not hold these tokens.
            sequence.computed += count
            if experts is not None:
                sequence.experts += list(experts[:count])
                experts = experts[count:]
        self.steps += 1
        ids, logprobs = self._draw(ready, logits) if ready else ([], [])
        return Drawn(ready, ids, logprobs, refused)

    def settle(self, drawn: Drawn) -> None:
        """Append each request's drawn token, and answer the requests whose turn has ended. Must run on the event loop."""
        for request in self.requests():
            if request.done.done():  # cancelled during the pass
                self.drop(request)
        if drawn.refused is not None:
            self.fail(drawn.refused, EngineError(f"{len(drawn.refused.tokens)} tokens do not fit in an empty KV cache"))
        for request, token, logprob in zip(drawn.ready, drawn.ids, drawn.logprobs, strict=True):
            if request.done.done():
                continue
            if not math.isfinite(logprob):
                # The cache now holds NaN, which would spread to later sequences in the slot; `reset` wipes it.
                self._poisoned = True
                self.fail(request, EngineError(f"the output of weights version {self.version} is not finite"))
                continue
            if (constraint := request.constraint) is not None and not constraint.take(token):
                self.fail(request, EngineError(DEAD_END))
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if request.emit is not None:
                request.emit([token], [logprob])
            full, ends = len(request.logprobs) == len(request.uniforms), request.sampling.stop_token_ids
            if token in ends:
                self.finish(request, "stop")
            elif request.stops is not None and request.stops.completes(token):
                self.finish(request, "stop_string")
            elif full or (constraint is not None and constraint.over and not ends):
                self.finish(request, "length")
        self.sampled_tokens += len(drawn.ready)

    def finish(self, request: Request, reason: Finish) -> None:
        """Answer a request with its sampled tokens, and keep its cache for the episode's next turn."""
        self.drop(request, keep=True)
        if request.done.done():
            return
        start, experts = request.sampling.experts_from, None
        if start is not None and start < len(request.experts):
            experts = np.stack(request.experts[start : len(request.tokens) - 1])
        sampled = request.tokens[request.prompt :]
        request.done.set_result(Generation(sampled, request.logprobs, request.versions, reason, experts=experts))

    def fail(self, request: Request, error: EngineError) -> None:
        self.drop(request)
        if not request.done.done():
            request.done.set_exception(error)

    def reset(self, free_memory: bool = False) -> None:
        """Drop all caches; running requests return to the queue, in order, and are recomputed from the start."""
        while self.running:
            self._preempt()
        self.idle.clear()
        self._index.clear()
        for pool in self.slots.pools:  # after a NaN, wipe the memory
            pool.clear(free_memory=self._poisoned or free_memory)
        self._poisoned = False

    def drop(self, request: Request, keep: bool = False) -> None:
        """Remove a request, and its cache unless `keep` for the episode's next turn."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        sequence, request.sequence = request.sequence, None
        if sequence is None:
            return
        # Stored, since recomputed tokens may go to other experts, and later tokens were sampled with these.
        request.experts += sequence.experts[len(request.experts) :]
        if keep and sequence.computed:
            older = self.idle.pop(request.key, None)
            if older is not None:
                self._release(older)
            self.idle[request.key] = sequence
        else:
            self._release(sequence)

    def _admit(self) -> None:
        for request in list(self.waiting):
            if len(self.running) >= self._max_slots:
                break
            sequence, deferred = self._attach(request)
            if sequence is None:
                if deferred:
                    continue
                break
            self.waiting.remove(request)  # not earlier: if the allocation of a slot fails, the request must still be answered
            request.sequence = sequence
            # Once per request, even if it is sent back to the queue.
            if not request.admitted:
                self.cached_tokens += sequence.computed
                request.admitted = True
            self.running.append(request)

    def _attach(self, request: Request) -> tuple[Sequence | None, bool]:
        """Find a slot for a request, with as much of its prompt cached as possible. Returns (None, True) if it should wait for
        another request that is computing the same prefix, (None, False) if there is no room."""
        tokens = request.tokens
        own = self.idle.pop(request.key, None)
        if own is not None:
            # Compare tokens: a context policy may have rewritten the episode's history at equal length. The last token is always
            # computed, since its logits are needed.
            own.computed = min(common_prefix(own.tokens, tokens), own.computed, len(tokens) - 1)
            del own.experts[own.computed :]
            if own.computed:
                own.tokens = tokens
                self._index.grow(own, own.computed)
                return own, False
            self._release(own)
        source, length, blocks = self._index.find(tokens)
        if source is not None and source.computed < length:
            # A running holder will soon have computed it, so waiting is cheaper than computing it twice. An idle one never will.
            if self.idle.get(source.key) is not source:
                return None, True
            length = source.computed
        # Room for the current tokens only, since most turns end early; `enlarge` moves the others.
        while len(self.running) + len(self.idle) >= self._max_slots or (room := self.slots.take(len(tokens))) is None:
            if not self._evict(spare=source):
                # As a last resort, evict the sequence whose cache was to be copied.
                if not self._evict():
                    return None, False
                source = None
        sequence = Sequence(request.key, tokens, *room, blocks=blocks, first=len(blocks))
        if source is not None:
            # A copy rather than shared pages, since decoding reads a slot's keys in place, as one block of memory.
            sequence.pool.kv[:, :, sequence.slot, :, :length] = source.pool.kv[:, :, source.slot, :, :length]
            sequence.computed, sequence.experts = length, source.experts[:length]
        for block in blocks:
            self._index.setdefault(block, sequence)
        return sequence, False

    def _schedule(self) -> Iterator[tuple[Request, Sequence, int]]:
        """Yield how many tokens each request computes in this step: one in decode, a share of the budget in prefill."""
        budget = self._step_tokens
        for request in list(self.running):
            # Let its cache grow: evict idle episodes, then send the youngest requests back to the queue, in the end even this
            # one.
            while (sequence := request.sequence) is not None and not self.slots.enlarge(sequence):
                if self._evict():
                    continue
                self._preempt()
            if sequence is None:
                continue
            due = len(request.tokens) - sequence.computed
            # Decoding is not charged to the budget, so that long prompts do not stall requests that are sampling.
            count = due if due == 1 else min(due, budget)
            if due > 1:
                budget -= count
            if count:
                yield request, sequence, count

    def _preempt(self) -> None:
        """Return the youngest running request to the head of the queue and drop its cache."""
        # It loses the least work, and the oldest always finish, so no request starves.
        self.drop(youngest := self.running[-1])
        self.waiting.appendleft(youngest)

    def _evict(self, spare: Sequence | None = None) -> bool:
        """Drop the cache that has been idle longest, except `spare`. Returns False if none is left."""
        for key, sequence in self.idle.items():
            if sequence is not spare:
                del self.idle[key]
                self._release(sequence)
                return True
        return False

    def _release(self, sequence: Sequence) -> None:
        self._index.remove(sequence)
        sequence.pool.free.append(sequence.slot)

    def _draw(self, ready: list[Request], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        device, options = logits.device, list[tuple[float, int, float, float]]()
        masks: npt.NDArray[np.bool_] | None = None
        for row, request in enumerate(ready):
            sampling = request.sampling
            # Indexed by position, so that a request's tokens depend neither on the other requests nor on being sent back.
            own = request.uniforms[len(request.logprobs)]
            options.append((sampling.temperature, sampling.top_k, sampling.top_p, own))
            if request.constraint is not None:
                masks = np.ones(tuple(logits.shape), dtype=np.bool_) if masks is None else masks
                masks[row] = request.constraint.mask()
        temperature, top_k, top_p, uniform = zip(*options, strict=True)
        ids, logprobs = draw_tokens(
            logits,
            torch.tensor(temperature, device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, device=device),
            torch.tensor(uniform, dtype=torch.float64, device=device),
            self._unused,
            None if masks is None else torch.from_numpy(masks).to(device),
        )
        return ids.tolist(), logprobs.tolist()
