"""The trainer's end of a publish, one per rank: rank 0 sends, the others help to gather."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.train.engine import BaseEngine
from agentrl.weights.bucket import Bucket, Named, Stream
from agentrl.weights.conversions import Saving
from agentrl.weights.joined import Joined, join
from agentrl.weights.route import Offer, Sender, Silent
from agentrl.weights.routes import make_sender


class WeightSource:
    """Streams an engine's weights over one route; all ranks call the same methods in the same order."""

    def __init__(self, engine: BaseEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self._sender: Sender | None = None
        self._tensors: Iterator[Named] | None = None
        self._stream: Stream | None = None
        self._saving: Saving | None = None
        self._joined: Joined | None = None

    def open(self, route: str, cfg: WeightsConfig, receivers: int, host: str, saved: bool = False) -> Offer:
        """Create the channel; an earlier one is closed. `host`: the address at which the engine's machines reach this rank.
        `saved`: tensors are sent as checkpoints have them, not as the model's modules do.

        Raises ConfigError if this machine cannot serve the route."""
        self.close()
        largest = self._engine.largest()
        self._saving = self._engine.saving() if saved else None
        if self._saving is not None:
            largest = self._saving.largest()
        sender = make_sender(route, cfg, largest, receivers, host)
        lent = self._lendable(sender)
        # The slot size is the sender's, which may differ from the requested one: all ranks must cut the stream alike.
        self._sender = sender if self._rank == 0 or sender.every_rank else Silent(sender)
        self._sender.lend(lent)
        return self._sender.open()

    def _lendable(self, sender: Sender) -> list[Tensor]:
        """What receivers may read where it is. Shards of several ranks are joined once a route asks for it, and stay so."""
        if self._joined is None and sender.joins and (shards := self._engine.shards()):
            self._joined = join(shards, self._rank, dist.get_world_size())
            self._engine.use_joined(self._joined.whole)
        return self._engine.resident() if self._joined is None else [self._joined.flat]

    def attached(self) -> None:
        """Called when all receivers have attached."""
        self._ready().attached()

    def send(self, first: bool) -> Bucket | None:
        """The next bucket; None at the end. `first` starts a new stream, whatever the state of the previous one."""
        if first:
            self._abandon()
            held = self._engine.tensors()
            self._tensors = held if self._saving is None else self._saving.tensors(held)
            self._stream = Stream(self._tensors)
        if self._stream is None:
            return None
        bucket = self._ready().send(self._stream)
        # Ranks without buckets reach the end one call before rank 0 does: on that last call they must not start again.
        if self._stream.done and bucket is None:
            self._abandon()
        return bucket

    def close(self) -> None:
        """Free the channel; idempotent."""
        self._abandon()
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _abandon(self) -> None:
        self._stream = self._tensors = None  # dropping the generator reshards its current layer

    def _ready(self) -> Sender:
        if self._sender is None:
            raise ConfigError("no route for weights is open: call open_route first")
        return self._sender
