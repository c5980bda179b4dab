"""The rule from hidden states to logits, measured: of families that scale, cap or shift them, and of what it cannot express."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig

from agentrl.config.schema import LoraSection
from agentrl.trainer.language_model import HeadRule, backbone, head_rule
from agentrl.trainer.layers import inject
from agentrl.utils.errors import ModelError
from tests.trainer.tiny_families import FAMILIES, tiny_model

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
    inject(model, LoraSection(rank=2, modules=["lm_head"]))  # else what adapts the head would have no effect, and no gradient
    with pytest.raises(ModelError, match=r"PhiForCausalLM \(phi\): its output embedding is a peft[a-z.]*\.Linear; only a plain"):
        head_rule(model)
