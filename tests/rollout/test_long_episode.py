"""Episodes of 200 turns on a real engine and model: every token that was sampled is the model's own."""

import asyncio
from pathlib import Path

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
from agentrl.rollout.context import Compact, KeepRecent, Stop
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.run.assembly import model_length
from agentrl.run.engine_choice import EngineChoice
from agentrl.trainer.pretrained import init_model, packaged_tokenizer
from tests.rollout.test_context_policies import TURNS, Endless

CONTEXT = 4096
Played = tuple[Path, dict[str, Trajectory]]
"""The model, and the episodes by name."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("model")
    # Random weights; a larger spread than a trained model starts from, so that a wrong cache would be seen.
    init_model(InitModelConfig(layers=1, hidden=32, mlp=32, heads=2, kv_heads=1, head_dim=16, context=CONTEXT,
                               init_std=0.3), folder, 0)  # fmt: skip
    contexts = {
        "whole": Stop(),
        "compact": Compact(tokens=500, summary_tokens=12, prompt="sum up"),
        "recent": KeepRecent(tokens=500, turns=5),
    }

    async def scenario() -> list[Trajectory]:
        engine, renderer = EmbeddedEngine(str(folder), max_slots=4), ChatML(packaged_tokenizer(CONTEXT))
        limits, scorer = Limits(200, 4, 50_000, 60.0, 300.0, CONTEXT), compile_spec(TURNS)
        await engine.start()
        try:
            return await asyncio.gather(*(
                run_episode(Endless(), Policy(engine, renderer, context=context),
                            EpisodeSpec(1, "train", len(key), 0, key), limits, scorer)
                for key, context in contexts.items()
            ))  # fmt: skip
        finally:
            await engine.close()

    return folder, dict(zip(contexts, asyncio.run(scenario()), strict=True))


@pytest.mark.parametrize("name", ["whole", "compact", "recent"])
def test_a_forward_pass_agrees_with_every_sampled_token(played: Played, name: str) -> None:
    folder, episodes = played
    assert episodes[name].stop is StopReason.MAX_TURNS and len(episodes[name].turns) == 200
    assert (len(episodes[name].ledgers) == 1) == (name == "whole") and sum(map(len, episodes[name].ledgers)) > 2000
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
