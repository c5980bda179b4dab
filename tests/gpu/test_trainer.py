"""The trainer on a card: its kernels against plain float64, its precision against float32, and what may not change a digit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ModelConfig
from agentrl.data.rows import Ragged
from agentrl.engines.exact_attention import AttentionForm
from agentrl.trainer import attention
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.update import Pack
from tests.publishing import weights_of
from tests.trainer.test_attention import by_hand
from tests.trainer.train_batches import make_batch, toy_optim, train_batch

pytestmark = pytest.mark.gpus(1, timeout=540)
HALF = torch.bfloat16


def rows_by_hand(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], form: AttentionForm) -> Tensor:
    """Causal attention of each row alone, in float64: [T, H, E]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    rows = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([by_hand(*row, form, form.sinks, 0) for row in rows])


FORMS = {  # the form, and the width of the values
    "plain": (AttentionForm(64**-0.5), 64),
    "window": (AttentionForm(64**-0.5, window=50), 64),
    "sinks": (AttentionForm(64**-0.5, sinks=torch.empty(0)), 64),
    "sinks and window": (AttentionForm(64**-0.5, window=50, sinks=torch.empty(0)), 64),
    "narrow values": (AttentionForm(64**-0.5), 40),
    "cap": (AttentionForm(64**-0.5, cap=1.0), 64),
}


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", ["varlen", "blocks"])
def test_attention_is_that_of_each_row_alone(
    device: torch.device, way: str, name: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, wide = FORMS[name]
    if way == "varlen" and (device.type != "cuda" or form.cap is not None):
        pytest.skip("the kernel for rows of any length is a GPU's, and has no caps")
    lengths = [1, 300, 17, 64, 129]
    torch.manual_seed(0)
    size = [(sum(lengths), heads, width) for heads, width in ((8, 64), (kv_heads, 64), (kv_heads, wide))]
    given = [torch.randn(shape, dtype=HALF, device=device, requires_grad=True) for shape in size]
    if form.sinks is not None:
        given.append(torch.randn(8, dtype=HALF, device=device, requires_grad=True))
    packed = attention.packed_rows(torch.tensor([0, *lengths]).cumsum(0), device)
    packed = replace(packed, shares=way == "blocks")  # which the kernel for rows of any length does not take
    if way == "varlen":
        monkeypatch.setattr(attention, "attend", None)  # what the dispatcher falls back to
    push = torch.randn(sum(lengths), 8, wide, dtype=HALF, device=device)

    def formed(tensors: list[Tensor]) -> AttentionForm:
        return replace(form, sinks=tensors[3] if form.sinks is not None else None)

    out = attention._attention(given[0], given[1], given[2], packed, formed(given))
    grads = torch.autograd.grad(out, given, push)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in given]
    want = rows_by_hand(exact[0], exact[1], exact[2], lengths, formed(exact))
    wanted = torch.autograd.grad(want, exact, push.double().cpu())
    for mine, right in zip((out, *grads), (want, *wanted), strict=True):
        error = (mine.double().cpu() - right).norm() / right.norm()
        assert float(error) < 0.01  # bfloat16 has 8 bits: 0.004 for each number
    # Control: a boundary in the wrong place is seen.
    shifted = rows_by_hand(exact[0], exact[1], exact[2], [2, *lengths[1:-1], lengths[-1] - 1], formed(exact))
    assert float((out.double().cpu() - shifted).norm() / want.norm()) > 0.05


def gradient(folder: str, device: torch.device, **model: Any) -> tuple[float, Tensor]:
    """The loss of one micro-batch, and the gradient of all parameters as one float64 vector."""
    engine = FsdpEngine(folder, ModelConfig(**model), 1.0, device=device)
    micro = Pack(Ragged.of(make_batch(16, longest=400)), list(range(16)), engine.device).micro
    logprobs, entropy = engine.logprobs(micro, 1.0, True)
    loss = -(logprobs.mean() + 0.01 * entropy.mean())
    engine.backward(loss, last=True)
    grads = [p.grad for _, p in engine.named_weights() if p.grad is not None]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return float(loss), torch.cat([g.double().reshape(-1) for g in whole])


def agree(one: tuple[float, Tensor], other: tuple[float, Tensor], loss: float, cosine: float) -> None:
    assert one[0] == pytest.approx(other[0], rel=loss)
    assert float(F.cosine_similarity(one[1], other[1], dim=0)) > cosine
    assert float(one[1].norm()) == pytest.approx(float(other[1].norm()), rel=0.02)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"activation_checkpointing": True}])
def test_bfloat16_against_float32(small: str, device: torch.device, options: dict[str, Any]) -> None:
    if device.type != "cuda" and "compile" in options:
        pytest.skip("minutes of compilation on a CPU")
    exact = gradient(small, device)
    agree(gradient(small, device, dtype="bfloat16", **options), exact, loss=0.01, cosine=0.999)


@pytest.mark.usefixtures("one_rank")
def test_checkpointing_changes_nothing(small: str, device: torch.device) -> None:
    plain = gradient(small, device, dtype="bfloat16")
    agree(gradient(small, device, dtype="bfloat16", activation_checkpointing=True), plain, loss=1e-6, cosine=0.99999)


def started(small: str, **model: Any) -> Any:
    group = launch(Actor, backend="inline")
    group.run(Actor.init_model, small, ModelConfig(dtype="bfloat16", **model), toy_optim(micro_tokens=2000))
    return group


def trained(small: str, **model: Any) -> Any:
    """An actor after two updates, and its last metrics."""
    group = started(small, **model)
    for step in range(2):
        metrics = train_batch(group, Actor.update, make_batch(16, seed=step, longest=200), AlgorithmConfig(), step=step)
    return group, metrics


def test_the_model_is_on_the_card(small: str, card: torch.device) -> None:
    group, _ = trained(small)
    engine = group.backend.workers[0]._engine
    devices = {p.to_local().device if isinstance(p, DTensor) else p.device for _, p in engine.named_weights()}
    state = {tensor.device for name, tensor in engine.optimizers.state().items() if not name.endswith(".step")}
    assert {device.type for device in devices | state} == {"cuda"}
    assert {p.dtype for _, p in engine.named_weights()} == {torch.float32}  # the master weights


def test_weights_in_host_memory_train_alike(small: str, card: torch.device) -> None:
    start = weights_of(started(small))
    plain, metrics = trained(small)
    away, others = trained(small, offload="always")
    assert others["loss"] == pytest.approx(metrics["loss"], rel=0.01)
    moves = [
        torch.cat([(tensor.float() - start[name].float()).reshape(-1) for name, tensor in weights_of(group).items()])
        for group in (plain, away)
    ]
    # Not number by number: Adam's first steps are as long for a gradient near 0, whose sign hangs on the order of a sum.
    assert float(moves[0].norm()) > 0
    assert float(F.cosine_similarity(moves[0], moves[1], dim=0)) > 0.95
    engine = away.backend.workers[0]._engine
    assert {p.to_local().device.type for _, p in engine.named_weights()} == {"cpu"}


def test_an_actor_that_waits_gives_the_card_back_and_learns_the_same(small: str, card: torch.device, tmp_path: Path) -> None:
    stays, _ = trained(small)
    goes, _ = trained(small, offload="idle")
    held = torch.cuda.memory_allocated()
    goes.run(Actor.offload)
    engine = goes.backend.workers[0]._engine
    size = sum(p.to_local().nbytes for p in engine.module.parameters()) * 3  # weights, and AdamW's two moments
    assert held - torch.cuda.memory_allocated() > 0.95 * size
    pinned = [host.is_pinned() for _, host in engine._offloaded._held.values()]
    assert pinned and all(pinned)
    goes.run(Actor.save, str(tmp_path))  # from host memory
    assert held - torch.cuda.memory_allocated() > 0.95 * size
    mine, theirs = weights_of(stays), weights_of(goes)
    assert max((mine[name].float() - theirs[name].float()).abs().max().item() for name in mine) < 2e-3
    resumed = started(small)
    resumed.run(Actor.load, str(tmp_path))
    saved = weights_of(resumed)
    assert all(torch.equal(saved[name], theirs[name]) for name in saved)


@pytest.mark.parametrize("background", [False, True])
def test_a_saved_run_goes_on_to_the_digit(small: str, tmp_path: Path, device: torch.device, background: bool) -> None:
    straight, _ = trained(small)
    straight.run(Actor.begin_save if background else Actor.save, str(tmp_path))
    while background and not straight.run(Actor.is_saved):
        pass
    resumed = started(small)
    resumed.run(Actor.load, str(tmp_path))
    mine, theirs = weights_of(straight), weights_of(resumed)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    batch = make_batch(16, seed=7, longest=200)
    one, other = (train_batch(group, Actor.update, batch, AlgorithmConfig(), step=2) for group in (straight, resumed))
    # The sums of a GPU's attention backward have no fixed order.
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_an_optimizer_step_waits_for_nothing_until_its_last_backward_pass(
    small: str, card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises where the host would wait for the card; the first update is not watched, since it sets up NCCL and cuBLAS."""
    group, watched = started(small), []
    train_batch(group, Actor.update, make_batch(16, longest=200), AlgorithmConfig(), step=0)
    logprobs, backward = FsdpEngine.logprobs, FsdpEngine.backward

    def begun(self: FsdpEngine, *args: Any) -> tuple[Tensor, Tensor]:
        torch.cuda.set_sync_debug_mode("error")
        return logprobs(self, *args)

    def ended(self: FsdpEngine, loss: Tensor, last: bool) -> None:
        backward(self, loss, last)
        watched.append(last)
        if last:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(FsdpEngine, "logprobs", begun)
    monkeypatch.setattr(FsdpEngine, "backward", ended)
    try:
        train_batch(group, Actor.update, make_batch(32, seed=1, longest=400), AlgorithmConfig(), step=1)
        assert len(watched) > 1 and watched[-1]
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchroniz"):  # control
            torch.ones(1, device=card).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
