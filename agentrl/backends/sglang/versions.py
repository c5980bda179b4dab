"""Names of weight versions at the servers, which keep one as text and say for each answer which tokens it sampled."""

from __future__ import annotations

import uuid

from agentrl.backends.sglang.http import Json
from agentrl.errors import EngineError


class Versions:
    """The versions that this engine has brought to its servers. With a prefix of its own: what another trainer brings to the
    same server would pass for ours under the same number."""

    def __init__(self) -> None:
        self._prefix = f"agentrl-{uuid.uuid4().hex[:12]}-"
        self._known: dict[str, int] = {}

    def name(self, version: int) -> str:
        """The name under which a server is given this version."""
        name = f"{self._prefix}{version}"
        self._known[name] = version
        return name

    def of(self, meta: Json, count: int, address: str) -> list[int]:
        """The version of each of an answer's `count` tokens. Raises EngineError if the answer does not say, or if the server has
        other weights than this engine gave it."""
        spans = meta.get("weight_versions")
        if not spans and count:
            raise EngineError(f"{address} does not say which weights sampled which token (meta_info.weight_versions)")
        found: list[int] = []
        for span in spans or []:
            name, start, end = span["version"], int(span["start"]), int(span["end"])
            if start != len(found) or end < start:
                raise EngineError(f"{address}: weight versions {spans} do not follow each other")
            if end > start and name not in self._known:
                raise EngineError(f"{address} sampled with weights {name!r}, which are not this run's: does another one use it?")
            found += [self._known.get(name, 0)] * (end - start)
        if len(found) != count:
            raise EngineError(f"{address}: weight versions of {len(found)} tokens in an answer of {count}")
        return found
