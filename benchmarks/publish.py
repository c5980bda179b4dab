"""Bytes per second of every weight route against a plain copy of the same bytes on the same machine.

    python benchmarks/publish.py [--mib 1024] [--bucket-mib 64] [--repeats 5] [--route shared]

A sender and a receiver, each with its own copy of the weights. Measured is the time from the first bucket until
the last tensor is in the receiver's own parameters. Except for `memory`, the receiver is another process. The routes
`memory` and `in_place` copy every byte once, `shared`, `disk` and `collective` twice or more, into a bucket and out of
it, so on one core these cannot be faster than 0.5 of a copy; the two sides work at the same time, so on two cores they
can. Copies and publishes alternate; the best of all repeats counts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.weights.bucket import Bucket, Stream
from agentrl.weights.route import ROUTES, Offer, Receiver, Sender
from agentrl.weights.routes import make_sender, open_receiver, order

TENSOR_MIB = 8


def weights(mib: int, seed: float) -> dict[str, Tensor]:
    """`mib` MiB of float32, in tensors of 8 MiB."""
    count = TENSOR_MIB << 18
    return {f"layer{i}": torch.full((count,), seed + i) for i in range(mib // TENSOR_MIB)}


def load(receiver: Receiver, bucket: Bucket, own: dict[str, Tensor]) -> None:
    for name, tensor in receiver.receive(bucket):
        own[name].copy_(tensor)


def engine(pipe: Connection, mib: int) -> None:
    """The receiving process: says that it is ready, attaches to an Offer, loads and acknowledges each bucket, answers "sum", ends
    at None."""
    torch.set_num_threads(1)
    own = weights(mib, 0.0)
    receiver: Receiver | None = None
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        if isinstance(message, Offer):
            receiver = open_receiver(message, 0)
            pipe.send("attached")
        elif message == "sum":
            pipe.send(sum(float(tensor[0]) + float(tensor[-1]) for tensor in own.values()))
        else:
            assert receiver is not None
            load(receiver, message, own)
            pipe.send("loaded")


def publish(sender: Sender, pipe: Connection, held: dict[str, Tensor]) -> float:
    """Seconds of one publish; each bucket is filled while the other side loads the previous one."""
    start = time.perf_counter()
    stream = Stream(iter(held.items()))
    bucket = sender.send(stream)
    while bucket is not None:
        pipe.send(bucket)
        bucket = sender.send(stream)
        pipe.recv()
    return time.perf_counter() - start


def publish_here(sender: Sender, receiver: Receiver, held: dict[str, Tensor], own: dict[str, Tensor]) -> float:
    """The same in one process, one thread."""
    start = time.perf_counter()
    stream = Stream(iter(held.items()))
    while (bucket := sender.send(stream)) is not None:
        load(receiver, bucket, own)
    return time.perf_counter() - start


def copies(held: dict[str, Tensor], own: dict[str, Tensor]) -> float:
    """Seconds of the plain copy."""
    start = time.perf_counter()
    for name, tensor in held.items():
        own[name].copy_(tensor)
    return time.perf_counter() - start


def measure(route: str, args: argparse.Namespace) -> tuple[float, float]:
    """Best seconds of (copy, publish), measured alternately. The received weights are checked."""
    held, own = weights(args.mib, 1.0), weights(args.mib, 0.0)
    cfg = WeightsConfig(bucket_mib=args.bucket_mib, folder=tempfile.gettempdir())
    sender = make_sender(route, cfg, TENSOR_MIB << 20, 1, "127.0.0.1")
    sender.lend(list(held.values()))
    want = sum(float(tensor[0]) + float(tensor[-1]) for tensor in held.values())
    times: list[tuple[float, float]] = []
    if route == "memory":
        receiver = open_receiver(sender.open(), 0)
        sender.attached()
        times = [(copies(held, own), publish_here(sender, receiver, held, own)) for _ in range(args.repeats + 1)]
        got = sum(float(tensor[0]) + float(tensor[-1]) for tensor in own.values())
    else:
        for pipe in other_process(args.mib):
            pipe.send(sender.open())
            assert pipe.recv() == "attached"
            sender.attached()
            times = [(copies(held, own), publish(sender, pipe, held)) for _ in range(args.repeats + 1)]
            pipe.send("sum")
            got = pipe.recv()
    sender.close()
    assert got == want, f"route {route} delivered wrong weights"
    return min(copy for copy, _ in times[1:]), min(sent for _, sent in times[1:])  # the first round warms up


def other_process(mib: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=engine, args=(there, mib), daemon=True)
    process.start()
    there.close()  # so that the end of the process is seen here
    assert here.recv() == "ready"  # the time that gloo waits for the other end begins with the offer
    yield here
    here.send(None)
    process.join(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--route", choices=order(), action="append")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ratios, rates = {}, {}
    gpu = torch.cuda.is_available()
    for route in args.route or [name for name in order() if gpu or "cuda" not in ROUTES.entry(name).traits]:
        copy, sent = measure(route, args)
        ratios[f"{route}_over_memcpy"] = round(copy / sent, 4)
        rates[route] = {"memcpy_gib_s": round(args.mib / 1024 / copy, 3), "publish_gib_s": round(args.mib / 1024 / sent, 3)}
        print(
            f"{route:12s} {rates[route]['publish_gib_s']:7.2f} GiB/s, memcpy {rates[route]['memcpy_gib_s']:.2f}, "
            f"ratio {copy / sent:.3f}",
            flush=True,
        )
    print(
        json.dumps(
            {
                "benchmark": "publish",
                "ratios": ratios,
                "rates": rates,
                "mib": args.mib,
                "bucket_mib": args.bucket_mib,
                "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
