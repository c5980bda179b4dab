"""Faster layers: compiled ones compute what plain ones compute, and what needs a GPU says so before a model is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from agentrl.config.schema import AlgorithmConfig, LoraSection, ModelConfig
from agentrl.trainer import layers as kernels
from agentrl.trainer.actor import Actor
from agentrl.trainer.language_model import PLAIN, HeadRule
from tests.conftest import proof
from tests.publishing import weights_of
from tests.trainer.learners import start
from tests.trainer.train_batches import make_batch, train_batch

FORMS = {"plain": {}, "checkpointing": {"activation_checkpointing": True}, "lora": {"lora": LoraSection(rank=4)}}


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo and its guards are real; the graphs that it finds run as they are, as inductor needs minutes on a CPU."""
    monkeypatch.setattr(kernels.compile_layers, "__defaults__", ("eager",))
    monkeypatch.setattr(kernels.compiled_head, "__defaults__", ("eager",))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("form", ["plain", *(pytest.param(form, marks=proof) for form in FORMS if form != "plain")])
@pytest.mark.usefixtures("eager_graphs")
def test_compiled_layers_give_the_same_update(tiny: str, form: str) -> None:
    found = []
    for compiled in (False, True):
        group = start(tiny, ModelConfig(compile=compiled, **FORMS[form]), micro_tokens=150)
        metrics = [train_batch(group, Actor.update, make_batch(8, seed=step), AlgorithmConfig(minibatch=6)) for step in range(2)]
        found.append((metrics, weights_of(group), counters["stats"].get("unique_graphs", 0)))
        counters.clear()
    (plain, mine, none), (fast, theirs, graphs) = found
    assert none == 0 and graphs > 0
    for one, other in zip(plain, fast, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert max((mine[name] - theirs[name]).abs().max().item() for name in mine) < 1e-5


@pytest.mark.usefixtures("eager_graphs")
def test_micro_batches_of_other_sizes_do_not_compile_again(tiny: str) -> None:
    group = start(tiny, ModelConfig(compile=True), micro_tokens=150)
    seen = []
    for step in range(4):  # every one has micro-batches of lengths, and layouts, of its own
        train_batch(group, Actor.update, make_batch(6 + step, seed=step), AlgorithmConfig(minibatch=6))
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[1] == seen[-1] > 0, seen


@proof
@pytest.mark.usefixtures("eager_graphs")
def test_compiled_layers_of_a_sharded_model(tiny: str) -> None:
    """FSDP gathers a layer's weights in hooks around the compiled function; float32 shards of one rank give its own digits."""
    found = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the fixture of conftest.py ends it
    for compiled in (False, True):
        group = start(tiny, ModelConfig(compile=compiled, dtype="bfloat16"), micro_tokens=150)
        metrics = train_batch(group, Actor.update, make_batch(8), AlgorithmConfig(minibatch=6))
        found.append((metrics["loss"], metrics["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=proof)])
@pytest.mark.parametrize(
    ("dtype", "cap"),
    [(torch.float32, None), pytest.param(torch.bfloat16, None, marks=proof), pytest.param(torch.float32, 2.0, marks=proof)],
)
def test_the_compiled_head_gives_the_same_numbers_and_gradients(backend: str, dtype: torch.dtype, cap: float | None) -> None:
    """Chunks of 8, and last ones of 3, 5 and 1 tokens, with and without a gradient of the entropy: two graphs of each
    function for any number of tokens, one more for a single one."""
    torch._dynamo.reset()
    counters.clear()
    fast = kernels.compiled_head(backend)
    torch.manual_seed(0)
    weight = torch.randn(50, 16).to(dtype).requires_grad_()
    bias = None if cap is None else torch.randn(50)
    for tokens, bonus in ((11, 0.0), (13, 0.0), (21, 0.0), (17, 0.0), (11, 0.3), (13, 0.3)):
        hidden = torch.randn(tokens, 16).to(dtype).requires_grad_()
        targets = torch.randint(50, (tokens,))
        found = []
        for way in (PLAIN, fast):
            head: Any = SimpleNamespace(weight=weight, bias=bias)
            logprobs, entropy = HeadRule(cap=cap).logprobs(hidden, head, targets, 0.7, chunk=8, kernels=way)
            total = (logprobs * torch.arange(tokens)).sum() + (bonus * entropy.sum() if bonus else 0.0)
            found.append((logprobs, entropy, *torch.autograd.grad(total, [hidden, weight])))
        for one, other in zip(*found, strict=True):
            # bfloat16's gradients may round the other way where float32 differs in its last digit.
            assert ((one - other).norm() / one.norm()).item() < (1e-5 if dtype == torch.float32 else 2e-3)
    assert counters["stats"]["unique_graphs"] <= 10
