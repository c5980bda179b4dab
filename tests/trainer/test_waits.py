"""The host does not wait for the GPU within an optimizer step, which would leave the GPU idle."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils

from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig
from agentrl.data.rows import nested_tensor, on_device
from agentrl.engines.embedded.embedded_model import EmbeddedModel
from agentrl.engines.embedded.kv_cache import NAME
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.roles import Critic
from agentrl.trainer.update import Pack
from tests.trainer.learners import role_of, start
from tests.trainer.train_batches import make_batch, toy_critic, train_batch

READS = {"item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"}
waits: Counter[str] = Counter()


class OnCard(torch.Tensor):
    """A host tensor that passes for one on a GPU, as does all that is computed from it; what reads it is counted."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        lengths_read = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        chosen = name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
        if name in READS or lengths_read or chosen:
            waits[name] += 1
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of the model and columns of a micro-batch pass for tensors on a GPU until the last backward pass of a step."""

    def carded(owner: type, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = plain(*args, **kwargs)
            return tuple(o.as_subclass(OnCard) for o in out) if isinstance(out, tuple) else out.as_subclass(OnCard)

        monkeypatch.setattr(owner, name, call)

    for owner, names in ((FsdpEngine, ("logprobs", "values")), (Pack, ("column", "row"))):
        for name in names:
            carded(owner, name)
    packed, backward = Pack.__init__, FsdpEngine.backward

    def init(self: Pack, *args: Any, **named: Any) -> None:
        packed(self, *args, **named)
        self.compact = self.compact.as_subclass(OnCard)

    monkeypatch.setattr(Pack, "__init__", init)

    def closed(self: FsdpEngine, loss: torch.Tensor, last: bool) -> None:
        backward(self, loss, last)
        seen.append(dict(waits))

    monkeypatch.setattr(FsdpEngine, "backward", closed)
    seen.clear()
    waits.clear()


seen: list[dict[str, int]] = []
"""What had been read by the end of each backward pass."""


@pytest.mark.parametrize(
    ("loss", "aggregate"), [("ppo_clip", "token_mean"), ("gspo", "seq_mean_token_mean"), ("gmpo", "seq_mean_token_mean")]
)
def test_a_policy_step_of_several_micro_batches_reads_nothing(tiny: str, card: None, loss: str, aggregate: str) -> None:
    group = start(tiny, micro_tokens=200)
    batch = make_batch(12)
    algorithm = AlgorithmConfig(loss=Choice(name=loss), aggregate=aggregate, kl=KlConfig(coef=0.1, where="loss"), minibatch=12)
    logprobs = batch["logprobs"]
    batch["ref_logprobs"] = nested_tensor(logprobs.values() - 0.1, logprobs.offsets())
    metrics = train_batch(group, Actor.update, batch, algorithm)
    assert len(seen) > 1 and metrics["optimizer_steps"] == 1
    assert seen[-1] == {}
    assert waits["__float__"] + waits["cpu"] + waits["tolist"] > 0  # control: reads are seen, after the step


def test_a_critic_step_reads_nothing(tiny: str, card: None) -> None:
    group = role_of(Critic, tiny, toy_critic(), micro_tokens=200)
    batch = make_batch(12)
    column = batch["advantages"]
    batch.update({"values": column, "returns": nested_tensor(column.values() + 1, column.offsets())})
    train_batch(group, Critic.update, batch, AlgorithmConfig(advantage=Choice(name="gae"), minibatch=12))
    assert len(seen) > 1 and seen[-1] == {}


def test_what_goes_to_a_gpu_is_pinned_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not pinned is copied in two stages, the first of which waits for all kernels before it."""
    asked: list[Any] = []

    class Pinned(torch.Tensor):
        def to(self, device: torch.device, **how: Any) -> str:  # type: ignore[override]
            asked.append(how)
            return f"on {device}"

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.as_subclass(Pinned))
    assert on_device(torch.ones(3), torch.device("cuda")) == "on cuda"
    assert asked == [{"non_blocking": True}]
    host = torch.ones(3)
    assert on_device(host, torch.device("cpu")) is host


@pytest.mark.parametrize("engine", ["trainer", "embedded"])
def test_a_forward_pass_does_not_search_for_packed_rows(tiny: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would look for them in the positions and wait; where rows end is known."""
    searched: list[int] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: searched.append(positions.shape[-1]))
    if engine == "embedded":
        model = EmbeddedModel(tiny, "float32", torch.device("cpu"))  # its check runs the model, once with its own attention
        assert searched == [9]
        assert model.module.config._attn_implementation == NAME
    else:
        group = start(tiny, micro_tokens=200)
        train_batch(group, Actor.update, make_batch(12), AlgorithmConfig())
        assert searched == []
