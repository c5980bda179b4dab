"""Asks a judge model through litellm. A request that fails gives a Verdict without a value, never 0."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from agentrl.errors import JudgeBudgetError
from agentrl.executors import after_fork, threads
from agentrl.litellm_calls import ONCE, load_litellm, request_of, said_of
from agentrl.redaction import redact_said, redacted
from agentrl.reward.judge.budget import Budget
from agentrl.reward.judge.cache import VerdictCache
from agentrl.reward.judge.own import own_name
from agentrl.schemas import first_fault, validator
from agentrl.trajectory import Json

_CHARACTERS_PER_TOKEN = 2  # low on purpose, for an upper bound on a prompt's cost


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """A run's settings for its judges; a spec decides only model, prompt and verdict.

    `args`: further arguments of litellm's. `calls`, `usd`: budgets for the whole run (None: no limit). `usd_per_million`:
    (prompt, sampled) prices for models whose price litellm does not know. Times in seconds.
    """

    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)
    args: Mapping[str, Any] = field(default_factory=dict)
    cache: Path | None = None
    calls: int | None = 10_000
    usd: float | None = None
    usd_per_million: tuple[float, float] | None = None
    concurrency: int = 8
    timeout: float = 60.0
    retries: int = 3
    backoff: float = 0.5


@dataclass(frozen=True, slots=True)
class VerdictRequest:
    """A request to a judge: everything that the verdict depends on, and therefore the cache key."""

    model: str
    messages: tuple[Mapping[str, str], ...]
    schema: Mapping[str, Any]
    max_tokens: int

    def key(self) -> str:
        """SHA-256 of the canonical JSON of all fields, in their order."""
        text = json.dumps([1, *asdict(self).values()], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's answer: a JSON value that fits the request's schema, or None and the reason."""

    value: Json
    error: str | None = None
    cached: bool = False


class JudgeFault(Exception):
    """One attempt failed; `again`: whether to retry."""

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


class Judge:
    """A client for all judge leaves of a run: cache, budget, retries, and at most `concurrency` requests at
    a time. Equal requests made at the same time share one call."""

    def __init__(self, settings: JudgeSettings | None = None) -> None:
        self.settings = settings or JudgeSettings()
        self.cache = VerdictCache(self.settings.cache)
        self.budget = Budget(self.settings.calls, self.settings.usd)
        self._pool = threads(self.settings.concurrency, "agentrl-judge")
        self._begin()
        after_fork(self, Judge._begin)

    def _begin(self) -> None:
        self._running: dict[str, Future[Verdict]] = {}
        self._lock = threading.Lock()

    def ask(self, key: str, request: VerdictRequest) -> Verdict:
        """The verdict, blocking. Raises DependencyError without litellm, JudgeBudgetError if the budget is spent."""
        return self._submit(key, request).result()

    async def aask(self, key: str, request: VerdictRequest) -> Verdict:
        """As `ask`, without blocking. Cancelling stops the waiting only; the call itself ends by its timeout."""
        # shield: another caller may share this call and still wait for it.
        return await asyncio.shield(asyncio.wrap_future(self._submit(key, request)))

    def close(self) -> None:
        """Accept no more requests; running ones finish by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, key: str, request: VerdictRequest) -> Future[Verdict]:
        if self.settings.args:  # a verdict depends on them, too
            said = json.dumps([key, dict(self.settings.args)], sort_keys=True, default=str)
            key = hashlib.sha256(said.encode()).hexdigest()
        known = _not_here(request.model) or (
            (kept := self.cache.get(key, request.schema)) is not None and Verdict(kept, cached=True)
        )
        if known:
            done: Future[Verdict] = Future()
            done.set_result(known)
            return done
        with self._lock:
            running = self._running.get(key)
            if running is None:
                # `_attempts` fills the cache before the future ends, so an equal request always finds one of the two.
                running = self._pool.submit(self._attempts, key, request)
                self._running[key] = running
                running.add_done_callback(lambda _: self._running.pop(key, None))
            return running

    def _attempts(self, key: str, request: VerdictRequest) -> Verdict:
        """Up to 1 + retries attempts, with exponential backoff between them."""
        why = ""
        for attempt in range(self.settings.retries + 1):
            if attempt:
                time.sleep(self.settings.backoff * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
            try:
                value = self._attempt(request)
            except JudgeFault as fault:
                why = redact_said(str(fault))
                if not fault.again:
                    break
                continue
            self.cache.put(key, value)
            return Verdict(value)
        return Verdict(None, error=why)

    def _attempt(self, request: VerdictRequest) -> Json:
        litellm = load_litellm()
        reserved = self._most(litellm, request)
        refusal = self.budget.reserve(reserved)
        if refusal is not None:
            raise JudgeBudgetError(refusal)
        used = 0.0
        try:
            response = self._complete(litellm, request)
            used = self._cost(litellm, request, response)
            return read_verdict(response.choices[0].message.content if response.choices else None, request)
        finally:
            self.budget.settle(reserved, used)

    def _complete(self, litellm: Any, request: VerdictRequest) -> Any:
        errors = importlib.import_module("openai")
        asked = judge_call(self.settings, request)
        base = asked.get("api_base")
        try:
            return litellm.completion(**asked)
        except (errors.AuthenticationError, errors.PermissionDeniedError, errors.NotFoundError) as error:
            _refuse(error, base, again=False)
        except errors.BadRequestError as error:
            _refuse(error, base, again=False)
        except errors.OpenAIError as error:
            _refuse(error, base, again=True)

    def _prices(self, litellm: Any, model: str) -> tuple[float, float] | None:
        """USD per token (prompt, sampled), or None if unknown."""
        if self.settings.usd_per_million is not None:
            prompt, sampled = self.settings.usd_per_million
            return prompt / 1e6, sampled / 1e6
        known = litellm.model_cost.get(model) or litellm.model_cost.get(model.partition("/")[2])
        if not known or "input_cost_per_token" not in known:
            return None
        return float(known["input_cost_per_token"]), float(known.get("output_cost_per_token", 0.0))

    def _most(self, litellm: Any, request: VerdictRequest) -> float | None:
        prices = self._prices(litellm, request.model)
        if prices is None:
            return None
        characters = sum(len(message["content"].encode()) for message in request.messages)
        return characters / _CHARACTERS_PER_TOKEN * prices[0] + request.max_tokens * prices[1]

    def _cost(self, litellm: Any, request: VerdictRequest, response: Any) -> float:
        prices = self._prices(litellm, request.model)
        usage = response.usage
        if prices is None or usage is None:
            return 0.0
        return float(usage.prompt_tokens or 0) * prices[0] + float(usage.completion_tokens or 0) * prices[1]


def judge_call(settings: JudgeSettings, request: VerdictRequest) -> dict[str, Any]:
    """The keyword arguments of a judge's call of litellm's: what a model does not take is left out."""
    form = {"name": "verdict", "schema": dict(request.schema), "strict": True}
    own = {
        **ONCE,
        "model": request.model,
        "messages": [dict(message) for message in request.messages],
        "timeout": settings.timeout,
        "temperature": 0,
        "max_tokens": request.max_tokens,
        "response_format": {"type": "json_schema", "json_schema": form},
        "drop_params": True,
        "caching": False,
        **({} if settings.api_key is None else {"api_key": settings.api_key}),
    }
    keys = {"args_key": "reward.judge.args", "base_key": "reward.judge.api_base"}
    return request_of(own, settings.args, settings.api_base, **keys)


def _not_here(model: str) -> Verdict | None:
    """The verdict of a judge that only a run's own engines have (`rollout.judge`), and that is asked of an API."""
    if (name := own_name(model)) is None:
        return None
    return Verdict(
        None, error=f"{model} is a judge of a run's own (reward.judge.engines.{name}), and nothing here has its engine"
    )


def _refuse(error: Exception, base: str | None, again: bool) -> NoReturn:
    raise JudgeFault(f"{type(error).__name__}: {said_of(error, base)}", again=again) from error


def read_verdict(text: Any, request: VerdictRequest) -> Json:
    """The JSON object in an answer's text, checked against the schema. Raises JudgeFault."""
    if not isinstance(text, str):
        raise JudgeFault("the judge's answer has no text", again=True)
    body = text.strip()
    if body.startswith("```"):
        body = body.strip("`").removeprefix("json").strip()
    try:
        verdict = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise JudgeFault(f"the judge's answer is not JSON: {text[:120]!r}", again=True) from error
    fault = first_fault(validator(request.schema), verdict)
    if fault is not None:
        raise JudgeFault(f"the judge's verdict does not fit its schema: {fault.message[:200]}", again=True)
    return redacted(verdict)


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")
