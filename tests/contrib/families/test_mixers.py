"""Mixers of tokens other than attention see one row alone, in every layout of the rows; with the gradients of rows alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.contrib.families import PREFIX, cut, micro_of, rows_of
from agentrl.data.schedule import Tree
from agentrl.trainer.attention import PACKED, keep_rows_apart, mixers_of, register_packed_attention
from agentrl.trainer.language_model import PolicyModule
from agentrl.trainer.parallel import recompute_layout
from tests.trainer.family_models import MIXED, model_of

ALL = (0, 1, 2, 3)
TREES = (Tree((0, 1, 3), PREFIX), Tree((2,), 0))
MIXERS = {
    "lfm2": ["layers.0.conv", "layers.2.conv"],
    "qwen3_next": ["layers.0.linear_attn"],
    "mamba2": ["layers.0.mixer", "layers.1.mixer"],
    "rwkv": [f"blocks.{n}.{part}" for n in (0, 1) for part in ("attention", "feed_forward")],
}
ROWS, VIEW = rows_of(400)


def alone(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """By transformers: logprobs of each row alone, and the gradient of their sum times 1, 2, 3 ..."""
    logprobs = []
    for row in ROWS:
        logits = model(input_ids=row[None], use_cache=False).logits[0]
        logprobs.append((logits[:-1] / 0.7).log_softmax(-1).gather(1, row[1:, None])[:, 0])
    return slopes(model, torch.cat(logprobs))


def slopes(model: Any, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logprobs.detach(), found


def far(mine: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> tuple[float, float]:
    """The largest difference of a logprob, and of a gradient as a part of its largest number."""
    assert mine[1].keys() == other[1].keys()
    off = max(((g - other[1][n]).abs().max() / other[1][n].abs().max()).item() for n, g in mine[1].items())
    return (mine[0] - other[0]).abs().max().item(), off


@pytest.mark.parametrize("family", MIXED)
def test_rows_packed_with_a_shared_prefix_and_computed_again_are_rows_alone(family: str) -> None:
    register_packed_attention()
    expected = alone(model_of(family))
    model = model_of(family, PACKED)
    names = list(model.state_dict())
    module = PolicyModule(model)
    packed, shared = micro_of(VIEW, ALL, ()), micro_of(VIEW, ALL, TREES)
    assert len(packed.input_ids) == 88 and len(shared.input_ids) == 88 - 2 * PREFIX
    leaking, _ = far(slopes(model, module(packed, 0.7, False)[0]), expected)
    assert leaking > 0.05, "the control: without row boundaries"
    assert keep_rows_apart(model.base_model) == MIXERS[family]
    assert list(model.state_dict()) == names
    for micro in (packed, shared):
        logprob, gradient = far(slopes(model, module(micro, 0.7, False)[0]), expected)
        assert logprob < 2e-5 and gradient < 2e-4
    if not model.supports_gradient_checkpointing:
        return
    # Two layouts under way at once: each is computed again with its own.
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_layout})
    first, second = (module(micro, 0.7, False)[0] for micro in (packed, shared))
    kept = [slopes(model, logprobs) for logprobs in (first, second)]
    for found in kept:
        logprob, gradient = far(found, expected)
        assert logprob < 2e-5 and gradient < 2e-4


def test_attention_and_what_surrounds_mixers_stay_packed() -> None:
    """A row of a block of Nemotron-H may be an MLP; attention reads the layout itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = cut(AutoConfig.for_model("nemotron_h"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {type(module).__name__ for module in mixers_of(model.base_model).values()}
    assert found == {"NemotronHMamba2Mixer"}
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(cut(AutoConfig.for_model("qwen3")))
    assert mixers_of(plain.base_model) == {}
