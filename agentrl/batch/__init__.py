"""Trajectories to batches: collate, schedule, pack, and row operations on TensorDicts."""

from agentrl.batch.balance import BalancePlan, plan
from agentrl.batch.collate import collate
from agentrl.batch.rows import Ragged, concat, lengths, pack, select, unpack

__all__ = ["BalancePlan", "Ragged", "collate", "concat", "lengths", "pack", "plan", "select", "unpack"]
