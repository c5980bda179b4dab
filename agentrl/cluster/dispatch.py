"""The dispatch strategies in one place."""

from agentrl.cluster.shard import Shard
from agentrl.cluster.shipment import Shipment
from agentrl.cluster.strategy import AllToAll, Broadcast, Call, Direct, PerRank, RankZero, Strategy

__all__ = ["AllToAll", "Broadcast", "Call", "Direct", "PerRank", "RankZero", "Shard", "Shipment", "Strategy"]
