"""Episodes of 200 turns on a real engine and model, up to the model's whole context, exact to the token."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config import TrainConfig
from agentrl.config.schema import InitModelConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.render.chatml import ChatML
from agentrl.reward import compile_spec
from agentrl.rollout.context import Compact, ContextPolicy, KeepRecent, Stop
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.run.assembly import model_length
from agentrl.run.engine_choice import EngineChoice
from agentrl.trainer.pretrained import init_model, packaged_tokenizer
from tests.rollout.test_context_policies import TURNS, Endless, replayed

CONTEXT = 4096
Played = tuple[Path, "Listening", dict[str, Trajectory]]
"""The model, the engine with what it was asked, and the episodes by name."""


class Listening(EmbeddedEngine):
    """The real engine; keeps what each episode asked and was answered."""

    def __init__(self, path: str) -> None:
        super().__init__(path, max_slots=4)
        self.calls: dict[str, list[tuple[list[int], Generation]]] = {}

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        generation = await super().generate(token_ids, sampling, request_key)
        self.calls.setdefault(request_key, []).append((list(token_ids), generation))
        return generation


def limits(turns: int, context: int = CONTEXT) -> Limits:
    return Limits(turns, 4, 50_000, 60.0, 300.0, context)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("model")
    # Random weights; a larger spread than a trained model starts from, so that a wrong cache would be seen.
    init_model(InitModelConfig(layers=1, hidden=32, mlp=32, heads=2, kv_heads=1, head_dim=16, context=CONTEXT,
                               init_std=0.3), folder, 0)  # fmt: skip

    async def scenario() -> tuple[Listening, dict[str, Trajectory]]:
        engine = Listening(str(folder))
        await engine.start()
        renderer = ChatML(packaged_tokenizer(CONTEXT))

        async def one(key: str, context: ContextPolicy, bounds: Limits) -> Trajectory:
            policy = Policy(engine, renderer, context=context)
            return await run_episode(Endless(), policy, EpisodeSpec(1, "train", len(key), 0, key), bounds, compile_spec(TURNS))

        try:
            found = await asyncio.gather(
                one("whole", Stop(), limits(200)),
                one("full", Stop(), limits(10_000, context=1500)),
                one("compact", Compact(tokens=500, summary_tokens=12, prompt="sum up"), limits(200)),
                one("recent", KeepRecent(tokens=500, turns=5), limits(200)),
            )
        finally:
            await engine.close()
        return engine, dict(zip(("whole", "full", "compact", "recent"), found, strict=True))

    return folder, *asyncio.run(scenario())


@pytest.mark.parametrize("name", ["whole", "full", "compact", "recent"])
def test_the_ledgers_are_the_engine_calls(played: Played, name: str) -> None:
    _, engine, episodes = played
    calls = engine.calls[name]
    assert replayed(episodes[name]) == [(prompt, generation.token_ids) for prompt, generation in calls]
    logprobs = np.concatenate([ledger.logprobs[ledger.sampled] for ledger in episodes[name].ledgers])
    assert logprobs == pytest.approx(np.concatenate([generation.logprobs for _, generation in calls]))


def test_two_hundred_turns_in_one_ledger(played: Played) -> None:
    episode = played[2]["whole"]
    assert episode.stop is StopReason.MAX_TURNS and len(episode.turns) == 200
    [ledger] = episode.ledgers
    assert len(ledger) > 2000 and set(ledger.turns.tolist()) == set(range(200))


def test_an_episode_ends_with_the_context_to_the_last_token(played: Played) -> None:
    episode = played[2]["full"]
    assert episode.stop is StopReason.CONTEXT_FULL and episode.truncated and episode.reward is not None
    [ledger] = episode.ledgers
    # The next prompt would have been a few tokens; with less room nothing was asked.
    assert 1500 - 16 <= len(ledger) <= 1500


def test_an_episode_of_its_last_turns_alone_goes_on(played: Played) -> None:
    episode = played[2]["recent"]
    assert episode.stop is StopReason.MAX_TURNS and len(episode.turns) == 200
    assert len(episode.ledgers) == len(episode.rewrites) + 1 > 3 and all(len(ledger) <= 500 + 16 for ledger in episode.ledgers)
    # Five turns are kept each time: the note counts all others.
    gone = [message["content"] for rewrite in episode.rewrites for message in rewrite["added"]]
    assert gone == [f"[{rewrite['turn'] - 5} earlier turns were left out]" for rewrite in episode.rewrites]


def test_compacted_episodes_go_on(played: Played) -> None:
    episode = played[2]["compact"]
    assert episode.stop is StopReason.MAX_TURNS and len(episode.turns) == 200
    # `tokens` is where it happens: one answer, the request and the summary may lie beyond it.
    assert len(episode.ledgers) > 3 and max(map(len, episode.ledgers)) <= 640  # an answer to a cut call has 45 tokens
    assert len(played[1].calls["compact"]) == 200 + len(episode.rewrites)


@pytest.mark.parametrize("name", ["whole", "compact", "recent"])
def test_a_forward_pass_agrees_with_every_sampled_token(played: Played, name: str) -> None:
    folder, _, episodes = played
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ledger in episodes[name].ledgers:
        assert off(model, ledger) < 1e-3
    last = episodes[name].ledgers[-1]
    ids = last.ids()
    ids[1] = (ids[1] + 7) % 300  # the control: one other token at the very start
    assert off(model, last, ids) > 1e-3


async def test_an_episode_budget_over_the_context_is_no_prompt_over_the_context(played: Played) -> None:
    folder = str(played[0])
    config = TrainConfig.model_validate({
        "env": {"id": "key_value"}, "vllm": {"max_model_len": 1000}, "rollout": {"max_episode_tokens": 50_000},
    })  # fmt: skip
    engine = EngineChoice(config, "embedded").make(folder)
    await engine.start()
    await engine.close()
    length = model_length(config.model, folder)
    assert [EngineChoice(config, name).maker().context(length) for name in ("embedded", "vllm")] == [CONTEXT, 1000]


@torch.inference_mode()
def off(model: torch.nn.Module, ledger: TokenLedger, ids: list[int] | None = None) -> float:
    tokens = torch.tensor([ids or ledger.ids()])
    found = torch.log_softmax(model(tokens, use_cache=False).logits[0, :-1].float(), -1)
    found = found.gather(1, tokens[0, 1:, None]).squeeze(1)
    sampled = torch.tensor(ledger.sampled)[1:]
    return float((found - torch.tensor(ledger.logprobs)[1:])[sampled].abs().max())
