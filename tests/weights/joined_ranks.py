"""FSDP2 ranks that train, publish in place to this process, and train on: a script, because ranks are forked.

    PYTHONPATH=.:tests/trainer python tests/weights/joined_ranks.py OUT MODEL RANKS...

OUT/<ranks>.json: what test_joined.py asks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentrl.cluster.worker import WorkerContext
from agentrl.config.schema import AlgorithmConfig, ModelConfig, WeightsConfig
from agentrl.engines.weights import host_routes as joined
from agentrl.engines.weights.base import Bucket, open_receiver
from agentrl.trainer.actor import Actor
from agentrl.utils.errors import ConfigError
from tests.trainer.ranks import forked, join, mine, warm_up
from tests.trainer.train_batches import make_batch, toy_optim

CFG = WeightsConfig(bucket_mib=0.06)
Weights = dict[str, Any]


def whole(actor: Actor) -> Weights:
    """Gathered by DTensor itself, tensor by tensor."""
    held = actor._ready().module.state_dict()
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in held.items() if "lm_head" not in n}
    return {name.removeprefix("hf."): tensor.numpy().copy() for name, tensor in full.items()}


def next_one(actor: Actor, first: bool) -> tuple[Bucket | None, bool]:
    bucket = actor.next_bucket(first)
    told = [bucket is not None]
    dist.broadcast_object_list(told, 0)  # in a run the driver knows
    return bucket, told[0]


def publish(actor: Actor, pipe: Connection) -> None:
    """Each bucket to the other end, then the weights as they should be."""
    more, first = True, True
    while more:
        bucket, more = next_one(actor, first)
        first = False
        if bucket is not None:
            pipe.send(bucket.to_plain())
            assert pipe.recv() == "loaded"
    truth = whole(actor)
    if dist.get_rank() == 0:
        pipe.send(truth)
    dist.barrier()


def size_of(actor: Actor, folder: Path) -> int:
    """Of a checkpoint that is written as a run does, from a copy of the state while training could go on."""
    actor.begin_save(str(folder))
    while not actor.saved():
        time.sleep(0.01)
    dist.barrier()
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def train(actor: Actor, steps: range, context: WorkerContext) -> list[float]:
    """This rank's losses."""
    algorithm = AlgorithmConfig()
    batches = [mine(Actor, make_batch(8, seed=step), algorithm, context) for step in steps]
    return [actor.update(batch, algorithm, step=step)["loss"] for step, batch in zip(steps, batches, strict=True)]


def refused(actor: Actor) -> str:
    """Why ranks that do not share memory cannot open the route: as if the last one were on another machine."""
    real = joined._unlike
    if dist.get_rank() == dist.get_world_size() - 1:
        joined._unlike = lambda *_: "another machine"
    try:
        actor.open_route("in_place", CFG, 1)
    except ConfigError as problem:
        return str(problem)
    finally:
        joined._unlike = real
    return ""


def body_of(tiny: str, out: Path, pipe: Connection) -> Any:
    def body(context: WorkerContext) -> None:
        rank, gathers = dist.get_rank(), [0]
        actor = Actor(context)
        actor.init_model(tiny, ModelConfig(), toy_optim(lr=1e-2))
        plain = Actor(context)  # the control, in the same processes: never published
        plain.init_model(tiny, ModelConfig(), toy_optim(lr=1e-2))
        assert train(actor, range(2), context) == train(plain, range(2), context)
        sizes = [size_of(actor, out / f"{dist.get_world_size()}_before")]
        why = refused(actor)
        for _ in range(2):  # the second time the shards are joined already
            offer = actor.open_route("in_place", CFG, 1)
            if rank == 0:
                pipe.send((offer, why))
                assert pipe.recv() == "attached"
            dist.barrier()
            actor.route_attached()
            real, gathers[0] = FSDPModule.unshard, 0

            def counted(part: FSDPModule, *args: Any, real: Any = real) -> Any:
                gathers[0] += 1
                return real(part, *args)

            FSDPModule.unshard = counted  # type: ignore[method-assign]
            publish(actor, pipe)
            FSDPModule.unshard = real  # type: ignore[method-assign]
            assert gathers[0] == 0
            losses = train(actor, range(2, 4), context), train(plain, range(2, 4), context)
        sizes.append(size_of(actor, out / f"{dist.get_world_size()}_after"))
        same = all((a == b).all() for a, b in zip(whole(actor).values(), whole(plain).values(), strict=True))
        resumed = Actor(context)
        resumed.init_model(tiny, ModelConfig(), toy_optim(lr=1e-2))
        resumed.load(str(out / f"{dist.get_world_size()}_after"))
        actor.load(str(out / f"{dist.get_world_size()}_after"))  # into the segment itself
        again = [train(each, range(4, 5), context) for each in (resumed, actor, plain)]
        if rank == 0:
            pipe.send({"losses": losses, "same": same, "sizes": sizes, "again": again})

    return body


def mapped() -> list[bool]:
    """Of each file for weights that this process has mapped: whether it still has a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [not line.endswith("(deleted)") for line in lines if "agentrl-weights-" in line]


def engine(pipe: Connection) -> dict[str, Any]:
    """The other end: what it has against what it should have, for each of the two publishes."""
    found: dict[str, Any] = {"publishes": []}
    for _ in range(2):
        offer, found["refused"] = pipe.recv()
        receiver = open_receiver(offer, 0)
        pipe.send("attached")
        own: dict[str, torch.Tensor] = {}
        buckets, lent = 0, True
        while not isinstance(message := pipe.recv(), dict):
            bucket = Bucket.from_plain(message)
            buckets, lent = buckets + 1, lent and all(entry.lent is not None for entry in bucket.entries)
            own |= {name: tensor.clone() for name, tensor in receiver.receive(bucket)}
            pipe.send("loaded")
        names = set(own) == set(message)
        equal = names and all(torch.equal(own[name], torch.from_numpy(message[name])) for name in own)
        found["publishes"].append({"equal": equal, "lent": lent, "buckets": buckets, "mapped": mapped(), "names": len(own)})
        receiver.close()
    return found | pipe.recv()


def main(out: Path, tiny: str, counts: list[int]) -> None:
    warm_up(tiny)
    for count in counts:
        here, there = multiprocessing.Pipe()
        children = forked({"dp": count}, out, body_of(tiny, out, there))
        there.close()  # so that the end of the ranks is seen here
        (out / f"{count}.json").write_text(json.dumps(engine(here)))
        join(children)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(count) for count in sys.argv[3:]])
