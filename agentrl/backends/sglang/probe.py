"""Whether a server's logprobs are those of the policy at the request's temperature, found out by asking it.

SGLang reports log softmax(z / T) over the whole vocabulary, before `top_p` and `top_k`: what agentrl means by a logprob. But
with SGLANG_RETURN_ORIGINAL_LOGPROB in its environment it is log softmax(z) at any temperature, and no route tells. The difference
of the logprobs of two tokens at T = 2 is half of that at T = 1, or the same.
"""

from __future__ import annotations

import logging
from typing import Any

from agentrl.backends.sglang.http import Http, Json
from agentrl.backends.sglang.turn import sampling_params
from agentrl.errors import EngineError
from agentrl.rollout.engine import Sampling

log = logging.getLogger(__name__)
TOKENS = 8
LEAST = 1e-3
"""Difference of logprobs below which a distribution is too flat to tell."""


async def prove_temperature(http: Http, prompt: list[int]) -> None:
    """Raise EngineError if the server's logprobs leave out the temperature. `prompt`: any token ids of the model."""
    cold, hot = [await _top(http, prompt, temperature) for temperature in (1.0, 2.0)]
    both = sorted(cold.keys() & hot.keys(), key=lambda token: cold[token])
    if len(both) < 2 or (spread := cold[both[-1]] - cold[both[0]]) < LEAST:
        log.warning("%s: the model's distribution is too flat to tell whether its logprobs follow the temperature", http.address)
        return
    ratio = (hot[both[-1]] - hot[both[0]]) / spread
    if ratio > 0.75:
        raise EngineError(
            f"{http.address} reports logprobs of another temperature than the request's (at T = 2 they differ {ratio:.2f} times "
            "as much as at T = 1, and not 0.5): start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )


async def _top(http: Http, prompt: list[int], temperature: float) -> dict[int, float]:
    """The likeliest tokens after the prompt, with their logprobs."""
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": sampling_params(Sampling(max_tokens=1, temperature=temperature), 1),
        "return_logprob": True,
        "top_logprobs_num": TOKENS,
    }
    answer: Json = await http.post("/generate", body)
    try:
        [entries] = answer["meta_info"]["output_top_logprobs"]
    except (KeyError, ValueError) as problem:
        raise EngineError(f"{http.address}/generate: no output_top_logprobs in {str(answer)[:200]}") from problem
    return {int(token): float(value) for value, token, *_ in entries if value is not None}
