"""An OpenAI-compatible server that answers at once: two tool calls and an answer. For peers that talk HTTP.

    python stub_server.py       prints its port; ends when its standard input is closed

Standard library only, so that every peer's interpreter can run it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

TURNS = (("get", '{"key": "a"}'), ("add", '{"x": 1}'))


def completion(request: dict[str, Any]) -> bytes:
    answered = sum(message["role"] == "tool" for message in request["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if answered < len(TURNS):
        name, arguments = TURNS[answered]
        function = {"name": name, "arguments": arguments}
        message["tool_calls"] = [{"id": f"c{answered}", "type": "function", "function": function}]
    else:
        message["content"] = "1"
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if answered < len(TURNS) else "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    row = {"id": "x", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice], "usage": usage}
    return json.dumps(row).encode()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            answer = completion(json.loads(body)) if body else b'{"object": "list", "data": []}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer))
            writer.write(answer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
