"""Names and arguments of algorithms: a wrong one is an error that names the nearest right one."""

from __future__ import annotations

import pytest

from agentrl.algorithm import advantages, correction, kl_estimate, policy_loss
from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: advantages("grppo", {}), "did you mean 'grpo'"),
        (lambda: policy_loss("ppo_clp", {}), "did you mean 'ppo_clip'"),
        (lambda: policy_loss("ppo_clip", {"clip_hi": 0.28}), "did you mean 'clip_high'"),
        (lambda: policy_loss("ppo_clip", {"clip_high": "0.28"}), "clip_high = '0.28'"),
        (lambda: policy_loss("ppo_clip", {"clip_high": -1.0}), "greater than or equal to 0"),
        (lambda: policy_loss("ppo_clip", {"dual_clip": 0.5}), "dual_clip"),
        (lambda: advantages("gae", {"gamma": 1.5}), "less than or equal to 1"),
        (lambda: advantages("rloo", {"eps": 1}), "known: none"),
        (lambda: correction("trunc", {}), "did you mean 'truncated'"),
        (lambda: kl_estimate("k4", None, None), "unknown name 'k4'"),
    ],
)
def test_wrong_names_and_values(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
