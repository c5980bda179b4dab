"""Part `publish`: bytes per second of each weight route from a trainer's tensors on the card to another process's on the card
(for `memory`: the same process), against a plain copy on the card."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_common import clear, copy_gb_s, rounded, wait

from agentrl.config.schema import WeightsConfig
from agentrl.engines.weights.base import Bucket, Offer, Receiver, Sender, auto_routes, make_sender, open_receiver
from agentrl.utils.errors import AgentrlError

TENSOR_MIB = 16
Weights = dict[str, torch.Tensor]


def weights(mib: int, seed: float, device: torch.device) -> Weights:
    """Make bfloat16 tensors of 16 MiB, each filled with a different number."""
    count = (TENSOR_MIB << 20) // 2
    make = {f"layer{i}": seed + i for i in range(max(1, mib // TENSOR_MIB))}
    return {name: torch.full((count,), value, dtype=torch.bfloat16, device=device) for name, value in make.items()}


def publish(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure GB/s of the best of three publishes per route, or the reason why it cannot be used. Checks the received weights."""
    mib = 64 if quick else 4096
    found: dict[str, Any] = {"mib": mib, "copy_gb_s": rounded(copy_gb_s(device, quick))}
    for route in auto_routes():
        try:
            found[route] = {"gb_s": rounded(mib * 2**20 / _best_seconds(route, mib, device) / 1e9)}
        except AgentrlError as problem:
            found[route] = {"error": str(problem)[:200]}
        print(f"publish {route}: {found[route]}", flush=True)  # now, so that a hanging route loses no other figure
        clear(device)
    return found


def _best_seconds(route: str, mib: int, device: torch.device) -> float:
    held = weights(mib, 1.0, device)
    with tempfile.TemporaryDirectory() as folder:
        cfg = WeightsConfig(folder=folder)
        sender = make_sender(route, cfg, TENSOR_MIB << 20, 1, "127.0.0.1")
        way = _publish_in_process if route == "memory" else _publish_across_processes
        took, sums = way(sender, held, mib, device)
    if sums != _sums(held):
        raise AssertionError(f"route {route} delivered wrong weights")
    return took


def _sums(held: Weights) -> list[float]:
    return [float(tensor[0]) + float(tensor[-1]) for tensor in held.values()]


def _load(receiver: Receiver, bucket: Bucket, own: Weights, device: torch.device) -> None:
    for name, tensor in receiver.receive(bucket):
        own[name].copy_(tensor)
    wait(device)  # the sender may refill the slot after the answer


def _stream(sender: Sender, held: Weights, hand: Callable[[Bucket], None]) -> float:
    began = time.perf_counter()
    for bucket in sender.buckets(iter(held.items())):
        assert bucket is not None
        hand(bucket)
    return time.perf_counter() - began


def _publish_in_process(sender: Sender, held: Weights, mib: int, device: torch.device) -> tuple[float, list[float]]:
    own = weights(mib, 0.0, device)
    receiver = open_receiver(sender.open(), 0)
    sender.attached()
    took = [_stream(sender, held, lambda bucket: _load(receiver, bucket, own, device)) for _ in range(4)]
    receiver.close()
    sender.close()
    return min(took[1:]), _sums(own)


def _publish_across_processes(sender: Sender, held: Weights, mib: int, device: torch.device) -> tuple[float, list[float]]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_run_receiver, args=(theirs, mib, str(device)), daemon=True)
    process.start()
    theirs.close()  # so that this side notices the end of the process
    try:
        mine.send(sender.open())
        answer = mine.recv()
        if answer is not None:
            raise answer
        sender.attached()

        def hand(bucket: Bucket) -> None:
            mine.send(bucket)
            mine.recv()

        took = [_stream(sender, held, hand) for _ in range(4)]
        mine.send("sums")
        return min(took[1:]), mine.recv()
    except EOFError as problem:
        raise AgentrlError("the receiving process ended; its output is above") from problem
    finally:
        with suppress(OSError):
            mine.send(None)
        process.join(30)
        sender.close()


def _run_receiver(pipe: Connection, mib: int, device: str) -> None:
    """Run the receiving process."""
    place = torch.device(device)
    own = weights(mib, 0.0, place)
    receiver: Receiver | None = None
    while (message := pipe.recv()) is not None:
        if isinstance(message, Offer):
            try:
                receiver = open_receiver(message, 0)
                pipe.send(None)
            except AgentrlError as problem:
                pipe.send(problem)
        elif message == "sums":
            pipe.send(_sums(own))
        else:
            assert receiver is not None
            _load(receiver, message, own, place)
            pipe.send("loaded")
