"""Run raw vLLM (AsyncLLM) on rounds of work from standard input. Run by against_vllm.py with agentrl's interpreter.

Each input line is one round, {"tokens": n, "episodes": [{"opening": ids, "answers": [ids, ...]}, ...]}: all episodes run
concurrently, n tokens per turn, and after each turn its next answer is appended. The output line has the round's seconds and
sampled tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


async def episode(engine: Any, work: dict[str, Any], name: str, tokens: int) -> int:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids, sampled = list(work["opening"]), 0
    for turn in range(len(work["answers"]) + 1):
        params = SamplingParams(
            max_tokens=tokens,
            temperature=1.0,
            seed=turn,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        async for output in engine.generate({"prompt_token_ids": ids}, params, f"{name}-{turn}"):
            final = output
        assert final is not None
        sampled += len(final.outputs[0].token_ids)
        if turn < len(work["answers"]):
            ids = [*ids, *final.outputs[0].token_ids, *work["answers"][turn]]
    return sampled


async def main(options: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    print("READY", flush=True)
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        work = json.loads(line)
        await engine.reset_prefix_cache()
        start = time.perf_counter()
        calls = [episode(engine, one, f"{number}-{i}", work["tokens"]) for i, one in enumerate(work["episodes"])]
        sampled = sum(await asyncio.gather(*calls))
        print("RESULT", json.dumps([time.perf_counter() - start, sampled]), flush=True)
        number += 1
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
