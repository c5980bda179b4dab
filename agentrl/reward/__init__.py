"""Reward specs in JSON: load, compile, score, explain, lint."""

from __future__ import annotations

from agentrl.reward.compile import compile_spec, make_context
from agentrl.reward.leaf import Context, Services
from agentrl.reward.score import Score, Scorer, token_rewards
from agentrl.reward.spec import load_spec

__all__ = ["Context", "Score", "Scorer", "Services", "compile_spec", "load_spec", "make_context", "token_rewards"]
