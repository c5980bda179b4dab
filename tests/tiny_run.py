"""Of runs that are killed or only counted, of tests and of benchmarks: a model that knows nothing, a reward that differs."""

from typing import Any

MODEL = """\
[model.init]
layers = 1
hidden = 32
mlp = 32
heads = 2
kv_heads = 1
head_dim = 16
"""
"""A section of a config."""


def shorter_is_better(tokens: int) -> dict[str, Any]:
    """A reward spec: fewer tokens are better, up to so many."""
    return {
        "agentrl_reward": 1,
        "name": "short",
        "success": {"use": "number.close", "args": {"expect": {"$": "/task/gold/answer"}}},
        "root": {"use": "cost.tokens", "args": {"max": tokens}},
    }
