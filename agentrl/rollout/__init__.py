"""Rollouts: engine interface, episode loop, groups, and the group ledger (staleness)."""

import sys

from agentrl.utils.callable_module import CallableModule

sys.modules[__name__].__class__ = CallableModule  # `agentrl.rollout(...)`
