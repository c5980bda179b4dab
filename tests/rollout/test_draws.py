"""What each request of a group is sampled with: seeds, temperatures, splits, retries, and when groups are admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.data.trajectory import Group, Message, ToolCall
from agentrl.render.base import Renderer
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import Policy
from agentrl.utils.errors import EngineError
from tests.players import collector_of
from tests.publishing import exchange
from tests.rollout.conftest import FaultyEngine
from tests.rollout.test_collect import ENV, scorer

CALL = Message("assistant", tool_calls=(ToolCall("list", {}),))


class Listening(FaultyEngine):
    """Makes the same call in every turn, and writes down how it was asked. `broken`: requests of these keys fail."""

    def __init__(self, renderer: Renderer, broken: tuple[str, ...] = ()) -> None:
        super().__init__(renderer.stop_token_ids[0])
        self.ids = renderer.assistant(CALL)
        self.asked: list[tuple[str, Sampling]] = []
        self.broken = broken

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        self.asked.append((request_key, sampling))
        if request_key in self.broken:
            raise EngineError("the replica went away")
        await asyncio.sleep(0)
        return Generation(list(self.ids), [-1.0] * len(self.ids), [self.version] * len(self.ids), "stop")

    def seeds(self) -> list[int | None]:
        return [sampling.seed for _, sampling in self.asked]


def play(renderer: Renderer, engine: FaultyEngine, seed: int = 0, greedy: bool = False) -> list[Group]:
    from agentrl.config import RolloutConfig

    config = RolloutConfig(groups=2, group_size=3, max_turns=3, temperature=0.8)
    policy = Policy(engine, renderer, temperature=0.8)

    async def scenario() -> list[Group]:
        collect = collector_of(ENV, policy, scorer(), config, context=2048, seed=seed, greedy=greedy)
        groups = await collect.collect()
        await collect.close()
        return groups

    return asyncio.run(scenario())


def test_every_turn_of_every_member_of_every_group_has_a_seed_of_its_own(renderer: Renderer) -> None:
    engine, other = Listening(renderer), Listening(renderer)
    play(renderer, engine)
    assert len(engine.asked) == 2 * 3 * 3 == len(set(engine.seeds()))
    play(renderer, other, seed=1)
    assert not set(engine.seeds()) & set(other.seeds())
    again = Listening(renderer)
    play(renderer, again)
    assert sorted(map(repr, again.asked)) == sorted(map(repr, engine.asked))


def test_a_retry_has_another_seed_and_the_same_task(renderer: Renderer) -> None:
    engine = Listening(renderer, broken=("g0.m1.a0",))
    groups = play(renderer, engine)
    first = {key: sampling.seed for key, sampling in reversed(engine.asked)}  # of each attempt's first turn
    assert {"g0.m1.a0", "g0.m1.a1"} <= set(first) and first["g0.m1.a0"] != first["g0.m1.a1"]
    assert len(set(engine.seeds())) == len(engine.asked) == 2 * 3 * 3 + 1
    assert {member.task.seed for member in groups[0].trajectories} == {groups[0].task_seed}
    assert all(member.reward is not None for group in groups for member in group.trajectories)


def test_training_episodes_are_of_the_train_split(renderer: Renderer) -> None:
    groups = play(renderer, Listening(renderer))
    assert {member.task.split for group in groups for member in group.trajectories} == {"train"}


def test_the_greedy_episode_alone_is_greedy(renderer: Renderer) -> None:
    engine = Listening(renderer)
    groups = play(renderer, engine, greedy=True)
    found = {key.split(".")[1]: sampling.temperature for key, sampling in engine.asked}
    assert found == {"m-1": 0.0, "m0": 0.8, "m1": 0.8, "m2": 0.8}
    for group in groups:
        assert group.baseline is not None and group.baseline.task == group.trajectories[0].task


def test_a_publish_admits_the_groups_that_it_made_room_for(renderer: Renderer) -> None:
    from agentrl.config import RolloutConfig

    config = RolloutConfig(groups=2, group_size=2, max_turns=2, max_staleness=1)

    async def scenario() -> tuple[int, int]:
        collect = collector_of(ENV, Policy(Listening(renderer), renderer), scorer(), config, context=2048, seed=0)
        collect.trained(await collect.collect())
        before = collect.ledger.slots_taken()
        await exchange(collect)
        after = collect.ledger.slots_taken()
        await collect.close()
        return before, after

    # Two updates' groups at first (staleness 1); after the first update the third's.
    assert asyncio.run(scenario()) == (4, 6)
