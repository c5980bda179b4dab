"""The service `judge`: models behind an API through litellm, with a cache and a budget, and those on engines of the run's own."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import JudgeConfig, RewardConfig
from agentrl.contrib.judges.leaf import (
    JudgeFault,
    LastingJudgeFault,
    Verdict,
    VerdictCache,
    VerdictRequest,
    own_name,
    read_verdict,
)
from agentrl.data.trajectory import Json
from agentrl.render.litellm_calls import ONCE, load_litellm, refusal, request_of, said_of
from agentrl.reward.leaf import SERVICES
from agentrl.run.services import ApiModel, RunServices, Service, SideEngine
from agentrl.utils.errors import JudgeBudgetError
from agentrl.utils.redaction import redact_said
from agentrl.utils.threads import after_fork, background, fork_safe, threads

if TYPE_CHECKING:
    from agentrl.contrib.judges.engines import EngineJudge
    from agentrl.reward import Scorer


class Budget:
    """Counts calls and dollars over all threads. A call reserves its maximum cost and returns what it did
    not use, so that concurrent calls cannot overspend together."""

    def __init__(self, calls: int | None, usd: float | None) -> None:
        self.limit_calls, self.limit_usd = calls, usd
        self.calls = 0
        self.usd = 0.0
        self._reserved = 0.0
        self._lock = fork_safe(threading.Lock())

    def reserve(self, usd: float | None) -> None:
        """Reserve one call that costs at most `usd` (None: not known). Raises JudgeBudgetError if it may not be made."""
        with self._lock:
            if self.limit_calls is not None and self.calls >= self.limit_calls:
                raise JudgeBudgetError(f"the budget of {self.limit_calls} judge calls is spent; raise reward.judge.calls")
            if self.limit_usd is not None and usd is None:
                why = "the model's price is not known, so a budget in USD cannot be enforced; set reward.judge.usd_per_million"
                raise JudgeBudgetError(f"reward.judge.usd: {why}")
            if self.limit_usd is not None and self.usd + self._reserved + (usd or 0.0) > self.limit_usd + 1e-12:
                why = f"budget of {self.limit_usd} USD for judging is spent ({self.usd:.6f} used); raise reward.judge.usd"
                raise JudgeBudgetError(f"the {why}")
            self.calls += 1
            self._reserved += usd or 0.0

    def settle(self, reserved: float | None, used: float) -> None:
        """Release a reservation and count the actual cost."""
        with self._lock:
            self._reserved -= reserved or 0.0
            self.usd += used


class Judge:
    """A client for all judge leaves of a run: cache, budget, retries, and at most `concurrency` requests at
    a time. Equal requests made at the same time share one call."""

    def __init__(self, settings: JudgeConfig | None = None, *, backoff: float = 0.5) -> None:
        """`settings`: the section `reward.judge`, by default its defaults. `backoff`: seconds before the second attempt, doubled
        for each later one."""
        self.settings, self._backoff = settings or JudgeConfig(), backoff
        self.cache = VerdictCache(None if self.settings.cache is None else Path(self.settings.cache))
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

    def _submit(self, key: str, request: VerdictRequest) -> Future[Verdict]:
        if self.settings.args:  # a verdict depends on them, too
            said = json.dumps([key, dict(self.settings.args)], sort_keys=True, default=str)
            key = hashlib.sha256(said.encode()).hexdigest()
        if (kept := self.cache.get(key, request.schema)) is not None:
            done: Future[Verdict] = Future()
            done.set_result(Verdict(kept, cached=True))
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
                time.sleep(self._backoff * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
            try:
                value = self._attempt(request)
                self.cache.put(key, value)
                return Verdict(value)
            except JudgeFault as fault:
                why = redact_said(str(fault))
                if isinstance(fault, LastingJudgeFault):
                    break
        return Verdict(None, error=why)

    def _attempt(self, request: VerdictRequest) -> Json:
        litellm, reserved = load_litellm(), None
        prices: tuple[float, float] | None = None  # USD per token (prompt, sampled)
        known = litellm.model_cost.get(request.model) or litellm.model_cost.get(request.model.partition("/")[2])
        if self.settings.usd_per_million is not None:
            prompt, sampled = self.settings.usd_per_million
            prices = prompt / 1e6, sampled / 1e6
        elif known and "input_cost_per_token" in known:
            prices = float(known["input_cost_per_token"]), float(known.get("output_cost_per_token", 0.0))
        if prices is not None:
            characters = sum(len(message["content"].encode()) for message in request.messages)
            # Two characters a token: few on purpose, for an upper bound.
            reserved = characters / 2 * prices[0] + request.max_tokens * prices[1]
        errors, asked = importlib.import_module("openai"), judge_call(self.settings, request)
        self.budget.reserve(reserved)
        used = 0.0
        try:
            response = litellm.completion(**asked)
            if prices is not None and (usage := response.usage) is not None:
                used = float(usage.prompt_tokens or 0) * prices[0] + float(usage.completion_tokens or 0) * prices[1]
            return read_verdict(response.choices[0].message.content if response.choices else None, request)
        except errors.OpenAIError as error:
            refused = refusal(error, asked, self.settings.api_base)
            why = f"{type(error).__name__}: {refused or said_of(error, asked.get('api_base'))}"
            lasting = refused is not None or isinstance(error, errors.BadRequestError)
            raise (LastingJudgeFault if lasting else JudgeFault)(why) from error
        finally:
            self.budget.settle(reserved, used)


def judge_call(settings: JudgeConfig, request: VerdictRequest) -> dict[str, Any]:
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
    }
    return request_of(own, settings.args, settings.api_base, args_key="reward.judge.args", base_key="reward.judge.api_base")


@SERVICES.register("judge")
class Judges(Service):
    """Asks the run's own judges for "engine:NAME", and for other models one client, since its budget and its limit of calls at a
    time are the whole run's."""

    def __init__(self, config: RewardConfig) -> None:
        self.api = Judge(config.judge)
        self._own: dict[str, EngineJudge] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def engines(cls, run: RunServices) -> Sequence[SideEngine]:
        if not run.config.reward.judge.engines:
            return ()
        from agentrl.contrib.judges.engines import OwnJudge

        judges = [OwnJudge(run.config, name) for name in run.config.reward.judge.engines]
        return [
            SideEngine(f"judge {one.name}", "judge", one.key, one.as_policy(), one.maker, f"concurrency = {one.own.concurrency}")
            for one in judges
        ]

    @classmethod
    def api_models(cls, run: RunServices, scorers: Mapping[str, Scorer]) -> Iterable[ApiModel]:
        from agentrl.contrib.judges.checks import paid_models

        return paid_models(run, scorers)

    def ask(self, key: str, request: VerdictRequest) -> Verdict:
        if own_name(request.model) is None:
            return self.api.ask(key, request)
        return asyncio.run_coroutine_threadsafe(self._verdict(request), self._loop or background().loop).result()

    async def aask(self, key: str, request: VerdictRequest) -> Verdict:
        if own_name(request.model) is None:
            return await self.api.aask(key, request)
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await self._verdict(request)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._verdict(request), self._loop))

    async def _verdict(self, request: VerdictRequest) -> Verdict:
        if (judge := self._own.get(str(own_name(request.model)))) is None:
            why = f"{request.model} is a judge of a run's own (reward.judge.engines), and nothing here has its engine"
            return Verdict(None, error=why)
        return await judge.verdict(request)

    async def start(self, run: RunServices, scorers: Sequence[Scorer]) -> None:
        """As of any service; own judges answer on this event loop."""
        from agentrl.contrib.judges.checks import leaves_on_engines
        from agentrl.contrib.judges.engines import OwnJudge

        names = sorted({found.name for found in leaves_on_engines(run.config.reward.judge, scorers)})
        self._loop = asyncio.get_running_loop()
        try:
            for name in names:
                self._own[name] = OwnJudge(run.config, name).make(run)
                await self._own[name].engine.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        judges, self._own = self._own, {}
        for judge in judges.values():
            await judge.close()

    async def forget(self) -> None:
        for judge in self._own.values():
            await judge.forget()

    def metrics(self) -> dict[str, float]:
        """Of each own judge since the last call: verdicts, how many were known and how many failed, tokens, the seconds in which
        it had something to do, and sampled tokens in each of these."""
        row: dict[str, float] = {}
        for name, judge in self._own.items():
            counted, judge.counted = judge.counted, dict.fromkeys(judge.counted, 0.0)
            busy = counted.pop("busy_s")
            row |= {f"judge/{name}/{key}": value for key, value in counted.items()}
            row[f"time/judge/{name}_s"] = busy
            row[f"throughput/judge/{name}_tokens_per_s"] = counted["sampled_tokens"] / max(busy, 1e-9)
        return row
