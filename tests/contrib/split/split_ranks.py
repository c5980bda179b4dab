"""Ranks that split matrices and experts, as forked processes over gloo: everything that `test_split.py` wants of them.

python split_ranks.py OUT [CASE ...]       OUT/<model>.pt: of one rank;  OUT/<case>.pt, OUT/<case> saved, exported: of four
"""

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import agentrl.trainer.train_engine
from agentrl.cluster.worker import Mesh, WorkerContext
from agentrl.config.schema import AlgorithmConfig, LoraSection, ModelConfig
from agentrl.trainer.actor import Actor
from agentrl.trainer.train_engine import TRAIN_ENGINES
from tests.tiny_families import EXPERTS, build_family
from tests.trainer.ranks import forked, join, mine, noisy, routed, weights_on
from tests.trainer.train_batches import sharing, toy_optim

ALGORITHM = AlgorithmConfig(minibatch=7)
OPTIM = toy_optim(lr=1e-4, micro_tokens=64, max_grad_norm=0.01)
LORA = LoraSection(rank=2, modules=["q_proj", "o_proj", "gate_proj", "down_proj"])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {"tie_word_embeddings": False}),
    "untied": ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama": ("llama", {"tie_word_embeddings": False}),
}


@dataclass(frozen=True)
class Case:
    """A model, how four ranks split it (or the product of `mesh`), and whether rows share their prefixes."""

    model: str
    mesh: dict[str, int]
    cfg: ModelConfig = field(default_factory=ModelConfig)
    shared: bool = False


TP = {"dp": 2, "sp": 1, "tp": 2}
BOTH = ModelConfig(tensor_parallel=2, expert_parallel=2)
SHORT = {"tp 2 x 2": Case("qwen3", TP, ModelConfig(tensor_parallel=2)), "tp 2, ep 2": Case("moe", TP, BOTH)}
LONG = {
    "tp 4": Case("untied", {"dp": 1, "sp": 1, "tp": 4}, ModelConfig(tensor_parallel=4)),
    "tp 2 of 2": Case("llama", {"dp": 1, "sp": 1, "tp": 2}, ModelConfig(tensor_parallel=2)),
    "tp 2, llama": Case("llama", TP, ModelConfig(tensor_parallel=2)),
    "tp 2, replicas": Case("qwen3", TP, ModelConfig(tensor_parallel=2, replicas=2)),
    "tp 2, sp 2": Case("qwen3", {"dp": 1, "sp": 2, "tp": 2}, ModelConfig(tensor_parallel=2, sequence_parallel=2)),
    "tp 2, prefixes": Case("qwen3", TP, ModelConfig(tensor_parallel=2), shared=True),
    "tp 2, adapters": Case("qwen3", TP, ModelConfig(tensor_parallel=2, lora=LORA)),
    "tp 2, checkpoints": Case("qwen3", TP, ModelConfig(tensor_parallel=2, activation_checkpointing=True)),
    "tp 2, sharded gradients": Case("qwen3", TP, ModelConfig(tensor_parallel=2, shard_gradients=True)),
    "ep 2": Case("moe", {"dp": 4, "sp": 1}, ModelConfig(expert_parallel=2)),
    "ep 4": Case("moe", {"dp": 4, "sp": 1}, ModelConfig(expert_parallel=4, activation_checkpointing=True)),
    "ep 2, sp 2": Case("moe", {"dp": 2, "sp": 2}, ModelConfig(expert_parallel=2, sequence_parallel=2)),
    "ep 4, tp 2": Case("moe", TP, ModelConfig(tensor_parallel=2, expert_parallel=4)),
    "ep 2, adapters": Case("moe", TP, BOTH.model_copy(update={"lora": LoraSection(rank=2)})),
    "ep 2, sharded gradients": Case("moe", {"dp": 4, "sp": 1}, ModelConfig(expert_parallel=2, shard_gradients=True)),
}
TITAN = {
    "titan, tp 2 x 2": Case("qwen3", TP, ModelConfig(engine="titan", tensor_parallel=2, activation_checkpointing=True)),
    "titan, tp 2, sp 2": Case(
        "llama", {"dp": 1, "sp": 2, "tp": 2}, ModelConfig(engine="titan", tensor_parallel=2, sequence_parallel=2)
    ),
    "titan, tp 2, replicas": Case("untied", TP, ModelConfig(engine="titan", tensor_parallel=2, replicas=2), shared=True),
    "titan, ep 2": Case("moe", {"dp": 4, "sp": 1}, ModelConfig(engine="titan", expert_parallel=2)),
    "titan, ep 4": Case("moe", {"dp": 4, "sp": 1}, ModelConfig(engine="titan", expert_parallel=4, activation_checkpointing=True)),
    "titan, ep 2, sp 2": Case("moe", {"dp": 2, "sp": 2}, ModelConfig(engine="titan", expert_parallel=2, sequence_parallel=2)),
}
if importlib.util.find_spec("torchtitan") is not None:  # else test_titan.py says that it is not installed
    LONG |= TITAN
CASES = {**SHORT, **LONG}


class Logged:
    """Around an engine's optimizers: notes the whole gradients of each step, before they are clipped by `engine.step`."""

    def __init__(self, engine: Any) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []
        self._engine, step = engine, engine.step

        def logged(sound: bool = True) -> float:
            self.seen.append({name: whole(p.grad) for name, p in engine.named_weights()})
            size: float = step(sound)
            return size

        engine.step = logged


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return full


def updated(path: str, case: Case, context: WorkerContext) -> tuple[Actor, dict[str, Any]]:
    """An actor after two optimizer steps, and what it computed: logprobs before, gradients, metrics, weights."""
    actor = Actor(context)
    actor.init_model(path, case.cfg, OPTIM)
    engine: Any = actor._engine
    log, rows = Logged(engine), sharing(noisy(), "on") if case.shared else noisy()
    found = {"logprobs": actor.compute_logprob(noisy())["logprobs"].values()}
    if case.model == "moe" and "router_replay" in TRAIN_ENGINES.entry(case.cfg.engine).traits:
        found["routed"] = actor.compute_logprob(routed(EXPERTS["num_experts"]))["logprobs"].values()
    found["metrics"] = actor.update(mine(Actor, rows, ALGORITHM, context), ALGORITHM, step=1)
    return actor, {**found, "gradients": list(log.seen), "weights": weights_on(actor)}


def moved(actor: Actor) -> bool:
    """Whether all weights are the same after the memory was given back and taken again, and none of it was left meanwhile."""
    before = weights_on(actor)
    kept, agentrl.trainer.train_engine.check_on_host = agentrl.trainer.train_engine.check_on_host, lambda cfg: None
    actor.offload()
    engine: Any = actor._ready(onload=False)
    left = sum(p.to_local().untyped_storage().nbytes() for p in engine.module.parameters())
    actor.onload()
    agentrl.trainer.train_engine.check_on_host = kept
    after = weights_on(actor)
    return left == 0 and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def broken(actor: Actor, context: WorkerContext) -> list[bool]:
    """What `finite` says as it is, and with one NaN on the last rank alone."""
    engine: Any = actor._ready(onload=False)
    found = [engine.finite()]
    parameter: Any = next(p for name, p in engine.named_weights() if "q_proj" in name and p.ndim > 1)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    kept = local.detach().clone()
    if context.rank == context.mesh.world_size - 1:
        local.data.view(-1)[0] = float("nan")
    found.append(engine.finite())
    local.data.copy_(kept)
    return found


def measured(folder: Path, out: Path, name: str, context: WorkerContext) -> None:
    """One case on this rank."""
    case = CASES[name]
    path = str(folder / case.model)
    actor, found = updated(path, case, context)
    found["moved"], found["finite"] = moved(actor), broken(actor, context)
    state = actor._ready(onload=False).state()
    local = {key: tensor.to_local() if isinstance(tensor, DTensor) else tensor for key, tensor in state.items()}
    found["held"] = {key: tuple(tensor.shape) for key, tensor in local.items()}
    actor.save(str(out / f"{name} saved"))
    actor.export_hf(str(out / f"{name} exported"))
    found["goes on"] = step_of(actor, context)
    # The same state in another layout: as many ranks, all of them FSDP2's; and back in its own.
    for other, cfg in (("plain", ModelConfig(lora=case.cfg.lora)), ("split", case.cfg)):
        again = Actor(context)
        again.init_model(path, cfg, OPTIM)
        again.load(str(out / f"{name} saved"))
        found[f"loaded {other}"] = weights_on(again)
        if other == "split":
            found["resumed"] = step_of(again, context)
    if context.rank == 0:
        torch.save(found, out / f"{name}.pt")


def step_of(actor: Actor, context: WorkerContext) -> dict[str, torch.Tensor]:
    """The weights after another update."""
    actor.update(mine(Actor, noisy(), ALGORITHM, context), ALGORITHM, step=2)
    return weights_on(actor)


def alone(folder: Path, out: Path, name: str) -> None:
    """What one rank computes, for each kind of adapters that a case of this model has."""
    context = WorkerContext("ranks", 0, Mesh.of({"dp": 1}, 1))
    adapted = {str(case.cfg.lora): case.cfg.lora for key, case in wanted().items() if case.model == name}
    found = {}
    for key, lora in adapted.items():
        actor, found[key] = updated(str(folder / name), Case(name, {"dp": 1}, ModelConfig(lora=lora)), context)
        found[key]["goes on"] = step_of(actor, context)
    torch.save(found, out / f"{name}.pt")


def wanted() -> dict[str, Case]:
    return {name: CASES[name] for name in sys.argv[2:]} or SHORT


def main(out: Path) -> None:
    models, cases = out / "models", wanted()
    for name in sorted({case.model for case in cases.values()}):
        family, changed = MODELS[name]
        build_family(models / name, family, **changed)
    path = str(models / next(iter(cases.values())).model)
    import torch._dynamo  # noqa: F401  # FSDP2 imports it when it first shards
    from transformers.distributed import tensor_parallel  # noqa: F401

    actor = Actor(WorkerContext("ranks", 0, Mesh.of({"dp": 1}, 1)))
    actor.init_model(path, ModelConfig(), toy_optim())
    actor.compute_logprob(noisy())
    ones = forked({"dp": 1}, out, lambda _: [alone(models, out, name) for name in {case.model for case in cases.values()}])
    meshes = {tuple(case.mesh.items()): case.mesh for case in cases.values()}
    for mesh in meshes.values():
        these = [name for name, case in cases.items() if case.mesh == mesh]
        ranks = forked(mesh, out, lambda context, these=these: [measured(models, out, name, context) for name in these])  # type: ignore[misc]
        join(ranks + ones)
        ones = []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()
