"""Parts for rollout tests: the real environment, renderer and reward spec; an engine whose faults are chosen."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Group
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec
from agentrl.rollout import stats as tally
from agentrl.rollout.collector import Collector
from agentrl.rollout.engine import EngineStats, Generation, Sampling
from agentrl.rollout.episode import Policy
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import EngineError
from tests.players import Still, collector_of
from tests.publishing import VersionOnly, exchange


class FaultyEngine(Still, VersionOnly):
    """Answers with short random text. `stuck`: keys of episodes that get no answer; `lost`: an error; `keys`: all."""

    def __init__(
        self, stop: int, *, fail: float = 0.0, hang: float = 0.0, max_delay: float = 0.0, seed: int = 0,
        stuck: tuple[str, ...] = (), lost: tuple[str, ...] = (),
    ):  # fmt: skip
        self.stop, self.fail, self.hang, self.max_delay = stop, fail, hang, max_delay
        self.stuck, self.lost = stuck, lost
        self.keys: list[str] = []
        self.random = random.Random(seed)
        self.running = 0
        self.open = asyncio.Event()
        self.open.set()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        fate, delay = self.random.random(), self.random.random() * self.max_delay
        self.running += 1
        self.keys.append(request_key)
        try:
            await self.open.wait()
            if self.stuck and request_key.startswith(self.stuck):
                await asyncio.sleep(3600)
            if fate < self.fail or (self.lost and request_key.startswith(self.lost)):
                raise EngineError("the replica went away")
            if fate < self.fail + self.hang:
                await asyncio.sleep(3600)
            rng = random.Random(sampling.seed)
            ids, versions = [], []
            for _ in range(rng.randint(1, 3)):
                await asyncio.sleep(delay / 3)
                await self.open.wait()
                ids.append(rng.randrange(260, 300))
                versions.append(self.version)
            return Generation([*ids, self.stop], [-1.0] * (len(ids) + 1), [*versions, self.version], "stop")
        finally:
            self.running -= 1

    async def pause(self) -> None:
        await super().pause()
        self.open.clear()

    async def resume(self) -> None:
        await super().resume()
        self.open.set()

    async def stats(self) -> EngineStats:
        return EngineStats(running=self.running, version=self.version)


LENGTH = {"agentrl_reward": 1, "name": "n", "success": {"id": "n"}, "root": {"use": "cost.tokens", "id": "n", "args": {"max": 4}}}
"""Episodes of four tokens and more succeed: some members of most groups."""


def collecting(renderer: Renderer, engine: FaultyEngine, spec: dict[str, Any], **rollout: Any) -> Collector:
    """A collector of key_value whose requests this engine answers."""
    policy, config = Policy(engine, renderer), RolloutConfig(**{"stall_timeout": 20.0, **rollout})
    return collector_of(EnvRef("key_value"), policy, compile_spec(spec), config, context=2048, seed=0)


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return make_renderer(packaged_tokenizer(4096))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in which nothing was ever scored goes on to the limit of groups that it bears later."""
    monkeypatch.setattr(tally, "MIN_DEAD_GROUPS", 10**9)


async def until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    """Let the loop go round until it is so."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.002)


async def steps(collect: Collector, updates: int) -> list[Group]:
    """So many updates; the groups that they trained on, in order."""
    found = []
    for _ in range(updates):
        groups = await collect.collect()
        found += groups
        collect.trained(groups)
        await exchange(collect)
    return found


async def only_update(collect: Collector) -> list[Group]:
    """The groups of one update; the collector is closed, whatever comes of it."""
    try:
        return await collect.collect()
    finally:
        await collect.close()


async def resume(first: Collector, again: Collector) -> dict[str, Any]:
    """End a run after an update, and go on in another collector from the state that files have."""
    groups = [group.to_json() for group in first.ledger.complete_groups()]
    state, written = json.loads(json.dumps([first.to_json(), groups]))
    await first.close()
    again.load_json(state, map(Group.from_json, written))
    await exchange(again)
    return {**state, "complete": groups}


RUN = """
base = "quickstart"
name = "r"
engine = "embedded"
sft = false
trackers = []
cluster = { backend = "inline" }
health = { idle_updates = 1000 }
model = { init = { layers = 1, hidden = 16 } }
"""


def trained(folder: Path, keys: str) -> list[dict[str, Any]]:
    """The rows of a run of a random model, which solves nothing and learns nothing, with these keys: `folder / "r"`."""
    from agentrl.cli.main import main

    (folder / "c.toml").write_text(RUN + keys)
    assert main(["train", str(folder / "c.toml"), f"out={folder}"]) in (0, 1)
    return [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
