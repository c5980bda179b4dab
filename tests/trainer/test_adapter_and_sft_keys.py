"""What each key of [sft] and [model.lora] does to the weights: by how much, and to which."""

from typing import Any

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, LoraSection, ModelConfig
from agentrl.data.rows import collate
from agentrl.trainer.actor import Actor
from agentrl.trainer.layers import inject
from agentrl.trainer.optim import muon, sft_optim
from tests.publishing import weights_of
from tests.trainer.family_models import MIXED, model_of
from tests.trainer.learners import start
from tests.trainer.tiny_families import tiny_model
from tests.trainer.train_batches import make_batch, toy_optim, toy_sft, train_batch, trajectories

# -- the warm start --------------------------------------------------------------------------------


def named(group: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in weights_of(group).items()}


def inner(name: str, tensor: torch.Tensor) -> bool:
    """Whether Muon moves it: a matrix inside the layers."""
    return tensor.ndim == 2 and ".layers." in name


def first_sft_step(tiny: str, **sft: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before, and how far one supervised step moved each."""
    group = start(tiny, max_grad_norm=1e9)
    before = named(group)
    group.run(Actor.begin_sft, toy_sft(**{"lr": 1e-3, "matrix_lr": 1e-2, "warmup": 0, "min_steps": 10, **sft}))
    train_batch(group, Actor.sft_steps, collate(trajectories(8)), 1)
    return before, {name: tensor - before[name] for name, tensor in named(group).items()}


@pytest.fixture(scope="module")
def usual(tiny: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return first_sft_step(tiny)


def test_sft_lr_is_the_first_step_of_embeddings_and_vectors_and_matrix_lr_that_of_matrices(usual: Any) -> None:
    """AdamW's first step is lr against the sign of the gradient. Muon's (Jordan 2024) is W (1 - 0.1 lr) less lr times a nearly
    orthogonal matrix, longer by sqrt(rows / columns) if there are more rows: its singular values lie around 0.9."""
    before, moved = usual
    for name, tensor in moved.items():
        if inner(name, tensor):
            rows, columns = tensor.shape
            step = (tensor + 0.1 * 1e-2 * before[name]) / (1e-2 * max(1.0, rows / columns) ** 0.5)
            values = torch.linalg.svdvals(step)
            assert 0.75 < values.mean() < 1.05 and values.max() < 1.3, (name, values)
        else:
            assert tensor.abs().median().item() == pytest.approx(1e-3, rel=1e-3), name
            assert tensor.abs().max() < 1.001e-3, name
    assert sum(inner(name, tensor) for name, tensor in moved.items()) == 14  # 7 matrices in each of two layers


@pytest.mark.parametrize(("change", "matrices", "others"), [
    ({"lr": 2e-4}, 1.0, 0.2), ({"matrix_lr": 3e-3}, 0.3, 1.0), ({"warmup": 4}, 0.25, 0.25), ({"min_steps": 3}, 1.0, 1.0),
])  # fmt: skip
def test_a_key_of_sft_scales_the_first_step_of_its_weights(
    tiny: str, usual: Any, change: dict[str, Any], matrices: float, others: float
) -> None:
    _, plain = usual
    _, moved = first_sft_step(tiny, **change)
    for name, tensor in moved.items():
        share = matrices if inner(name, tensor) else others
        assert torch.allclose(tensor, share * plain[name], rtol=2e-3, atol=2e-7), name


@pytest.mark.parametrize(("change", "factors"), [
    # up to 1 at step warmup - 1, then a cosine to 0.1 at step min_steps
    ({"warmup": 2, "min_steps": 6}, [0.5, 1.0, 1.0, 0.8682, 0.55, 0.2318, 0.1, 0.1]),
    ({"warmup": 0, "min_steps": 2}, [1.0, 0.55, 0.1, 0.1]),
    ({"warmup": 4, "min_steps": 6}, [0.25, 0.5, 0.75, 1.0, 1.0, 0.55, 0.1]),
])  # fmt: skip
def test_sft_warmup_and_min_steps_are_where_the_rate_rises_and_where_it_ends(
    tiny: str, change: dict[str, Any], factors: list[float]
) -> None:
    group = start(tiny)
    group.run(Actor.begin_sft, toy_sft(**change))
    found = [train_batch(group, Actor.sft_steps, collate(trajectories(1)), 1)[0]["lr_factor"] for _ in factors]
    assert found == pytest.approx(factors, abs=1e-4)


# -- adapters --------------------------------------------------------------------------------------


def adapted(tiny: str, **lora: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The merged weights' change after two updates, and the adapter's own matrices."""
    section = LoraSection(**{"rank": 4, "alpha": 8.0, "modules": ["q_proj", "down_proj"], **lora})
    group = start(tiny, ModelConfig(lora=section), lr=1e-2)
    before = named(group)
    for step in range(2):
        train_batch(group, Actor.update, make_batch(8, seed=step), AlgorithmConfig(minibatch=8), step=step)
    tensors = {name: tensor.double() for name, tensor in group.run(Actor.export_adapter).tensors.items()}
    return {name: tensor - before[name] for name, tensor in named(group).items()}, tensors


SIZES = {"q_proj": (32, 32), "down_proj": (32, 64), "k_proj": (16, 32)}
"""Rows and columns of the tiny model's matrices."""


@pytest.mark.parametrize("change", [{}, {"rank": 2}, {"alpha": 1.0}, {"modules": ["k_proj"]}])
def test_rank_alpha_and_modules_are_the_shape_the_scale_and_the_place_of_the_adapters(tiny: str, change: dict[str, Any]) -> None:
    """The weights change by alpha / rank B A in the named modules of both layers, and in no other."""
    rank, alpha = change.get("rank", 4), change.get("alpha", 8.0)
    modules = change.get("modules", ["q_proj", "down_proj"])
    moved, tensors = adapted(tiny, **change)
    assert sum(t.numel() for t in tensors.values()) == sum(2 * rank * sum(SIZES[module]) for module in modules)
    changed = {name for name, tensor in moved.items() if tensor.abs().max() > 0}
    assert {name.split(".")[-2] for name in changed} == set(modules) and len(changed) == 2 * len(modules)
    for name in changed:
        stem = name.removesuffix(".weight")
        [down], [up] = ([t for key, t in tensors.items() if stem in key and part in key] for part in ("lora_A", "lora_B"))
        assert down.shape[0] == up.shape[1] == rank and (up.shape[0], down.shape[1]) == SIZES[name.split(".")[-2]]
        expected = alpha / rank * (up @ down)
        assert expected.abs().max() > 1e-4 and torch.allclose(moved[name], expected, atol=1e-7)


@pytest.mark.parametrize("family", ["mistral", "deepseek-v3", "llama4", "opt", "phi", "lfm2", "qwen3_next"])
def test_adapters_are_on_all_linear_layers_whatever_the_family_calls_them(family: str) -> None:
    """But for head and routers: attention, fused and latent projections, convolutions, linear attention, MLPs."""
    model = model_of(family) if family in MIXED else tiny_model(family)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    expected = {name for name in linear if name.rpartition(".")[2] not in ("lm_head", *("router", "gate", "shared_expert_gate"))}
    inject(model, LoraSection())
    adapted = {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert adapted == expected and len(expected) >= 8


def test_muon_moves_the_matrices_inside_the_layers_and_neither_embeddings_nor_an_output_head_of_its_own() -> None:
    shapes = {
        "model.embed_tokens.weight": (5, 3),
        "model.layers.0.mlp.up.weight": (4, 3),
        "model.norm.weight": (3,),
        "lm_head.weight": (5, 3),
    }
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    of = {id(parameter): name for name, parameter in named}
    moved = {
        type(part).__name__: [of[id(p)] for group in part.param_groups for p in group["params"]]
        for part in muon(named, sft_optim(toy_optim(), toy_sft(), ModelConfig())).parts
    }
    assert moved == {
        "AdamW": ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"],
        "Muon": ["model.layers.0.mlp.up.weight"],
    }
