"""Measure seconds per turn of verifiers 0.3.1 with an instant model and three-turn tool episodes. Run by rollout.py.

    python peer_verifiers.py in_process|http AT_ONCE ROLLOUTS ROUNDS

"in_process": the client's `get_response` returns a complete response, without conversion or transport; "http": its own client
with an instant server in another process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
from verifiers.types import ClientConfig, Response, ResponseMessage, ToolCall, Usage

CALLS = (ToolCall(id="c0", name="get", arguments='{"key": "a"}'), ToolCall(id="c1", name="add", arguments='{"x": 1}'))


async def get(key: str) -> str:
    """value of a key"""
    return "1"


async def add(x: int) -> int:
    """add x to the total"""
    return x


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


class Instant(OpenAIChatCompletionsClient):
    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any) -> Response:
        turn = sum(message.role == "tool" for message in prompt)
        last = turn == len(CALLS)
        message = ResponseMessage(
            content="1" if last else "",
            tool_calls=None if last else [CALLS[turn]],
            finish_reason="stop" if last else "tool_calls",
            is_truncated=False,
        )
        usage = Usage(prompt_tokens=100, reasoning_tokens=0, completion_tokens=20, total_tokens=120)
        return Response(id="x", created=0, model=model, usage=usage, message=message)


async def main(kind: str, at_once: int, rollouts: int, rounds: int) -> None:
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "get each key, add its value, report the total."},
                {"role": "user", "content": f"report {number}"},
            ],
            "answer": "1",
        }
        for number in range(rollouts)
    ]
    env = vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[get, add], rubric=vf.Rubric(funcs=[right]), max_turns=8)
    server: subprocess.Popen[str] | None = None
    url = "http://127.0.0.1:1/v1"
    if kind == "http":
        script = Path(__file__).with_name("stub_server.py")
        server = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
    config = ClientConfig(api_base_url=url, api_key_var="NO_KEY")
    client = OpenAIChatCompletionsClient(config) if kind == "http" else Instant(config)

    async def play(inputs: Dataset) -> tuple[float, float]:
        wall, processor = time.perf_counter(), time.process_time()
        output = await env.generate(
            inputs, client=client, model="stub", max_concurrent=at_once, on_start=lambda *_: None, on_progress=lambda *_: None
        )
        spent = time.perf_counter() - wall, time.process_time() - processor
        assert [row["reward"] for row in output["outputs"]] == [1.0] * len(inputs), output["outputs"][0]
        return spent

    data = env.get_dataset()
    await play(data.select(range(min(8, rollouts))))
    spent = [await play(data) for _ in range(rounds)]
    if server is not None and server.stdin is not None:
        server.stdin.close()
        server.wait()
    turns = rollouts * (len(CALLS) + 1)
    print(
        json.dumps(
            {
                "version": vf.__version__,
                "seconds_per_turn": min(wall for wall, _ in spent) / turns,
                "cpu_seconds_per_turn": min(processor for _, processor in spent) / turns,
            }
        )
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
