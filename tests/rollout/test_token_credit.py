"""From spec over evidence to the token, through the real loop: environment, renderer, ledger, scorer, batch."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.data.rows import collate
from agentrl.data.trajectory import ToolCall, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec, token_rewards
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from tests.players import Script

REF = EnvRef("key_value", {"calls": 4, "set_share": 0.0})
LIMITS = Limits(max_turns=8, max_turn_tokens=64, max_episode_tokens=2000, turn_timeout=5, episode_timeout=20, context=4096)
GOLD = {"expect": {"$": "/task/gold/calls"}, "compare": "subset", "credit": "matched"}
PER_CALL = {"use": "calls.match", "id": "calls", "args": GOLD, "scope": "call", "emit": "step", "weight": 0.5}
PER_TURN = {
    "use": "calls.match", "id": "turns", "args": GOLD, "scope": "turn", "reduce": "sum", "emit": "step",
    "weight": 0.25, "when": {"$": "/turn/calls", "ne": []},
}  # fmt: skip
OUTCOME = {"use": "number.close", "id": "success", "args": {"expect": {"$": "/task/gold/answer"}}}

# The episode: get, (add, a wrong get), get, add, answer. Four of the five calls are gold calls.
CASES = {
    "call": ([PER_CALL], {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1}),
    "turn": ([PER_TURN], {0: 0.25, 1: 0.125, 2: 0.25, 3: 0.25}),
    "terminal": ([OUTCOME], {4: 1.0}),
    "all": ([PER_CALL, PER_TURN, OUTCOME], {0: 0.35, 1: 0.225, 2: 0.35, 3: 0.35, 4: 1.0}),
}


def played(renderer: Renderer, root: dict[str, Any]) -> tuple[Trajectory, Any]:
    env = REF.build()
    env.reset(seed=1)
    turns = env.gold_turns(env.task)
    env.close()
    wrong = ToolCall("get", {"key": "z"})
    turns[1] = replace(turns[1], tool_calls=(*turns[1].tool_calls, wrong))
    scorer = compile_spec({"agentrl_reward": 1, "name": "credit", "root": root})
    policy = Policy(Script([renderer.assistant(turn) for turn in turns]), renderer)
    trajectory = asyncio.run(run_episode(REF.build(), policy, EpisodeSpec(1, "train", 0, 0, "k"), LIMITS, scorer))
    return trajectory, scorer.score(trajectory)


@pytest.mark.parametrize("emission", list(CASES))
def test_rewards_lie_on_the_last_sampled_token_of_their_turn(renderer: Renderer, emission: str) -> None:
    parts, wanted = CASES[emission]
    trajectory, score = played(renderer, {"op": "sum", "of": parts})
    assert trajectory.reward == score.value == pytest.approx(sum(wanted.values()))
    [ledger] = trajectory.ledgers
    # Found from the ledger's own columns, not from where the turns say that they end.
    ends = {turn: int(np.flatnonzero(ledger.sampled & (ledger.turns == turn))[-1]) for turn in range(5)}
    for rewards in (token_rewards(trajectory, score), [collate([trajectory])["rewards"].values().numpy()]):
        [column] = rewards
        there = np.flatnonzero(np.abs(column) > 1e-12)  # what sums of floats leave over is not a reward
        assert {int(i): float(column[i]) for i in there} == pytest.approx({ends[turn]: amount for turn, amount in wanted.items()})
    assert all(ledger.token_ids[end] in renderer.stop_token_ids for end in ends.values())


def test_the_evidence_names_the_calls_that_were_rewarded(renderer: Renderer) -> None:
    trajectory, score = played(renderer, {"op": "sum", "of": [PER_CALL, PER_TURN]})
    by_call, by_turn = score.evidence["root"]["of"]
    assert [part["value"] for part in by_call["parts"]] == [1, 1, 0, 1, 1]
    assert by_call["parts"][2]["evidence"]["extra"] == ["get"]
    assert [part["value"] for part in by_turn["parts"]] == [1, 0.5, 1, 1, None]
    assert by_turn["parts"][4]["skipped"] == "when"
    assert [turn.reward for turn in trajectory.turns] == [score.turns.get(i) for i in range(5)]
    assert trajectory.evidence == score.evidence
