"""Routers watched and dictated, family by family, against float64 gates; and the experts of requests."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.contrib.moe.routers import Computed, ExpertLog, Routers, RouterWatch, Routing, load_metrics
from agentrl.data.expert_routing import FREE, narrow
from agentrl.utils.errors import ModelError
from tests import moe

TOKENS = 24
IDS = (torch.arange(TOKENS)[None] * 7 + 3) % moe.VOCAB


def logits_of(model: Any, routers: Routers | None = None, dictated: Tensor | None = None) -> Tensor:
    with torch.inference_mode(), nullcontext() if routers is None else moe.dictate(routers, dictated):
        found: Tensor = model(input_ids=IDS, use_cache=False).logits[0]
    return found


def all_of(score: Callable[[Tensor], Tensor], norm: bool, scale: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
    def gates(logits: Tensor, indices: Tensor) -> Tensor:
        found = score(logits).gather(1, indices)
        return scale * (found / found.sum(-1, keepdim=True) if norm else found)

    return gates


def softmax_chosen(logits: Tensor, indices: Tensor) -> Tensor:
    return logits.gather(1, indices).softmax(-1)


SOFTMAX = partial(torch.softmax, dim=-1)


GATES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "qwen3_moe": (all_of(SOFTMAX, True), {"norm_topk_prob": True}),
    "qwen2_moe": (all_of(SOFTMAX, False), {"norm_topk_prob": False}),
    "mixtral": (all_of(SOFTMAX, True), {}), "olmoe": (all_of(SOFTMAX, False), {"norm_topk_prob": False}),
    "ernie4_5_moe": (all_of(SOFTMAX, True), {}), "granitemoe": (softmax_chosen, {}), "gpt_oss": (softmax_chosen, {}),
    "glm4_moe": (all_of(torch.sigmoid, True, 2.5), {"routed_scaling_factor": 2.5, "norm_topk_prob": True}),
    "dots1": (all_of(torch.sigmoid, False, 1.5), {"routed_scaling_factor": 1.5, "norm_topk_prob": False}),
    "deepseek_v3": (all_of(torch.sigmoid, True, 2.5), {"routed_scaling_factor": 2.5, "norm_topk_prob": True}),
    "deepseek_v2": (all_of(SOFTMAX, False), {"routed_scaling_factor": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("family", GATES)
def test_a_dictated_expert_has_the_gate_of_its_own_score(family: str) -> None:
    """Gates follow from current scores of the dictated experts, and so does the router's gradient."""
    gates, settings = GATES[family]
    model = moe.model(family, **settings)
    plain = logits_of(model)
    watch = RouterWatch(model)
    with watch.watching():
        assert torch.equal(logits_of(model), plain), "watching changes nothing"
    own = torch.from_numpy(watch.experts())
    routers = watch.routers
    assert own.dtype == torch.uint8 and own.shape == (TOKENS, len(routers), moe.CHOSEN)
    assert torch.equal(logits_of(model, routers, own), plain), "its own choices, repeated, change no bit"
    free = own.clone()
    free[TOKENS // 2 :] = FREE[torch.uint8]
    assert torch.equal(logits_of(model, routers, free), plain), "free tokens are sent by the router"
    assert torch.equal(logits_of(model, routers, own.to(torch.int16)), plain)

    other = (own + 3) % moe.EXPERTS
    assert (logits_of(model, routers, other) - plain).abs().max() > 0.1
    router = routers._routers[-1]
    module = model.get_submodule(router.name)
    hidden = torch.randn(TOKENS, 128 if "hidden_size" in moe.FAMILIES[family] else 64)
    with moe.dictate(routers, other):
        outs = [out for out in module(hidden) if out.shape == (TOKENS, moe.CHOSEN)]
    [indices] = [out for out in outs if not out.is_floating_point()]
    [found] = [out for out in outs if out.is_floating_point()]
    assert torch.equal(indices, other[:, -1].long())
    weights = torch.randn(TOKENS, moe.CHOSEN)
    [gradient] = torch.autograd.grad((found * weights).sum(), module.weight)

    weight = module.weight.detach().double().requires_grad_()
    logits = hidden.double() @ weight.T
    if getattr(module, "bias", None) is not None:
        logits = logits + module.bias.detach().double()
    want = gates(logits, indices)
    [want_gradient] = torch.autograd.grad((want * weights.double()).sum(), weight)
    assert (found - want).abs().max() < 1e-6
    assert (gradient - want_gradient).abs().max() < 1e-4 * want_gradient.abs().max()


def test_choices_that_cannot_be_repeated_are_refused() -> None:
    sparse = moe.model("phimoe")
    refused = r"layers\.0\.mlp\.router.*PhimoeTopKRouter does not choose experts by one topk"
    with pytest.raises(ModelError, match=refused), RouterWatch(sparse).watching():
        logits_of(sparse)
    with pytest.raises(ModelError, match=refused):
        Routers(sparse.to("meta")).probe()
    model = moe.model("qwen3_moe")
    routers = Routers(model)
    for family in sorted(GATES):
        Routers(moe.model(family).to("meta")).probe()
    for shape, wrong in (((TOKENS, 3, 2), "with 2 routers"), ((TOKENS, 2, 3), "dictated"), ((TOKENS - 1, 2, 2), "dictated")):
        with pytest.raises(ModelError, match=wrong):
            logits_of(model, routers, torch.zeros(shape, dtype=torch.uint8))
    dense = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert len(Routers(dense)) == 0
    with pytest.raises(ModelError, match="no routers to replay"):
        RouterWatch(dense)


def test_the_type_holds_every_expert_and_none() -> None:
    assert (narrow(8), narrow(255), narrow(256), narrow(512)) == (torch.uint8, torch.uint8, torch.int16, torch.int16)


def test_loads_are_counted_over_real_tokens() -> None:
    """A family that cannot be watched is not counted, and computes as before."""
    model = moe.model("glm4_moe")
    watch = RouterWatch(model)
    with watch.watching():
        logits_of(model)
    load = Routing(watch.routers, None)
    for tokens in (TOKENS, 5):
        with load.counting(tokens):
            logits_of(model)
    choices = watch.experts()[:, 0]
    want = np.bincount(np.concatenate((choices, choices[:5])).reshape(-1), minlength=moe.EXPERTS)
    assert load.counts is not None and load.counts.tolist() == [want.tolist()]
    sparse = moe.model("phimoe")
    plain = logits_of(sparse)
    with Routing(Routers(sparse), None).counting(TOKENS):
        assert torch.equal(logits_of(sparse), plain)


def test_load_metrics_by_hand() -> None:
    """Two layers of four experts: even, and (4, 2, 2, 0) of 8 tokens' choices: 2 x 4 / 4 - 1, and 1.5 bits of 2."""
    found = load_metrics(np.array([[5.0, 5, 5, 5], [4, 2, 2, 0]]))
    wanted = {"experts_max_violation": (0 + 1) / 2, "experts_entropy": (1 + 0.75) / 2, "experts_unused": 1 / 8}
    assert found == pytest.approx(wanted)
    assert load_metrics(np.zeros((2, 4))) == {}


# -- the experts of a request


def rows(*values: int) -> Any:
    return np.asarray(values, np.uint8).reshape(-1, 1, 1)


def part(request: str, start: int, count: int, first_slot: int = 0, asked: bool = True) -> Computed:
    """A request whose tokens lie in adjacent slots."""
    return Computed(request, start, count, np.arange(first_slot, first_slot + start + count), asked)


def told(log: ExpertLog, request: str, start: int = 0, stop: int = 99) -> list[int] | None:
    found = log.take(request, start, stop)
    return None if found is None else found.reshape(-1).tolist()


def test_chunks_and_steps_of_several_requests() -> None:
    log = ExpertLog(100)
    log.add([part("a#1-x", 0, 3), part("b#1-y", 0, 2, 50)], rows(1, 2, 3, 11, 12))
    log.add([part("b#1-y", 2, 1, 50), part("a#1-x", 3, 2)], rows(13, 4, 5))
    log.end(["a#1-x"])
    assert told(log, "a#1", 1, 4) == [2, 3, 4], "as of an ended request"
    assert told(log, "a#1") is None, "once"
    assert told(log, "b#1") == [11, 12, 13], "before its end was told"


def test_tokens_of_the_prefix_cache_are_found_by_their_slots() -> None:
    """Computed for a request that nobody asks about; one token of the second is computed by itself."""
    log = ExpertLog(100)
    log.add([part("a#1-x", 0, 4, 8, asked=False)], rows(1, 2, 3, 4))
    log.end(["a#1-x"])
    shared = Computed("b#2-y", 4, 2, np.array([8, 9, 10, 11, 30, 31]), True)
    log.add([shared], rows(7, 8))
    assert told(log, "b#2") == [1, 2, 3, 4, 7, 8] and told(log, "a#1") is None


def test_what_is_computed_again_keeps_its_first_experts() -> None:
    """After a preemption in other slots and with other choices; what follows is new."""
    log = ExpertLog(100)
    log.add([part("a#1-x", 0, 3)], rows(1, 2, 3))
    log.add([part("a#1-x", 3, 1)], rows(4))
    log.add([part("a#1-x", 0, 5, 60)], rows(91, 92, 93, 94, 5))
    log.add([part("a#1-x", 5, 1, 60)], rows(6))
    assert told(log, "a#1") == [1, 2, 3, 4, 5, 6]
    log.add([part("b#1-z", 0, 2, 0)], rows(8, 9))
    log.add([Computed("c#1-z", 5, 1, np.array([60, 61, 62, 63, 64, 65]), True)], rows(7))
    assert told(log, "c#1") == [91, 92, 93, 94, 5, 7], "the slots have the newest, as the keys and values there do"


def test_requests_that_nobody_asks_for_are_dropped_oldest_first() -> None:
    log = ExpertLog(100, unread=2)
    for number in range(4):
        log.add([part(f"r#{number}-x", 0, 1)], rows(number))
        log.end([f"r#{number}-x", "never-seen"])
    assert [told(log, f"r#{number}") for number in range(4)] == [None, None, [2], [3]]
