"""The plan that `--dry-run` prints: its numbers are those of an arithmetic by hand, and of the code that cuts batches."""

import json
from typing import Any

import numpy as np
import pytest

from agentrl.config.load import config_from
from agentrl.data.packing import micro_batches
from agentrl.run.plan import Planner, RunPlan, lines
from tests.conftest import Agentrl

BASE: dict[str, Any] = {
    "env": {"id": "key_value"}, "engine": "embedded", "model": {"init": {}, "packing": "packed"},
    "rollout": {"groups": 3, "group_size": 5, "max_turns": 4, "max_turn_tokens": 10, "max_episode_tokens": 30},
    "optim": {"micro_tokens": 100}, "cluster": {"backend": "inline"}, "steps": 7,
}  # fmt: skip


def plan(*overrides: str) -> RunPlan:
    return Planner(config_from(BASE, overrides)).plan(cuda=False)


@pytest.mark.parametrize(("overrides", "found"), [
    ("", {"episodes": 15, "minibatches": [15], "optimizer_steps": 1}),
    ("", {"sampled_tokens": 30, "episode_tokens": 30, "tokens": 15 * 30}),  # 4 turns of 10, but 30 in all
    ("rollout.max_turns=2", {"sampled_tokens": 20}),
    ("algorithm.minibatch=4", {"episodes": 15, "minibatches": [4, 4, 4, 3], "optimizer_steps": 4}),
    ("algorithm.minibatch=4 algorithm.epochs=2", {"episodes": 15, "minibatches": [4, 4, 4, 3], "optimizer_steps": 8}),
    ("algorithm.minibatch=10 algorithm.groups=kept", {"episodes": 15, "minibatches": [10, 5], "optimizer_steps": 2}),  # of 5
    # Ranks that share tokens are one data rank.
    ("cluster={backend='ray',actors=4} model.sequence_parallel=2", {"data_ranks": 2}),
    # What is started and not trained: 4.5 groups of 6 members, rounded up; a greedy episode for each group, the baseline.
    ("rollout.oversample=1.5 rollout.oversample_members=1.2", {"episodes": 15, "started": 5 * 6}),
    ("algorithm.advantage.name=remax", {"episodes": 15, "started": 3 * 6}),
])  # fmt: skip
def test_an_update_in_numbers(overrides: str, found: dict[str, Any]) -> None:
    batches = Planner(config_from(BASE, overrides.split())).batches()
    assert {name: getattr(batches, name) for name in found} == found


@pytest.mark.parametrize(
    ("actors", "packing", "micros"), [(1, "packed", 5), (2, "packed", 3), (2, "one_row", 8), (4, "packed", 2)]
)
def test_micro_batches_hold_as_many_of_the_longest_episodes_as_the_cap_allows(actors: int, packing: str, micros: int) -> None:
    """100 tokens hold three episodes of 30: of 15 episodes on one rank 5, on two (8 and 7) 3, on four (4, 4, 4, 3) 2."""
    cluster = f'cluster={{backend="ray",actors={actors}}}'
    found = Planner(config_from(BASE, [cluster, f"model.packing={packing}"])).batches()
    assert (found.data_ranks, found.micros) == (actors, micros)
    if packing == "packed":
        assert max(len(micro_batches(part, 100)) for part in np.array_split(np.full(15, 30), actors)) == micros


def test_the_runs_course_is_told_by_updates() -> None:
    found = plan("eval.every=3", "eval.tasks=20", "checkpoint.every=2", "trajectories_every=4", "sft={min_steps=10,max_steps=30}")
    assert found.evaluations.after == [0, 3, 6, 7] and found.evaluation_episodes == 4 * 20
    assert (found.checkpoints, found.kept, found.trajectories) == ([0, 2, 4, 6, 7], 3, [4, 7]), "one is of the start"
    assert (found.episodes, found.transcripts) == (7 * 15, (10 * 8, 30 * 8))
    assert plan("eval.every=7").evaluations.after == [0, 7], "none is added after the last update"
    text = "\n".join(lines(found))
    assert "20 tasks of heldout at temperature 1, before, after 3, 6, 7 updates" in text
    assert "80 to 240 transcripts" in text and "105 episodes of training, 80 of evaluation, 7 optimizer steps" in text


def test_parameters_that_are_trained_and_frozen_are_counted() -> None:
    """Adapters of rank 2 on q, k, v, o, gate, up and down of three layers: hidden 64, four query heads and two key heads of 32,
    an MLP of 128."""
    [whole], [few] = plan().parameters, plan("model.lora.rank=2").parameters
    adapters = 3 * 2 * ((64 + 128) + (64 + 64) + (64 + 64) + (128 + 64) + 3 * (64 + 128))
    assert whole.trained == whole.all and (few.trained, few.all) == (adapters, whole.all + adapters)
    actor, critic = plan("critic={}", "algorithm.advantage.name=gae").parameters
    assert (actor.role, critic.role) == ("actor", "critic") and critic.trained == critic.all
    assert f"actor: {adapters:,} of {whole.all + adapters:,} parameters" in "\n".join(lines(plan("model.lora.rank=2")))


def test_the_command_prints_a_screen_or_json(agentrl: Agentrl) -> None:
    words = ["train", "quickstart", "--dry-run", "cluster.backend=inline", "engine=embedded"]
    text = agentrl(*words).out.rstrip("\n").split("\n")
    assert len(text) <= 24 and max(map(len, text)) <= 140
    assert "an update    16 groups x 8 = 128 episodes -> 4 minibatches of 32 -> 4 optimizer steps" in text
    found = json.loads(agentrl(*words, "--json").out)
    assert found["batches"]["minibatches"] == [32] * 4 and found["evaluations"]["after"] == [0, 10, 20, 30, 40]
    assert {row["role"] for row in found["memory"]} == {"actor", "rollout"} and found["peaks"][0]["limit"] > 0
    assert "--json: it is for planning" in agentrl("train", "quickstart", "--json", code=2).err


def test_what_is_added_to_an_update_is_in_no_minibatch_of_its_own() -> None:
    """15 episodes in 4 steps: a third of them again is 5, but 3 are kept; 4 demonstrations: at most 4 + 2 episodes a step."""
    found = plan("algorithm.minibatch=4", "algorithm.experience={share=0.33,size=3}", "algorithm.demonstrations={}")
    batches = found.batches
    assert (batches.kept, batches.shown, batches.minibatches, batches.optimizer_steps) == (3, 4, [4, 4, 4, 3], 4)
    assert batches.micros == 2 and plan("algorithm.minibatch=4").batches.micros == 2  # 3 rows of 30 tokens in 100: 6 and 4 rows
    assert "4 optimizer steps, and at most 3 kept and 4 demonstrations next to them" in "\n".join(lines(found))
    assert plan("algorithm.minibatch=9", "algorithm.demonstrations={episodes=5}").batches.micros == 4  # 8 and 3 rows


def test_no_more_checkpoints_stay_than_there_are() -> None:
    def said(steps: int) -> str:
        return next(line for line in lines(plan(f"steps={steps}", "checkpoint.every=1")) if line.startswith("checkpoints"))

    assert said(2).endswith("before, after 1, 2 updates, of which all stay, 2 MiB each")
    assert said(9).endswith(", of which at most 3 stay, 2 MiB each"), "two of the newest and the best, which may be one of them"


@pytest.mark.parametrize(("overrides", "state", "models"), [
    ("", 8, 1), ("model.lora.rank=2", 8, 1), ("model.lora.rank=2 model.dtype=bfloat16", 8, 1),
    ("optim.name=sgd optim.lr=0.1 optim.betas=[0.0,0.9]", 0, 1), ("sft={min_steps=10,max_steps=30}", 8, 2),
])  # fmt: skip
def test_a_checkpoint_has_what_is_frozen_too_and_a_model_is_of_the_computation(overrides: str, state: int, models: int) -> None:
    """Weights are float32, and each number that is trained has `state` bytes. Models: the first, the warm start's, the last."""
    found, base = plan(*overrides.split()), plan().parameters[0].all
    [actor] = found.parameters
    width = 2 if found.dtype == "bfloat16" else 4
    assert found.checkpoint_bytes == 4 * actor.all + state * actor.trained
    assert found.model_bytes == base * (4 + models * width)
