"""What a batch is refused for, and how old its tokens are."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from agentrl.run.loop import staleness
from agentrl.utils.errors import ConfigError


def test_a_batch_without_a_token_of_the_policy_is_an_error_that_says_what_to_raise() -> None:
    def batch(sampled: list[list[bool]]) -> TensorDict:
        columns = {"sampled": torch.nested.as_nested_tensor([torch.tensor(row) for row in sampled], layout=torch.jagged)}
        ages = [torch.arange(len(row)) for row in sampled]
        return TensorDict({**columns, "versions": torch.nested.as_nested_tensor(ages, layout=torch.jagged)}, [len(sampled)])

    found = staleness(batch([[False, True, True], [False, True]]), 4)  # of versions 1, 2 and 1
    assert found == {"staleness_mean": pytest.approx(8 / 3), "staleness_max": 3}
    with pytest.raises(ConfigError, match=r"step 5: none of its 2 episodes has a token .* rollout.max_episode_tokens"):
        staleness(batch([[False, False, False], [False, False]]), 4)
