"""Calls to one SGLang server, each of which ends in its answer or in an error that names server, route and cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from agentrl.errors import EngineError
from agentrl.plain_data import read_json

Json = dict[str, Any]
_GONE = (502, 503, 504)
"""Statuses of a server that ends or of a proxy that does not reach it."""
_EVENT = "data: "
_END = "[DONE]"


class ServerDeadError(EngineError):
    """The server does not answer, or not any more: what it was asked may be asked of another one."""


class Http:
    """One server. Used from one event loop only."""

    def __init__(self, address: str, seconds: float, key: str | None = None) -> None:
        """`address`: for example "http://10.0.0.5:30000". `seconds`: how long a call may take. `key`: its API key."""
        self.address, self._seconds = address, seconds
        # No proxies from the environment: the servers are in the same network, and a proxy's timeouts end long requests.
        self._client = httpx.AsyncClient(
            base_url=address,
            headers=headers(key),
            timeout=httpx.Timeout(seconds),
            # SGLang closes an idle connection after 5 s; one that is used at that moment would look like a dead server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def get(self, route: str) -> Json:
        """Raises ServerDeadError, or EngineError if the server refuses."""
        return await self._call("GET", route, None, None)

    async def post(self, route: str, body: Mapping[str, Any], seconds: float | None = None) -> Json:
        """`seconds`: if it may take another time than other calls. Raises as `get`."""
        return await self._call("POST", route, body, seconds)

    async def _call(self, method: str, route: str, body: Mapping[str, Any] | None, seconds: float | None) -> Json:
        limit = self._seconds if seconds is None else seconds
        try:
            answer = await self._client.request(method, route, json=body, timeout=httpx.Timeout(limit))
        except httpx.HTTPError as problem:
            raise self._dead(route, problem, limit) from problem
        return read(self.address, route, answer)

    async def events(self, route: str, body: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        """The parts of a streamed answer. If none comes for a call's time, the server is asked whether it is alive: a request
        may wait in its queue, or while weights are replaced. Raises as `get`."""
        try:
            # Only reading may take as long as it does: a server that cannot be reached is given up in time.
            timeout = httpx.Timeout(self._seconds, read=None)
            async with self._client.stream("POST", route, json=body, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    read(self.address, route, answer)
                async for line in self._lines(answer):
                    if line == _EVENT + _END:
                        return
                    if line.startswith(_EVENT):
                        yield self._event(route, line.removeprefix(_EVENT))
        except httpx.HTTPError as problem:
            raise self._dead(route, problem, self._seconds) from problem
        raise ServerDeadError(f"{self.address}{route}: the answer broke off")

    async def _lines(self, answer: httpx.Response) -> AsyncGenerator[str, None]:
        lines = answer.aiter_lines()
        while True:
            coming = asyncio.ensure_future(anext(lines, None))
            try:
                while not (await asyncio.wait([coming], timeout=self._seconds))[0]:
                    await self.get("/server_info")  # the scheduler's process answers it, not only the HTTP one
                line = coming.result()
            finally:
                coming.cancel()
            if line is None:
                return
            yield line

    def _event(self, route: str, text: str) -> Json:
        event: Json = read_json(text)
        if "error" in event:
            raise EngineError(f"{self.address}{route}: {_message(event)}")
        return event

    def _dead(self, route: str, problem: httpx.HTTPError, seconds: float) -> ServerDeadError:
        where = f"{self.address}{route}"
        if isinstance(problem, httpx.TimeoutException):
            return ServerDeadError(f"{where}: no answer within {seconds:g} s (sglang.timeout, sglang.load_timeout)")
        return ServerDeadError(f"{where}: {problem or type(problem).__name__}")

    async def close(self) -> None:
        await self._client.aclose()


def headers(key: str | None) -> dict[str, str]:
    """As SGLang's servers take their API key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def read(address: str, route: str, answer: httpx.Response) -> Json:
    """The body of an answer. Raises ServerDeadError or EngineError if it is a refusal."""
    where, status = f"{address}{route}", answer.status_code
    try:
        body = answer.json() if answer.content else {}
    except ValueError:
        body = answer.text
    # Some routes answer 200 and say in the body that nothing was done.
    if status == httpx.codes.OK and not (isinstance(body, dict) and body.get("success") is False):
        return body if isinstance(body, dict) else {"answer": body}
    if status in _GONE:
        raise ServerDeadError(f"{where}: {status} {_message(body)}")
    if status in (401, 403):
        raise EngineError(f"{where}: {status}: the server wants another API key; set sglang.api_key_env")
    if status in (404, 405):
        raise EngineError(f"{where}: {status}: the server has no such route; is it SGLang of a version that agentrl knows?")
    raise EngineError(f"{where}: {status} {_message(body)}")


def _message(body: Any) -> str:
    """SGLang has its reason under `message`, or under `error` as text or with a message of its own."""
    while isinstance(body, dict):
        body = body.get("error") or body.get("message") or str(body)
    return " ".join(str(body).split())[:600]
