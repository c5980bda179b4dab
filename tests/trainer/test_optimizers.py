"""Every optimizer that a config can name: its step, what it keeps, how it goes on, and its rate. AdamW's step: test_keys.py."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Mesh, WorkerContext
from agentrl.config.load import config_from
from agentrl.config.schema import AlgorithmConfig, LoraSection, ModelConfig, OptimConfig, SftConfig
from agentrl.run.plan import Planner
from agentrl.trainer import optim
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.learner import check_learner
from agentrl.trainer.memory import count, shell
from agentrl.trainer.optim import optim_of, optims_of, sft_optim
from agentrl.trainer.roles import Critic
from agentrl.trainer.train_state import load_state, save_state
from agentrl.utils.errors import ConfigError
from tests.conftest import proof
from tests.publishing import weights_of as weights
from tests.trainer.engine_contract import check_resumed, parameters_of, updated
from tests.trainer.learners import agree
from tests.trainer.train_batches import make_batch, toy_critic, toy_optim, toy_sft, train_batch

KINDS = ["adamw", "muon", "sgd"]
Array = np.ndarray[Any, np.dtype[np.float64]]


# -- one step, and another ---------------------------------------------------------------------------------------


def taken(name: str, shape: tuple[int, ...], steps: int, **keys: Any) -> tuple[Array, list[Array], Array]:
    """Weights before, the gradients of each step, and the weights after."""
    random = np.random.default_rng(3)
    start, gradients = random.standard_normal(shape), [random.standard_normal(shape) for _ in range(steps)]
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    made = optim.OPTIMIZERS[name]([("model.layers.0.w", parameter)], OptimConfig(**{"name": name, "lr": 1e-2, **keys}))
    made.set_rate(0.5)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        made.step()
    return start, gradients, parameter.detach().double().numpy()


def sgd(start: Array, gradients: list[Array], lr: float, one: float, decay: float) -> Array:
    momentum, w = np.zeros_like(start), start.copy()
    for g in gradients:
        momentum = one * momentum + g + decay * w
        w = w - lr * momentum
    return w


def muon(start: Array, gradients: list[Array], lr: float, decay: float, jordan: bool) -> Array:
    momentum, w = np.zeros_like(start), start.copy()
    rows, columns = start.shape
    scale = math.sqrt(max(1, rows / columns)) if jordan else 0.2 * math.sqrt(max(rows, columns))
    for g in gradients:
        momentum = 0.95 * momentum + 0.05 * g
        x = 0.05 * g + 0.95 * momentum  # Nesterov
        x /= np.linalg.norm(x)
        flat = x.T if rows > columns else x
        for _ in range(5):
            square = flat @ flat.T
            flat = 3.4445 * flat + (-4.775 * square + 2.0315 * square @ square) @ flat
        w = w * (1 - lr * decay) - lr * scale * (flat.T if rows > columns else flat)
    return w


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(8, 6), (5,)])
def test_sgd_steps_as_its_formula_in_float64(shape: tuple[int, ...], decay: float) -> None:
    own = decay if len(shape) > 1 else 0.0  # vectors do not decay
    for momentum in (0.0, 0.7):
        start, gradients, after = taken("sgd", shape, 3, weight_decay=decay, betas=(momentum, 0.9))
        assert np.abs(after - sgd(start, gradients, 5e-3, momentum, own)).max() < 1e-6


@pytest.mark.parametrize("shape", [(8, 6), (6, 8)])
@pytest.mark.parametrize("rate", [None, 0.04])
def test_muon_steps_by_its_own_rate_or_as_long_as_adamw(shape: tuple[int, int], rate: float | None) -> None:
    """Its products are in bfloat16, hence the tolerance: of a step, in the mean."""
    start, gradients, after = taken("muon", shape, 2, matrix_lr=rate, weight_decay=0.5)
    expected = muon(start, gradients, 0.5 * (rate or 1e-2), 0.5, jordan=rate is not None)
    assert np.abs(after - expected).mean() < 0.03 * np.abs(expected - start).mean()


# -- in an engine ------------------------------------------------------------------------------------------------


def engine_of(tiny: str, name: str, **model: Any) -> FsdpEngine:
    engine = FsdpEngine(tiny, ModelConfig(**model), 1.0)
    engine.use_optimizer(toy_optim(name=name))
    return engine


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_engine_goes_on_to_the_bit_with_each(tiny: str, name: str, tmp_path: Path) -> None:
    check_resumed(engine_of(tiny, name), engine_of(tiny, name), tmp_path / "state")


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_the_momentum_of_sgd_may_begin_or_end_with_a_resume(tiny: str, tmp_path: Path, before: float, after: float) -> None:
    """`optim.betas` may change there; a momentum that begins was a checkpoint "of another model"."""
    old, again = engine_of(tiny, "sgd"), engine_of(tiny, "sgd")
    old.use_optimizer(toy_optim(name="sgd", betas=(before, 0.9)))
    again.use_optimizer(toy_optim(name="sgd", betas=(after, 0.9)))
    for engine in (old, again):  # one that has a momentum of its own too, as that of a step-wise loop
        updated(engine)
    save_state(old, tmp_path / "state", {})
    load_state(again, tmp_path / "state")
    mine, theirs = parameters_of(old), parameters_of(again)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert again.optimizers is not None and not any(bool(tensor.any()) for tensor in again.optimizers.tensors())


@pytest.mark.parametrize("name", KINDS)
def test_the_memory_that_is_counted_for_an_optimizer_is_what_it_holds(tiny: str, name: str) -> None:
    engine = engine_of(tiny, name)
    updated(engine)
    assert engine.optimizers is not None
    held = sum(tensor.nbytes for tensor in engine.optimizers.tensors())
    cfg = ModelConfig(path=tiny, dtype="float32")
    assert count(shell(cfg), cfg, 1, 64, [toy_optim(name=name)]).optimizer == held
    both = count(shell(cfg), cfg, 1, 64, [toy_optim(name="sgd", betas=(0.0, 0.9)), toy_optim(name=name)])
    assert both.optimizer == held  # one after the other, and not together


KINDS_OF = {"adamw": ["AdamW"], "muon": ["AdamW", "Muon"], "sgd": ["SGD"]}


@pytest.mark.parametrize(("name", "warm"), [("sgd", "muon"), ("muon", "sgd"), ("adamw", None), ("muon", None)])
def test_a_config_names_every_optimizer(tiny: str, name: str, warm: str | None) -> None:
    """Of a policy, a critic, and the warm start."""
    context, optimizer, model = WorkerContext("one", 0, Mesh.of({"dp": 1}, 1)), toy_optim(name=name), ModelConfig()

    def kinds(role: Any) -> list[str]:
        return [type(part).__name__ for part in role._engine.optimizers.parts]

    actor, critic = Actor(context), Critic(context)
    actor.init_model(tiny, model, optimizer)
    critic.init_model(tiny, model, optimizer, toy_critic())
    assert kinds(actor) == kinds(critic) == KINDS_OF[name]
    actor.begin_sft(SftConfig(optimizer=warm, lr=1e-3))
    assert kinds(actor) == KINDS_OF[warm or name]


# -- rates -------------------------------------------------------------------------------------------------------


def config_of(*words: str) -> Any:
    return config_from({"env": {"id": "key_value"}, "model": {"path": "some/model"}}, list(words))


DATA, ADAPTER, SCRATCH = "data.path=['x']", "model.lora.rank=4", ["~model.path", "model.init={}"]


@pytest.mark.parametrize(("words", "rates"), [
    (["critic={}", "sft={}"], {"optim": 1e-6, "critic": 1e-5, "sft": 1e-5}),
    (["critic={}", "sft={}", ADAPTER], {"optim": 1e-5, "critic": 1e-4, "sft": 1e-4}),
    (["critic={}", "sft={}", *SCRATCH], {"optim": 1e-3, "critic": 1e-3, "sft": 3e-3}), ([DATA], {"optim": 1e-5}),
    ([DATA, ADAPTER], {"optim": 1e-4}), ([DATA, "data.loss=dpo"], {"optim": 1e-6}),
    ([DATA, "data.loss=reward"], {"optim": 1e-5}), ([DATA, *SCRATCH], {"optim": 3e-3}),
    (["optim.lr=0.5", "critic.lr=0.25", "sft.lr=0.125"], {"optim": 0.5, "critic": 0.25, "sft": 0.125}),
])  # fmt: skip
def test_rates_that_are_left_open_are_those_of_what_is_trained(words: list[str], rates: dict[str, float]) -> None:
    config = config_of(*words)
    assert {section: made.lr for section, made in optims_of(config).items()} == rates
    assert all(made.name == "adamw" for made in optims_of(config).values())
    left = {f"{at}.lr": f"{lr:.0e}" for at, lr in rates.items() if getattr(getattr(config, at), "lr", None) is None}
    assert {key: f"{float(lr):.0e}" for key, lr in Planner(config).derived_values().items() if key.endswith(".lr")} == left


def test_a_warm_start_with_a_rate_of_muon_has_muon_as_it_always_had() -> None:
    """Jordan's scale, AdamW's betas of 0.9 and 0.95, and decay of matrices of 0.1: what the quickstart's results are from."""
    made = sft_optim(toy_optim(), toy_sft(), ModelConfig())
    assert (made.name, made.lr, made.matrix_lr, made.betas, made.weight_decay) == ("muon", 3e-3, 0.02, (0.9, 0.95), 0.1)
    assert optim_of(OptimConfig(), ModelConfig(lora=LoraSection())).lr == 1e-5


@pytest.mark.parametrize(("words", "said"), [
    (["optim.name=sgd"], r'optim\.lr: "sgd" has no usual learning rate\. Set one'),
    (["optim.name=sgd", "optim.lr=0.1", "critic={}"], r"critic\.lr: "),
    (["optim.name=sgd", "optim.lr=0.1", "sft={}"], r"sft\.lr: "),
    (["optim.matrix_lr=0.1"], r'optim\.matrix_lr = 0\.1 is read with optim\.name = "muon" alone'),
    (["optim.name=adamw_8bit"], r"optim\.name: input should be 'adamw', 'muon' or 'sgd', got 'adamw_8bit'"),
    (["sft={optimizer='adamw',matrix_lr=0.1}"], r'sft\.matrix_lr = 0\.1 is read with sft\.optimizer = "muon" alone'),
])  # fmt: skip
def test_what_an_optimizer_lacks_or_does_not_read_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_learner(config_of(*words))


# -- on another number of ranks (FSDP2 over gloo, in Ray actors) -------------------------------------------------


@proof
@pytest.mark.parametrize("name", KINDS)
def test_each_optimizer_goes_on_with_another_number_of_ranks(ray_up: None, tiny: str, tmp_path: Path, name: str) -> None:
    optim, algorithm = toy_optim(micro_tokens=150, name=name), AlgorithmConfig(minibatch=6)
    with launch(Actor, backend="ray", world_size=2, name=name, num_cpus=0.5) as two:
        two.run(Actor.init_model, tiny, ModelConfig(dtype="float32"), optim)
        train_batch(two, Actor.update, make_batch(6), algorithm)
        two.run(Actor.save, str(tmp_path / "c"))
        one = launch(Actor, backend="inline", world_size=1)
        one.run(Actor.init_model, tiny, ModelConfig(), optim)
        one.run(Actor.load, str(tmp_path / "c"))
        one.run(Actor.save, str(tmp_path / "again"))
        two.run(Actor.load, str(tmp_path / "again"))
        batch = make_batch(11, seed=5)
        agree(train_batch(one, Actor.update, batch, algorithm, step=1), train_batch(two, Actor.update, batch, algorithm, step=1))
        mine, theirs = weights(one), weights(two)
    tolerance = 1e-4 if name == "muon" else 1e-5  # it computes in bfloat16, to a share of a step of 1e-3
    assert max((mine[n] - theirs[n]).abs().max().item() for n in mine) < tolerance
