"""One turn as requests to `/generate` and their streamed answers.

SGLang ends a request at the model's own end-of-sequence tokens too, and `ignore_eos` also ignores `stop_token_ids`. So with
stop tokens a request may end at a token that is none of them; the turn then goes on as another request, whose prompt ends with
what was sampled. With a seed it draws the same numbers as one request would: SGLang's noise depends on the seed and the position
alone.
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field
from typing import Any

from agentrl.backends.sglang.http import Json
from agentrl.backends.sglang.versions import Versions
from agentrl.errors import EngineError
from agentrl.rollout.engine import Finish, Generation, Sampling

WHOLE, PARTS = 256, 16
"""Tokens between two parts of a streamed answer: if each part repeats all tokens so far, and if it has only the new ones."""

BOTH = (
    "SGLang takes top_p of the probability of all tokens, and the other engines of that which top_k leaves: together they would "
    "draw from other tokens; set one of rollout.top_k and rollout.top_p"
)


@dataclass(slots=True)
class TurnRequests:
    """What a turn has sampled in its requests so far, and in the current one. `address`: of the server, for messages."""

    address: str
    prompt: list[int]
    sampling: Sampling
    budget: int
    unused: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    aborted: bool = False
    finish: Finish | None = None
    rid: str = ""
    _from: int = 0
    """Tokens of earlier requests."""

    def request(self, interval: int, seeds: bool) -> dict[str, Any]:
        """The body of its next request. `interval`: see WHOLE; `seeds`: whether the server's noise takes them."""
        # Of one length: SGLang aborts each request whose id begins with the one that is to be aborted.
        self.rid, self._from = uuid.uuid4().hex, len(self.token_ids)
        options = {"stream_interval": interval, "sampling_seed": self._seed() if seeds else None}
        return {
            "rid": self.rid,
            "input_ids": [*self.prompt, *self.token_ids],
            "sampling_params": sampling_params(self.sampling, self.budget - len(self.token_ids)) | options,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
        }

    def _seed(self) -> int:
        # A server that draws with seeds gives all requests without one the same.
        seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed
        return seed % 2**63

    @property
    def in_scheduler(self) -> bool:
        """Whether the current request has sampled: before, an abort may come to the scheduler ahead of it and have no effect."""
        return len(self.token_ids) > self._from

    def add(self, part: Json, known: Versions) -> None:
        """Take a part of the answer; the last one sets `finish`, unless the turn goes on in another request. Raises EngineError
        for an answer that cannot be trained on."""
        meta = part["meta_info"]
        count = int(meta.get("completion_tokens", 0))
        ids, logprobs = self._columns(meta.get("output_token_logprobs") or [])
        if lost := self.unused.intersection(ids):
            # A bias would forbid them, and be in the logprobs: those would no longer be of the whole vocabulary.
            raise EngineError(f"{self.address} drew the id {min(lost)}, for which the tokenizer has no token")
        # A part has all tokens so far, or the new ones: the last part of an aborted request may have all in either mode.
        if len(ids) == count:
            del self.token_ids[self._from :], self.logprobs[self._from :]
        if self._from + count != len(self.token_ids) + len(ids):
            raise EngineError(f"{self.address}: {len(ids)} logprobs in a part of an answer of {count} tokens")
        self.token_ids += ids
        self.logprobs += logprobs
        reason = meta.get("finish_reason")
        if reason is not None:
            self.versions += known.of(meta, count, self.address)
            # Of the first request: what the others find is their own turn.
            self.cached = self.cached if self._from else int(meta.get("cached_tokens", 0))
            self.finish = self._finish(reason)

    def _columns(self, entries: list[list[Any]]) -> tuple[list[int], list[float]]:
        """Entries are (logprob, id, text)."""
        if any(entry[0] is None for entry in entries):
            raise EngineError(f"{self.address}: a sampled token has no finite logprob")
        return [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries]

    def _finish(self, reason: Json) -> Finish | None:
        kind, left = reason["type"], self.budget - len(self.token_ids)
        if kind == "abort":
            # Requested aborts have no status; with one, the server says why it cannot answer.
            if reason.get("status_code"):
                raise EngineError(f"{self.address}/generate: {reason['status_code']} {reason.get('message')}")
            return "abort"
        if kind == "length":
            if left > 0:
                raise EngineError(
                    f"{self.address} ended a turn after {len(self.token_ids)} of {self.budget} tokens: its KV cache has no room "
                    "for more, or SGLANG_MAX_NEW_TOKENS_LIMIT is set"
                )
            return "length"
        matched = reason.get("matched")
        if not isinstance(matched, int):
            raise EngineError(f"{self.address} ended a turn for another reason than its tokens: {matched}")
        if matched in self.sampling.stop_token_ids:
            return "stop"
        return "length" if left == 0 else None

    def over(self, finish: Finish) -> Generation:
        """The turn."""
        return Generation(self.token_ids, self.logprobs, self.versions, finish)


def sampling_params(sampling: Sampling, tokens: int) -> dict[str, Any]:
    """Everything that enters the draw, so that no default of the server or of the model's generation config does."""
    return {
        "max_new_tokens": tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
