"""How many sandboxes run at once in this process, and those that are started before anybody asks."""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from agentrl.config.schema import SandboxConfig
from agentrl.errors import ConfigError, EnvError, ResourceError, hinted
from agentrl.redaction import resolved
from agentrl.sandbox.base import SANDBOXES, Sandbox, SandboxProvider, SandboxSpec
from agentrl.sandbox.choice import settled

log = logging.getLogger(__name__)


class SandboxPool:
    """Sandboxes of one provider on one event loop: at most `limit` at a time, of which up to `warm` are ahead of demand.

    Warm ones have no files yet and are of the kind (`SandboxSpec.key`) that was asked for last; one that is in the way of
    another kind is stopped. Taking one costs what writing the task's files costs.
    """

    def __init__(self, provider: SandboxProvider, warm: int, limit: int) -> None:
        self.provider, self.warm, self.limit = provider, warm, limit
        self.running = 0
        """Sandboxes that are started or being started: those held, and the warm ones."""
        self.started = 0
        """Sandboxes that the provider has been asked for so far."""
        self._idle: deque[tuple[str, Sandbox]] = deque()
        self._queue: deque[asyncio.Future[None]] = deque()
        self._refills: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        # Those that are warm when the loop is gone or the process ends.
        weakref.finalize(self, _abandon_all, self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def acquire(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        """A started sandbox with the spec's files (or a snapshot's), to be given back with `release`. Raises SandboxError if
        it does not start."""
        key = spec.key
        taken = self._take(key) if snapshot is None else None
        if taken is None:
            await self._slot()
            try:
                self.started += 1
                taken = await self.provider.start(spec, snapshot)
            except BaseException:
                self._free()
                raise
        elif spec.files:
            try:
                await taken.write(spec.files)
            except BaseException:
                await asyncio.shield(self.release(taken))
                raise
        self._refill(key, spec.empty())
        return taken

    async def release(self, sandbox: Sandbox) -> None:
        """Stop a sandbox, and let the next one start."""
        try:
            await sandbox.stop()
        finally:
            self._free()

    def lost(self, sandbox: Sandbox) -> None:
        """A sandbox that nobody holds any more, told from any thread."""
        sandbox.abandon()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._free)

    async def close(self) -> None:
        """Stop the warm ones."""
        for task in list(self._refills):
            task.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        while self._idle:
            await self.release(self._idle.pop()[1])

    # -- inside ------------------------------------------------------------------------------------

    def _take(self, key: str) -> Sandbox | None:
        for place, (kind, sandbox) in enumerate(self._idle):
            if kind == key:
                del self._idle[place]
                return sandbox
        return None

    async def _slot(self) -> None:
        """Wait until one more may run; a warm one of another kind makes room."""
        if self.running < self.limit:
            self.running += 1
            return
        if self._idle:
            # Its slot is taken over: `running` stays as it is.
            _, sandbox = self._idle.popleft()
            await sandbox.stop()
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free()  # the slot came together with the cancellation
            else:
                self._queue.remove(turn)
            raise

    def _free(self) -> None:
        """A slot is free: it goes to who waits longest."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def _refill(self, key: str, spec: SandboxSpec) -> None:
        """Start what is missing in the background."""
        there = sum(kind == key for kind, _ in self._idle) + len(self._refills)
        for _ in range(min(self.warm - there, self.limit - self.running)):
            if self._queue:
                return
            self.running += 1
            task = self._loop.create_task(self._start_ahead(key, spec))
            self._refills.add(task)
            task.add_done_callback(self._refills.discard)

    async def _start_ahead(self, key: str, spec: SandboxSpec) -> None:
        try:
            self.started += 1
            sandbox = await self.provider.start(spec)
        except EnvError as fault:
            self._free()
            log.warning("no sandbox could be started ahead: %s", fault)
            return
        except BaseException:
            self._free()
            raise
        if self._queue:  # somebody has begun to wait meanwhile, maybe for another kind
            await self.release(sandbox)
            return
        self._idle.append((key, sandbox))
        while len(self._idle) > self.warm:
            await self.release(self._idle.popleft()[1])


_BY_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, SandboxPool]] = WeakKeyDictionary()


def chosen(config: SandboxConfig | Mapping[str, Any] | None) -> SandboxConfig:
    """A config's `[env.sandbox]` as an environment's class gets it, with a provider in place of "auto". Raises ConfigError if it
    is none."""
    if config is None or isinstance(config, SandboxConfig):
        return settled(config or SandboxConfig())
    try:
        return settled(SandboxConfig.model_validate(dict(config)))
    except ValidationError as problem:
        first = problem.errors()[0]
        known = list(SandboxConfig.model_fields)
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"sandbox.{key}: {first['msg']}{hinted(key, known)}; known: {', '.join(known)}") from None


def provider_of(config: SandboxConfig) -> SandboxProvider:
    """The config's provider. Raises ConfigError for an unknown name or argument."""
    config = settled(config)
    make: Callable[..., SandboxProvider] = SANDBOXES.bind(config.provider, resolved(config.args, "env.sandbox.args"))
    return make()


def require(config: SandboxConfig) -> SandboxProvider:
    """The provider, there on this machine. Raises ConfigError as `provider_of`, ResourceError if it is not to be had."""
    config = settled(config)
    provider = provider_of(config)
    if reason := provider.unavailable():
        raise ResourceError(f"env.sandbox.provider = {config.provider!r}: {reason}")
    return provider


def pool_of(config: SandboxConfig) -> SandboxPool:
    """The pool of the running event loop that all environments with this config share."""
    pools = _BY_LOOP.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps(config.model_dump(), sort_keys=True)
    if key not in pools:
        pools[key] = SandboxPool(provider_of(config), config.warm, config.limit)
    return pools[key]


async def close_pools() -> None:
    """Stop the warm sandboxes of the running event loop."""
    for pool in _BY_LOOP.pop(asyncio.get_running_loop(), {}).values():
        await pool.close()


def _abandon_all(idle: deque[tuple[str, Sandbox]]) -> None:
    while idle:
        idle.pop()[1].abandon()
