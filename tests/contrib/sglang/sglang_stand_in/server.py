"""A stand-in of an SGLang 0.5.23 server: its routes, its request classes, and its answers as its source writes them.

What it samples is real (model.py). What it does with a request was read in SGLang's source: where a request waits while the
server is paused, which aborts come to nothing, when parts of an answer are sent and what is in them, how an update ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.engines.embedded.scheduler import Request
from agentrl.rollout.engine import Sampling
from tests.contrib.sglang.sglang_stand_in.model import Model
from tests.contrib.sglang.sglang_stand_in.requests import CLASSES, SAMPLING, VERSION, BadRequestError, Frozen


@dataclass
class Settings:
    """`server_args`: what `/server_info` says beside the defaults. `original`: SGLANG_RETURN_ORIGINAL_LOGPROB. `without`: routes
    that it does not have. `silent`: routes that never answer. `spans`: whether answers say which weights sampled which token.
    `most_tokens`: SGLANG_MAX_NEW_TOKENS_LIMIT."""

    server_args: dict[str, Any] = field(default_factory=dict)
    original: bool = False
    api_key: str | None = None
    without: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    spans: bool = True
    most_tokens: int = 1 << 30
    context: int = 2048


DEFAULTS = {
    **dict.fromkeys(("tp_size", "pp_size", "dp_size"), 1),
    **dict.fromkeys(("incremental_streaming_output", "enable_deterministic_inference"), True),
    **dict.fromkeys(("allow_auto_truncate", "skip_tokenizer_init"), False),
    **{"speculative_algorithm": None, "disaggregation_mode": "null"},
}


class StandIn:
    """One server, in a thread with a loop of its own: `with StandIn(folder) as server: server.address`."""

    def __init__(self, folder: str, settings: Settings | None = None, port: int = 0) -> None:
        self.folder, self.settings, self._port = folder, settings or Settings(), port
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.refused: list[str] = []
        self.paused: str | None = None
        self.model_path = folder
        self._known = Frozen()
        self._streams: dict[str, Request] = {}
        self._args = DEFAULTS | self.settings.server_args

    def __enter__(self) -> StandIn:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="SGLang stand-in", daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def running(self) -> int:
        """Requests in its scheduler."""
        return len(self.model.requests)

    def posts(self, route: str) -> list[dict[str, Any]]:
        """The bodies that came to a route."""
        return [body for at, body in self.bodies if at == route]

    def kill(self) -> None:
        """End it as a process that is killed: connections break."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._die)
            self._thread.join(30)

    def _die(self) -> None:
        for listener in self._uvicorn.servers:
            listener.close()
        self._hang_up()
        self._uvicorn.should_exit = self._uvicorn.force_exit = True

    def _hang_up(self) -> None:
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def _serve(self) -> None:
        self._loop, self._gate = asyncio.get_running_loop(), asyncio.Event()
        self._gate.set()
        self.model = Model(self.folder)
        await self.model.start()
        config = uvicorn.Config(self._app(), host="127.0.0.1", port=self._port, log_level="critical", lifespan="off")
        self._uvicorn = uvicorn.Server(config)
        serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:
            await asyncio.sleep(0.01)
        self._port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        with contextlib.suppress(BaseException):
            await serving
        self._hang_up()  # what came in meanwhile; a process that ends leaves no connection open
        await asyncio.sleep(0)
        await self.model.engine.close()

    def _app(self) -> Starlette:
        without = self.settings.without
        posts: dict[str, Callable[[dict[str, Any]], Awaitable[Response]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._from_disk,
        }
        routes = [Route(path, self._posted(path, handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, self._told) for path in ("/model_info", "/server_info")]
        return Starlette(routes=[route for route in routes if route.path not in without])

    def _posted(self, path: str, handler: Callable[[dict[str, Any]], Awaitable[Response]]) -> Any:
        async def endpoint(request: HttpRequest) -> Response:
            body = await request.json()
            self.bodies.append((path, body))
            if (early := await self._early(path, request)) is not None:
                return early
            try:
                whole = self._known.build(CLASSES[path], body)
                if path == "/generate":
                    whole["sampling_params"] = self._known.build(SAMPLING, body["sampling_params"])
            except BadRequestError as problem:
                self.refused.append(str(problem))
                return JSONResponse({"object": "error", "message": str(problem), "code": 400}, 400)
            return await handler(whole)

        return endpoint

    async def _told(self, request: HttpRequest) -> Response:
        name, kind = self.model.names[max(self.model.names)], self.model.plain.config.model_type
        model = {"model_path": self.model_path, "is_generation": True, "weight_version": name, "model_type": kind}
        server = {"version": VERSION, "max_req_input_len": self._longest - 5, "max_total_num_tokens": 1 << 20, **self._args}
        early = await self._early(path := request.url.path, request)
        return JSONResponse(model if path == "/model_info" else server) if early is None else early

    async def _early(self, path: str, request: HttpRequest) -> Response | None:
        if path in self.settings.silent:
            await asyncio.sleep(3600)
        if self.settings.api_key is not None and request.headers.get("authorization") != f"Bearer {self.settings.api_key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    @property
    def _longest(self) -> int:
        """SGLang's max_req_len: a prompt must be 5 tokens shorter, and with its turn 1."""
        return self.settings.context - 1

    async def _generate(self, body: dict[str, Any]) -> Response:
        if not body["stream"]:
            parts = [part async for part in self._parts(body, every=1 << 30)]
            return JSONResponse(parts[-1], 400 if "error" in parts[-1] else 200)

        async def events() -> AsyncIterator[str]:
            async with contextlib.aclosing(self._parts(body, every=body["sampling_params"]["stream_interval"] or 1)) as parts:
                async for part in parts:
                    yield f"data: {json.dumps(part)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _parts(self, body: dict[str, Any], every: int) -> Any:
        prompt, params = list(body["input_ids"]), body["sampling_params"]
        await self._gate.wait()  # before its scheduler, which knows nothing of it yet
        if len(prompt) >= self._longest - 5:
            context = f"the model's context length ({self.settings.context} tokens)"
            yield {"error": {"message": f"The input ({len(prompt)} tokens) is longer than {context}.", "code": 400}}
            return
        seed = 42 if params["sampling_seed"] is None else int(params["sampling_seed"])
        seed = seed if self._args["enable_deterministic_inference"] else None
        request = self.model.submit(body["rid"] or "", prompt, self._sampling(len(prompt), params), seed)
        sent = 0
        try:
            while not request.done.done():
                await self.model.until(request, sent + every if sent else 1)
                if not request.done.done():
                    count = len(request.logprobs)
                    yield self._part(body, request, sent, None)
                    sent = count
            yield self._part(body, request, sent, self._reason(request, params))
        finally:
            if not request.done.done():
                self.model.drop(request)

    def _sampling(self, prompt: int, params: dict[str, Any]) -> Sampling:
        stops = set() if params["ignore_eos"] else {*(params["stop_token_ids"] or ()), *self.model.eos}
        most = min(params["max_new_tokens"], self._longest - prompt - 1, self.settings.most_tokens)
        temperature, top_k = params["temperature"], params["top_k"]
        return Sampling(most, temperature, params["top_p"], 0 if top_k == -1 else top_k, tuple(sorted(stops)))

    def _reason(self, request: Request, params: dict[str, Any]) -> dict[str, Any]:
        finish = request.done.result().finish
        if finish == "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if finish == "length":
            return {"type": "length", "length": request.sampling.max_tokens}
        return {"type": "stop", "matched": request.tokens[-1]}

    def _part(self, body: dict[str, Any], request: Request, sent: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        """With incremental output a part has what is new; but that of a request that is aborted in the queue has everything."""
        count = len(request.logprobs)
        ids = request.tokens[request.prompt : request.prompt + count]
        columns = [[value, token, None] for value, token in zip(request.logprobs, ids, strict=True)]
        queued = reason is not None and reason["type"] == "abort" and self.paused is not None
        start = sent if self._args["incremental_streaming_output"] and body["stream"] and not queued else 0
        meta: dict[str, Any] = {
            "id": request.key,
            "finish_reason": reason,
            "prompt_tokens": request.prompt,
            "completion_tokens": count,
            "cached_tokens": self.model.cached() if reason is not None else 0,
            "weight_version": self.model.names[max(self.model.names)],
            "output_token_logprobs": columns[start:],
        }
        if reason is not None and self.settings.spans:
            meta["weight_versions"] = self.model.spans(request)
        if body["top_logprobs_num"]:
            temperature = 1.0 if self.settings.original else body["sampling_params"]["temperature"]
            meta["output_top_logprobs"] = [self.model.top(list(body["input_ids"]), temperature, body["top_logprobs_num"])]
        return {"text": "", "output_ids": ids[start:], "meta_info": meta}

    async def _abort(self, body: dict[str, Any]) -> Response:
        """Every request whose id begins with the one given, if the scheduler has it."""
        for request in self.model.requests:
            if body["abort_all"] or (body["rid"] and request.key.startswith(body["rid"])):
                self.model.engine._batcher.finish(request, "abort")  # type: ignore[union-attr]
        return Response(status_code=200)

    async def _pause(self, body: dict[str, Any]) -> Response:
        assert body["mode"] != "abort", "the stand-in does not end requests"
        self.paused = body["mode"]
        self._gate.clear()
        await self.model.engine.pause()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, body: dict[str, Any]) -> Response:
        self.paused = None
        await self.model.engine.resume()
        self._gate.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _from_disk(self, body: dict[str, Any]) -> Response:
        problem = await self.model.load(body["model_path"], body["weight_version"])
        self.model_path = self.model_path if problem else body["model_path"]
        if not problem and body["flush_cache"] and self.model.requests and self.paused != "retract":
            problem = "Weights were updated, but the cache was not flushed because requests are still running or queued."
        said = problem or "Succeeded to update model weights."
        return JSONResponse({"success": not problem, "message": said}, 400 if problem else 200)
