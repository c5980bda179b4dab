"""Requests of token ids: what no engine can serve, the text at which a stop string ends a turn, the tokens a grammar allows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import EngineError, ModelError, PromptTooLongError

_MARGIN = 8
"""Characters at the start of a decoded window that may read otherwise than in the whole text (parts of a character, a space)."""
_GRAMMARS = 64
"""Compiled grammars that are kept."""


def check_request(token_ids: Sequence[int], sampling: Sampling, context: int, vocab: int) -> None:
    """Raise EngineError for a request that no engine could serve; `context`: tokens of a prompt and its turn."""
    if not token_ids:
        raise EngineError("the prompt is empty")
    if len(token_ids) >= context:
        raise PromptTooLongError(f"a prompt of {len(token_ids)} tokens leaves no room in a context of {context}")
    if min(token_ids) < 0 or max(token_ids) >= vocab:
        raise EngineError(f"the prompt has token ids outside [0, {vocab})")
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, got {sampling.max_tokens}")


class Words:
    """The tokenizer of a model's folder, loaded when it is first needed: most runs never ask."""

    def __init__(self, model_path: str, *, trust: bool = False) -> None:
        self._path, self._trust = model_path, trust
        self._tokenizer: Any = None
        self._pieces: Any = None
        self._matcher = lru_cache(_GRAMMARS)(self._compile)

    def refusal(self, sampling: Sampling) -> str:
        """As `Engine.refusal`. Loads the tokenizer, and compiles the grammar."""
        field = "stop" if sampling.stop else "grammar" if sampling.grammar is not None else ""
        if not field:
            return ""
        try:
            self.load()
        except ModelError as problem:
            return f"{field}: {problem}"
        if sampling.grammar is None:
            return ""
        if importlib.util.find_spec("llguidance") is None:
            return "grammar: it needs llguidance: pip install 'agentrl[server]'"
        wrong: str = self._matcher(sampling.grammar).get_error()
        return wrong and f"grammar: {' '.join(wrong.split())}"

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens by name. Raises ModelError if the folder has no tokenizer."""
        return str(self.load().decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def constraint(self, sampling: Sampling, vocab: int) -> Constraint | None:
        """Constraint of a turn's grammar, of a model with `vocab` ids; None if it has none. Raises EngineError for a grammar
        that cannot be compiled."""
        if sampling.grammar is None:
            return None
        matcher = self._matcher(sampling.grammar)
        if matcher.is_error():
            raise EngineError(f"grammar: {matcher.get_error()}")
        return Constraint(matcher.deep_copy(), vocab, self._pieces.eos_tokens, sampling.stop_token_ids)

    def load(self) -> Any:
        """The tokenizer. Raises ModelError if the folder has none."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._path, trust_remote_code=self._trust)
            except (OSError, ValueError) as problem:
                raise ModelError(f"{self._path}: no tokenizer could be read there: {problem}") from problem
        return self._tokenizer

    def _compile(self, grammar: str) -> Any:
        """At the grammar's beginning; to be copied."""
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        if self._pieces is None:
            self._pieces = from_tokenizer(self.load())
        return LLMatcher(self._pieces, grammar)


class Constraint:
    """Allowed next tokens of one turn, by a grammar."""

    def __init__(self, matcher: Any, vocab: int, ends: Sequence[int], stops: Sequence[int]) -> None:
        """`ends`: the tokenizer's end of a text, where the renderer may differ; `stops`: what ends
        the turn."""
        self._matcher, self._vocab = matcher, vocab
        self._ends, self._stops = list(ends), list(stops)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Mask [vocab] of the ids that may come next: those that the grammar takes, and the stop tokens if the text may end
        here."""
        mask = np.zeros(self._vocab, dtype=np.bool_)
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            mask[: len(bits)] = bits[: self._vocab]
            mask[self._ends] = False
        if self._matcher.is_accepting():
            mask[self._stops] = True
        return mask

    def take(self, token_id: int) -> None:
        """The turn goes on with a token that was allowed. Raises EngineError if it was not."""
        if token_id not in self._stops and not self._matcher.consume_token(token_id):
            raise EngineError(f"grammar: token {token_id} was drawn and does not fit: {self._matcher.get_error()}")

    @property
    def over(self) -> bool:
        """True if nothing but a stop token may come."""
        return bool(self._matcher.is_stopped())


class StopStrings:
    """Watches one turn for the token that completes one of some texts."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts, self._decode = tuple(texts), decode
        self._enough = max(map(len, texts)) + _MARGIN
        self._window: list[int] = []

    def completes(self, token_id: int) -> bool:
        """Return True if the turn's next token completes a stop string."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if any(stop in text for stop in self._texts):
            return True
        # A stop string that is completed later begins in the last characters: the rest need not be decoded with every token.
        tail = self._window[len(self._window) // 2 :]
        if len(text) > 2 * self._enough and len(self._decode(tail)) >= self._enough:
            self._window = tail
        return False
