"""A trainer sends tokens to the engine's experts in every pass of the policy; a whole run; and refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.cluster.worker import Mesh, WorkerContext
from agentrl.config.schema import AlgorithmConfig, LoraSection, ModelConfig
from agentrl.contrib.moe.routers import Routers, RouterWatch, check_vllm, load_metrics
from agentrl.data.expert_routing import FREE
from agentrl.data.rows import nested_tensor, offsets_of, select
from agentrl.run.assembly import RunStart
from agentrl.run.checks.model_checks import check_router_replay
from agentrl.trainer.actor import Actor
from agentrl.trainer.minibatch import cut_update
from agentrl.trainer.roles import Reference
from agentrl.trainer.train_engine import TRAIN_ENGINES, check_train_engine
from agentrl.utils.errors import ConfigError, ModelError
from tests import moe
from tests.e2e.inside import config_of, episodes, execute, updates
from tests.tiny_families import EXPERTS, build_family
from tests.trainer.ranks import by_token, logged, noisy
from tests.trainer.train_batches import make_batch, sharing, toy_optim

CONTEXT = WorkerContext("one", 0, Mesh.of({"dp": 1}, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return moe.build("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def plain(folder: str) -> Any:
    """The model in plain transformers, with routers that can be dictated."""
    model = moe.model("qwen3_moe")
    return model, Routers(model)


def actor_of(folder: str, cap: int = 4096, **model: Any) -> Actor:
    actor = Actor(CONTEXT)
    actor.init_model(folder, ModelConfig(**model), toy_optim(micro_tokens=cap))
    return actor


def routed(count: int = 7, seed: int = 0) -> TensorDict:
    """Rows whose tokens went to two random experts in each of two layers; the last token of each row is free."""
    batch = make_batch(count, seed=seed)
    offsets = offsets_of(batch["sampled"])
    rng = np.random.default_rng(seed)
    chosen = rng.permuted(np.tile(np.arange(moe.EXPERTS), (int(offsets[-1]), 2, 1)), axis=2)[..., : moe.CHOSEN]
    chosen = torch.from_numpy(chosen.astype(np.uint8))
    chosen[offsets[1:] - 1] = FREE[torch.uint8]
    return batch.update({"experts": nested_tensor(chosen, offsets)})


def alone(plain: Any, batch: TensorDict) -> Tensor:
    """log p of the sampled tokens, each row by itself through transformers' own forward pass with its experts dictated."""
    model, routers = plain
    found = []
    for ids, experts, sampled in zip(*(batch[name].unbind() for name in ("token_ids", "experts", "sampled")), strict=True):
        with torch.inference_mode(), moe.dictate(routers, experts):
            logits = model(input_ids=ids.long()[None], use_cache=False).logits[0, :-1].float()
        logp = logits.log_softmax(-1).gather(1, ids.long()[1:, None]).squeeze(1)
        found.append(torch.cat([torch.zeros(1), logp]) * sampled)
    return torch.cat(found)


def logprobs(actor: Any, batch: TensorDict) -> Tensor:
    values: Tensor = actor.compute_logprob(batch)["logprobs"].values()
    return values


def mine(method: str, batch: TensorDict) -> TensorDict:
    """What the dispatch table gives the only rank."""
    shipment = Actor.dispatch_table[method].scatter("one", (batch,), {}, CONTEXT.mesh)
    return select(shipment.batch, shipment.rows[0])


@pytest.mark.parametrize("cap", [64, 4096])
def test_each_token_goes_to_its_own_experts_however_rows_are_packed(folder: str, plain: Any, cap: int) -> None:
    batch = routed()
    found = logprobs(actor_of(folder, cap), batch)
    assert (found - alone(plain, batch)).abs().max() < 1e-5
    own = logprobs(actor_of(folder, cap), batch.exclude("experts"))
    assert (own - alone(plain, batch)).abs().max() > 0.5, "control: the routers' own choices are others"


def test_a_shared_prefix_goes_to_the_experts_of_its_first_row(folder: str, plain: Any) -> None:
    """Rows whose engine sent the shared tokens elsewhere follow it."""
    batch = make_batch(8, seed=2)
    ids = batch["token_ids"]
    offsets, values = offsets_of(ids), ids.values().clone()
    for row in range(8):  # groups of four begin with 20 equal tokens
        start, stop = int(offsets[row]), int(offsets[row + 1])
        values[start : min(start + 20, stop - 1)] = torch.arange(7, 27)[: min(20, stop - 1 - start)] + row // 4
    batch["token_ids"] = nested_tensor(values, offsets)
    batch["experts"] = routed(8, seed=2)["experts"]
    shared = sharing(batch, "on")
    trees = shared["tree"].tolist()
    assert max(trees.count(tree) for tree in set(trees) if tree >= 0) > 1
    want = batch["experts"].values().clone()
    for tree in {number for number in trees if number >= 0}:
        rows = [row for row, number in enumerate(trees) if number == tree]
        length = int(shared["tree_prefix"][rows[0]])
        first = int(offsets[rows[0]])
        for row in rows[1:]:
            assert not torch.equal(want[offsets[row] : offsets[row] + length], want[first : first + length])
            want[offsets[row] : offsets[row] + length] = want[first : first + length]
    plain_rows = batch.clone().update({"experts": nested_tensor(want, offsets)})
    planned = mine("compute_logprob", shared)
    assert "prefix" in planned
    assert (logprobs(actor_of(folder), planned) - alone(plain, plain_rows)).abs().max() < 1e-5


def updated(actor: Actor, batch: TensorDict) -> tuple[dict[str, float], dict[str, Tensor]]:
    log = logged(actor)
    metrics = actor.update(mine("update", cut_update(batch, AlgorithmConfig(), 1, step=1)), AlgorithmConfig(), step=1)
    return metrics, log.seen[0]


def test_what_is_computed_again_for_the_gradient_goes_to_the_same_experts(folder: str) -> None:
    """With layers computed again in the backward pass and several micro-batches; the router learns from its gates."""
    batch = routed()
    metrics, whole = updated(actor_of(folder), batch)
    others, again = updated(actor_of(folder, 64, activation_checkpointing=True), batch)
    router = "model.layers.1.mlp.gate.weight"
    assert whole[router].abs().max() > 1e-4
    for name, gradient in whole.items():
        assert (gradient - again[name]).abs().max() < 1e-5 * max(1.0, float(gradient.abs().max())), name
    assert others["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    _, free = updated(actor_of(folder), batch.exclude("experts"))
    assert (free[router] - whole[router]).abs().max() > 1e-4, "control: other experts, another gradient"


def test_loads_are_those_of_the_tokens_that_were_computed(folder: str, plain: Any) -> None:
    """Counted by numpy: dictated choices, else those of a plain pass; once, and of rows with a gradient."""
    batch = routed()
    advantages = batch["advantages"].values()
    advantages[offsets_of(batch["advantages"])[3] :] = 0.0
    metrics, _ = updated(actor_of(folder, 64, activation_checkpointing=True), batch)
    counts = np.zeros((2, moe.EXPERTS))
    for ids, experts in list(zip(batch["token_ids"].unbind(), batch["experts"].unbind(), strict=True))[:3]:
        model = moe.model("qwen3_moe")
        watch = RouterWatch(model)
        with watch.watching(), torch.inference_mode(), moe.dictate(watch.routers, experts):
            model(input_ids=ids.long()[None], use_cache=False)
        for layer in range(2):
            counts[layer] += np.bincount(watch.experts()[:, layer].reshape(-1), minlength=moe.EXPERTS)
    want = load_metrics(counts)
    assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-9) and len(want) == 3


@pytest.mark.parametrize("cap", [200, 4096])
def test_a_shared_prefix_counts_for_each_row_that_has_it(folder: str, cap: int) -> None:
    """Loads, counted by numpy over all rows, are the same with prefixes computed once and without."""
    batch, table = by_token(noisy(120), 2)
    counts = np.stack(
        [np.bincount(table[batch["token_ids"].values(), layer].flatten(), minlength=moe.EXPERTS) for layer in (0, 1)]
    )
    want = load_metrics(counts)
    for mode, ratio in (("off", 1.0), ("on", 1.1)):
        metrics, _ = updated(actor_of(folder, cap), sharing(batch, mode))
        assert metrics["prefix_ratio"] >= ratio
        assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-9) and want["experts_max_violation"] > 0.05


def test_a_reference_has_routers_of_its_own(folder: str) -> None:
    """The frozen one, and the actor's base without its adapter."""
    batch = routed()
    reference = Reference(CONTEXT)
    reference.init_model(folder, ModelConfig(), toy_optim())
    free = batch.exclude("experts")
    assert torch.equal(logprobs(reference, batch), logprobs(reference, free))
    adapted = actor_of(folder, lora=LoraSection(rank=2))
    base = adapted.compute_reference(batch)["logprobs"].values()
    assert (base - logprobs(reference, free)).abs().max() < 1e-6
    assert (logprobs(adapted, batch) - base).abs().max() > 0.5, "the policy repeats the choices"


def test_choices_of_another_model_are_refused(folder: str, tiny: str) -> None:
    batch = routed()
    with pytest.raises(ModelError, match="a model without routers"):
        actor_of(tiny).compute_logprob(batch)
    wide = batch["experts"].values()[:, :1]
    with pytest.raises(ModelError, match="with 2 routers"):
        actor_of(folder).compute_logprob(batch.clone().update({"experts": nested_tensor(wide, offsets_of(batch["sampled"]))}))
    metrics, _ = updated(actor_of(tiny), make_batch(4))
    assert not [name for name in metrics if name.startswith("experts")], "a dense model has no loads"


# -- from a config

REPLAY = "rollout.router_replay=true"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_family(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", tie_word_embeddings=False)


def test_what_the_engine_chose_is_repeated_from_the_first_step_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of a plain pass, the engine's logprobs; and a run with others computes something else."""
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


@pytest.mark.parametrize(("of", "message"), [
    ("model.path=api:gpt", 'engine = api does not report the experts .*: "embedded", "vllm"'),
    ("model.compile=true", r"routers of compiled layers cannot repeat choices"),
    ("dense", r"\[model.init\] is a dense model"),
    ("phimoe", "PhimoeTopKRouter does not choose experts by one topk"),
])  # fmt: skip
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
