"""A run of a tiny mixture of experts whose trainer repeats the engine's choices, from config to metrics; and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.contrib.moe.routers import RouterWatch, check_vllm
from agentrl.run.assembly import RunStart
from agentrl.run.checks.model_checks import check_router_replay
from agentrl.trainer.train_engine import TRAIN_ENGINES, check_train_engine
from agentrl.utils.errors import ConfigError
from tests import moe
from tests.e2e.inside import config_of, episodes, execute, updates
from tests.tiny_families import EXPERTS, build_family

REPLAY = "rollout.router_replay=true"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_family(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", tie_word_embeddings=False)


def test_what_the_engine_chose_is_repeated_from_the_first_step_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledgers have the experts of a plain forward pass over their tokens, the trainer's logprobs are the engine's; and a run that
    is told others computes something else."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    short = [f"model.path={model}", REPLAY, "steps=2", "algorithm.proximal=recompute", "rollout.groups=2", "rollout.group_size=2"]
    run = execute(config_of(tmp_path, "replayed", *short))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    watch = RouterWatch(plain)
    for episode in episodes(run, 1):
        for ledger in episode.ledgers:
            with torch.inference_mode(), watch.watching():
                plain(torch.tensor([ledger.ids()]), use_cache=False)
            assert ledger.experts is not None and ledger.routed_tokens == len(ledger) - 1 and bool(ledger.sampled[-1])
            assert np.array_equal(np.sort(ledger.experts, -1), np.sort(watch.experts(), -1)[:-1])
    rows = updates(run)
    assert len(rows) == 2 and max(row["mismatch_max"] for row in rows) < 1e-4
    assert all(0 <= row["experts_unused"] < 1 and 0 < row["experts_entropy"] <= 1 for row in rows)

    def others(self: Any) -> Any:
        return (told(self) + 1) % EXPERTS["num_experts"]

    told = RouterWatch.experts
    monkeypatch.setattr(RouterWatch, "experts", others)
    wrong = execute(config_of(tmp_path, "told wrong", *short[:2], "steps=1", *short[3:]))
    assert updates(wrong)[0]["mismatch_max"] > 1e-2


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("model.path=api:gpt", 'engine = api does not tell which experts .*: "embedded", "vllm"'),
        ("model.compile=true", r"routers of compiled layers cannot repeat choices"),
        ("dense", r"\[model.init\] is a dense model"),
        ("phimoe", "PhimoeTopKRouter does not choose experts by one topk"),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_name(model: str, tmp_path: Path, of: str, message: str) -> None:
    words = [f"model.path={model}", of] if "=" in of else []
    words += [f"model.path={moe.build('phimoe', tmp_path / 'sparse')}"] if of == "phimoe" else []
    with pytest.raises(ConfigError, match=message):
        check_router_replay(RunStart(config_of(tmp_path, "x", REPLAY, *words)))
    check_router_replay(RunStart(config_of(tmp_path, "x")))


def test_an_engine_that_cannot_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, entry = config_of(tmp_path, "x", f"model.path={model}", REPLAY), TRAIN_ENGINES.entry("fsdp2")
    unable = SimpleNamespace(name="fsdp2", make=entry.make, needs=entry.needs, traits=entry.traits - {"router_replay"})
    with monkeypatch.context() as patch:
        patch.setattr(TRAIN_ENGINES, "entry", lambda name: unable)
        with pytest.raises(ConfigError, match=r'rollout.router_replay: model.engine = "fsdp2" does not support it'):
            check_train_engine(config)
    check_train_engine(config)
    for name in ("speculative_config", "enable_expert_parallel", "kv_transfer_config"):
        vllm = config_of(tmp_path, "x", f"model.path={model}", REPLAY, "engine=vllm", f"vllm.args.{name}=true")
        with pytest.raises(ConfigError, match=rf"vllm.args.{name}: with rollout.router_replay"):
            check_vllm(vllm.vllm)
