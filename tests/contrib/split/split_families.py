"""Every family that tensor or expert parallelism admits, tiny, on two forked ranks against one.

python split_families.py OUT FAMILY ...       OUT/<family>.json: the largest error of logprobs, and of gradients relative to
                                              each parameter's own, over two micro-batches
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
from torch.distributed.tensor import DTensor

from agentrl.cluster.worker import WorkerContext
from agentrl.config.schema import ModelConfig
from agentrl.contrib.split import EXPERT_FAMILIES
from agentrl.data.rows import Ragged
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.update import Pack
from tests.tiny_families import EXPERTS, build_family
from tests.trainer.ranks import forked, join
from tests.trainer.train_batches import make_batch

SPECIAL: dict[str, dict[str, Any]] = {
    "hyperclovax": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phi3": {"original_max_position_embeddings": 512},
}


def measured(path: str, cfg: ModelConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs of all rows, and the gradients of these and of the first two rows' alone, added up."""
    engine, view = FsdpEngine(path, cfg, 1.0), Ragged.of(make_batch(6))
    found = []
    for rows in (list(range(6)), [0, 1]):
        micro = Pack(view, rows, torch.device("cpu")).micro
        logprobs, entropy = engine.logprobs(micro, 1.0, True)
        loss = (logprobs * torch.cos(micro.position_ids[micro.before].float())).sum() + 0.1 * entropy.sum()
        engine.backward(loss, last=len(rows) == 2)
        found.append(logprobs.detach())
    grads = {name: p.grad for name, p in engine.named_weights() if p.grad is not None}
    return torch.cat(found), {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def compared(out: Path, family: str) -> None:
    folder = out / family
    experts = family in EXPERT_FAMILIES
    build_family(folder, family, **{**(EXPERTS if experts else {}), **SPECIAL.get(family, {})})

    def body(context: WorkerContext) -> None:
        split = context.mesh.world_size > 1
        cfg = ModelConfig(tensor_parallel=2, expert_parallel=2 if experts else 1) if split else ModelConfig()
        found = measured(str(folder), cfg)
        if context.rank == 0:
            torch.save(found, out / f"{family} {split}.pt")

    join(forked({"dp": 1}, out, body))
    join(forked({"dp": 2}, out, body))
    (one, grads), (two, others) = (torch.load(out / f"{family} {split}.pt") for split in (False, True))
    errors = {name: float((g - others[name]).abs().max() / (g.abs().max() + 1e-6)) for name, g in grads.items()}
    worst = max(errors, key=errors.__getitem__)
    result = {"logprobs": float((one - two).abs().max()), "gradients": errors[worst], "worst": worst, "tensors": len(errors)}
    (out / f"{family}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        compared(Path(sys.argv[1]), name)
