"""Judges on the run's own engines (`reward.judge.engines`): models whose weights are not trained."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from agentrl.cluster.placement import has_gpus
from agentrl.config import TrainConfig
from agentrl.config.load import check_unread
from agentrl.config.schema import JudgeConfig, ModelConfig, RolloutConfig, VllmConfig
from agentrl.contrib.judges.client import BACKOFF, VerdictCache
from agentrl.contrib.judges.leaf import JudgeFault, Verdict, VerdictRequest, read_verdict
from agentrl.contrib.toolkit.turns import grammar_of
from agentrl.data.trajectory import Json, Message
from agentrl.render import make_renderer
from agentrl.render.base import Renderer
from agentrl.rollout.engine import ENGINES, Engine, EngineMaker, Sampling
from agentrl.run.digests import files_digest
from agentrl.run.engine_choice import AUTO, EngineChoice
from agentrl.run.services import RunServices
from agentrl.trainer.pretrained import load_tokenizer, model_context, named_anywhere, unused_ids
from agentrl.utils.errors import ConfigError, EngineError, PromptTooLongError, RenderError
from agentrl.utils.event_loop import LateError, cancel_all, within
from agentrl.utils.redaction import redact_said

SHORTEST, LONGEST = 16, 500
"""Minimum and maximum characters of a text in a verdict; evidence keeps no more."""
FRAME = 48
"""Tokens of a verdict besides its text: braces, keys, the score."""

COUNTED = ("verdicts", "cached", "failed", "prompt_tokens", "sampled_tokens", "busy_s")
"""Counters per judge: requested verdicts, cached (or shared) ones, failed ones; prompt and sampled tokens; busy seconds."""


class EngineJudge:
    """One judge model on one engine. It answers on the event loop where it was started."""

    def __init__(self, name: str, config: JudgeConfig, engine: Engine, renderer: Renderer, model: str) -> None:
        """`model`: identifies its weights in the cache, which other runs may share."""
        self.name, self.counted, self.engine = name, dict.fromkeys(COUNTED, 0.0), engine
        self._config, self._own, self._renderer, self._model = config, config.engines[name], renderer.with_tools([]), model
        self._cache = VerdictCache(None if config.cache is None else Path(config.cache))
        self._running: dict[str, asyncio.Task[Verdict]] = {}
        self._places = asyncio.Semaphore(self._own.concurrency)
        self._grammars: dict[str, str | None] = {}
        self._busy, self._since = 0, 0.0

    async def close(self) -> None:
        """Cancel running requests and close the engine; idempotent."""
        await cancel_all(self._running.values())
        await self.engine.close()

    async def forget(self) -> None:
        """Drop cached verdicts and engine state, so that a run continued from a checkpoint gives the same results. Verdicts in a
        folder stay. Does nothing while requests are running."""
        if not self._busy:
            self._cache.forget()
            await self.engine.forget()

    def take(self) -> dict[str, float]:
        """Return the counters since the last call; seconds of running requests count up to now."""
        if self._busy:
            before, self._since = self._since, time.monotonic()
            self.counted["busy_s"] += self._since - before
        counted, self.counted = self.counted, dict.fromkeys(COUNTED, 0.0)
        return counted

    async def verdict(self, request: VerdictRequest) -> Verdict:
        """Return the verdict; equal requests share it. Cancelling only stops the wait."""
        self.counted["verdicts"] += 1
        asked = f"{self._model}\n{self._own.reasoning}\n{replace(request, model='').key()}"
        key = hashlib.sha256(asked.encode()).hexdigest()
        kept = self._cache.get(key, request.schema)
        if kept is not None:
            self.counted["cached"] += 1
            # Without a folder it was answered in this update for another episode; which one came first is random with workers.
            return Verdict(kept, cached=self._cache.folder is not None)
        running = self._running.get(key)
        if running is None:
            running = asyncio.create_task(self._answer(key, request), name=f"a verdict of judge {self.name}")
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key, None))
        else:
            self.counted["cached"] += 1
        # shield: another episode may share this verdict.
        return await asyncio.shield(running)

    async def _answer(self, key: str, request: VerdictRequest) -> Verdict:
        if not self._busy:
            self._since = time.monotonic()
        self._busy += 1
        value: Json = None
        why = ""
        try:
            for attempt in range(self._config.retries + 1):
                if attempt:
                    await asyncio.sleep(BACKOFF * 2 ** (attempt - 1))
                try:
                    async with self._places:
                        work = self._attempt(request, f"judge/{self.name}/{key[:16]}")
                        value = await within(self._config.timeout, work, f"judge {self.name}")
                        break
                except (PromptTooLongError, RenderError, JudgeFault) as fault:
                    why = str(fault)
                    break  # greedy sampling: a retry would give the same answer
                except (EngineError, LateError) as fault:
                    why = str(fault)
        finally:
            self._busy -= 1
            if not self._busy:
                self.counted["busy_s"] += time.monotonic() - self._since
        if value is None:
            self.counted["failed"] += 1
            return Verdict(None, error=redact_said(f"{request.model}: {why}"))
        self._cache.put(key, value)
        return Verdict(value)

    async def _attempt(self, request: VerdictRequest, key: str) -> Json:
        messages = [Message(cast(Any, message["role"]), message["content"]) for message in request.messages]
        prompt = await self._renderer.astart(messages, [])
        # None if the renderer has no grammar or the engine does not support it: verdicts are then parsed as sampled.
        form = form_of(request.schema, request.max_tokens)
        known = repr(form)
        if known not in self._grammars:
            try:
                grammar: str | None = grammar_of(self._renderer, form, reasons=self._own.reasoning)
            except RenderError:
                grammar = None
            kept = grammar is None or not self.engine.refusal(Sampling(max_tokens=1, grammar=grammar))
            self._grammars[known] = grammar if kept else None
        sampling = Sampling(
            max_tokens=request.max_tokens,
            temperature=0.0,
            stop_token_ids=self._renderer.stop_token_ids,
            grammar=self._grammars[known],
        )
        generation = await self.engine.generate(prompt, sampling, key)
        self.counted["prompt_tokens"] += len(prompt)
        self.counted["sampled_tokens"] += len(generation.token_ids)
        if generation.finish == "abort":
            raise EngineError("the request was aborted")
        said = await self._renderer.aparse(generation.token_ids, generation.finish)
        try:
            return read_verdict(said.content, request)
        except JudgeFault as fault:
            if generation.finish != "length":
                raise
            cut = f"it was cut after {len(generation.token_ids)} tokens: raise the leaf's max_tokens, or max_model_len"
            raise JudgeFault(f"{fault} ({cut})") from fault


def form_of(schema: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return a verdict's schema for its grammar, without parts that a weak model may never end: free white space, texts longer
    than `max_tokens`, and arbitrarily many digits (a score has 100 to 1000 steps)."""
    most = min(LONGEST, max(SHORTEST, max_tokens - FRAME))
    properties = {}
    for name, part in schema.get("properties", {}).items():
        if part.get("type") == "string":
            part = {**part, "maxLength": most}
        elif part.get("type") == "number" and "minimum" in part and "maximum" in part:
            steps = math.floor(math.log10(part["maximum"] - part["minimum"])) - 2
            part = {**part, "multipleOf": 10**steps if steps >= 0 else round(10.0**steps, -steps)}
        properties[name] = part
    spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "properties": properties, "x-guidance": spaced}


# From a config


class OwnJudge:
    """A judge of a config (`reward.judge.engines.NAME`), without its engine."""

    def __init__(self, config: TrainConfig, name: str) -> None:
        self.config, self.name, self.key = config, name, f"reward.judge.engines.{name}"
        self.own = config.reward.judge.engines[name]

    def as_policy(self, positions: int | None = None) -> TrainConfig:
        """Return the config with the judge as the policy, for its engine's maker. `positions`: the model's context length, if
        known."""
        one, model = self.own, self.config.model
        longest = min(one.max_model_len, one.vllm.max_model_len, positions or one.max_model_len)
        own: dict[str, Any] = {
            "env": None,
            "engine": one.engine,
            "engine_args": one.engine_args,
            "model": ModelConfig(path=one.path, trust_remote_code=model.trust_remote_code, threads=model.threads),
            "rollout": RolloutConfig(max_episodes=one.concurrency, max_episode_tokens=longest),
            "vllm": one.vllm.model_copy(update={"max_model_len": longest}),
        }
        return self.config.model_copy(update=own)

    def maker(self, positions: int | None = None) -> EngineMaker:
        """Return its engine's maker. Raises ConfigError for an engine that does not support judges."""
        engine = self.own.engine
        able = sorted(entry.name for entry in ENGINES.own() if "judges" in entry.traits)
        if engine == AUTO or "judges" not in ENGINES.entry(engine).traits:
            raise ConfigError(
                f"{self.key}.engine = {engine!r}: this engine does not support judges; use one of {', '.join(able)}"
            )
        if "transformers" in ENGINES.entry(engine).traits:  # it reads nothing of vLLM's but the length
            keys = tuple(key for key in VllmConfig.model_fields if key != "max_model_len")
            check_unread(f"{self.key}.vllm", self.own.vllm, keys, f'{self.key}.engine = "vllm"')
        with self.name_in_errors():
            maker = EngineChoice(self.as_policy(positions), engine).maker()
        maker.cuda = partial(has_gpus, self.config.cluster, "judge")
        return maker

    @contextmanager
    def name_in_errors(self) -> Iterator[None]:
        """Prefix a ConfigError with the judge's key."""
        try:
            yield
        except ConfigError as problem:
            raise ConfigError(f"{self.key}: {problem}") from problem

    def make(self, run: RunServices) -> EngineJudge:
        """Build the judge with its engine, not started. Raises UserError if its model is unusable."""
        path, trust = self.own.path, self.config.model.trust_remote_code
        tokenizer, maker = load_tokenizer(path, trust), self.maker()
        maker.unused = unused_ids(tokenizer, path, trust)
        options = run.ray_options(f"judge {self.name}")
        engine = maker.make(named_anywhere(path), model_context(path, trust), options)
        renderer = make_renderer(tokenizer, day=self.config.model.date)
        return EngineJudge(self.name, self.config.reward.judge, engine, renderer, files_digest(path) or path)
