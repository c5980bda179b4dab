"""Compare the bytes per second of every weight route with a plain copy of the same bytes on the same machine.

    python benchmarks/publish.py [--mib 1024] [--bucket-mib 64] [--repeats 5] [--route shared]

Sender and receiver each have a copy of the weights. Measures the time from the first bucket until the last tensor is in
the receiver's parameters. Except for `memory`, the receiver is another process. The route `memory` copies every byte
once, `shared` and `disk` twice or more, into a bucket and out of it, so on one core these cannot be faster than 0.5 of a
copy; both sides work concurrently, so on two cores they can. Copies and publishes alternate; the best of all repeats
counts. `cpu` is the processor time of both sides / that of the copy, the copies that a byte costs, on which other load has
little effect. The last line is one JSON object.
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
from agentrl.engines.weights.base import ROUTES, Bucket, Offer, Receiver, Sender, auto_routes, make_sender, open_receiver

TENSOR_MIB = 8
Times = tuple[float, float]
"""Wall-clock seconds and processor seconds."""


def weights(mib: int, seed: float) -> dict[str, Tensor]:
    """Make `mib` MiB of float32 in tensors of 8 MiB."""
    count = TENSOR_MIB << 18
    return {f"layer{i}": torch.full((count,), seed + i) for i in range(mib // TENSOR_MIB)}


def load(receiver: Receiver, bucket: Bucket, own: dict[str, Tensor]) -> None:
    for name, tensor in receiver.receive(bucket):
        own[name].copy_(tensor)


def run_receiver(pipe: Connection, mib: int) -> None:
    """Run the receiving process: report readiness, attach to an Offer, load and acknowledge each bucket, answer "sum" and "cpu",
    end at None."""
    torch.set_num_threads(1)
    own = weights(mib, 0.0)
    receiver: Receiver | None = None
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        if isinstance(message, Offer):
            receiver = open_receiver(message, 0)
            pipe.send("attached")
        elif message == "cpu":
            pipe.send(time.process_time())
        elif message == "sum":
            pipe.send(sum(float(tensor[0]) + float(tensor[-1]) for tensor in own.values()))
        else:
            assert receiver is not None
            load(receiver, message, own)
            pipe.send("loaded")


def publish(sender: Sender, pipe: Connection, held: dict[str, Tensor]) -> Times:
    """Publish once. The sender fills a bucket while the receiver loads the previous one."""
    begun, before = time.process_time(), receiver_cpu_seconds(pipe)
    start = time.perf_counter()
    buckets = sender.buckets(iter(held.items()))
    bucket = next(buckets, None)
    while bucket is not None:
        pipe.send(bucket)
        bucket = next(buckets, None)
        pipe.recv()
    taken = time.perf_counter() - start
    return taken, time.process_time() - begun + receiver_cpu_seconds(pipe) - before


def receiver_cpu_seconds(pipe: Connection) -> float:
    """Return the processor seconds of the other process."""
    pipe.send("cpu")
    return float(pipe.recv())


def publish_here(sender: Sender, receiver: Receiver, held: dict[str, Tensor], own: dict[str, Tensor]) -> Times:
    """Publish once in one process and thread."""
    start, begun = time.perf_counter(), time.process_time()
    for bucket in sender.buckets(iter(held.items())):
        assert bucket is not None
        load(receiver, bucket, own)
    return time.perf_counter() - start, time.process_time() - begun


def copy_weights(held: dict[str, Tensor], own: dict[str, Tensor]) -> Times:
    """Copy the weights plainly."""
    start, begun = time.perf_counter(), time.process_time()
    for name, tensor in held.items():
        own[name].copy_(tensor)
    return time.perf_counter() - start, time.process_time() - begun


def measure(route: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure copies and publishes alternately, and check the received weights. `copy_s` and `publish_s`: best of each; `cpu`:
    processor time of a publish / that of a copy."""
    held, own = weights(args.mib, 1.0), weights(args.mib, 0.0)
    cfg = WeightsConfig(bucket_mib=args.bucket_mib, folder=tempfile.gettempdir())
    sender = make_sender(route, cfg, TENSOR_MIB << 20, 1, "127.0.0.1")
    sender.lend(list(held.values()))
    want = sum(float(tensor[0]) + float(tensor[-1]) for tensor in held.values())
    if route == "memory":
        receiver = open_receiver(sender.open(), 0)
        sender.attached()
        times = [(copy_weights(held, own), publish_here(sender, receiver, held, own)) for _ in range(args.repeats + 1)]
        got = sum(float(tensor[0]) + float(tensor[-1]) for tensor in own.values())
    else:
        for pipe in started_receiver(args.mib):
            pipe.send(sender.open())
            assert pipe.recv() == "attached"
            sender.attached()
            times = [(copy_weights(held, own), publish(sender, pipe, held)) for _ in range(args.repeats + 1)]
            pipe.send("sum")
            got = pipe.recv()
    sender.close()
    assert got == want, f"route {route} delivered wrong weights"
    copy, sent = ([pair[side] for pair in times[1:]] for side in (0, 1))  # the first round warms up
    cpu = min(used for _, used in sent) / min(used for _, used in copy)
    return {"copy_s": min(taken for taken, _ in copy), "publish_s": min(taken for taken, _ in sent), "cpu": cpu}


def started_receiver(mib: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_receiver, args=(there, mib), daemon=True)
    process.start()
    there.close()  # so that this side notices the end of the process
    assert here.recv() == "ready"
    yield here
    here.send(None)
    process.join(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--route", choices=auto_routes(), action="append")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ratios, rates, cpu = {}, {}, {}
    gpu = torch.cuda.is_available()
    usual = [name for name in auto_routes() if gpu or "cuda" not in ROUTES.entry(name).traits]
    for route in args.route or usual:
        found = measure(route, args)
        gib, ratio = args.mib / 1024, found["copy_s"] / found["publish_s"]
        ratios[f"{route}_over_memcpy"], cpu[route] = round(ratio, 4), round(found["cpu"], 3)
        rates[route] = {"memcpy_gib_s": round(gib / found["copy_s"], 3), "publish_gib_s": round(gib / found["publish_s"], 3)}
        speeds = f"{rates[route]['publish_gib_s']:7.2f} GiB/s, memcpy {rates[route]['memcpy_gib_s']:.2f}"
        print(f"{route:16s} {speeds}, ratio {ratio:.3f}, processor time of {found['cpu']:.2f} copies", flush=True)
    print(
        json.dumps(
            {
                "benchmark": "publish",
                "ratios": ratios,
                "copies_in_processor_time": cpu,
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
