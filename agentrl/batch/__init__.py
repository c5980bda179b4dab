"""Trajectories to batches: collate, plan, pack, and row operations on TensorDicts."""

from agentrl.batch.collate import collate
from agentrl.batch.pack import pack, unpack
from agentrl.batch.plan import Plan, assign, micro_rows, plan
from agentrl.batch.rows import concat, lengths, select

__all__ = ["Plan", "assign", "collate", "concat", "lengths", "micro_rows", "pack", "plan", "select", "unpack"]
