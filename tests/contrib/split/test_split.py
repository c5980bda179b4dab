"""Four ranks that split matrices, heads and experts compute, save and publish as one (`split_ranks.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cluster.launch import launch
from agentrl.config.schema import ModelConfig
from agentrl.contrib.split import EXPERT_FAMILIES, FAMILIES
from agentrl.trainer.actor import Actor
from agentrl.trainer.memory import count, shell
from tests.conftest import PROOFS, proof
from tests.contrib.split.split_ranks import CASES, SHORT, Case
from tests.e2e.runs import run_script
from tests.publishing import weights_of

from tests.trainer.train_batches import toy_optim  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
THESE = CASES if PROOFS else SHORT


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    run_script(Path(__file__).with_name("split_ranks.py"), str(folder), *THESE, timeout=500)
    return folder


def results(out: Path, name: str) -> tuple[Case, dict[str, Any], dict[str, Any]]:
    """A case, what one rank found, and what four did."""
    case = CASES[name]
    one, many = torch.load(out / f"{case.model}.pt"), torch.load(out / f"{name}.pt")
    return case, one[str(case.cfg.lora)], many


def distance(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max((tensor - theirs[name]).abs().max().item() for name, tensor in mine.items())


@pytest.mark.parametrize("name", THESE)
def test_logprobs_gradients_norms_and_steps_are_those_of_one_rank(out: Path, name: str) -> None:
    _, one, many = results(out, name)
    assert (one["logprobs"] - many["logprobs"]).abs().max() < 1e-5 and one["logprobs"].min() < -7
    assert len(one["gradients"]) == len(many["gradients"]) == 2
    for mine, theirs in zip(one["gradients"], many["gradients"], strict=True):
        size = max(grad.abs().max().item() for grad in mine.values())
        assert size > 0.05 and distance(mine, theirs) < 1e-5 * max(size, 1.0)
    if "routed" in many:  # tokens sent to experts that their routers did not choose
        assert (one["routed"] - many["routed"]).abs().max() < 1e-5 < (one["routed"] - one["logprobs"]).abs().max()
    for key, value in one["metrics"].items():
        if key != "prefix_ratio":
            assert many["metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    assert one["metrics"]["grad_norm"] > 0.5  # 50 times the limit, so a clip by another norm would show in the weights
    assert distance(one["weights"], many["weights"]) < 1e-5


@pytest.mark.parametrize("name", THESE)
def test_a_norm_that_split_heads_share_gets_the_gradient_of_all_heads(out: Path, name: str) -> None:
    """In each of several micro-batches: a hook that adds over the ranks what has come so far counts the first ones again."""
    case, one, many = results(out, name)
    names = [n for n in one["gradients"][0] if "q_norm" in n or "k_norm" in n]
    assert bool(names) == (case.model != "llama" and case.cfg.lora is None)
    for mine, theirs in zip(one["gradients"], many["gradients"], strict=True):
        for norm in names:
            size = mine[norm].abs().max()
            assert size > 1e-4 and (mine[norm] - theirs[norm]).abs().max() < 1e-4 * size + 1e-7


@pytest.mark.parametrize("name", THESE)
def test_what_they_gave_back_or_saved_returns_in_other_layouts_and_goes_on_to_the_bit_in_its_own(out: Path, name: str) -> None:
    case, one, many = results(out, name)
    assert many["moved"] and many["finite"] == [True, False], "one broken rank is seen by all"
    assert distance(many["loaded plain"], many["weights"]) == distance(many["loaded split"], many["weights"]) == 0
    assert distance(many["resumed"], many["goes on"]) == 0
    # Looser: AdamW turns the rounding of a gradient near 0 into a share of a step, here of 1e-4.
    assert distance(many["goes on"], one["goes on"]) < 2e-5 and distance(many["goes on"], many["weights"]) > 1e-4
    single = launch(Actor, backend="inline", world_size=1)
    single.run(Actor.init_model, str(out / "models" / case.model), ModelConfig(lora=case.cfg.lora), toy_optim())
    single.run(Actor.load, str(out / f"{name} saved"))
    assert distance(weights_of(single), many["weights"]) == 0


@pytest.mark.parametrize("name", THESE)
def test_plain_transformers_loads_what_they_exported(out: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    _, _, many = results(out, name)
    exported = AutoModelForCausalLM.from_pretrained(out / f"{name} exported", dtype=torch.float32).state_dict()
    assert all(torch.equal(exported[key], tensor) for key, tensor in many["weights"].items())


@pytest.mark.parametrize("name", THESE)
def test_each_rank_holds_its_share(out: Path, name: str) -> None:
    """Rank 0's part of weights and moments: a quarter of a matrix that is split in two and sharded in two, and so on."""
    case, one, many = results(out, name)
    world, cfg = case.mesh["dp"] * case.mesh["sp"] * case.mesh.get("tp", 1), case.cfg
    for key, tensor in one["weights"].items():
        for kind in ("model.{}", "optimizer.{}.exp_avg"):
            shape = many["held"].get(kind.format(key))
            if shape is None:  # with adapters there are other names
                assert cfg.lora is not None
                continue
            split = any(part in key for part in ("proj", "embed", "lm_head")) and ".experts." not in key
            # An embedding that is not tied stays whole by transformers' plans, and is split by torchtitan's.
            split &= not ("embed" in key and case.model != "qwen3" and cfg.engine == "fsdp2")
            ranks = world if ".experts." in key else world // cfg.replicas // (1 if split else cfg.tensor_parallel)
            expected = -(-tensor.numel() // ranks)
            assert torch.Size(shape).numel() == expected, (key, shape)


@pytest.mark.parametrize("name", [name for name in THESE if CASES[name].cfg.engine == "fsdp2"])
def test_the_memory_that_is_counted_is_what_each_rank_holds(out: Path, name: str) -> None:
    """Weights and AdamW's two moments, of rank 0, which holds the most."""
    case, _, many = results(out, name)
    cfg = case.cfg.model_copy(update={"path": str(out / "models" / case.model), "dtype": "bfloat16"})  # of the computation
    world = case.mesh["dp"] * case.mesh["sp"] * case.mesh.get("tp", 1)
    counted = count(shell(cfg), cfg, world, 128, [toy_optim()])
    held = {key: 4 * torch.Size(shape).numel() for key, shape in many["held"].items()}
    weights = {key: size for key, size in held.items() if key.startswith("model.")}
    moments = sum(size for key, size in held.items() if key.endswith(("exp_avg", "exp_avg_sq")))
    assert counted.weights == sum(weights.values()) and counted.optimizer == moments
    plain = cfg.model_copy(update={"tensor_parallel": 1, "expert_parallel": 1, "sequence_parallel": 1})
    whole = count(shell(plain), plain, world, 128, [toy_optim()])
    kept, split = counted.activations / whole.activations * cfg.sequence_parallel, cfg.tensor_parallel > 1
    if split and not cfg.activation_checkpointing:  # half of the heads and of the MLP is computed, and kept, on a rank
        assert kept < 0.9
    else:  # the layers' inputs are whole on every rank; experts get as many tokens as their rank sends
        assert kept == pytest.approx(1, rel=1e-3)
    fewer = counted.gradients / whole.gradients
    if cfg.shard_gradients:  # a quarter of each in any case, but of the norms, which split ranks have alike
        assert fewer == pytest.approx(1, abs=0.01)
    else:
        assert fewer < (0.8 if split else 0.9)


@pytest.fixture(scope="module")
def of_families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    families = sorted(FAMILIES | EXPERT_FAMILIES)
    run_script(Path(__file__).with_name("split_families.py"), str(folder), *families, timeout=900)
    return folder


@proof
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("family", sorted(FAMILIES | EXPERT_FAMILIES))
def test_each_family_that_is_admitted_is_right_on_two_ranks(of_families: Path, family: str) -> None:
    """Each gradient relative to its own size, since a parameter that only some heads reach would be lost in a common one."""
    found = json.loads((of_families / f"{family}.json").read_text())
    assert found["logprobs"] < 1e-5 and found["gradients"] < 1e-4 and found["tensors"] > 8, found
