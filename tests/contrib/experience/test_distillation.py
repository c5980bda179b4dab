"""A teacher that is learned from (`algorithm.distillation`): the step by hand, and runs from a config."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from agentrl.config.schema import (
    AlgorithmConfig,
    Choice,
    DistillationConfig,
    InitModelConfig,
    LoraSection,
    ModelConfig,
    RolloutConfig,
)
from agentrl.contrib.experience.hooks import Opsd
from agentrl.data.rows import collate
from agentrl.data.trajectory import Group
from agentrl.rollout.warm_start import transcript
from agentrl.run.checks import check_config
from agentrl.trainer.pretrained import init_model
from agentrl.utils.errors import AgentrlError
from tests.contrib.experience.test_demonstrations import Part
from tests.contrib.experience.test_kept import PLAIN, advantage, logprobs, members_of, plain
from tests.e2e import inside
from tests.e2e.runs import numbers, rows
from tests.trainer.learners import config_of, opened
from tests.trainer.train_batches import toy_optim


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of another size than any policy here, and less uniform."""
    sizes = InitModelConfig(layers=1, hidden=48, mlp=32, heads=3, kv_heads=1, head_dim=16, init_std=0.1)
    return str(init_model(sizes, tmp_path_factory.mktemp("models") / "teacher", seed=7))


@pytest.mark.parametrize("proximal", ["behaviour", "recompute"])
@pytest.mark.parametrize("sharing", ["off", "on"])
def test_advantages_are_the_estimators_and_the_teachers_log_probabilities_less_the_policys(
    tiny: str, teacher: str, proximal: str, sharing: str
) -> None:
    """At a temperature, with several ledgers an episode and adapters, which the teacher has none of."""
    section = DistillationConfig(path=teacher, coef=0.3, reward_coef=0.5)
    algorithm = AlgorithmConfig(advantage=Choice(name="rloo"), loss=PLAIN, proximal=proximal, distillation=section)
    model = ModelConfig(lora=LoraSection(rank=2))
    rollout = RolloutConfig(temperature=1.5)
    learner = opened(tiny, config_of(algorithm=algorithm, model=model, rollout=rollout, optim=toy_optim(prefix_sharing=sharing)))
    batch = members_of(1, 0)
    policy, other = plain(tiny), plain(teacher)
    view, metrics, broken = asyncio.run(learner.ready(batch))
    assert not broken
    gaps, wholes = [], []
    for row in range(len(batch)):
        sampled = batch["sampled"][row]
        with torch.no_grad():
            now, theirs = logprobs(policy, batch, row, 1.5), logprobs(other, batch, row, 1.5)
        ahead = theirs - (batch["logprobs"][row][sampled].double() if proximal == "behaviour" else now)
        wanted = 0.5 * advantage(float(batch["reward"][row])) + 0.3 * ahead
        found = view.batch["advantages"][row]
        assert found[sampled].double().numpy() == pytest.approx(wanted.numpy(), rel=1e-4, abs=1e-5)
        assert not found[~sampled].any()
        gaps, wholes = gaps + ahead.tolist(), wholes + wanted.abs().tolist()
    assert metrics["teacher/kl"] == pytest.approx(-np.mean(gaps), rel=1e-4)
    assert metrics["advantage_abs"] == pytest.approx(np.mean(wholes), rel=1e-4), "of those that are trained with"
    learner.close()


def words(out: Path, teacher: str, *more: str) -> list[str]:
    given = [f"algorithm.distillation={{path='{teacher}',reward_coef=0.0}}", "rollout.group_size=1", "rollout.groups=12"]
    return [*given, "steps=8", "optim.lr=1e-2", "checkpoint.every=1", "checkpoint.keep=9", "algorithm.minibatch=64", *more]


def test_the_policy_comes_nearer_to_its_teacher_and_a_resumed_run_is_the_unbroken_one(tmp_path: Path, teacher: str) -> None:
    """One episode a group is enough without rewards: nothing is compared."""
    given = words(tmp_path, teacher)
    run = inside.execute(inside.config_of(tmp_path, "run", *given))
    kls = [row["teacher/kl"] for row in rows(run) if row["phase"] == "train"]
    assert len(kls) == 8 and sum(kls[-3:]) < 0.8 * sum(kls[:3]) and kls[0] > 0.2
    whole = numbers(run)
    for step in (5, 6, 7, 8):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    assert numbers(inside.execute(inside.config_of(tmp_path, "run", *given), resumed=True)) == whole


REFUSED = {
    "rollout.filter_zero_variance=true": "drops groups whose rewards are equal, from which algorithm.distillation learns",
    "algorithm.experience={}": 'algorithm.experience.term = "policy" trains kept episodes with the advantages that they had',
    "algorithm.distillation.reward_coef=0.1 rollout.group_size=1": "compares the episodes of a group",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_would_drop_keep_or_compare_by_rewards_is_refused(tmp_path: Path, teacher: str, word: str) -> None:
    with pytest.raises(AgentrlError, match=REFUSED[word][:40]) as problem:
        check_config(inside.config_of(tmp_path, "run", *words(tmp_path, teacher, "rollout.group_size=4", *word.split())))
    assert REFUSED[word] in str(problem.value)


def test_a_teacher_with_other_token_ids_is_refused_by_the_first_of_them(tmp_path: Path, teacher: str) -> None:
    other = Path(shutil.copytree(teacher, tmp_path / "other"))
    file = other / "tokenizer.json"
    tokenizer = AutoTokenizer.from_pretrained(other)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    (one, first), (two, second) = vocabulary[40], vocabulary[41]
    table: dict[str, Any] = json.loads(file.read_text())
    table["model"]["vocab"] |= {one: second, two: first}
    file.write_text(json.dumps(table))
    with pytest.raises(AgentrlError) as problem:
        check_config(inside.config_of(tmp_path, "run", *words(tmp_path, str(other))))
    said = str(problem.value)
    assert f"algorithm.distillation.path = {other}: its tokenizer is not the policy's: 2 of " in said and f"({first})" in said
    with pytest.raises(AgentrlError, match=r"algorithm\.distillation\.path = nowhere"):
        check_config(inside.config_of(tmp_path, "run", *words(tmp_path, "nowhere")))


@pytest.mark.parametrize("sharing", ["off", "on"])
def test_opsd_teacher_reads_the_gold_solution_behind_the_opening(tiny: str, teacher: str, sharing: str) -> None:
    """Log probabilities of the sampled tokens behind the longer prompt, by hand; a ledger that begins otherwise stays."""
    part: Any = Part()
    *members, spare = (asyncio.run(transcript(part.env.build(), part.policy.renderer, seed, "train")) for seed in (1, 1, 2, 2, 3))
    for place, member in enumerate(members):
        member.env, member.member, member.reward = part.name, place % 2, float(place % 2)
    members[3].ledgers += spare.ledgers
    section = DistillationConfig(path=teacher, reward_coef=0.0)
    algorithm = AlgorithmConfig(advantage=Choice(name="rloo"), loss=PLAIN, distillation=section)
    learner = opened(tiny, config_of(algorithm=algorithm, optim=toy_optim(prefix_sharing=sharing)))
    hook = learner.hooks["opsd"] = Opsd("Solution:")
    groups = [Group(place, 1, members[2 * place : 2 * place + 2]) for place in (0, 1)]
    batch = asyncio.run(hook.prepare(collate(members, [0, 0, 1, 1]), groups, [part]))
    view, metrics, broken = asyncio.run(learner.ready(batch))
    assert not broken and metrics["opsd/shown"] == 4 / 5

    other = plain(teacher)
    tokenizer, told = AutoTokenizer.from_pretrained(teacher), {"token_ids": [], "sampled": []}
    for row in range(len(batch)):
        ids, sampled = batch["token_ids"][row], batch["sampled"][row]
        own = sampled
        if row < 4:
            messages, text = members[row].messages, tokenizer.decode(ids.tolist())
            calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for one in messages for call in one.tool_calls]
            lines = "\n".join(
                ["Solution:", *calls, *(one.content for one in messages if one.role == "assistant" and one.content)]
            )
            opening = messages[1].content
            assert text.count(opening) == 1
            ids = torch.tensor(tokenizer.encode(text.replace(opening, f"{opening}\n\n{lines}"), add_special_tokens=False))
            sampled = torch.cat([torch.zeros(len(ids) - len(own), dtype=torch.bool), own])
            assert ids[sampled].tolist() == batch["token_ids"][row][own].tolist() and len(ids) - len(own) > 20
        told["token_ids"].append(ids)
        told["sampled"].append(sampled)
        ahead = logprobs(other, told, row, 1.0).detach() - batch["logprobs"][row][own].double()  # type: ignore[arg-type]
        found = view.batch["advantages"][row]
        assert found[own].double().numpy() == pytest.approx(ahead.numpy(), rel=1e-4, abs=1e-5)
        assert not found[~own].any()
    learner.close()


def test_opsd_needs_a_teacher_and_is_told_apart_from_the_policy_by_the_solution_alone(tmp_path: Path, tiny: str) -> None:
    callback, model = "callbacks=[{name='opsd'}]", f"model.path='{tiny}'"
    with pytest.raises(AgentrlError, match=r"callbacks\.opsd: the run has no teacher\. Set algorithm\.distillation\.path"):
        check_config(inside.config_of(tmp_path, "run", callback))
    run = inside.execute(inside.config_of(tmp_path, "run", *words(tmp_path, tiny), callback, "steps=1", model))
    (row,) = [row for row in rows(run) if row["phase"] == "train"]
    assert row["opsd/shown"] == 1 and abs(row["teacher/kl"]) > 1e-4
