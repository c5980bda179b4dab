"""What every engine that knows the text of its tokens must do; fixtures as for `EngineContract`, with `tokenizer`."""

import asyncio
import json

import numpy as np
import pytest
from llguidance import LLMatcher

from agentrl.rollout.engine import Sampling
from tests.engines.contract import off, prompt_of
from tests.engines.engine_models import log_table

SCHEMA = {
    "type": "object",
    "properties": {"get": {"enum": ["key", "list", "value"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["get", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))


class TextContract:
    """Subclass beside `EngineContract`."""

    async def test_tokens_are_told_as_they_are_sampled(self, engine):
        """Once, in order, with logprobs, most before the turn is over; and the same tokens as without."""
        sampling = Sampling(max_tokens=48, seed=11)
        fine = False
        for attempt in range(4):  # a reader that gets no processor for a while is told many at once
            told, times = [], []

            def tell(token_ids, logprobs, told=told, times=times):
                told.extend(zip(token_ids, logprobs, strict=True))
                times.append(len(told))

            streamed = await engine.stream(prompt_of(9), sampling, f"a{attempt}", tell)
            assert told == list(zip(streamed.token_ids, streamed.logprobs, strict=True)) and len(told) == 48
            fine = fine or (len(times) > 12 and times[0] < 12)
        assert fine
        whole = await engine.generate(prompt_of(9), sampling, "b")
        assert whole.token_ids == streamed.token_ids

    async def test_a_stop_string_ends_sampling_with_the_token_that_completes_it(self, engine, model, tokenizer):
        """Also one that spans tokens, next to other requests: what comes back is all that was sampled."""
        prompt = prompt_of(12, seed=3)
        free = await engine.generate(prompt, Sampling(max_tokens=60, seed=5), "free")
        text = tokenizer.decode(free.token_ids)
        pieces = [tokenizer.decode([number]) for number in free.token_ids]
        at = next(i for i in range(20, 58) if "\ufffd" not in pieces[i] + pieces[i + 1] and pieces[i] and pieces[i + 1])
        spanning = pieces[at][-1] + pieces[at + 1][0]
        inside = next(piece for piece in pieces[30:] if len(piece) > 2 and "\ufffd" not in piece)[:-1]
        assert spanning in text and inside in text
        for stop in ((spanning,), (inside, "never said"), ("never said",)):
            count = next((n for n in range(61) if any(s in tokenizer.decode(free.token_ids[:n]) for s in stop)), 60)
            sampling = Sampling(max_tokens=60, seed=5, stop=stop)
            before = (await engine.stats()).sampled_tokens
            other, ended = await asyncio.gather(
                engine.generate(prompt, Sampling(max_tokens=60, seed=6), "other"), engine.generate(prompt, sampling, "a")
            )
            assert ended.token_ids == free.token_ids[:count], stop
            assert ended.finish == ("length" if count == 60 else "stop_string")
            assert len(ended.logprobs) == len(ended.versions) == count
            assert off(model, prompt, ended) < self.tolerance
            assert len(other.token_ids) == 60
            assert (await engine.stats()).sampled_tokens == before + 60 + count

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    async def test_a_grammar_says_which_tokens_are_drawn_and_no_more(self, engine, model, tokenizer, temperature):
        """Log probabilities stay of the whole vocabulary, of which the grammar leaves less than a tenth somewhere."""
        prompt, end = prompt_of(14, seed=7), 1
        plain = Sampling(max_tokens=30, temperature=temperature, seed=3, stop_token_ids=(end,))
        bound = Sampling(max_tokens=60, temperature=temperature, seed=3, stop_token_ids=(end,), grammar=GRAMMAR)
        assert engine.refusal(bound) == ""
        alone = await engine.generate(prompt, plain, "alone")
        beside, one, other = await asyncio.gather(
            engine.generate(prompt, plain, "beside"),
            engine.generate(prompt, bound, "one"),
            engine.generate(prompt, Sampling(60, temperature, seed=8, stop_token_ids=(end,), grammar=GRAMMAR), "other"),
        )
        assert beside.token_ids == alone.token_ids
        for found in (one, other):
            assert found.finish == "stop" and found.token_ids[-1] == end
            said = json.loads(tokenizer.decode(found.token_ids[:-1]))
            assert said["get"] in ("key", "list", "value") and 0 <= said["n"] <= 99 and len(said) == 2
            table = log_table(model, prompt, found.token_ids, temperature=temperature or 1.0)
            assert np.abs(table[np.arange(len(found.token_ids)), found.token_ids] - found.logprobs).max() < self.tolerance
            assert min(found.logprobs) < np.log(0.1)

    async def test_what_cannot_be_constrained_is_refused_by_name(self, engine):
        assert engine.refusal(Sampling(4)) == "" and engine.refusal(Sampling(4, stop=("x",))) == ""
        wrong = Sampling(4, grammar=LLMatcher.grammar_from_json_schema('{"type": "nonsense"}'))
        assert engine.refusal(wrong).startswith("grammar: ") and "nonsense" in engine.refusal(wrong)
