"""A judge that says the best or the worst of everything: what a spec's other leaves decide, without a model."""

from __future__ import annotations

from agentrl.reward.judge.client import Verdict, VerdictRequest

REASON = "assumed: no model was asked"


class AssumedJudge:
    """Gives every request the highest score that it may have (`best`), or the lowest."""

    def __init__(self, best: bool) -> None:
        self.best = best

    def ask(self, key: str, request: VerdictRequest) -> Verdict:
        """The verdict, at once."""
        score = request.schema["properties"]["score"]
        return Verdict({"score": score["maximum" if self.best else "minimum"], "reason": REASON})

    async def aask(self, key: str, request: VerdictRequest) -> Verdict:
        """As `ask`."""
        return self.ask(key, request)
