"""A template that drops old reasoning forks the ledger; every sampled token is kept exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.data.trajectory import Message, ToolCall, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render.chatml import ChatML
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.trainer.pretrained import packaged_tokenizer
from tests.rollout.conftest import FaultyEngine

REF = EnvRef("key_value", {"calls": 4, "set_share": 0.0})
LIMITS = Limits(max_turns=8, max_turn_tokens=64, max_episode_tokens=2000, turn_timeout=5, episode_timeout=20, context=4096)


class Forgetful(ChatML):
    """ChatML as a reasoning model's template has it: a finished turn is never shown as it was sampled."""

    def keeps(self, message: Message, following: Sequence[Message], earlier: Sequence[Message] = (), begun: int = 0) -> bool:
        return False


class Player(FaultyEngine):
    """Samples a fixed list of turns, and keeps what it was asked with."""

    def __init__(self, renderer: ChatML, turns: Sequence[Message]) -> None:
        super().__init__(renderer.stop_token_ids[0])
        self.turns = [renderer.assistant(turn) for turn in turns]
        self.prompts: list[list[int]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        ids = self.turns[len(self.prompts)]
        self.prompts.append(list(token_ids))
        return Generation(ids, [-0.5] * len(ids), [self.version] * len(ids), "stop")


def play(renderer: ChatML) -> tuple[Trajectory, Player]:
    env = REF.build()
    env.reset(seed=1)
    player = Player(renderer, env.gold_turns(env.task))
    env.close()
    spec = EpisodeSpec(1, "train", 0, 0, "k")
    scorer = compile_spec(load_spec(REF.default_reward()))
    return asyncio.run(run_episode(REF.build(), Policy(player, renderer), spec, LIMITS, scorer)), player


def test_every_turn_of_a_forgetful_template_begins_a_ledger_and_is_sampled_once() -> None:
    trajectory, player = play(Forgetful(packaged_tokenizer(4096)))
    assert trajectory.reward == 1.0
    assert len(trajectory.ledgers) == len(player.turns) == len(trajectory.turns)
    sampled = [list(ledger.token_ids[ledger.sampled]) for ledger in trajectory.ledgers]
    assert sampled == player.turns
    for index, turn in enumerate(trajectory.turns):
        ledger = trajectory.ledgers[index]
        assert (turn.ledger, turn.end) == (index, len(ledger) - 1)
        assert list(ledger.token_ids[: len(player.prompts[index])]) == player.prompts[index]


def test_an_append_only_template_keeps_one_ledger_whose_prompts_are_its_prefixes() -> None:
    trajectory, player = play(ChatML(packaged_tokenizer(4096)))
    [ledger] = trajectory.ledgers
    for prompt, ids in zip(player.prompts, player.turns, strict=True):
        assert list(ledger.token_ids[: len(prompt) + len(ids)]) == prompt + ids
    assert int(ledger.sampled.sum()) == sum(len(ids) for ids in player.turns)
    assert isinstance(trajectory.turns[0].message.tool_calls[0], ToolCall)
