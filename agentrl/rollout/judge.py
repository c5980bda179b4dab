"""A judge on an engine of the run's own (`reward.judge.engines`): verdicts of a model whose weights stay as they are.

    request -> messages -> renderer -> ids -> engine, greedily, by a grammar of the verdict -> text -> verdict

What is asked meanwhile is computed together: all members of a group that end at about the same time. A fault of the engine and
an answer that is no verdict give a Verdict without a value, so that the episode is unscored, and never one of 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from agentrl.deadline import LateError, within
from agentrl.errors import EngineError, PromptTooLongError, RenderError
from agentrl.redaction import redact_said
from agentrl.render.base import Renderer
from agentrl.reward.judge.cache import VerdictCache
from agentrl.reward.judge.client import JudgeFault, Verdict, VerdictRequest, read_verdict
from agentrl.reward.judge.own import form_of
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.trajectory import Json, Message

BACKOFF = 0.5
"""Seconds before the second attempt; each further one waits twice as long."""
NO_LIBRARY = (
    "verdicts are not held to their form, which takes llguidance, and those that do not fit it leave their episodes unscored: "
    "pip install 'agentrl[server]'"
)


def can_constrain() -> bool:
    """Whether the library is there that keeps an engine to a grammar."""
    return importlib.util.find_spec("llguidance") is not None


@dataclass(slots=True)
class Counted:
    """Of one judge, since its start: verdicts asked for, how many were known (or shared), how many failed; tokens; and the
    seconds in which it had something to do."""

    verdicts: int = 0
    cached: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JudgeLimits:
    """`timeout` (seconds) of an attempt, which is not counted before there is a place for it; `retries` after a fault of the
    engine; `concurrency`: places. `reasoning`: whether a verdict may come after one."""

    timeout: float = 60.0
    retries: int = 3
    concurrency: int = 64
    reasoning: bool = False


class EngineJudge:
    """One model on one engine. It answers on the event loop on which it was started; see the module."""

    def __init__(
        self, name: str, engine: Engine, renderer: Renderer, model: str, cache: VerdictCache, limits: JudgeLimits
    ) -> None:
        """`model`: what tells its weights apart, for the cache, which other runs may share."""
        self.name, self.counted = name, Counted()
        self._engine, self._renderer, self._model, self._cache, self._limits = engine, renderer, model, cache, limits
        self._running: dict[str, asyncio.Task[Verdict]] = {}
        self._places = asyncio.Semaphore(limits.concurrency)
        self._grammars: dict[str, str | None] = {}
        self._busy, self._since = 0, 0.0

    async def start(self) -> None:
        """Load the model. Raises UserError or EngineError."""
        await self._engine.start()

    async def close(self) -> None:
        """End what is under way, and the engine; idempotent."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._engine.close()

    async def forget(self) -> None:
        """Drop what was computed so far: what follows does not depend on what went before, of which a run that goes on from a
        checkpoint knows nothing. Verdicts in a folder stay. Not while something is under way."""
        if not self._busy:
            self._cache.forget()
            await self._engine.forget()

    async def verdict(self, request: VerdictRequest) -> Verdict:
        """The verdict, which equal requests share. Cancelling ends the waiting only."""
        self.counted.verdicts += 1
        key = self._key(request)
        kept = self._cache.get(key, request.schema)
        if kept is not None:
            self.counted.cached += 1
            # Without a folder it was said in this very update, to whoever came first, which is a matter of luck beside workers.
            return Verdict(kept, cached=self._cache.folder is not None)
        running = self._running.get(key)
        if running is None:
            running = asyncio.create_task(self._answer(key, request), name=f"a verdict of judge {self.name}")
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key, None))
        else:
            self.counted.cached += 1
        # shield: another episode may share this verdict and still wait for it.
        return await asyncio.shield(running)

    def _key(self, request: VerdictRequest) -> str:
        """What tells a verdict apart, for whoever shares the cache: the weights and how they are asked, and not how a config
        calls them."""
        asked = f"{self._model}\n{self._limits.reasoning}\n{replace(request, model='').key()}"
        return hashlib.sha256(asked.encode()).hexdigest()

    async def _answer(self, key: str, request: VerdictRequest) -> Verdict:
        self._begin()
        try:
            value, why = await self._attempts(key, request)
        finally:
            self._end()
        if value is None:
            self.counted.failed += 1
            return Verdict(None, error=redact_said(f"{request.model}: {why}"))
        self._cache.put(key, value)
        return Verdict(value)

    async def _attempts(self, key: str, request: VerdictRequest) -> tuple[Json, str]:
        """A verdict, or None and what was wrong with the last attempt."""
        why = ""
        for attempt in range(self._limits.retries + 1):
            if attempt:
                await asyncio.sleep(BACKOFF * 2 ** (attempt - 1))
            try:
                async with self._places:
                    work = self._attempt(request, f"judge/{self.name}/{key[:16]}")
                    return await within(self._limits.timeout, work, f"judge {self.name}"), ""
            except (PromptTooLongError, RenderError, JudgeFault) as fault:
                # It samples greedily: asked again it would say the same.
                return None, str(fault)
            except (EngineError, LateError) as fault:
                why = str(fault)
        return None, why

    async def _attempt(self, request: VerdictRequest, key: str) -> Json:
        messages = [Message(cast(Any, message["role"]), message["content"]) for message in request.messages]
        prompt = await self._renderer.astart(messages, [])
        sampling = Sampling(
            max_tokens=request.max_tokens,
            temperature=0.0,
            stop_token_ids=self._renderer.stop_token_ids,
            grammar=self._grammar(request),
        )
        generation = await self._engine.generate(prompt, sampling, key)
        self.counted.prompt_tokens += len(prompt)
        self.counted.sampled_tokens += len(generation.token_ids)
        if generation.finish == "abort":
            raise EngineError("the request was aborted")
        return await self._read(generation, request)

    async def _read(self, generation: Generation, request: VerdictRequest) -> Json:
        said = await self._renderer.aparse(generation.token_ids, generation.finish)
        try:
            return read_verdict(said.content, request)
        except JudgeFault as fault:
            if generation.finish != "length":
                raise
            cut = f"it was cut after {len(generation.token_ids)} tokens: raise the leaf's max_tokens, or max_model_len"
            raise JudgeFault(f"{fault} ({cut})", again=False) from fault

    def _grammar(self, request: VerdictRequest) -> str | None:
        """The grammar of a verdict; None if the renderer knows none, or the engine cannot keep to it."""
        form = form_of(request.schema, request.max_tokens)
        key = repr(form)
        if key not in self._grammars:
            self._grammars[key] = grammar_of(self._engine, self._renderer, form, self._limits.reasoning)
        return self._grammars[key]

    def _begin(self) -> None:
        if not self._busy:
            self._since = time.monotonic()
        self._busy += 1

    def _end(self) -> None:
        self._busy -= 1
        if not self._busy:
            self.counted.busy_s += time.monotonic() - self._since


def grammar_of(engine: Engine, renderer: Renderer, form: Mapping[str, Any], reasoning: bool) -> str | None:
    """The grammar of a turn that fits `form`, after a `reasoning` or none; None if the renderer knows none, or the engine cannot
    keep to it: verdicts are then read as they come."""
    try:
        grammar = renderer.grammar(form, reasons=reasoning)
    except RenderError:
        return None
    return None if engine.refusal(Sampling(max_tokens=1, grammar=grammar)) else grammar
