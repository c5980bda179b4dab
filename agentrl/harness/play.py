"""`Harness`: plays episodes with an agent of somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentrl.backends.endpoint.server import Endpoint
from agentrl.config.schema import AgentConfig
from agentrl.env import ToolEnv
from agentrl.executors import in_thread
from agentrl.harness.brief import MODEL
from agentrl.harness.episode import AgentEpisode
from agentrl.harness.programs import program_of
from agentrl.harness.tools import ToolServer, load_server
from agentrl.reward import Scorer
from agentrl.rollout.clock import Watch
from agentrl.rollout.course import EpisodeSpec, Limits, Policy, played
from agentrl.trajectory import Trajectory


class Harness:
    """The agent of a run and what serves it: one endpoint and one server of tools for all episodes of this process. They open
    with the first episode."""

    def __init__(self, config: AgentConfig, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """`decode`: the tokenizer's. Raises ConfigError or DependencyError if there is no such agent, or it cannot be served."""
        self._config, self._decode = config, decode
        self._program, self._tools = program_of(config), ToolServer(config.host)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._opening = asyncio.Lock()
        self._endpoint: Endpoint | None = None

    async def play(
        self, env: ToolEnv, policy: Policy, spec: EpisodeSpec, limits: Limits, scorer: Scorer | None, watch: Watch
    ) -> Trajectory:
        """As `run_episode`, with the agent's program in place of the loop over turns."""
        async with self._slots:
            endpoint = await self._open(policy)
            episode = AgentEpisode(env, policy, spec, limits, watch, self._config, self._program, endpoint, self._tools)
            return await played(episode, env, spec, limits, scorer, watch)

    async def close(self) -> None:
        """Stop serving; idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()
            await self._tools.close()
        await self._program.close()

    async def _open(self, policy: Policy) -> Endpoint:
        async with self._opening:
            if self._endpoint is None:
                await in_thread("load", load_server)  # seconds of imports, in which other episodes go on
                endpoint = Endpoint(policy.engine, policy.renderer, model=MODEL, host=self._config.host, decode=self._decode)
                await endpoint.start()
                await self._tools.start()
                self._endpoint = endpoint
            return self._endpoint
