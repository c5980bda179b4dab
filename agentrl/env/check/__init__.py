"""`agentrl env check`: does an environment keep the contract? Each check reports what it saw."""

from agentrl.env.check.report import CheckFinding, Subject
from agentrl.env.check.run import CHECKS, check_all

__all__ = ["CHECKS", "CheckFinding", "Subject", "check_all"]
