"""A real HTTP server on loopback that speaks the OpenAI chat API: an API model, a judge and a simulated user in one."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = dict[str, Any] | str | None
"""A message, its text, or None: the socket is closed without an answer. {"status": 429, "headers": {...}, "sleep": s}
is an error, {"raw": "text"} a body that is no answer, of any status."""


class LoopbackServer:
    """A server of one's own on a free port of 127.0.0.1, a thread for each request. Use as a context manager."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.handle(self)

            do_GET = do_DELETE = do_POST

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        raise NotImplementedError

    def send(self, handler: BaseHTTPRequestHandler, text: str, status: int = 200, **headers: str) -> None:
        data = text.encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # the client gave up waiting
            handler.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data)


class Loopback(LoopbackServer):
    """`answer` gets the request's body and its number, from 0."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer], usage: bool = True) -> None:
        super().__init__()
        self.answer, self.usage = answer, usage
        self.times: list[float] = []

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            number = len(self.requests)
            self.requests.append(body)
            self.times.append(time.monotonic())
        answer = self.answer(body, number)
        if answer is None:
            handler.close_connection = True
            return
        status, headers = 200, {}
        if isinstance(answer, dict) and "status" in answer:
            status, headers = answer["status"], answer.get("headers", {})
            time.sleep(answer.get("sleep", 0.0))
            error = {"error": {"message": answer.get("message", "not now"), "type": "x", "code": status}}
            reply: dict[str, Any] = answer if "raw" in answer else error
        elif isinstance(answer, dict) and "raw" in answer:
            reply = answer
        else:
            message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
            reply = completion(message, body, self.usage)
        self.send(handler, str(reply.get("raw", json.dumps(reply))), status, **headers)


def completion(message: dict[str, Any], body: dict[str, Any], usage: bool) -> dict[str, Any]:
    more = message.pop("choice", {})  # what else the choice has
    reply = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", **more}
        ],
    }
    if usage:
        counts = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        reply["usage"] = counts
    return reply


def solve(body: dict[str, Any], number: int) -> Answer:
    """Plays key_value right: reads every key that the prompt asks for, one call a turn, and reports the sum."""
    question = next(m["content"] for m in body["messages"] if m["role"] == "user")
    keys = [word.strip(".,:?`'\"") for word in question.split()]
    keys = [key for key in dict.fromkeys(keys) if len(key) == 1 and key.islower()]
    results = [int(m["content"]) for m in body["messages"] if m["role"] == "tool" and m["content"].lstrip("-").isdigit()]
    if len(results) < len(keys):
        arguments = json.dumps({"key": keys[len(results)]})
        call = {"id": f"c{number}", "type": "function", "function": {"name": "get", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return str(sum(results))
