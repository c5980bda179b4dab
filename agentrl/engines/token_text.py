"""Checks and constraints of token requests: validity, stop strings, and grammars."""

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
"""Characters at the start of a decoded window that may differ from the whole text (parts of a character, a space)."""
DEAD_END = "grammar: no token of the vocabulary writes what it asks for next. Ask for other text, or use another tokenizer"
"""Error of a request whose grammar allows no token."""


def check_request(token_ids: Sequence[int], sampling: Sampling, context: int, vocab: int) -> None:
    """Raise EngineError for an invalid request. `context`: maximum tokens of a prompt and its turn."""
    if not token_ids:
        raise EngineError("the prompt is empty")
    if len(token_ids) >= context:
        raise PromptTooLongError(f"a prompt of {len(token_ids)} tokens leaves no room in a context of {context}")
    if min(token_ids) < 0 or max(token_ids) >= vocab:
        raise EngineError(f"the prompt has token ids outside [0, {vocab})")
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, got {sampling.max_tokens}")


class LazyTokenizer:
    """Tokenizer of a model's folder, loaded on first use, since most runs never need it."""

    def __init__(self, model_path: str, *, trust: bool = False) -> None:
        self._path, self._trust = model_path, trust
        self._tokenizer: Any = None
        self._pieces: Any = None
        self._matcher = lru_cache(64)(self._compile)

    def refusal(self, sampling: Sampling) -> str:
        """Return the result of `Engine.refusal`. Loads the tokenizer and compiles the grammar."""
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
        try:
            wrong: str = self._matcher(sampling.grammar).get_error()
        except ValueError as problem:
            wrong = f"llguidance does not read this model's tokenizer: {problem}"
        return wrong and f"grammar: {' '.join(wrong.split())}"

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids, with control tokens by name. Raises ModelError if the folder has no tokenizer."""
        return str(self.load().decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def constraint(self, sampling: Sampling, vocab: int) -> Constraint | None:
        """Make the constraint of a turn's grammar for `vocab` ids; None without a grammar. Raises EngineError for a grammar that
        cannot be compiled."""
        if sampling.grammar is None:
            return None
        matcher = self._matcher(sampling.grammar)
        if matcher.is_error():
            raise EngineError(f"grammar: {matcher.get_error()}")
        return Constraint(matcher.deep_copy(), vocab, self._pieces.eos_tokens, sampling.stop_token_ids)

    def load(self) -> Any:
        """Load the tokenizer and return it. Raises ModelError if the folder has none."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._path, trust_remote_code=self._trust)
            except (OSError, ValueError) as problem:
                raise ModelError(f"{self._path}: no tokenizer could be read there: {problem}") from problem
        return self._tokenizer

    def _compile(self, grammar: str) -> Any:
        """Compile a grammar to a matcher in its initial state, to be copied per turn."""
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        if self._pieces is None:
            self._pieces = from_tokenizer(self.load())
        return LLMatcher(self._pieces, grammar)


class Constraint:
    """Tracks the tokens that a grammar allows next in one turn."""

    def __init__(self, matcher: Any, vocab: int, ends: Sequence[int], stops: Sequence[int]) -> None:
        """`ends`: the tokenizer's end-of-text ids, excluded from the grammar; `stops`: ids that end the turn."""
        self._matcher, self._vocab = matcher, vocab
        self._ends, self._stops = list(ends), list(stops)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return the mask [vocab] of the allowed next ids: those that fit the grammar, and the stop tokens if the text may end
        here. If none fits (a vocabulary without a character), stop tokens, else all: a step of many requests must not fail."""
        mask = np.zeros(self._vocab, dtype=np.bool_)
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            mask[: len(bits)] = bits[: self._vocab]
            mask[self._ends] = False
        if self._matcher.is_accepting() or not mask.any():
            mask[self._stops] = True
        return mask if mask.any() else ~mask

    def take(self, token_id: int) -> bool:
        """Advance by a drawn token. Returns False if it does not fit: then none did."""
        ends = token_id in self._stops and self._matcher.is_accepting()
        return bool(ends or self._matcher.consume_token(token_id))

    @property
    def over(self) -> bool:
        """True if only a stop token is allowed next."""
        return bool(self._matcher.is_stopped())


class StopStrings:
    """Detects the token of one turn that completes a stop string."""

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
        # A stop string that is completed later begins in the last characters, so the rest need not be decoded every time.
        tail = self._window[len(self._window) // 2 :]
        if len(text) > 2 * self._enough and len(self._decode(tail)) >= self._enough:
            self._window = tail
        return False
