"""Episodes: the engine protocol, the episode loop, groups, and the group ledger (staleness)."""

from agentrl.utils.callable_module import make_callable

make_callable(__name__, "agentrl.run.api.functions", "rollout")  # `agentrl.rollout(...)`
