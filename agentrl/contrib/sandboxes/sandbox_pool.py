"""Choose a sandbox provider, limit the sandboxes of a process, and hold one per environment."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from agentrl.config.schema import SandboxConfig
from agentrl.contrib.sandboxes import bubblewrap
from agentrl.contrib.sandboxes.contract import SANDBOXES, Sandbox, SandboxProvider, SandboxSpec
from agentrl.utils.errors import ConfigError, EnvError, ResourceError, SandboxError, hint_text
from agentrl.utils.event_loop import cancel_all
from agentrl.utils.redaction import resolve_references

# Choose a provider

log = logging.getLogger(__name__)

AUTO = "auto"


def settle_provider(config: SandboxConfig) -> SandboxConfig:
    """Replace the provider "auto": bubblewrap if it works and keeps all promises of docs/sandboxes.md, else "local", which is
    refused if the kernel lacks support. With `args` it is always "local", to which the arguments belong."""
    if config.provider != AUTO:
        return config
    return config.model_copy(update={"provider": "local" if config.args else preferred_provider()})


@cache
def preferred_provider() -> str:
    """Return the provider for "auto" on this machine; checked and logged once per process."""
    reason = bubblewrap.unavailable() or bubblewrap.lacking()
    if reason is None:
        log.info('sandboxes: "bubblewrap", which works here; env.sandbox.provider = "local" chooses the other one')
        return bubblewrap.BubblewrapProvider.name
    log.info('sandboxes: "local" (no bubblewrap: %s)', reason)
    return "local"


# The pool


class SandboxPool:
    """Sandboxes of one provider on one event loop: at most `limit` at a time, up to `warm` of them started ahead of demand.

    Warm sandboxes have no files yet and the kind (the spec without files) of the last request; one is stopped if another kind
    needs its slot. Acquiring one only takes the time to write the task's files.
    """

    def __init__(self, provider: SandboxProvider, warm: int, limit: int) -> None:
        self.provider, self.warm = provider, warm
        self._slots = asyncio.Semaphore(limit)  # one for each sandbox that runs or starts, acquired or warm
        self._waiting = 0
        self._idle: deque[tuple[SandboxSpec, Sandbox]] = deque()
        self._refills: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        # Stop the warm sandboxes when the loop is gone or the process ends.
        weakref.finalize(self, _abandon_all, self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def full(self) -> bool:
        """True if no further sandbox may start now."""
        return self._slots.locked()

    async def acquire(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        """Return a started sandbox with the spec's or a snapshot's files; end its use with `release`. Raises SandboxError if it
        does not start."""
        wanted = replace(spec, files={})
        warm = next((one for one in self._idle if one[0] == wanted), None) if snapshot is None else None
        if warm is not None:
            self._idle.remove(warm)
            taken = warm[1]
            try:
                if spec.files:
                    await taken.write(spec.files)
            except BaseException:
                await asyncio.shield(self.release(taken))
                raise
        else:
            if self.full and self._idle:  # a warm sandbox is stopped to make room
                await self.release(self._idle.popleft()[1])
            self._waiting += 1
            try:
                await self._slots.acquire()
            finally:
                self._waiting -= 1
            try:
                taken = await self.provider.start(spec, snapshot)
            except BaseException:
                self._slots.release()
                raise
        # Start missing warm sandboxes in the background.
        there = sum(kind == wanted for kind, _ in self._idle) + len(self._refills)
        for _ in range(self.warm - there):
            task = self._loop.create_task(self._start_ahead(wanted))
            self._refills.add(task)
            task.add_done_callback(self._refills.discard)
        return taken

    async def release(self, sandbox: Sandbox) -> None:
        """Stop a sandbox and free its slot."""
        try:
            await sandbox.stop()
        finally:
            self._slots.release()

    def lost(self, sandbox: Sandbox) -> None:
        """Abandon an unreferenced sandbox and free its slot; callable from any thread."""
        sandbox.abandon()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._slots.release)

    async def close(self) -> None:
        """Stop the warm sandboxes."""
        await cancel_all(self._refills)
        while self._idle:
            await self.release(self._idle.pop()[1])

    # -- inside ------------------------------------------------------------------------------------

    async def _start_ahead(self, spec: SandboxSpec) -> None:
        if self.full:
            return
        await self._slots.acquire()
        try:
            sandbox = await self.provider.start(spec)
        except BaseException as fault:
            self._slots.release()
            if not isinstance(fault, EnvError):
                raise
            log.warning("no sandbox could be started ahead: %s", fault)
            return
        if self._waiting:  # a request began to wait during the start, maybe for another kind
            await self.release(sandbox)
            return
        self._idle.append((spec, sandbox))
        while len(self._idle) > self.warm:
            await self.release(self._idle.popleft()[1])


_BY_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, SandboxPool]] = WeakKeyDictionary()


def sandbox_config(config: SandboxConfig | Mapping[str, Any] | None) -> SandboxConfig:
    """Return the `[env.sandbox]` section that an environment's class gets, with "auto" replaced. Raises ConfigError if it is
    invalid."""
    if config is None or isinstance(config, SandboxConfig):
        return settle_provider(config or SandboxConfig())
    try:
        return settle_provider(SandboxConfig.model_validate(dict(config)))
    except ValidationError as problem:
        first = problem.errors()[0]
        known = list(SandboxConfig.model_fields)
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"sandbox.{key}: {first['msg']}{hint_text(key, known)}; known: {', '.join(known)}") from None


def provider_of(config: SandboxConfig) -> SandboxProvider:
    """Return the config's provider. Raises ConfigError for an unknown name or argument."""
    config = settle_provider(config)
    make: Callable[..., SandboxProvider] = SANDBOXES.bind(config.provider, resolve_references(config.args, "env.sandbox.args"))
    return make()


def require(config: SandboxConfig) -> SandboxProvider:
    """Return the provider if it works here. Raises ConfigError as `provider_of`, ResourceError if it is unavailable."""
    provider = provider_of(config)
    if reason := provider.unavailable():
        raise ResourceError(f"env.sandbox.provider = {settle_provider(config).provider!r}: {reason}")
    return provider


def pool_of(config: SandboxConfig) -> SandboxPool:
    """Return the pool that all environments with this config share on the running event loop."""
    pools = _BY_LOOP.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps(config.model_dump(), sort_keys=True)
    if key not in pools:
        pools[key] = SandboxPool(provider_of(config), config.warm, config.limit)
    return pools[key]


def _abandon_all(idle: deque[tuple[SandboxSpec, Sandbox]]) -> None:
    while idle:
        idle.pop()[1].abandon()


# A held sandbox

Answer = TypeVar("Answer")


class Saved:
    """Files of a sandbox at one moment. The snapshot is only taken when it is needed: before the sandbox changes, or when a copy
    of it starts."""

    def __init__(self, held: HeldSandbox) -> None:
        self._held: HeldSandbox | None = held
        self._id: str | None = None
        self._lock = asyncio.Lock()

    async def id(self) -> str:
        async with self._lock:
            if self._id is None:
                assert self._held is not None
                sandbox, provider = self._held.live, self._held.provider
                self._id = await sandbox.snapshot()
                weakref.finalize(self, provider.forget, self._id)
                self._held = None
            return self._id

    @property
    def taken(self) -> bool:
        return self._id is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Saved:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a snapshot with a live sandbox stays in the process that has the sandbox")


class HeldSandbox:
    """The sandbox of one episode, started at its first use. `copy.deepcopy` makes an independent one with the same files."""

    def __init__(self, config: SandboxConfig, spec: SandboxSpec, disk: int | None = None) -> None:
        """Check the spec without starting anything. `disk`: bytes of all files, where the provider can limit them (containers
        cannot). Raises ConfigError for a field that it does not support."""
        self.config, self.provider = config, provider_of(config)
        self.spec = spec if disk is None or "images" in SANDBOXES.entry(config.provider).traits else replace(spec, disk=disk)
        self.provider.check(self.spec)
        self._sandbox: Sandbox | None = None
        self._begins: Saved | None = None
        self._saved: weakref.ref[Saved] | None = None
        self._dropped: Callable[[], object] | None = None
        self._lock = asyncio.Lock()
        self._ended = False
        self._queued_since: float | None = None

    @property
    def live(self) -> Sandbox:
        """The running sandbox. Raises SandboxError if it is not started or has ended."""
        if self._sandbox is None:
            raise SandboxError("the sandbox has ended" if self._ended else "the sandbox is not started")
        return self._sandbox

    @property
    def queued(self) -> str:
        """Resource that the start waits for, for messages; "" if it does not wait."""
        if self._queued_since is None:
            return ""
        waited = time.monotonic() - self._queued_since
        return f"a {self.config.provider} sandbox for {waited:.0f} s ({self.config.limit} run: env.sandbox.limit)"

    async def start(self) -> Sandbox:
        """Start the sandbox if needed and return it. Raises SandboxError if it has ended."""
        async with self._lock:
            if self._ended:
                raise SandboxError("the sandbox has ended")
            if self._sandbox is None:
                begins = None if self._begins is None else await self._begins.id()
                pool = pool_of(self.config)
                self._queued_since = time.monotonic() if pool.full and not pool.idle else None
                try:
                    self._sandbox = sandbox = await pool.acquire(self.spec, begins)
                finally:
                    self._queued_since = None
                self._dropped = weakref.finalize(self, pool.lost, sandbox)
                self._begins = None
            return self._sandbox

    async def use(self, work: Callable[[Sandbox], Awaitable[Answer]], changes: bool = True) -> Answer:
        """Run `work` with the started sandbox; `changes`: it may change files."""
        sandbox = await self.start()
        if changes:
            await self._save_if_needed()
        return await work(sandbox)

    async def _save_if_needed(self) -> None:
        saved = self._saved() if self._saved is not None else None
        if saved is not None and not saved.taken:
            await saved.id()
        self._saved = None

    async def stop(self) -> None:
        """Release the sandbox, after a snapshot if copies need one."""
        async with self._lock:
            self._ended, self._begins = True, None
            if self._sandbox is None:
                return
            pool = pool_of(self.config)
            try:
                await self._save_if_needed()
            finally:
                sandbox, self._sandbox = self._sandbox, None
                if isinstance(self._dropped, weakref.finalize):
                    self._dropped.detach()
                await pool.release(sandbox)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldSandbox:
        other = HeldSandbox(self.config, self.spec)
        other._ended = self._ended
        other._begins = self._begins
        if self._sandbox is not None:  # the files as they are now; the same for all copies made before the next change
            other._begins = (self._saved() if self._saved is not None else None) or Saved(self)
            self._saved = weakref.ref(other._begins)
        return other

    def __reduce__(self) -> Any:
        raise TypeError("a live sandbox cannot be pickled")
