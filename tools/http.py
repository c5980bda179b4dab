"""HTTP requests answered from a recording, never from the network: a cassette in VCR.py's JSON format (serializer "json").

    {"version": 1, "interactions": [
      {"request": {"method": "GET", "uri": "https://api.example/items?page=1", "body": null},
       "response": {"status": {"code": 200, "message": "OK"}, "headers": {}, "body": {"string": "[1, 2]"}}}]}

https://vcrpy.readthedocs.io describes how to record one. Requests are matched by method, URI (query in any order) and, if the
recorded request has one, body (as JSON if both are JSON). A request that was recorded several times gets its responses in that
order, and then repeats the last one.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

import jsonschema
from pydantic import Field

from agentrl.data.trajectory import Json
from agentrl.env import ToolSet, tool
from agentrl.utils.errors import ConfigError, ToolError
from agentrl.utils.parsing import read_json

Key = tuple[str, str, tuple[tuple[str, str], ...], str]
_TEXT = {"type": ["string", "null"]}
_SCHEMA = {
    "type": "object",
    "required": ["interactions"],
    "properties": {
        "interactions": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["request", "response"],
                "properties": {
                    "request": {
                        "type": "object",
                        "required": ["method", "uri"],
                        "properties": {"method": {"type": "string"}, "uri": {"type": "string"}, "body": _TEXT},
                    },
                    "response": {
                        "type": "object",
                        "required": ["status", "body"],
                        "properties": {
                            "status": {"type": "object", "required": ["code"], "properties": {"code": {"type": "integer"}}},
                            "body": {"type": "object", "required": ["string"], "properties": {"string": _TEXT}},
                        },
                    },
                },
            },
        }
    },
}


class Http(ToolSet):
    """Plays a cassette for one episode; earlier requests decide which of several responses comes next."""

    name = "http"

    def __init__(self, *, cassette: str) -> None:
        """`cassette`: path of a file. Raises ConfigError, naming the interaction, if it is invalid."""
        self.cassette = cassette
        self.asked: list[Key] = []
        _recorded(cassette)

    def state(self) -> Json:
        """Return the answered requests, in order."""
        return [{"method": key[0], "url": key[1], "query": _query(key[2]), "body": key[3]} for key in self.asked]

    @tool(inline=True, parallel=False)
    def http_request(
        self,
        url: Annotated[str, Field(min_length=1, max_length=2000)],
        method: Literal["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"] = "GET",
        body: Annotated[str, Field(max_length=20000)] = "",
    ) -> str:
        """Send an HTTP request; returns the status and the answer's text.

        Args:
            url: such as https://api.example/items?page=1
            method: GET if left out
            body: text to send, such as JSON
        """
        recorded = _recorded(self.cassette)
        # A recorded request without a body matches any body.
        keys = [_key(method, url, body), _key(method, url, "")]
        key = next((key for key in keys if key in recorded), None)
        if key is None:
            other = sorted({known[0] for known in recorded if known[1:3] == keys[0][1:3]})
            hint = f"; for this address there is {', '.join(other)}" if other else ""
            raise ToolError(f"no answer to {method} {url[:300]} is recorded, and there is no network{hint}")
        answers = recorded[key]
        code, text = answers[min(self.asked.count(key), len(answers) - 1)]
        self.asked.append(key)
        return f"{code}\n{text}"


def _query(pairs: tuple[tuple[str, str], ...]) -> dict[str, Json]:
    """Return the query parameters by name: a text, or the sorted texts of a repeated name."""
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


@lru_cache(maxsize=64)
def _recorded(path: str) -> dict[Key, list[tuple[int, str]]]:
    """Read the responses (status, text) to each request, in order."""
    try:
        found: Any = read_json(Path(path).read_text(encoding="utf-8"))
        jsonschema.validate(found, _SCHEMA)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"tools.args.http.cassette = {path!r}: {problem}") from None
    except jsonschema.ValidationError as problem:
        raise ConfigError(f"tools.args.http.cassette = {path!r}: {problem.json_path}: {problem.message[:300]}") from None
    answers: dict[Key, list[tuple[int, str]]] = {}
    for item in found["interactions"]:
        request, response = item["request"], item["response"]
        try:
            key = _key(request["method"], request["uri"], request.get("body") or "")
        except ToolError as problem:
            raise ConfigError(f"tools.args.http.cassette = {path!r}: {problem}") from None
        answers.setdefault(key, []).append((response["status"]["code"], response["body"]["string"] or ""))
    return answers


def _key(method: str, url: str, body: str) -> Key:
    try:
        parts = urlsplit(url.strip())
    except ValueError as problem:
        raise ToolError(f"{url[:300]!r} is not an address: {problem}") from None
    address = f"{parts.scheme.lower()}://{parts.netloc.lower()}{parts.path or '/'}"
    return method.upper(), address, tuple(sorted(parse_qsl(parts.query, keep_blank_values=True))), _plain(body)


def _plain(body: str) -> str:
    """Return the body, in a canonical form if it is JSON."""
    try:
        return json.dumps(read_json(body), sort_keys=True)
    except (ValueError, RecursionError):
        return body
