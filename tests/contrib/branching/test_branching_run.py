"""Runs whose episodes branch (`rollout.branch`), from a config: trained tokens and their advantages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl.data.trajectory import Trajectory
from agentrl.run.reader import token_columns
from tests.conftest import proof
from tests.e2e.inside import config_of, episodes, execute, updates
from tests.engines.vllm_parts import SLOW_START, skip_without_vllm

TESTS = Path(__file__).parents[2]
TURNS = "{at='depth', roots=2, turns=[1, 2]}"
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def shelf() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_PATH", str(TESTS / "rollout" / "patient"))
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a reward that differs from episode to episode."""
    folder = tmp_path_factory.mktemp("branching")
    spec = json.loads((TESTS / "e2e" / "short.json").read_text()) | {"name": "luck"}
    (folder / "luck.json").write_text(json.dumps(spec | {"root": {"use": "python", "args": {"name": "luck"}}}))
    return folder


def config(out: Path, name: str, *more: str, branch: str = TURNS) -> Any:
    words = [
        *("env.id=patient", f"env.reward={out / 'luck.json'}", "reward.python.luck=tests.rollout.luck:luck"),
        *(f"rollout.branch={branch}", "rollout.groups=2", "rollout.group_size=6", "rollout.max_turns=5"),
        *("rollout.max_turn_tokens=8", "rollout.max_episode_tokens=600", "algorithm.advantage={name='tree'}"),
        *("model.init={layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=16}", "optim.schedule=constant"),
        "health={lint=false,max_unsolvable=1}",
    ]
    return config_of(out, name, *words, *more)


@pytest.fixture(scope="module")
def whole(out: Path) -> Path:
    """An unbroken run."""
    return execute(config(out, "whole", f"steps={STEPS}"))


def groups(folder: Path, step: int) -> list[list[Trajectory]]:
    members, size = episodes(folder, step), 6
    return [members[n : n + size] for n in range(0, len(members), size)]


def test_each_sampled_token_is_trained_once_with_the_advantage_of_what_followed(whole: Path) -> None:
    check_trees(whole)


@proof
@SLOW_START
def test_vllm_samples_what_follows_a_branching_as_well(out: Path) -> None:
    """Its cache of prefixes has what the parent sampled; the trainer's own numbers for all of it are the engine's."""
    skip_without_vllm()
    model = "model.init={layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=32}"
    folder = execute(config(out, "vllm", "steps=2", model, "engine=vllm", "vllm.kv_cache_mib=256"))
    check_trees(folder)
    for step, row in enumerate(updates(folder), start=1):
        first, last = groups(folder, step)[0][0], groups(folder, step)[0][-2]
        begins = last.ledgers[0].sampled.tolist().index(True)
        assert last.ledgers[0].ids()[:begins] == first.ledgers[0].ids()[: own_from(first, 2)]
        assert row["mismatch_max"] < 1e-4


def check_trees(folder: Path) -> None:
    """Every group is as `TURNS` says, and each of its sampled tokens has been trained once, with the advantage by hand."""
    for step, row in enumerate(updates(folder), start=1):
        lines = iter((folder / "tokens" / f"step_{step:06d}.jsonl").read_text().splitlines())
        sampled = 0
        for members in groups(folder, step):
            assert [(m.parent, m.branch_turn) for m in members] == [(None, 0)] * 2 + [(0, 1), (1, 1), (0, 2), (1, 2)]
            own = [m.ledgers[0].turns[m.ledgers[0].sampled] for m in members]
            assert [min(turns) for turns in own] == [m.branch_turn for m in members]
            sampled += sum(map(len, own))
            expected = by_hand([float(m.reward or 0) for m in members])
            for member, turns, wanted in zip(members, own, expected, strict=True):
                found = token_columns(json.loads(next(lines)), member.ledgers, 0)
                assert found is not None
                assert found[0].tolist() == pytest.approx([wanted[min(turn, len(wanted) - 1)] for turn in turns], abs=1e-5)
        assert row["tokens_trained"] == row["tokens_sampled"] == sampled
        assert row["grad_norm"] > 0


def own_from(member: Trajectory, turn: int) -> int:
    """Where the tokens of a turn begin that was sampled."""
    ledger = member.ledgers[0]
    return next(n for n, (of, mine) in enumerate(zip(ledger.turns, ledger.sampled, strict=True)) if mine and of == turn)


def by_hand(rewards: Sequence[float]) -> list[list[float]]:
    """Of six members as above: the advantages of each by turn, the last for all that follow."""
    std, ways = stdev(rewards) + 1e-6, {}
    for root in (0, 1):
        second = fmean([rewards[root], rewards[root + 4]])  # V of the place before turn 2
        ways[root] = second, fmean([second, rewards[root + 2]])
    all_of = fmean(first for _, first in ways.values())

    def advantage(value: float, place: float) -> float:
        return (value - 0.5 * all_of - 0.5 * place) / std

    found = []
    for member, reward in enumerate(rewards):
        second, first = ways[member % 2]
        if member < 2:
            found.append([advantage(first, all_of), advantage(second, first), advantage(reward, second)])
        else:
            found.append([advantage(reward, first if member < 4 else second)])
    return found


@pytest.mark.parametrize("at", ["entropy", "depth", "failure"])
def test_places_that_depend_on_what_was_sampled_leave_no_token_out_either(out: Path, at: str) -> None:
    more = ["steps=1", "optim.prefix_sharing=on"]
    folder = execute(config(out, f"at-{at}", *more, branch=f"{{at='{at}', roots=2, width=2}}"))
    members, [row] = episodes(folder, 1), updates(folder)
    assert row["tokens_trained"] == row["tokens_sampled"] == sum(m.sampled_tokens for m in members)
    branches = [m for m in members if m.parent is not None]
    assert all(1 <= m.branch_turn <= 4 and m.parent in (0, 1) for m in branches)
    if at == "failure":  # a model that knows nothing calls nearly nothing
        found = {(m.task.seed, m.member): m for m in members}
        parents = [found[m.task.seed, m.parent] for m in branches if m.parent is not None]
        assert all(parent.turns[m.branch_turn].results[0].error for m, parent in zip(branches, parents, strict=True))
    else:
        assert len(branches) == 8 and row["tokens_computed"] < sum(m.tokens for m in members)


def test_shared_prefixes_change_the_cost_of_an_update_and_not_its_result(out: Path) -> None:
    found = {}
    for sharing in ("on", "off"):
        folder = execute(config(out, f"sharing-{sharing}", "steps=1", f"optim.prefix_sharing={sharing}"))
        found[sharing] = updates(folder)[0], load_file(next((folder / "final").glob("*.safetensors")))
    (shared, there), (plain, here) = found["on"], found["off"]
    assert shared["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    assert shared["prefix_ratio"] > 1.2 and plain["prefix_ratio"] == 1.0
    for name, weights in there.items():
        np.testing.assert_allclose(weights, here[name], atol=1e-5, err_msg=name)


def told(member: Trajectory) -> tuple[Any, ...]:
    return member.reward, member.parent, member.branch_turn, [(x.ids(), x.sampled.tolist()) for x in member.ledgers]


def test_with_neighbours_that_choose_tasks_beginnings_and_groups(out: Path) -> None:
    """Gold calls at the beginning, groups that are replaced, demonstrations, and weights that move on while a tree is played."""
    more = [
        *("steps=3", "env.params={calls=4,set_share=0.0}", "rollout.start={left=2,step=1,whole=0.0}", "rollout.max_turns=7"),
        *("rollout.filter_zero_variance=true", "rollout.max_staleness=1", "algorithm.demonstrations={}"),
        "algorithm.proximal=recompute",
    ]
    folder = execute(config(out, "neighbours", *more, branch="{at='depth', roots=2, turns=[4]}"))
    for step, row in enumerate(updates(folder), start=1):
        members = episodes(folder, step)
        branches = [m for m in members if m.parent is not None]
        assert len(branches) == 8 and {m.branch_turn for m in branches} == {4}
        assert {m.given for m in members} == {2}, "of branches too: the calls were made before they left"
        assert all(turn.ledger == -1 for m in branches for turn in m.turns[:4])
        assert all(m.ledgers[0].turns[m.ledgers[0].sampled].min() == (4 if m.parent is not None else 2) for m in members)
        assert row["tokens_trained"] == sum(m.sampled_tokens for m in members)


def test_an_environment_in_wrappers_branches_as_one_without(whole: Path, out: Path) -> None:
    """One that changes nothing plays the same episodes; one by which tools fail is forked with its draws."""
    same = execute(config(out, "wrapped", "steps=1", "env.wrappers=[{name='turn_limit', args={turns=100}}]"))
    assert [told(m) for m in episodes(same, 1)] == [told(m) for m in episodes(whole, 1)]
    failing = execute(config(out, "failing", "steps=1", "env.wrappers=[{name='tool_faults', args={rate=0.5}}]"))
    for members in groups(failing, 1):
        for branch in (m for m in members if m.parent is not None):
            shared = [[r.error for r in turn.results] for turn in branch.turns[: branch.branch_turn]]
            parent = members[branch.parent].turns[: branch.branch_turn]
            assert shared == [[r.error for r in turn.results] for turn in parent]
