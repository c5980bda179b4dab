"""Clients of SGLang servers: calls, server facts, model files, weight versions, turns, routing."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors import safe_open

from agentrl.config.schema import SglangConfig
from agentrl.engines.weights.parameters import Expected
from agentrl.rollout.engine import Finish, Sampling
from agentrl.utils.errors import EngineError, ModelError
from agentrl.utils.parsing import read_json

# Calls

Json = dict[str, Any]
_UNREACHABLE = (502, 503, 504)
"""HTTP statuses of a server that shuts down, or of a proxy that cannot reach it."""
_EVENT = "data: "
_END = "[DONE]"


class ServerDeadError(EngineError):
    """The server does not answer, or stopped answering; the request may go to another server."""


class Server:
    """Client of one server, for one event loop. `cause`: why the server is dead; None while it takes requests."""

    def __init__(self, address: str, seconds: float, key: str | None = None) -> None:
        """`address`: for example "http://10.0.0.5:30000". `seconds`: timeout of a call. `key`: API key of the server."""
        self.address, self._seconds = address, seconds
        self.facts: Facts | None = None
        self.cause: str | None = None
        self.in_flight = 0
        # No proxies from the environment: the servers are in the same network, and proxy timeouts would end long requests.
        self._client = httpx.AsyncClient(
            base_url=address,
            headers=headers(key),
            timeout=httpx.Timeout(seconds),
            # SGLang closes idle connections after 5 s; a request on one just then would look like a dead server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def call(self, route: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Json:
        """Send a GET, or a POST if there is a body. `seconds`: timeout instead of the default. Raises ServerDeadError, or
        EngineError if the server refuses."""
        limit, method = self._seconds if seconds is None else seconds, "GET" if body is None else "POST"
        try:
            answer = await self._client.request(method, route, json=body, timeout=httpx.Timeout(limit))
        except httpx.HTTPError as problem:
            raise self._dead_error(route, problem, limit) from problem
        return read(self.address, route, answer)

    async def events(self, route: str, body: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        """Yield the parts of a streamed answer. If none arrives within a call's timeout, ask the server whether it is alive: the
        request may be queued, or paused during a weight update. Raises as `call`."""
        try:
            # Only reading has no timeout; an unreachable server still fails in time.
            timeout = httpx.Timeout(self._seconds, read=None)
            async with self._client.stream("POST", route, json=body, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    read(self.address, route, answer)
                async for line in self._lines(answer):
                    if line == _EVENT + _END:
                        return
                    if line.startswith(_EVENT):
                        event: Json = read_json(line.removeprefix(_EVENT))
                        if "error" in event:
                            raise EngineError(f"{self.address}{route}: {_message(event)}")
                        yield event
        except httpx.HTTPError as problem:
            raise self._dead_error(route, problem, self._seconds) from problem
        raise ServerDeadError(f"{self.address}{route}: the answer broke off")

    async def _lines(self, answer: httpx.Response) -> AsyncGenerator[str, None]:
        lines = answer.aiter_lines()
        while True:
            coming = asyncio.ensure_future(anext(lines, None))
            try:
                while not (await asyncio.wait([coming], timeout=self._seconds))[0]:
                    await self.call(SERVER)  # answered by the scheduler process, not only by the HTTP server
                line = coming.result()
            finally:
                coming.cancel()
            if line is None:
                return
            yield line

    def _dead_error(self, route: str, problem: httpx.HTTPError, seconds: float) -> ServerDeadError:
        where = f"{self.address}{route}"
        if isinstance(problem, httpx.TimeoutException):
            return ServerDeadError(f"{where}: no answer within {seconds:g} s (sglang.timeout)")
        return ServerDeadError(f"{where}: {problem or type(problem).__name__}")

    async def close(self) -> None:
        await self._client.aclose()


def headers(key: str | None) -> dict[str, str]:
    """Return the HTTP headers for the API key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def read(address: str, route: str, answer: httpx.Response) -> Json:
    """Return the body of a response. Raises ServerDeadError or EngineError for an error response."""
    where, status = f"{address}{route}", answer.status_code
    try:
        body = answer.json() if answer.content else {}
    except ValueError:
        body = answer.text
    # Some routes answer 200 and say in the body that nothing was done.
    if status == httpx.codes.OK and not (isinstance(body, dict) and body.get("success") is False):
        return body if isinstance(body, dict) else {"answer": body}
    if status in _UNREACHABLE:
        raise ServerDeadError(f"{where}: {status} {_message(body)}")
    if status in (401, 403):
        raise EngineError(f"{where}: {status}: the server wants another API key; set sglang.api_key_env")
    if status in (404, 405):
        raise EngineError(f"{where}: {status}: the server has no such route; is it SGLang of a version that agentrl knows?")
    raise EngineError(f"{where}: {status} {_message(body)}")


def _message(body: Any) -> str:
    """Return SGLang's error text: `message`, or `error` as text or as an object with a message."""
    while isinstance(body, dict):
        body = body.get("error") or body.get("message") or str(body)
    return " ".join(str(body).split())[:600]


# Properties of a server

MODEL, SERVER = "/model_info", "/server_info"


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a server. `context`: most tokens of prompt and turn together; `incremental`: parts of a streamed answer have
    only the new tokens; `seeds`: sampling follows the request's seed."""

    address: str
    version: str
    model_type: str | None
    context: int
    incremental: bool
    seeds: bool
    refused: tuple[str, ...]

    @classmethod
    def of(cls, address: str, model: Json, server: Json) -> Facts:
        """Parse the responses of MODEL and SERVER. Raises EngineError if a field is missing, as in other servers."""
        try:
            version, mode = str(server["version"]), server["disaggregation_mode"]
            doubts = (
                (not model["is_generation"], "it serves a model that does not generate"),
                (server["allow_auto_truncate"], "--allow-auto-truncate cuts prompts that are too long without a word"),
                (
                    server["speculative_algorithm"],
                    "--speculative-algorithm: that the logprobs of drafted tokens are those of the policy was not checked",
                ),
                (mode != "null", f"--disaggregation-mode {mode}: it must compute both prompts and answers"),
                # Without a tokenizer, SGLang handles answers and stop conditions in other code.
                (server["skip_tokenizer_init"], "--skip-tokenizer-init"),
            )
            return cls(
                address=address,
                version=version,
                model_type=model.get("model_type"),
                # A prompt must be shorter, and SGLang reserves a few more tokens; this value is within all of its limits.
                context=int(server["max_req_input_len"]),
                incremental=bool(server["incremental_streaming_output"]),
                seeds=bool(server["enable_deterministic_inference"]),
                refused=tuple(why for doubtful, why in doubts if doubtful),
            )
        except KeyError as missing:
            raise EngineError(f"{address}{MODEL} and {SERVER} do not give {missing}: is it SGLang 0.5.23 or newer?") from missing


def check(facts: Facts, cfg: SglangConfig, model_type: str | None) -> None:
    """Raise EngineError if the server cannot be used. `model_type`: type of the run's model; None if unknown."""
    where = f"sglang.servers: {facts.address} (SGLang {facts.version})"
    if facts.refused:
        raise EngineError(f"{where} cannot be used: {'; '.join(facts.refused)}")
    if model_type is not None and facts.model_type != model_type:
        raise EngineError(f"{where} serves a model of type {facts.model_type!r}, and the run's is {model_type!r}")
    if cfg.seeds and not facts.seeds:
        raise EngineError(
            f"{where} ignores seeds, so no run could be repeated: start it with --enable-deterministic-inference, or set "
            "sglang.seeds = false"
        )


def ask(address: str, cfg: SglangConfig, key: str | None) -> Facts:
    """Query a server's properties without an event loop. Raises EngineError if it cannot be reached."""
    answers = []
    for route in (MODEL, SERVER):
        try:
            answer = httpx.get(f"{address}{route}", headers=headers(key), timeout=cfg.timeout, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            why = f"no answer within {cfg.timeout:g} s" if isinstance(problem, httpx.TimeoutException) else problem
            raise EngineError(f"sglang.servers: {address}{route} cannot be reached: {why}") from problem
        answers.append(read(address, route, answer))
    return Facts.of(address, *answers)


# Files of a model folder


def weight_files(model: str) -> list[Path]:
    """List the safetensors files of a folder or hub name, downloading if necessary. Raises ModelError."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(model, allow_patterns=["*.safetensors"]))
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as problem:
            raise ModelError(f"{model}: its weights cannot be read: {problem}") from problem
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{model} has no safetensors files, which SGLang's servers would load")
    return files


def check_names(files: list[Path], expected: Expected) -> None:
    """Raise EngineError if the weight names in the files differ from those that the trainer publishes, the names in which
    transformers saves a model: SGLang's loaders know the names of the files and silently skip some others."""
    stored = set[str]()
    for path in files:
        with safe_open(path, framework="pt") as file:
            stored.update(file.keys())
    same = stored | {name for name, other in expected.tied.items() if other in stored}
    aliases = {other for name, other in expected.tied.items() if name in stored}
    unknown = sorted(expected.shapes.keys() - same - aliases)
    if unknown:
        raise EngineError(
            f"sglang: the weight names in the model's files differ from those that transformers saves ({unknown[0]} and "
            f"{len(unknown) - 1} more), and SGLang loads by the names in the files: this engine cannot train such a model"
        )


# Versions of weights


class Versions:
    """Weight versions that this engine published. Their names have a unique prefix, so that the weights of another trainer on
    the same server are not taken for ours."""

    def __init__(self) -> None:
        self._prefix = f"agentrl-{uuid.uuid4().hex[:12]}-"
        self._known: dict[str, int] = {}

    def name(self, version: int) -> str:
        """Return the server's name for this version."""
        name = f"{self._prefix}{version}"
        self._known[name] = version
        return name

    def of(self, meta: Json, count: int, address: str) -> list[int]:
        """Return the weight version of each of `count` tokens. Raises EngineError if the answer has no versions, or names
        weights that this engine did not publish."""
        spans = meta.get("weight_versions")
        if not spans and count:
            raise EngineError(f"{address} does not say which weights sampled which token (meta_info.weight_versions)")
        found: list[int] = []
        for span in spans or []:
            name, start, end = span["version"], int(span["start"]), int(span["end"])
            if start != len(found) or end < start:
                raise EngineError(f"{address}: weight versions {spans} do not follow each other")
            if end > start and name not in self._known:
                raise EngineError(f"{address} sampled with weights {name!r}, which are not this run's: does another run use it?")
            found += [self._known.get(name, 0)] * (end - start)
        if len(found) != count:
            raise EngineError(f"{address}: weight versions of {len(found)} tokens in an answer of {count}")
        return found


# A turn

WHOLE, PARTS = 256, 16
"""Tokens per part of a streamed answer, if each part repeats all tokens so far, and if it has only the new ones."""

TOP_K_WITH_TOP_P = (
    "SGLang takes top_p of the probability of all tokens, and the other engines of that which top_k leaves: together they would "
    "draw from other tokens; set one of rollout.top_k and rollout.top_p"
)


@dataclass(slots=True)
class TurnRequests:
    """Samples of a turn, from its finished requests and the current one. `address`: the server, for messages."""

    address: str
    prompt: list[int]
    sampling: Sampling
    budget: int
    unused: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    aborted: bool = False
    finish: Finish | None = None
    rid: str = ""
    _from: int = 0
    """Number of tokens from earlier requests."""

    def request(self, interval: int, seeds: bool) -> dict[str, Any]:
        """Return the body of the next request. `interval`: see WHOLE; `seeds`: the server uses seeds."""
        # All ids have the same length: SGLang aborts every request whose id starts with the aborted one.
        self.rid, self._from = uuid.uuid4().hex, len(self.token_ids)
        # A server that uses seeds gives all requests without one the same seed.
        seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed
        options = {"stream_interval": interval, "sampling_seed": seed % 2**63 if seeds else None}
        return {
            "rid": self.rid,
            "input_ids": [*self.prompt, *self.token_ids],
            "sampling_params": sampling_params(self.sampling, self.budget - len(self.token_ids)) | options,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
        }

    @property
    def in_scheduler(self) -> bool:
        """True if the current request has sampled; earlier, an abort could reach the scheduler first and have no effect."""
        return len(self.token_ids) > self._from

    def add(self, part: Json, known: Versions) -> None:
        """Add a part of the answer; the last part sets `finish`, unless the turn continues in another request. Raises
        EngineError for an answer that cannot be trained on."""
        meta = part["meta_info"]
        count = int(meta.get("completion_tokens", 0))
        entries = meta.get("output_token_logprobs") or []  # (logprob, id, text)
        if any(entry[0] is None for entry in entries):
            raise EngineError(f"{self.address}: a sampled token has no finite logprob")
        ids, logprobs = [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries]
        if lost := self.unused.intersection(ids):
            # A logit bias could forbid these ids, but would change the logprobs of all other tokens.
            raise EngineError(f"{self.address} drew the id {min(lost)}, for which the tokenizer has no token")
        # A part has all tokens so far, or only new ones; the last part of an aborted request may have all in either mode.
        if len(ids) == count:
            del self.token_ids[self._from :], self.logprobs[self._from :]
        if self._from + count != len(self.token_ids) + len(ids):
            raise EngineError(f"{self.address}: {len(ids)} logprobs in a part of an answer of {count} tokens")
        self.token_ids += ids
        self.logprobs += logprobs
        reason = meta.get("finish_reason")
        if reason is not None:
            self.versions += known.of(meta, count, self.address)
            # Only the first request counts: later ones find the turn itself in the cache.
            self.cached = self.cached if self._from else int(meta.get("cached_tokens", 0))
            self.finish = self._finish(reason)

    def _finish(self, reason: Json) -> Finish | None:
        kind, left = reason["type"], self.budget - len(self.token_ids)
        if kind == "abort":
            # A requested abort has no status; otherwise the server could not answer.
            if reason.get("status_code"):
                raise EngineError(f"{self.address}/generate: {reason['status_code']} {reason.get('message')}")
            return "abort"
        if kind == "length":
            if left > 0:
                raise EngineError(
                    f"{self.address} ended a turn after {len(self.token_ids)} of {self.budget} tokens: its KV cache has no room "
                    "for more, or SGLANG_MAX_NEW_TOKENS_LIMIT is set"
                )
            return "length"
        matched = reason.get("matched")
        if not isinstance(matched, int):
            raise EngineError(f"{self.address} ended a turn for a reason other than its tokens: {matched}")
        if matched in self.sampling.stop_token_ids:
            return "stop"
        return "length" if left == 0 else None


def sampling_params(sampling: Sampling, tokens: int) -> dict[str, Any]:
    """Return all sampling parameters, so that no default of the server or of the generation config applies."""
    return {
        "max_new_tokens": tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


# The servers of an engine

log = logging.getLogger(__name__)
_KEYS_REMEMBERED = 65536


class Servers:
    """Clients of all servers in the config."""

    def __init__(self, cfg: SglangConfig, key: str | None) -> None:
        self._cfg = cfg
        self.all = [Server(address.rstrip("/"), cfg.timeout, key) for address in cfg.servers]
        self.home: OrderedDict[str, Server] = OrderedDict()

    def alive(self) -> list[Server]:
        return [server for server in self.all if server.cause is None]

    async def check_facts(self, server: Server, model_type: str | None) -> None:
        """Query and check a server's properties. Raises EngineError if it cannot be used."""
        facts = Facts.of(server.address, await server.call(MODEL), await server.call(SERVER))
        check(facts, self._cfg, model_type)
        server.facts = facts

    def route(self, key: str) -> Server:
        """Return the server with the episode's cache; for a new episode or after a death, the one with the fewest requests.
        Raises EngineError if all are dead."""
        server = self.home.pop(key, None)
        if server is None or server.cause is not None:
            able = self.alive()
            if not able:
                raise EngineError(f"no SGLang server is alive: {self.deaths()}")
            server = min(able, key=lambda one: one.in_flight)
        self.home[key] = server
        if len(self.home) > _KEYS_REMEMBERED:
            self.home.popitem(last=False)
        return server

    async def check_lost(self, server: Server, cause: ServerDeadError) -> None:
        """Handle a broken connection: the server counts as dead unless it answers another request."""
        try:
            if server.cause is None:
                await server.call(MODEL)
                log.warning("%s; the server answers, and the turn is sampled again", cause)
        except EngineError:
            self.mark_dead(server, cause)

    def mark_dead(self, server: Server, cause: ServerDeadError) -> None:
        """Record a server's death once, also if several requests report it."""
        if server.cause is None:
            server.cause = str(cause)
            log.warning(
                "SGLang server %s; its %d requests move on, and it is asked again at the next publish", cause, server.in_flight
            )

    def deaths(self) -> str:
        return "; ".join(server.cause for server in self.all if server.cause is not None) or "the engine is closed"

    async def post(
        self, servers: Sequence[Server], route: str, body: Mapping[str, Any], seconds: float | None = None
    ) -> list[Json]:
        """Call each server; leave out those found dead. Raises EngineError if one refuses, or if none is alive."""
        calls = [server.call(route, body, seconds) for server in servers]
        # Collect all answers before raising, so that no call is still in progress.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, ServerDeadError):
                self.mark_dead(server, answer)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ServerDeadError):
                raise answer
        if not self.alive():
            raise EngineError(f"no SGLang server is alive: {self.deaths()}")
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def close(self) -> None:
        for server in self.all:
            await server.close()
        self.home.clear()
