"""`agentrl env check`: does an environment fulfill the contract? Each check reports its evidence."""

from agentrl.env.check.report import CheckFinding, Subject
from agentrl.env.check.run import CHECKS, check_all, limit_to

__all__ = ["CHECKS", "CheckFinding", "Subject", "check_all", "limit_to"]
