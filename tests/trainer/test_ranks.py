"""Loss and gradient do not depend on packing, sizes, ranks or Ulysses; a kill -9 loses its save alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.trainer.actor import Actor
from agentrl.trainer.checkpoint import Checkpoints
from agentrl.trainer.train_engine import TRAIN_ENGINES
from tests.e2e.runs import run_script
from tests.publishing import weights_of
from tests.trainer.learners import start
from tests.trainer.ranks import ENGINES, FAMILIES, KILLED, LAYOUTS, LOADS, LOSSES, SHARDED, SPREAD

pytestmark = pytest.mark.timeout(450)
WHAT = [
    (layout, what)
    for layout, (_, model, _) in LAYOUTS.items()
    for what in [
        *LOSSES,
        *(["critic"] if "critic" in TRAIN_ENGINES.entry(model.engine).traits else []),
        *(["routed"] if "router_replay" in TRAIN_ENGINES.entry(model.engine).traits else []),
    ]
    if layout != "one"
]


@pytest.fixture(scope="module")
def out(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_script(Path(__file__).with_name("ranks.py"), str(folder), tiny, timeout=400)
    return folder


def results(out: Path, layout: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / f"{layout}.pt")
    return found


@pytest.mark.parametrize(("layout", "what"), WHAT)
def test_loss_and_gradient_are_those_of_one_rank(out: Path, layout: str, what: str) -> None:
    metrics, steps = results(out, "one")[what]
    other, others = results(out, layout)[what]
    assert metrics.keys() == other.keys()
    for name, value in metrics.items():
        assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert len(steps) == len(others) == 2
    for mine, theirs in zip(steps, others, strict=True):
        assert mine.keys() == theirs.keys()
        size = max(grad.abs().max().item() for grad in mine.values())
        assert size > 1e-3
        for name, grad in mine.items():
            assert (grad - theirs[name]).abs().max().item() < 1e-5 * max(size, 1.0), name


@pytest.mark.parametrize("layout", [layout for layout, what in WHAT if what == "routed" and layout in LOADS])
def test_loads_of_experts_are_those_of_one_rank_that_shares_no_prefix(out: Path, layout: str) -> None:
    """A prefix is computed once on each rank that has rows of it, and counts for each of these rows."""
    want, one = results(out, "one")["loads"]
    plain, shared = results(out, layout)["loads"]
    assert plain["prefix_ratio"] == 1 and shared["prefix_ratio"] > 1 and want["experts_max_violation"] > 0.05
    for name in (name for name in want if name.startswith("experts_")):
        assert all(found[name] == pytest.approx(want[name], abs=1e-9) for found in (one, plain, shared)), name


@pytest.mark.parametrize("name", [name for name in FAMILIES if "," in name])
def test_a_family_with_mixers_has_on_two_ranks_the_gradient_of_one(out: Path, name: str) -> None:
    """Rows over ranks, tokens over ranks, and one row a pass; prefixes are shared but in the last."""
    metrics, steps, ids, values = torch.load(out / f"{name.partition(',')[0]}.pt")
    other, others, own, theirs = torch.load(out / f"{name}.pt")
    assert len(steps) == len(others) == 2 and metrics["prefix_ratio"] > 1
    assert (other["prefix_ratio"] > 1) == ("one row" not in name)
    for key in ("loss", "grad_norm", "entropy", "tokens_trained"):
        assert other[key] == pytest.approx(metrics[key], rel=2e-5, abs=1e-5), key
    for mine, yours in zip(steps, others, strict=True):
        top = max(grad.abs().max().item() for grad in mine.values())
        assert top > 1e-3 and mine.keys() == yours.keys()
        assert max((grad - yours[key]).abs().max().item() for key, grad in mine.items()) < 5e-5 * max(top, 1.0)
    if "shared tokens" in name:
        assert torch.equal(ids, own) and (values - theirs).abs().max() < 1e-5 and values.abs().max() > 0.01


@pytest.mark.parametrize("model", SHARDED)
def test_gradients_sharded_after_every_micro_batch_are_the_same_and_take_a_ranks_share(out: Path, model: str) -> None:
    """`shard_gradients` on, off and left open."""
    found = torch.load(out / "reduced.pt")
    (whole, much, micros, size), (sharded, little, others, _) = found[f"{model} False"], found[f"{model} True"]
    assert micros == others >= 2 and len(whole) == len(sharded) == 1
    for mine, theirs in zip(whole, sharded, strict=True):
        top = max(grad.abs().max().item() for grad in mine.values())
        assert top > 1e-4
        assert max((grad - theirs[name]).abs().max().item() for name, grad in mine.items()) < 1e-6 * max(top, 1.0)
    # Every first dimension is even, so a rank's share is exactly half; two replicas have all of the weights each.
    assert (much, little) == (size, size if model == "replicas" else size // 2)
    unset, kept, *_ = found[f"{model} None"]
    assert kept == much, "a model of this size keeps them whole by default, and every digit with them"
    assert all(torch.equal(grad, other[name]) for mine, other in zip(whole, unset, strict=True) for name, grad in mine.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_that_give_their_memory_back_between_turns_learn_the_same(out: Path, engine: str) -> None:
    (rows, weights, _), (others, theirs, left) = torch.load(out / "reduced.pt")["waited"][engine]
    assert left == [0, 0] and rows == others
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights.items())


def test_the_frozen_base_of_adapters_on_two_ranks_is_the_model_itself(out: Path) -> None:
    adapted, base, separate = torch.load(out / "reduced.pt")["base"]
    assert torch.equal(base, separate) and (adapted - base).abs().max() > 1e-3


def test_a_reference_follows_the_policy_shard_by_shard_on_two_ranks(out: Path) -> None:
    (start, policy, average, _, last), (own, theirs) = torch.load(out / "reduced.pt")["moved"]
    for name, tensor in average.items():
        expected = 0.75 * start[name].double() + 0.25 * policy[name].double()
        assert (tensor - expected).abs().max() < 5e-7 and torch.equal(last[name], policy[name]), name
    assert max(float((policy[name] - start[name]).abs().max()) for name in start) > 1e-3
    assert torch.equal(own, theirs)  # by the weights of now, not by those that the pass before had gathered


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_leave_out_the_step_in_which_one_of_them_has_a_number_that_is_not_finite(out: Path, layout: str) -> None:
    metrics, (weights,) = results(out, layout)["broken"]
    expected, (alone,) = results(out, "one")["broken"]
    assert metrics["skipped_optimizer_steps"] == metrics["optimizer_steps"] == 1
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, tensor in weights.items():
        assert torch.isfinite(tensor).all() and (tensor - alone[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "shared tokens" in name or "torchtitan" in name])
def test_what_several_ranks_saved_one_rank_loads(out: Path, tiny: str, layout: str) -> None:
    resumed = start(tiny)
    resumed.run(Actor.load, str(out / f"{layout}, trained"))
    _, (expected,) = results(out, layout)["broken"]
    loaded = weights_of(resumed)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("prefix", [0, 9])
@pytest.mark.parametrize("family", SPREAD)
def test_families_whose_heads_two_ranks_split_are_as_on_one(out: Path, family: str, prefix: int) -> None:
    """Each rank has its own heads' sinks, of which the sum over the ranks is the gradient."""
    logprob, gradients = torch.load(out / "spread.pt")[family, prefix]
    assert logprob < 1e-5 and max(gradients.values()) < 1e-4
    assert family != "gpt-oss" or any(name.endswith("sinks") for name in gradients)


def test_the_losses_differ(out: Path) -> None:
    found = [results(out, "one")[name][1][0] for name in LOSSES]
    for index, grads in enumerate(found):
        for other in found[:index]:
            assert any(not torch.allclose(grads[n], other[n], atol=1e-5) for n in grads)


@pytest.mark.parametrize(("world", "seed"), KILLED)
def test_kill_in_the_middle_of_a_background_save(out: Path, tiny: str, world: int, seed: int) -> None:
    folder = out / f"killed_{world}_{seed}"
    said = (folder / "said").read_text().split("\n")
    began = max(int(line.split()[1]) for line in said if line.startswith("began"))
    sealed = max(int(line.split()[1]) for line in said if line.startswith("whole"))
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    newest = checkpoints.newest()
    assert newest is not None
    step = int(newest.name.removeprefix("step_"))
    assert sealed <= step <= began and step >= began - 1
    lost = checkpoints.recover_interrupted()
    assert lost in ([], [step + 1]) and (step == began or lost == [began])
    resumed = start(tiny)
    resumed.run(Actor.load, str(newest / "actor"))
    expected = torch.load(folder / f"weights_{step}.pt")
    loaded = weights_of(resumed)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
