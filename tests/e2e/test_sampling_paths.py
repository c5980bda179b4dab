"""Temperature and truncation: engine, actor, proximal and reference name one policy, softmax(z / T)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from agentrl.data.token_ledger import TokenLedger
from agentrl.env.catalog import make_env
from tests.conftest import proof
from tests.e2e.runs import train, updates
from tests.engines.vllm_parts import skip_without_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# What an untrained model says holds some letters and not others, so rewards differ within a group.
RIGHT = {"use": "number.close", "args": {"expect": {"$": "/task/gold/answer"}}}
SPEC = {
    "agentrl_reward": 1,
    "name": "letters",
    "success": RIGHT,
    "root": {"use": "text.contains", "args": {"expect": list("abcdefghijklmnopqrst"), "where": "all", "credit": "partial"}},
}
TASKS, GROUPS, MEMBERS = 5, 3, 4
# The entropy bonus has every row computed, also of a member whose reward is its group's mean: metrics cover all tokens.
BASE = [
    "health.lint=false",  # what earns here is no solution
    "model.init={layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=32,init_std=0.4}",
    *f"env.id=key_value steps=2 trajectories_every=1 eval.tasks={TASKS} eval.every=1 cluster.backend=inline".split(),
    *f"rollout.groups={GROUPS} rollout.group_size={MEMBERS} rollout.max_turns=2 rollout.max_turn_tokens=16".split(),
    "algorithm={minibatch=64,entropy_bonus=1e-9}",
    "optim.lr=1e-3",
    "vllm.kv_cache_mib=256",
]


@dataclass(frozen=True)
class Case:
    """A run's settings, said once for its config and once for what is expected of it."""

    name: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eval_temperature: float = 1.0
    engine: str = "embedded"
    more: tuple[str, ...] = ()
    tolerance: float = 1e-4

    def overrides(self) -> list[str]:
        words = f"name={self.name} engine={self.engine} eval.temperature={self.eval_temperature}"
        words += f" rollout.temperature={self.temperature} rollout.top_p={self.top_p} rollout.top_k={self.top_k}"
        return [*words.split(), *self.more]


KL = ("algorithm.kl.coef=0.1",)
# Adapters alone go to the engine, after updates that are large: those of before would show.
ADAPTERS = ("model.lora.rank=4", "model.lora.alpha=8.0", 'weights.lora="adapter"', "optim.lr=2e-2")
CASES = [
    Case("truncated", top_p=0.8, eval_temperature=0.0),
    Case("cool", temperature=0.7, eval_temperature=0.3, more=KL),
    Case("both", temperature=0.7, top_p=0.8, top_k=20, more=(*KL, "algorithm.kl.where=reward")),
    Case("recomputed", temperature=1.4, top_p=0.8, eval_temperature=0.0, more=(*KL, "algorithm.proximal=recompute")),
    Case("vllm", temperature=0.7, top_p=0.8, eval_temperature=0.3, engine="vllm", more=(*KL, *ADAPTERS), tolerance=2e-3),
]


@dataclass(frozen=True)
class Done:
    case: Case
    folder: Path

    def episodes(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "trajectories" / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(
    scope="module", params=[pytest.param(case, id=case.name, marks=[proof] if case.engine == "vllm" else []) for case in CASES]
)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    case: Case = request.param
    if case.engine == "vllm":
        skip_without_vllm()
    out = tmp_path_factory.mktemp(case.name)
    (out / "spec.json").write_text(json.dumps(SPEC))
    (out / "run.toml").write_text("")
    train(out, str(out / "run.toml"), f"out={out}", f"env.reward={out / 'spec.json'}", *BASE, *case.overrides())
    return Done(case, out / case.name)


@dataclass(frozen=True)
class Seen:
    """What a plain forward pass in float64 says of an episode's sampled tokens."""

    table: npt.NDArray[np.float64]  # log softmax(z / T) over the vocabulary before each of them: [n, V]
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]  # the ledger's

    @property
    def own(self) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self.table[np.arange(len(self.ids)), self.ids]
        return found


def look(model: Any, episode: dict[str, Any], temperature: float) -> Seen:
    [columns] = episode["ledgers"]
    ledger = TokenLedger.from_json(columns)
    ids, sampled = ledger.token_ids, np.flatnonzero(ledger.sampled)
    with torch.inference_mode():
        scaled = model(torch.tensor([ids.tolist()]), use_cache=False).logits[0].numpy()[sampled - 1] / temperature
    shifted = scaled - scaled.max(axis=1, keepdims=True)
    table = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return Seen(table, ids[sampled], ledger.logprobs[sampled].astype(np.float64))


def kept(probability: npt.NDArray[np.float64], top_k: int, top_p: float) -> list[int]:
    """Token ids by hand: the `top_k` likeliest, then the fewest of them that reach `top_p` of what those have."""
    order = sorted(range(len(probability)), key=lambda token: -probability[token])[: top_k or None]
    whole, mass, found = sum(probability[token] for token in order), 0.0, []
    for token in order:
        if mass >= top_p * whole:
            break
        found.append(token)
        mass += probability[token]
    return found


@pytest.fixture(scope="module")
def start(done: Done) -> Any:
    """The weights that the run starts from."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(done.folder / "model", dtype=torch.float64).eval()


def test_the_ledger_holds_the_policy_at_the_rollouts_temperature(done: Done, start: Any) -> None:
    case, truncated = done.case, done.case.top_p < 1 or done.case.top_k > 0
    mass = []
    for episode in done.episodes("step_000001"):
        seen = look(start, episode, case.temperature)
        assert np.abs(seen.own - seen.logprobs).max() < case.tolerance
        sets = [kept(row, case.top_k, min(case.top_p + 1e-3, 1.0)) for row in np.exp(seen.table)]
        if truncated:
            assert all(token in chosen for token, chosen in zip(seen.ids, sets, strict=True))
        mass += [np.exp(row[chosen]).sum() for row, chosen in zip(seen.table, sets, strict=True)]
    # the control: had the kept set's own normalizer been taken, it would show
    assert np.mean(np.log(mass)) < -0.05 or not truncated


def test_the_first_steps_ratio_is_one(done: Done) -> None:
    for row in updates(done.folder):
        assert row["tokens_trained"] > 0 and row["minibatches"] == 1  # so that each update is one step
        assert row["ratio"] == pytest.approx(1, abs=done.case.tolerance)
        assert row["clip_fraction"] == 0
        assert row["mismatch_kl"] < done.case.tolerance**2 and row["mismatch_max"] < done.case.tolerance


def test_the_entropy_is_that_of_the_policy_that_sampled(done: Done, start: Any) -> None:
    tables = [look(start, episode, done.case.temperature).table for episode in done.episodes("step_000001")]
    assert len(tables) == GROUPS * MEMBERS
    entropies = np.concatenate([-(np.exp(table) * table).sum(axis=1) for table in tables])
    first = updates(done.folder)[0]
    assert first["tokens_trained"] == len(entropies)
    assert first["entropy"] == pytest.approx(entropies.mean(), abs=1e-4)


def test_the_reference_is_the_start_at_the_same_temperature(done: Done) -> None:
    first, second = updates(done.folder)
    if "algorithm.kl.coef=0.1" not in done.case.more:
        assert not {"kl_reward", "kl_reference", "kl_coef"} & {*first, *second}
        return
    name = "kl_reward" if "algorithm.kl.where=reward" in done.case.more else "kl_reference"
    assert abs(first[name]) < 5e-6 and abs(second[name]) > 1e-5  # the first update moved the policy


def test_an_evaluation_samples_at_its_own_temperature(done: Done, start: Any) -> None:
    wanted = done.case.eval_temperature
    for episode in done.episodes("before_000000"):
        seen = look(start, episode, wanted or 1.0)
        assert np.abs(seen.own - seen.logprobs).max() < done.case.tolerance
        if wanted == 0:  # greedy: no token is less likely than another by more than rounding
            assert (seen.table.max(axis=1) - seen.own).max() < done.case.tolerance
    if wanted == 0:  # the control: rollouts are not greedy
        sampled = [look(start, episode, 1.0) for episode in done.episodes("step_000001")]
        assert max((seen.table.max(axis=1) - seen.own).max() for seen in sampled) > 1


def test_an_engine_samples_from_the_newest_weights(done: Done, start: Any) -> None:
    """The evaluation after the last update, in the exported model and as controls in those of an update and of two before."""
    from transformers import AutoModelForCausalLM

    case, temperature = done.case, done.case.eval_temperature or 1.0
    final = AutoModelForCausalLM.from_pretrained(done.folder / "final", dtype=torch.float64).eval()

    def furthest(model: Any, name: str) -> float:
        seen = [look(model, episode, temperature) for episode in done.episodes(name)]
        return float(max(np.abs(each.own - each.logprobs).max() for each in seen))

    assert furthest(final, "after_000002") < case.tolerance
    assert furthest(start, "after_000002") > 2 * case.tolerance and furthest(final, "eval_000001") > 2 * case.tolerance


def test_training_draws_training_tasks_and_evaluation_held_out_ones(done: Done) -> None:
    env = make_env("key_value")
    goals: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for name in ("step_000001", "step_000002", "before_000000", "eval_000001", "after_000002"):
        split = "train" if name.startswith("step") else "heldout"
        episodes = done.episodes(name)
        assert {episode["task"]["split"] for episode in episodes} == {split}
        for episode in episodes:
            task = env.make_task(episode["task"]["seed"], split)  # what an environment of ours makes of this split's seed
            assert episode["task"]["id"] == task.id and episode["task"]["data"] == json.loads(json.dumps(task.data))
            goals[split].add(json.dumps([task.data["goal"], task.data["store"]]))
        if split == "heldout":  # the first tasks, each once, the same at every evaluation
            assert [episode["task"]["seed"] for episode in episodes] == list(range(TASKS))
        else:
            assert len(episodes) == GROUPS * MEMBERS
    assert len(goals["heldout"]) == TASKS and not goals["train"] & goals["heldout"]
