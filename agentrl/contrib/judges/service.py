"""The service `judge`: models behind an API, and models on the run's own engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from agentrl.config.schema import RewardConfig
from agentrl.contrib.judges.client import Judge
from agentrl.contrib.judges.leaf import Verdict, VerdictRequest, own_name
from agentrl.reward.leaf import SERVICES
from agentrl.run.services import ApiModel, RunServices, Service, SideEngine
from agentrl.utils.threads import background

if TYPE_CHECKING:
    from agentrl.contrib.judges.engines import EngineJudge
    from agentrl.reward import Scorer


@SERVICES.register("judge")
class Judges(Service):
    """Routes "engine:NAME" to the run's own judges, and other models to one client. Its budget and concurrency limit are those
    of the whole run."""

    def __init__(self, config: RewardConfig) -> None:
        self.api = Judge(config.judge)
        self._own: dict[str, EngineJudge] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def engines(cls, run: RunServices) -> Sequence[SideEngine]:
        if not run.config.reward.judge.engines:
            return ()
        from agentrl.contrib.judges.engines import OwnJudge

        found = []
        for name, own in run.config.reward.judge.engines.items():
            one, lower = OwnJudge(run.config, name), f"concurrency = {own.concurrency}"
            found.append(SideEngine(f"judge {name}", "judge", one.key, own.engine, one.as_policy().model, one.maker, lower))
        return found

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
        """Start the service; own judges answer on this event loop."""
        from agentrl.contrib.judges.checks import leaves_on_engines
        from agentrl.contrib.judges.engines import OwnJudge

        names = sorted(leaves_on_engines(run.config.reward.judge, scorers))
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
        async with AsyncExitStack() as closing:  # each even if another fails
            for judge in judges.values():
                closing.push_async_callback(judge.close)

    async def forget(self) -> None:
        for judge in self._own.values():
            await judge.forget()

    def metrics(self) -> dict[str, float | None]:
        """Return metrics per own judge since the last call: verdicts, cached and failed ones, tokens, busy seconds, and sampled
        tokens per busy second."""
        row: dict[str, float | None] = {}
        for name, judge in self._own.items():
            counted = judge.take()
            busy = counted.pop("busy_s")
            row |= {f"judge/{name}/{key}": value for key, value in counted.items()}
            row[f"time/judge/{name}_s"] = busy
            row[f"throughput/judge/{name}_tokens_per_s"] = counted["sampled_tokens"] / busy if busy else None
        return row
