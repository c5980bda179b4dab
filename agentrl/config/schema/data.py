"""Data to train on beside reinforcement: `agentrl sft`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.schema.base import Fraction, Frozen, Positive, PositiveInt, Unit


class DataConfig(Frozen):
    """Training on data that is there already: episodes of runs, conversations, or pairs of which one is preferred
    (docs/offline.md). Its learning rate and schedule are those of [optim]."""

    path: Annotated[list[str], Field(min_length=1)]
    """Files (.jsonl, .parquet), folders of them, and folders of runs, evaluations and rollouts."""
    loss: Literal["sft", "dpo", "reward"] = "sft"
    """What is learned: the assistant's tokens ("sft"), to prefer one of two episodes ("dpo", arXiv:2305.18290), or a reward model
    that does ("reward")."""
    batch: Annotated[PositiveInt, Unit("examples")] = 8
    """Examples of each optimizer step: episodes, conversations, or pairs."""
    epochs: Annotated[PositiveInt, Unit("passes")] = 1
    """How often the data is gone over, each time in another order."""
    heldout: Fraction = 0.05
    """This share of the tasks (of chat data: of the rows) is never trained on; the loss on it is measured before, every
    `eval.every` steps, and after."""
    max_bad: Fraction = 0.01
    """The largest share of rows that may be left out because they cannot be used; with more the run does not start."""
    split: str | None = "train"
    """Of episodes: only tasks of this split, so that held-out tasks stay held out; false is any."""
    min_reward: Annotated[float, Unit("reward")] | None = None
    """Of episodes: only those with at least this reward."""
    success: bool = False
    """Of episodes: only those that solved their task."""
    per_task: Annotated[PositiveInt, Unit("episodes")] | None = None
    """Of episodes: so many of each task at most, the best first; with a loss of pairs, so many pairs of each task. By default
    all, and one pair."""
    rerender: bool = False
    """Of episodes: not the tokens that were sampled, but those of their messages as the model's chat template writes them now;
    for a model with another tokenizer."""
    margin: Annotated[Positive, Unit("reward")] = 1e-6
    """Of pairs from episodes: the better one has at least so much more reward."""
    beta: Annotated[Positive, Unit("1")] = 0.1
    """Of "dpo": how strongly the start model holds the policy back."""
