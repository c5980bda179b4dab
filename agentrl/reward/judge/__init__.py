"""The judge: a model that gives verdicts, with a cache, a budget and a concurrency limit."""

from __future__ import annotations

from agentrl.reward.judge.cache import VerdictCache
from agentrl.reward.judge.client import Judge, JudgeSettings, Verdict, VerdictRequest

__all__ = ["Judge", "JudgeSettings", "Verdict", "VerdictCache", "VerdictRequest"]
