"""Serve an instant OpenAI-compatible model for peers that use HTTP: two tool calls, then an answer.

    python stub_server.py       prints its port; ends when its standard input is closed

Standard library only, so that every peer's interpreter can run it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

TURNS = (("get", '{"key": "a"}'), ("add", '{"x": 1}'))


def completion(request: dict[str, Any]) -> tuple[str, bytes]:
    """Return content type and body: a completion, or a stream of one event if the request asks for a stream."""
    answered = sum(message["role"] == "tool" for message in request["messages"])
    more = answered < len(TURNS)
    message: dict[str, Any] = {"role": "assistant", "content": "" if more else "1"}
    if more:
        name, arguments = TURNS[answered]
        offered = [tool["function"]["name"] for tool in request.get("tools", [])]
        full = next((known for known in offered if known.endswith(name)), name)  # peers may prefix the name
        call = {"id": f"c{answered}", "type": "function", "function": {"name": full, "arguments": arguments}}
        message["tool_calls"] = [{"index": 0, **call} if request.get("stream") else call]
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    row: dict[str, Any] = {"id": "x", "created": 0, "model": "stub", "usage": usage}
    choice = {"index": 0, "finish_reason": "tool_calls" if more else "stop"}
    if not request.get("stream"):
        row |= {"object": "chat.completion", "choices": [{**choice, "message": message}]}
        return "application/json", json.dumps(row).encode()
    row |= {"object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]}
    return "text/event-stream", f"data: {json.dumps(row)}\n\ndata: [DONE]\n\n".encode()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            kind, answer = completion(json.loads(body)) if body else ("application/json", b'{"object": "list", "data": []}')
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(answer)}\r\n\r\n"
            writer.write(head.encode() + answer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
