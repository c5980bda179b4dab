"""Chunked logprobs against log_softmax over the full logits, and the head of a family."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig

from agentrl.config.schema import LoraSection
from agentrl.trainer.language_model import HeadKernels, HeadRule, backbone, head_rule, logits_gradient
from agentrl.trainer.layers import inject
from agentrl.utils.errors import ModelError
from tests.trainer.tiny_families import FAMILIES, tiny_model


def head_of(weight: torch.Tensor) -> Any:
    return SimpleNamespace(weight=weight, bias=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    "rule", [HeadRule(), HeadRule(scale=0.4), HeadRule(0.3, 2.0), HeadRule(cap=1.5), HeadRule(0.7, 1.6, 2.5)]
)
def test_scales_cap_and_bias_against_the_same_in_float64(rule: HeadRule, chunk: int, dtype: torch.dtype) -> None:
    """log p, entropy and their gradients for hidden states, weight and bias, of c tanh((s (W a h + b)) / c) / temperature."""
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 11, dtype=dtype)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    hidden = torch.randn(7, 5).to(dtype).requires_grad_()
    targets, a, b = torch.randint(0, 11, (7,)), torch.randn(7), torch.randn(7)
    h, w, v = (tensor.detach().double().requires_grad_() for tensor in (hidden, head.weight, head.bias))
    z = rule.scale * (rule.hidden * h @ w.t() + v)
    table = torch.log_softmax((rule.cap * torch.tanh(z / rule.cap) if rule.cap else z) / 0.6, -1)
    expected = table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(-1)
    wanted = torch.autograd.grad((expected[0] * a + expected[1] * b).sum(), (h, w, v))
    found = rule.logprobs(hidden, head, targets, 0.6, chunk=chunk)
    got = torch.autograd.grad((found[0] * a + found[1] * b).sum(), (hidden, head.weight, head.bias))
    near = 1e-5 if dtype == torch.float32 else 1e-2  # bfloat16's steps are 0.4 to 0.8 percent
    for mine, other in zip((*found, *got), (*expected, *wanted), strict=True):
        assert ((mine.double() - other).norm() / other.norm()).item() < near


def test_logits_of_a_chunk_are_all_that_lives() -> None:
    """Peak memory of saved tensors: nothing of size tokens x vocabulary is kept for the backward pass."""
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    hidden, weight = torch.randn(500, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        HeadRule().logprobs(hidden, head_of(weight), torch.zeros(500, dtype=torch.int64), chunk=50)
    assert max(kept) <= max(hidden.numel(), weight.numel())


def test_entropies_that_are_only_measured_cost_nothing_in_the_backward_pass() -> None:
    """An update measures the entropy of every token; without a bonus it has no gradient."""
    asked = []
    kernels = HeadKernels(gradient=lambda *args: asked.append(args[4][1]) or logits_gradient(*args))
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8)
    for bonus in (False, True):
        logprobs, entropy = HeadRule().logprobs(hidden, head_of(weight), torch.arange(5), kernels=kernels)
        torch.autograd.backward(logprobs.sum() + (entropy.sum() if bonus else entropy.detach().sum()))
    assert asked[0] is None and asked[1].shape == (5,)


# -- the rule from hidden states to logits, measured: of families that scale, cap or shift them --------


RULES = {
    "gemma2": HeadRule(cap=2.0),
    "gemma4": HeadRule(cap=2.0),
    "granite": HeadRule(scale=2.5),  # divided by 0.4
    "cohere2": HeadRule(scale=2.5),  # multiplied by 2.5
    "minicpm3": HeadRule(hidden=2.5),  # 80 / 32, before the output embedding
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_gives_the_models_own_logits(family: str) -> None:
    model = tiny_model(family)
    rule, expected = head_rule(model), RULES.get(family, HeadRule())
    assert (rule.hidden, rule.scale) == pytest.approx((expected.hidden, expected.scale), rel=1e-9)
    assert rule.cap == (None if expected.cap is None else pytest.approx(expected.cap, rel=1e-9))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits
        states = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        logits = rule.logits(model.get_output_embeddings()(rule.hidden * states))
    assert (logits - own).abs().max() < 1e-5 and (rule == HeadRule() or (logits - own * 1.1).abs().max() > 0.1)


def test_a_model_without_weights_has_the_same_rule_and_keeps_its_forward() -> None:
    """As a trainer builds it, before anything is loaded."""
    config = AutoConfig.for_model("hyperclovax", logits_scaling=0.3, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        rule = head_rule(model)
    assert rule == head_rule(model) == HeadRule(scale=0.3)  # multiplied by what Granite divides by under the same key
    assert not any("forward" in vars(part) for part in model.modules())


def test_what_the_rule_cannot_express_is_refused_with_the_familys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    bert = AutoModelForCausalLM.from_config(
        BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, is_decoder=True)
    )
    with pytest.raises(ModelError, match=r"BertLMHeadModel \(bert\): how it gets logits from hidden states cannot be measured"):
        head_rule(bert)
    model = tiny_model("phi")
    own = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, **given: SimpleNamespace(logits=own(self, **given).logits.relu()))
    with pytest.raises(ModelError, match=r"PhiForCausalLM \(phi\): its logits are neither a scale nor a tanh cap"):
        head_rule(model)
    with pytest.raises(ModelError, match="'lm_head' names no linear layer inside"):  # it would have no effect, and no gradient
        inject(model, LoraSection(rank=2, modules=["lm_head"]))
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(
        ModelError, match=r"PhiForCausalLM \(phi\): its output embedding is a torch[a-z.]*\.Sequential; only a plain"
    ):
        head_rule(model)
