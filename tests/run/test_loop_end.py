"""Work that swallows its cancellation does not keep a run from ending."""

import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

from agentrl.run.loop import staleness
from agentrl.utils.errors import ConfigError

PROGRAM = """
import asyncio, sys
from agentrl.utils.event_loop import end, run_loop

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def polite():
    try:
        await asyncio.sleep(60)
    finally:
        print("ended")

async def train():
    beside = asyncio.create_task(polite())
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task, "the agent", 0.1)
    if len(sys.argv) > 1:
        raise ValueError("failed")
    return 7

try:
    print(run_loop(train(), grace=0.2))
except ValueError as fault:
    print(fault)
print("summary", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize(("args", "said"), [([], "7"), (["fail"], "failed")])
def test_a_run_ends_although_a_task_does_not(args: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, timeout=10)
    assert (done.stdout.split(), done.returncode) == (["ended", said, "summary"], 3), done.stderr
    assert "1 tasks did not end within 0.2 s" in done.stderr


def test_a_batch_without_a_token_of_the_policy_is_an_error_that_says_what_to_raise() -> None:
    def batch(sampled: list[list[bool]]) -> TensorDict:
        columns = {"sampled": torch.nested.as_nested_tensor([torch.tensor(row) for row in sampled], layout=torch.jagged)}
        ages = [torch.arange(len(row)) for row in sampled]
        return TensorDict({**columns, "versions": torch.nested.as_nested_tensor(ages, layout=torch.jagged)}, [len(sampled)])

    found = staleness(batch([[False, True, True], [False, True]]), 4)  # of versions 1, 2 and 1
    assert found == {"staleness_mean": pytest.approx(8 / 3), "staleness_max": 3}
    with pytest.raises(ConfigError, match=r"step 5: none of its 2 episodes has a token .* rollout.max_episode_tokens"):
        staleness(batch([[False, False, False], [False, False]]), 4)
