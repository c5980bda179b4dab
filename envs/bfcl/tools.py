"""The leaderboard's functions as tools: recorded only, or run on an object of its classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from agentrl.contrib.suites.benchmarks import published_tool
from agentrl.data.trajectory import Json
from agentrl.env import Tool

from .formats import with_json_types
from .package import Package


def recorded(package: Package, function: Mapping[str, Json]) -> Tool:
    """A tool that does nothing: the calls of a single turn are compared, not run."""
    return _tool(package, json.dumps(function), False)


@lru_cache(maxsize=256)
def api_tools(package: Package, classes: tuple[str, ...]) -> dict[str, Tool]:
    """The functions that the leaderboard shows of classes: tools that run the method of their name on the episode's objects,
    whatever the arguments are."""
    return {function["name"]: _tool(package, json.dumps(function), True) for function in package.documented(classes)}


@lru_cache(maxsize=256)
def method_tools(package: Package, classes: tuple[str, ...]) -> dict[str, Tool]:
    """Every public method, shown or not: the leaderboard runs each of them."""
    return {name: _tool(package, json.dumps({"name": name}), True) for name in package.methods(classes)}


@lru_cache(maxsize=8192)
def _tool(package: Package, declared: str, runs: bool) -> Tool:
    body = json.loads(declared)
    types = package.module("constants.type_mappings").GORILLA_TO_OPENAPI
    shown = with_json_types({**body.get("parameters", {}), "type": "object"}, types)

    def call(env: Any, /, **arguments: Json) -> str:
        return env.call(body["name"], arguments) if runs else ""

    return published_tool({**body, "parameters": shown}, call, inline=True, read_only=not runs)
