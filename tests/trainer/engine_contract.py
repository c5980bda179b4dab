"""The contract of training engines (`BaseEngine`) on one rank, over the fixtures `made` and `traits`."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import agentrl.trainer.train_engine
from agentrl.config.schema import LoraSection
from agentrl.data.rows import Ragged
from agentrl.trainer.language_model import Micro
from agentrl.trainer.optim import sft_optim
from agentrl.trainer.train_engine import BaseEngine
from agentrl.trainer.train_state import load_state, save_state
from agentrl.trainer.update import Pack
from agentrl.utils.errors import ConfigError
from tests.trainer.train_batches import make_batch, toy_optim, toy_sft

Made = Callable[..., BaseEngine]
ROWS = list(range(6))


def micro_of(rows: list[int]) -> Micro:
    return Pack(Ragged.of(make_batch(6)), rows, torch.device("cpu")).micro


def plain_of(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def row_by_row(model: Any, micro: Micro, temperature: float) -> tuple[Tensor, Tensor]:
    """Log pi and entropies of the chosen tokens by transformers alone, each row in a pass of its own."""
    ends = micro.packed.cu_seqlens.tolist()
    logits = torch.cat([model(micro.input_ids[None, a:b]).logits[0] for a, b in pairwise(ends)])
    log_p = torch.log_softmax(logits[micro.before] / temperature, -1)
    return log_p.gather(1, micro.targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def loss_of(engine: BaseEngine, micro: Micro, temperature: float = 1.0) -> Tensor:
    """Each row's tokens weighted by their position, and an entropy bonus."""
    logprobs, entropy = engine.logprobs(micro, temperature, True)
    return (logprobs * weights_of(micro)).sum() + 0.1 * entropy.sum()


def weights_of(micro: Micro) -> Tensor:
    return torch.cos(micro.position_ids[micro.before].float())


def whole(tensor: Any) -> Tensor:
    full: Tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return full


def parameters_of(engine: BaseEngine) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in engine.named_weights()}


def gradients_of(engine: BaseEngine) -> dict[str, Tensor]:
    return {name: whole(parameter.grad) for name, parameter in engine.named_weights()}


def updated(engine: BaseEngine) -> float:
    engine.backward(loss_of(engine, micro_of(ROWS)), last=True)
    return engine.step()


def check_resumed(engine: BaseEngine, again: BaseEngine, folder: Path) -> None:
    """That `again`, which loads what `engine` saves after an update, goes on as it does, to the bit."""
    updated(engine)
    save_state(engine, folder, {"updates": 1})
    assert load_state(again, folder) == {"updates": 1}
    state, loaded = ({name: whole(tensor) for name, tensor in one.state().items()} for one in (engine, again))
    assert state.keys() == loaded.keys() and all(torch.equal(tensor, loaded[name]) for name, tensor in state.items())
    assert updated(engine) == updated(again)
    mine, theirs = parameters_of(engine), parameters_of(again)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


class TrainEngineContract:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_and_entropies_are_those_of_transformers_alone(self, made: Made, tiny: str, temperature: float) -> None:
        engine, micro = made(), micro_of(ROWS)
        with torch.no_grad():
            found, wanted = engine.logprobs(micro, temperature, True), row_by_row(plain_of(tiny), micro, temperature)
            unwanted = engine.logprobs(micro, temperature, False)
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.dtype == torch.float32 and mine.shape == theirs.shape and (mine - theirs).abs().max() < 1e-5
        assert torch.equal(found[0], unwanted[0]) and not bool(unwanted[1].any())

    def test_gradients_are_the_sum_over_micro_batches(self, made: Made, tiny: str) -> None:
        """Of unequal ones, with one that has no rows: by name those of transformers alone, each row in a pass of its own."""
        engine, model = made(), plain_of(tiny)
        for rows, last in (([0, 1, 2], False), ([], False), ([3, 4, 5], True)):
            engine.backward(loss_of(engine, micro_of(rows)), last)
        micro = micro_of(ROWS)
        logprobs, entropy = row_by_row(model, micro, 1.0)
        ((logprobs * weights_of(micro)).sum() + 0.1 * entropy.sum()).backward()
        mine, theirs = gradients_of(engine), {name: p.grad for name, p in model.named_parameters()}
        assert mine.keys() == theirs.keys()
        size = max(gradient.abs().max() for gradient in theirs.values())
        assert size > 1 and max((mine[name] - theirs[name]).abs().max() for name in mine) < 1e-5 * size

    def test_a_step_clips_by_the_norm_and_is_adamws(self, made: Made) -> None:
        """In float64: the norm before clipping is returned; `set_rate` scales the rate; then there are no gradients."""
        engine = made()
        engine.use_optimizer(toy_optim(lr=0.01, weight_decay=0.1))
        engine.set_rate(0.5)
        before = parameters_of(engine)
        engine.backward(loss_of(engine, micro_of(ROWS)), last=True)
        gradients = gradients_of(engine)
        norm = engine.step()
        expected = math.sqrt(sum(float((g.numpy().astype(np.float64) ** 2).sum()) for g in gradients.values()))
        assert norm == pytest.approx(expected, rel=1e-5) and norm > 10
        after = parameters_of(engine)
        for name, gradient in gradients.items():
            clipped, weight = gradient.double() * (0.01 / norm), before[name].double()
            decay = 0.1 if weight.ndim > 1 else 0.0
            # The first step's moments are g and g^2, after the correction of their bias.
            step = clipped / (clipped.abs() + 1e-8) + decay * weight
            assert (after[name].double() - (weight - 0.005 * step)).abs().max() < 1e-5, name
        assert all(parameter.grad is None for _, parameter in engine.named_weights())

    def test_a_step_that_is_not_finite_or_not_sound_is_not_taken(self, made: Made) -> None:
        engine = made()
        engine.use_optimizer(toy_optim())
        updated(engine)
        before, state = parameters_of(engine), {name: whole(tensor) for name, tensor in engine.state().items()}
        engine.backward(loss_of(engine, micro_of(ROWS)) * math.inf, last=True)
        assert not math.isfinite(engine.step())
        engine.backward(loss_of(engine, micro_of(ROWS)), last=True)
        assert math.isfinite(engine.step(sound=False))
        assert all(parameter.grad is None for _, parameter in engine.named_weights())
        assert all(torch.equal(tensor, before[name]) for name, tensor in parameters_of(engine).items())
        assert all(torch.equal(whole(tensor), state[name]) for name, tensor in engine.state().items())
        assert engine.finite()
        name, parameter = engine.named_weights()[3]
        local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.detach().view(-1)[-1] = math.nan
        assert not engine.finite(), name

    def test_what_is_published_and_exported_is_the_model(self, made: Made, tiny: str, tmp_path: Path) -> None:
        """By name, after a step; a tied embedding once. Each tensor is valid until the next is requested."""
        engine, held = made(), plain_of(tiny).state_dict()
        before = {name: tensor.clone() for name, tensor in engine.tensors()}
        assert held.keys() - before.keys() == {"lm_head.weight"} and before.keys() <= held.keys()
        assert all(torch.equal(tensor, held[name]) for name, tensor in before.items())
        assert engine.largest() == max(tensor.nbytes for tensor in before.values())
        engine.use_optimizer(toy_optim())
        updated(engine)
        after = {name: tensor.clone() for name, tensor in engine.tensors()}
        assert after.keys() == before.keys() and all(not torch.equal(after[name], before[name]) for name in after)
        engine.export(tmp_path / "out")
        exported = plain_of(str(tmp_path / "out")).state_dict()
        assert all(torch.equal(exported[name], tensor) for name, tensor in after.items())
        stream = engine.tensors()
        next(stream)
        stream.close()  # an engine that died: the next publish starts again
        assert all(torch.equal(tensor, after[name]) for name, tensor in engine.tensors())

    def test_a_resumed_engine_goes_on_to_the_bit(self, made: Made, tmp_path: Path) -> None:
        engine, again = made(), made()
        for one in (engine, again):
            one.use_optimizer(toy_optim())
        check_resumed(engine, again, tmp_path / "state")
        assert {name for name in engine.state() if name.startswith("model.")} == {f"model.{n}" for n, _ in engine.tensors()}

    def test_memory_that_is_given_back_returns(
        self, made: Made, traits: frozenset[str], monkeypatch: Any, tmp_path: Path
    ) -> None:
        if "offload" not in traits:
            pytest.skip("this engine does not offload")
        monkeypatch.setattr(
            agentrl.trainer.train_engine, "check_on_host", lambda cfg: None
        )  # on a CPU nothing is gained by it, and nothing else differs
        engine, again = made(offload="idle"), made()
        for one in (engine, again):
            one.use_optimizer(toy_optim())
            updated(one)
        engine.offload()
        local = [one.to_local() if isinstance(one, DTensor) else one for _, one in engine.named_weights()]
        assert all(parameter.untyped_storage().nbytes() == 0 for parameter in local)
        before = parameters_of(again)
        save_state(engine, tmp_path / "state", {})  # also while it is away
        engine.onload()
        engine.onload()
        assert updated(engine) == updated(again)
        assert not all(torch.equal(tensor, before[name]) for name, tensor in parameters_of(engine).items())
        engine.offload()
        load_state(engine, tmp_path / "state")
        engine.onload()
        assert all(torch.equal(tensor, before[name]) for name, tensor in parameters_of(engine).items())

    def test_a_model_that_is_only_asked_has_no_gradients(self, made: Made) -> None:
        engine = made()
        engine.freeze()
        assert engine.named_weights() == [] and not engine.logprobs(micro_of(ROWS), 1.0, False)[0].requires_grad
        counts = torch.tensor([3.0, -1.0])
        assert torch.equal(engine.reduce(counts, "sum"), counts) and torch.equal(engine.reduce(counts, "max"), counts)

    def test_what_its_traits_promise(self, made: Made, traits: frozenset[str]) -> None:
        """Values of a new critic are 0; an adapter starts as no change; Muon moves matrices; else each is refused by name."""
        micro = micro_of(ROWS)
        if "critic" in traits:
            assert torch.equal(made(role="value").values(micro), torch.zeros(len(micro.targets)))
        else:
            with pytest.raises(ConfigError, match=r"role|values"):
                made(role="value").values(micro)
        if "sft" in traits:
            engine = made()
            engine.use_optimizer(sft_optim(toy_optim(), toy_sft(), engine.cfg))
            before = parameters_of(engine)
            updated(engine)
            assert all(not torch.equal(tensor, before[name]) for name, tensor in parameters_of(engine).items())
        if "lora" not in traits:
            with pytest.raises(ConfigError, match="adapter"):
                made().adapter()
            return
        engine, plain = made(lora=LoraSection(rank=2)), made()
        engine.use_optimizer(toy_optim(lr=0.02))
        updated(engine)
        updated(engine)
        with torch.no_grad():
            adapted, base = engine.logprobs(micro, 1.0, False)[0], plain.logprobs(micro, 1.0, False)[0]
            with engine.frozen_base():
                assert torch.equal(engine.logprobs(micro, 1.0, False)[0], base)
        assert (adapted - base).abs().max() > 1e-3
        assert {name for name, _ in engine.tensors()} == {name for name, _ in plain.tensors()}
        assert len(engine.adapter()) == len(engine.named_weights()) and all(".lora_" in name for name in engine.adapter())
