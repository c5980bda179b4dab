"""Kept episodes and demonstrations of a run whose context policy rewrites conversations: episodes of several ledgers."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from agentrl.data.schedule import KEPT, ORIGIN
from agentrl.data.trajectory import Message, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.context import ContextPolicy, KeepRecent, Moment, Stop, Truncate
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.starts import scripted_ids
from agentrl.rollout.warm_start import gold_transcript
from agentrl.run.checks.env_checks import check_demonstrations
from agentrl.trainer import learner
from agentrl.trainer.learner import Learner
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError
from tests.conftest import proof
from tests.e2e.inside import config_of, episodes, execute, updates

TURNS, TOKENS = 1, 180
STEPS = 3
SHORT = Path(__file__).parents[1] / "e2e/short.json"


def keys(folder: Path) -> list[str]:
    short = json.loads(SHORT.read_text())
    success = {"use": "format.regex", "args": {"pattern": "[0-9]", "match": "search"}}
    (folder / "digit.json").write_text(json.dumps(short | {"name": "digit", "success": success}))
    return [
        "model.init={layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=16}",
        "health={lint=false,preflight=false,max_unsolvable=1}",
        f"env={{id='key_value',reward='{folder / 'digit.json'}',params={{calls=[6,8]}}}}",
        f"steps={STEPS}",
        "eval.tasks=1",
        "rollout={groups=4,group_size=2,max_turns=11,max_turn_tokens=16,temperature=0.8}",
        # The policy's own turns come after gold ones, so that its conversations are long enough to be rewritten.
        "rollout.start={left=4,whole=0.0}",
        f"rollout.context={{name='keep_recent',args={{turns={TURNS},tokens={TOKENS}}}}}",
        "algorithm.experience={rare=0.9,share=1.0,max_age=3,size=9}",
        "algorithm.demonstrations={episodes=2,coef=0.3}",
        "checkpoint.every=1",
        "checkpoint.keep=9",
    ]


WARM = [
    "model.init={layers=1,hidden=64}",
    *("sft.max_steps=80", "sft.min_steps=80", "sft.gate_every=80", "sft.gate=0.0", "sft.gate_tasks=2"),
    "sft.teacher={stop=0.1}",
    "sft.params={calls=[4,6]}",
    "rollout.start.whole=0.9",
    "rollout.max_turn_tokens=24",
    "algorithm.experience.rare=1.0",
]


class Script(Engine):
    """Says given turns, one after the other."""

    def __init__(self, turns: Sequence[list[int]]) -> None:
        self.turns = list(turns)

    async def start(self) -> None: ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        ids = self.turns.pop(0)
        return Generation(ids, [0.0] * len(ids), [0] * len(ids), "stop")

    async def abort(self, request_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None: ...


class Newest(ContextPolicy):
    """The opening, the newest turn, and what the environment said of it: one of a user's own, who reads `fresh`."""

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        opening = next(place for place, message in enumerate(moment.messages) if message.role == "assistant")
        return [*moment.messages[:opening], *moment.messages[-moment.fresh - 1 :]] if moment.over(TOKENS) else None


LIMITS = Limits(11, 16, 4000, 10.0, 60.0, 4096)
REF = EnvRef("key_value", {"calls": [6, 8]})


async def played(seed: int, context: ContextPolicy | None = None) -> Trajectory:
    """The gold solution of a task, as a rollout of this run would record it of a policy that says just that."""
    env, renderer = REF.build(), make_renderer(packaged_tokenizer(4096))
    turns = [ids for said in env.gold_turns(env.make_task(seed, "train")) for ids in scripted_ids(renderer, said)]
    policy = Policy(Script(turns), renderer, context=context or KeepRecent(turns=TURNS, tokens=TOKENS))
    return await run_episode(env, policy, EpisodeSpec(seed, "train", 0, 0, "k"), LIMITS, None)


Seen = list[tuple[TensorDict | None, list[TensorDict]]]


def ran(folder: Path, *more: str) -> tuple[Path, Seen]:
    """The run's folder; and of each update its demonstrations, and the rows that were added to it."""
    seen: Seen = []
    step, join = Learner.step, learner.join_rows

    async def noted(self: Learner, batch: TensorDict, at: int, keep: bool = False, shown: Any = None) -> Any:
        seen.append((shown, []))
        return await step(self, batch, at, keep, shown)

    def joins(view: Any, added: Sequence[TensorDict], mode: Any) -> Any:
        seen[-1][1].extend(added)
        return join(view, added, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", noted)
        patch.setattr(learner, "join_rows", joins)
        return execute(config_of(folder, "forks", *keys(folder), *more)), seen


def rows_of(batch: TensorDict) -> dict[tuple[int, int], list[list[int]]]:
    """Token ids of the rows of each (group, member)."""
    found = defaultdict(list)
    for row, ids in enumerate(batch["token_ids"].unbind()):
        found[int(batch["group"][row]), int(batch["member"][row])].append(ids.tolist())
    return dict(found)


@proof
@pytest.mark.timeout(300)
def test_a_kept_episode_comes_back_with_all_its_ledgers(tmp_path: Path) -> None:
    """What is drawn are rows of episodes that were trained before, whole, with the advantage of their own update on each. The
    policy has learned to make calls first, of which each but the first begins another ledger."""
    folder, seen = ran(tmp_path, *WARM)
    trained, several = list[list[list[int]]](), 0
    for number, (_, added) in enumerate(seen):
        for rows in (rows for rows in added if int(rows[ORIGIN][0]) == KEPT):
            for own in rows_of(rows).values():
                assert own in trained
                several += len(own) > 1
        trained += [[one.token_ids.tolist() for one in episode.ledgers] for episode in episodes(folder, number + 1)]
    assert several > 1
    held = load_file(folder / f"checkpoints/step_{STEPS:06d}/experience.safetensors")
    sampled = np.split(held["rows/sampled"].numpy(), held["offsets"][1:-1])
    values = np.split(held["rows/advantages"].numpy(), held["offsets"][1:-1])
    for number in held["episode"].unique().tolist():
        own = np.flatnonzero(held["episode"].numpy() == number).tolist()
        assert len(np.unique(np.concatenate([values[row][sampled[row]] for row in own]))) == 1  # one outcome, on all its ledgers


def test_a_demonstration_is_what_a_rollout_would_record_of_it(tmp_path: Path) -> None:
    """Ledger by ledger: gold in a history that the run never shows would teach prompts that the policy never has."""
    folder, seen = ran(tmp_path)
    drawn: dict[int, int] = {}
    for number in range(STEPS):
        for episode in episodes(folder, number + 1):
            drawn[episode.task.seed] = drawn.get(episode.task.seed, 0) + 1
    expected = [asyncio.run(played(seed)) for seed in drawn]
    plain = [[one.token_ids.tolist() for one in gold.ledgers] for gold in expected]
    marks = [[one.sampled.tolist() for one in gold.ledgers] for gold in expected]
    count = 0
    for shown, _ in seen:
        for own in rows_of(shown).values() if shown is not None else []:
            assert own in plain and len(own) > 1
            place = plain.index(own)
            first = next(row for row in range(len(shown)) if shown["token_ids"][row].tolist() == own[0])
            assert [shown["sampled"][first + n].tolist() for n in range(len(own))] == marks[place]
            count += 1
    assert count > 1
    rows = updates(folder)
    assert sum(row["demonstrations/episodes"] for row in rows) == count
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in rows) and max(row["rewrites"] for row in rows) > 0


@pytest.mark.parametrize("context", [Stop(), Truncate(tokens=TOKENS, keep=1), Newest()])
async def test_under_every_context_policy_gold_has_a_rollouts_ledgers(context: ContextPolicy) -> None:
    for seed in range(3):
        expected = await played(seed, context)
        gold = await gold_transcript(REF.build(), make_renderer(packaged_tokenizer(4096)), seed, "train", context, LIMITS)
        assert len(expected.ledgers) > 1 or isinstance(context, Stop)
        for name in ("token_ids", "sampled", "turns"):
            found = [getattr(one, name).tolist() for one in gold.ledgers]
            assert found == [getattr(one, name).tolist() for one in expected.ledgers], name


def test_where_the_policy_writes_summaries_gold_is_refused_by_name(tmp_path: Path) -> None:
    config = config_of(tmp_path, "none", "algorithm.demonstrations={}", "rollout.context={name='compact',args={tokens=400}}")
    with pytest.raises(ConfigError, match=r"algorithm\.demonstrations \(key_value\): rollout\.context = 'compact': .* summaries"):
        check_demonstrations(config, EnvRef.of(config))
