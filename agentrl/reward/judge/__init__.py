"""The judge: a model that is asked for a verdict, with a cache, a budget and a limit on what runs at once."""

from __future__ import annotations

from agentrl.reward.judge.cache import VerdictCache
from agentrl.reward.judge.client import Judge, JudgeSettings, Verdict, VerdictRequest

__all__ = ["Judge", "JudgeSettings", "Verdict", "VerdictCache", "VerdictRequest"]
