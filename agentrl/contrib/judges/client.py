"""Judges behind an API: verdicts through litellm, with a cache and a budget."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from agentrl.config.schema import JudgeConfig
from agentrl.contrib.judges.leaf import JudgeFault, Verdict, VerdictRequest, read_verdict
from agentrl.data.trajectory import Json
from agentrl.render.litellm_calls import NO_RETRIES, choice_of, error_line, load_litellm, refusal, request_of, retry_wait
from agentrl.utils.errors import ConfigError, JudgeBudgetError
from agentrl.utils.parsing import read_json
from agentrl.utils.redaction import redact_said
from agentrl.utils.schemas import first_fault, validator
from agentrl.utils.threads import after_fork, fork_safe, threads

BACKOFF = 0.5
"""Seconds before the second attempt at a verdict, doubled for each later one."""


class Budget:
    """Budget of calls and dollars, shared by all threads. A call reserves its maximum cost and later returns the unused part, so
    that concurrent calls cannot overspend together."""

    def __init__(self, calls: int | None, usd: float | None) -> None:
        self.limit_calls, self.limit_usd = calls, usd
        self.calls = 0
        self.usd = 0.0
        self._reserved = 0.0
        self._lock = fork_safe(threading.Lock())

    def reserve(self, usd: float | None) -> None:
        """Reserve one call of at most `usd` (None: unknown). Raises JudgeBudgetError if the budget does not allow it."""
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
        """Release a reservation and add the actual cost."""
        with self._lock:
            self._reserved -= reserved or 0.0
            self.usd += used


class VerdictCache:
    """Verdicts in a folder, which several processes may share, or only in memory."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ConfigError if the folder is not writable."""
        if folder is not None:
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not there.is_dir():
                raise ConfigError(f"reward.judge.cache = {folder}: expected a folder, and {there} is a file")
            if not os.access(there, os.W_OK | os.X_OK):
                raise ConfigError(f"reward.judge.cache = {folder}: {there} may not be written")
        self.folder = folder
        self._memory: dict[str, Json] = {}

    def get(self, key: str, schema: Mapping[str, Any]) -> Json:
        """Return the verdict of a key, or None, also for a file that is unreadable or does not fit `schema`, since others write
        to the folder too."""
        if key not in self._memory and self.folder is not None:
            try:
                verdict = read_json(self._path(key).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
            if first_fault(validator(schema), verdict) is None:
                self._memory[key] = verdict
        return self._memory.get(key)

    def put(self, key: str, verdict: Json) -> None:
        """Store a verdict, by a temporary file and a rename, so that readers never see a partial one."""
        self._memory[key] = verdict
        if self.folder is None:
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".verdict-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(verdict, file)
        Path(name).replace(path)

    def forget(self) -> None:
        """Drop the verdicts, unless they are in a folder."""
        if self.folder is None:
            self._memory.clear()

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"


class Judge:
    """Client of all judge leaves of a run: cache, budget, retries, at most `concurrency` requests at a time. Concurrent equal
    requests share one call."""

    def __init__(self, settings: JudgeConfig) -> None:
        """`settings`: the section `reward.judge`."""
        self.settings = settings
        self.cache = VerdictCache(None if self.settings.cache is None else Path(self.settings.cache))
        self.budget = Budget(self.settings.calls, self.settings.usd)
        self._pool = threads(self.settings.concurrency, "agentrl-judge")
        self._begin()
        after_fork(self, Judge._begin)

    def _begin(self) -> None:
        self._running: dict[str, Future[Verdict]] = {}
        self._lock = threading.Lock()

    def ask(self, key: str, request: VerdictRequest) -> Verdict:
        """Return the verdict; blocks. Raises DependencyError without litellm, JudgeBudgetError if the budget is spent."""
        return self._submit(key, request).result()

    async def aask(self, key: str, request: VerdictRequest) -> Verdict:
        """Return the verdict without blocking. Cancelling only stops the wait; the call ends by its timeout."""
        # shield: another caller may share this call.
        return await asyncio.shield(asyncio.wrap_future(self._submit(key, request)))

    def _submit(self, key: str, request: VerdictRequest) -> Future[Verdict]:
        if self.settings.args:  # a verdict depends on them too
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
        """Make up to 1 + retries attempts, with exponential backoff."""
        why, wait = "", 0.0
        for attempt in range(self.settings.retries + 1):
            if attempt:
                time.sleep(max(wait, BACKOFF * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)))
            try:
                value = self._attempt(request)
                self.cache.put(key, value)
                return Verdict(value)
            except JudgeFault as fault:
                why = redact_said(str(fault))
                if fault.wait is None:
                    break
                wait = fault.wait
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
            # Two characters per token: an upper bound on tokens.
            reserved = characters / 2 * prices[0] + request.max_tokens * prices[1]
        asked = judge_call(self.settings, request)
        self.budget.reserve(reserved)
        used = 0.0
        try:
            try:
                response = litellm.completion(**asked)
            except Exception as error:  # litellm's errors have no common base class
                refused = refusal(error, asked, self.settings.api_base)
                failed = JudgeFault(f"{type(error).__name__}: {refused or error_line(error, asked.get('api_base'))}")
                failed.wait = retry_wait(error, 0.0)
                raise failed from error
            used = reserved or 0.0  # unless the server reports its usage; litellm puts zeros in place of a missing one
            if prices is not None and (usage := response.usage) is not None and usage.prompt_tokens:
                used = float(usage.prompt_tokens) * prices[0] + float(usage.completion_tokens or 0) * prices[1]
            cut = ""
            try:
                choice = choice_of(response)
                cut = " (it was cut: raise the leaf's max_tokens)" if choice.finish_reason == "length" else ""
                return read_verdict(choice.message.content, request)
            except (LookupError, JudgeFault) as fault:
                raise JudgeFault(f"{fault}{cut}") from fault
        finally:
            self.budget.settle(reserved, used)


def judge_call(settings: JudgeConfig, request: VerdictRequest) -> dict[str, Any]:
    """Build the arguments of litellm's call; litellm drops those that the model does not support."""
    form = {"name": "verdict", "schema": dict(request.schema), "strict": True}
    own = {
        **NO_RETRIES,
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
