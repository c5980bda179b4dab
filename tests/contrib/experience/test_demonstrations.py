"""Gold solutions of tasks at which a whole group failed (`algorithm.demonstrations`): which, their tokens, and where refused."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from agentrl.config import Choice
from agentrl.config.load import config_from
from agentrl.config.schema import DemonstrationsConfig
from agentrl.contrib.experience.hooks import MEMBER, Demonstrations, check_demonstrations
from agentrl.data.trajectory import Group, Message, Task, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.context import ContextPolicy, KeepRecent, Moment, Stop, Truncate
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.samplers import TaskChoice
from agentrl.rollout.starts import scripted_ids
from agentrl.rollout.warm_start import transcript
from agentrl.run.api.steps import session
from agentrl.run.checks import RunStart
from agentrl.trainer import learner
from agentrl.trainer.learner import Learner
from agentrl.trainer.minibatch import Term
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError
from tests.conftest import proof
from tests.e2e.inside import config_of as run_of
from tests.e2e.inside import episodes, execute, updates
from tests.players import Script

SHORT = Path(__file__).parents[2] / "e2e/short.json"


def config_of(*overrides: str) -> Any:
    base = {"env": {"id": "key_value", "params": {"calls": 3}}, "model": {"init": {"context": 4096}}}
    return config_from({**base, "algorithm": {"demonstrations": {}}}, list(overrides))


class Part:
    """What a demonstration reads of a `RunEnv`."""

    name = "key_value"

    def __init__(self) -> None:
        self.env = RunStart(config_of()).env
        self.policy = Policy.__new__(Policy)
        object.__setattr__(self.policy, "renderer", make_renderer(packaged_tokenizer(4096)))
        object.__setattr__(self.policy, "context", Stop())
        self.limits = SimpleNamespace(episode_timeout=60.0, max_turn_tokens=64, context=4096)


def shows_of(episodes: int, longest: int = 2000) -> Demonstrations:
    hook = Demonstrations(DemonstrationsConfig(episodes=episodes), config_of())
    hook.longest = longest
    return hook


async def taken(hook: Demonstrations, part: Any) -> tuple[Any, dict[str, float]]:
    """The rows of the next update."""
    await hook.prepare(TensorDict({}), [], [part])
    return hook.draw(0, 8)


def group(index: int, *successes: bool | None) -> Group:
    members = [
        Trajectory("key_value", Task("t", 1), member=n, success=s, reward=None if s is None else 0.5)
        for n, s in enumerate(successes)
    ]
    return Group(index, 1, members, env="key_value")


def choice(seed: int, calls: int) -> TaskChoice:
    return TaskChoice(seed, {"calls": calls}, env="key_value")


async def test_the_gold_of_failed_groups_is_shown_up_to_so_many_episodes() -> None:
    """Lowest numbers first, each its own task's gold; none of groups with a success or with none known."""
    part: Any = Part()
    shows = shows_of(2)
    for index, successes in ((9, (False, False)), (3, (False, None)), (5, (False, True)), (1, (None, None)), (7, (False, False))):
        shows.note_group(group(index, *successes), choice(seed=100 + index, calls=2 + index % 4))
    rows, metrics = await taken(shows, part)
    assert rows["group"].tolist() == [3, 7] and set(rows["member"].tolist()) == {MEMBER}
    for row, index in enumerate((3, 7)):
        env = part.env.with_params({"calls": 2 + index % 4}).build()
        gold = await transcript(env, part.policy.renderer, 100 + index, "train")
        assert rows["token_ids"][row].tolist() == gold.ledgers[0].token_ids.tolist()
        assert rows["sampled"][row].tolist() == gold.ledgers[0].sampled.tolist()
    sampled = float(rows["sampled"].values().sum())
    assert metrics == {"demonstrations/episodes": 2.0, "demonstrations/skipped": 0.0, "demonstrations/tokens": sampled}
    assert await taken(shows, part) == (None, {"demonstrations/episodes": 0.0, "demonstrations/skipped": 0.0}), (
        "each is shown once"
    )


async def test_tools_that_fail_by_chance_do_not_fail_in_a_gold_solution() -> None:
    """The policy plays with a wrapper that answers no call; what is shown is the solution."""
    shown = []
    for wrappers in ([], [Choice(name="tool_faults", args={"rate": 1.0})]):
        part: Any = Part()
        part.env = replace(part.env, wrappers=wrappers)
        shows = shows_of(1)
        shows.note_group(group(0, False), choice(5, 4))
        rows, _ = await taken(shows, part)
        shown.append(rows["token_ids"][0].tolist())
    assert shown[0] == shown[1]


async def test_what_does_not_fit_into_a_row_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    part: Any = Part()
    lengths = {}
    for calls in (2, 6):
        env = part.env.with_params({"calls": calls}).build()
        lengths[calls] = (await transcript(env, part.policy.renderer, 5, "train")).tokens
    shows = shows_of(1, lengths[6] - 1)
    shows.note_group(group(1, False), choice(5, 6))
    shows.note_group(group(2, False), choice(5, 2))
    rows, metrics = await taken(shows, part)
    assert rows["group"].tolist() == [2] and metrics["demonstrations/skipped"] == 1
    assert f"the task of group 1 is left out: its gold solution has {lengths[6]} tokens" in caplog.text


async def test_a_gold_solution_that_hangs_is_left_out_when_an_episode_would_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that never answers, in one of two tasks: the update waits for as long as for an episode, and has the other."""
    part: Any = Part()
    part.limits.episode_timeout = 0.3
    real = ToolEnv.astep

    async def hangs(env: Any, message: Any) -> Any:
        return await (asyncio.Event().wait() if len(env.task.gold["calls"]) == 6 else real(env, message))

    monkeypatch.setattr(ToolEnv, "astep", hangs)
    shows = shows_of(2)
    shows.note_group(group(0, False, False), choice(5, 6))
    shows.note_group(group(1, False, False), choice(6, 4))
    async with asyncio.timeout(20):
        rows, metrics = await taken(shows, part)
    assert rows["group"].tolist() == [1] and metrics["demonstrations/skipped"] == 1
    assert "group 0 is left out: its gold solution was not played within rollout.episode_timeout = 0.3 s" in caplog.text


def test_without_gold_or_elsewhere_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    check_demonstrations(RunStart(config, {}))
    for word, why in (
        ("env.url=http://127.0.0.1:9", r"env\.url = .*a remote environment"),
        ("agent.url=http://127.0.0.1:9", r"\[agent\]: .* prompts of its own"),
        ("rollout.context={name='compact',args={tokens=400}}", r"rollout\.context = 'compact': .* summaries"),
    ):
        with pytest.raises(ConfigError, match=rf"algorithm\.demonstrations \(key_value\): {why}"):
            check_demonstrations(RunStart(config_of(word), {}))
    monkeypatch.setattr(type(EnvRef.of(config.the_env, config.tools).build()), "horizon", lambda *_: None)
    with pytest.raises(ConfigError, match=r"algorithm\.demonstrations \(key_value\): its tasks have no gold solution"):
        check_demonstrations(RunStart(config, {}))


@pytest.mark.parametrize(("key", "value", "why"), [
    ("algorithm.experience", {}, "a step-wise loop chooses its own batches"),
    ("algorithm.demonstrations", {}, "a step-wise loop chooses its own batches"),
    ("callbacks", [{"name": "echo"}], "a step-wise loop has none"),
    ("profile", {"steps": [1]}, "a step-wise loop has none"),
])  # fmt: skip
def test_a_step_wise_loop_refuses_what_it_would_not_add(key: str, value: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(key)}: {why}"):
        session("quickstart", overrides={key: value})


def test_a_run_learns_from_what_answers_it_although_no_reward_differs(tmp_path: Path) -> None:
    words = [
        "steps=3",
        "env={id='service_desk'}",
        "eval.tasks=1",
        "rollout={groups=2,group_size=2,max_turns=3,max_turn_tokens=8}",
    ]
    rows = updates(execute(tiny(tmp_path, "echo", *words, "callbacks=[{name='echo',args={coef=1.0}}]")))
    assert all(row["advantage_zero"] == 1 and (row["grad_norm"] > 0) == (row["echo/tokens"] > 0) for row in rows)
    found = [row["loss"] - row["echo/nll"] for row in rows if row["echo/tokens"]]
    assert found == pytest.approx([0.0] * len(found), abs=1e-5) and found


def test_the_tasks_of_groups_that_a_filter_drops_are_shown_too(tmp_path: Path) -> None:
    """Three groups were replaced because nobody solved them, and so were their three replacements not: four are shown."""
    filtered = ["rollout.filter_zero_variance=true", "rollout.max_filtered=1.0", "env.reward=key_value_exact"]
    (row,) = updates(execute(tiny(tmp_path, "filtered", "steps=1", "algorithm.demonstrations={}", *filtered)))
    assert row["groups_filtered"] == 3 and row["success"] == 0
    assert row["demonstrations/episodes"] == 4 and row["demonstrations/nll"] > 3 and row["advantage_zero"] == 1
    assert row["grad_norm"] > 0.01


def test_beside_a_bound_on_staleness_and_adapters_each_keeps_its_own_age(tmp_path: Path) -> None:
    """`max_staleness` counts an update's own tokens alone; kept ones are older, up to `max_age`."""
    more = ["rollout.max_staleness=1", "algorithm.experience={rare=1.0,share=1.0,max_age=3}", "model.lora={rank=2}"]
    rows = updates(execute(tiny(tmp_path, "stale", "steps=5", f"env.reward={digit_in(tmp_path)}", *more)))
    assert max(row["staleness_max"] for row in rows) <= 1
    ages = [row["experience/age_max"] for row in rows if row["experience/episodes"]]
    assert 1 < max(ages) <= 3
    assert all(row["episodes_trained"] == row["scored"] == 12 for row in rows)
    assert any(row["experience/episodes"] for row in rows)


def digit_in(folder: Path) -> Path:
    """A reward whose success is a digit in the answer."""
    success = {"use": "format.regex", "args": {"pattern": "[0-9]", "match": "search"}}
    (folder / "digit.json").write_text(json.dumps(json.loads(SHORT.read_text()) | {"name": "digit", "success": success}))
    return folder / "digit.json"


def tiny(out: Path, name: str, *more: str) -> Any:
    model = "model.init={layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=16}"
    return run_of(out, name, model, "health.lint=false", "health.preflight=false", "health.max_unsolvable=1", *more)


def test_what_has_failed_since_the_last_update_is_in_the_checkpoint_and_is_shown_after_a_resume(tmp_path: Path) -> None:
    """Under a bound on staleness groups end while the weights are published: one that fails then is in no update yet."""
    words = ["rollout.max_staleness=1", "env.reward=key_value_exact", "algorithm.demonstrations={episodes=9}"]
    run = execute(tiny(tmp_path, "stale", "steps=2", "checkpoint.every=1", *words))
    owed = json.loads((run / "checkpoints/step_000002/driver.json").read_text())["demonstrations"]
    rows = updates(execute(tiny(tmp_path, "stale", "steps=3", "checkpoint.every=1", *words), resumed=True))
    shown = [row["demonstrations/episodes"] for row in rows]
    assert shown[2] >= len(owed)  # 3 or 6 of them
    # Every group fails, and those that an update trains have all ended: 9 in three updates, and at most 6 are ahead of these.
    assert 9 <= sum(shown) <= 15, (shown, owed)


TURNS, TOKENS = 1, 180
STEPS = 3


def keys(folder: Path) -> list[str]:
    return [
        f"env={{id='key_value',reward='{digit_in(folder)}',params={{calls=[6,8]}}}}",
        *(f"steps={STEPS}", "eval.tasks=1", "checkpoint.every=1", "checkpoint.keep=9"),
        "rollout={groups=4,group_size=2,max_turns=11,max_turn_tokens=16,temperature=0.8}",
        # The policy's own turns come after gold ones, so that its conversations are long enough to be rewritten.
        "rollout.start={left=4,whole=0.0}",
        f"rollout.context={{name='keep_recent',args={{turns={TURNS},tokens={TOKENS}}}}}",
        "algorithm.experience={rare=0.9,share=1.0,max_age=3,size=9}",
        "algorithm.demonstrations={episodes=2,coef=0.3}",
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


Seen = list[dict[str, TensorDict]]


def ran(folder: Path, *more: str) -> tuple[Path, Seen]:
    """The run's folder; and of each update the rows that were added to it, by the name of their term."""
    seen: Seen = []
    step, join = Learner.step, learner.join_rows

    async def noted(self: Learner, batch: TensorDict, at: int, keep: bool = False) -> Any:
        seen.append({})
        return await step(self, batch, at, keep)

    def joins(view: Any, added: Sequence[tuple[Term, TensorDict]], mode: Any) -> Any:
        seen[-1].update({term.name: rows for term, rows in added})
        return join(view, added, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", noted)
        patch.setattr(learner, "join_rows", joins)
        return execute(tiny(folder, "forks", *keys(folder), *more)), seen


def rows_of(batch: TensorDict) -> dict[tuple[int, int], list[list[int]]]:
    """Token ids of the rows of each (group, member)."""
    found = defaultdict(list)
    for row, ids in enumerate(batch["token_ids"].unbind()):
        found[int(batch["group"][row]), int(batch["member"][row])].append(ids.tolist())
    return dict(found)


@proof
@pytest.mark.timeout(300)
def test_a_kept_episode_comes_back_with_all_its_ledgers(tmp_path: Path) -> None:
    """Drawn rows are earlier episodes, whole, of several ledgers, with the advantages of their own update."""
    folder, seen = ran(tmp_path, *WARM)
    trained, several = list[list[list[int]]](), 0
    for number, added in enumerate(seen):
        for own in rows_of(added["experience"]).values() if "experience" in added else ():
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
    for shown in (added.get("demonstrations") for added in seen):
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
        gold = await transcript(REF.build(), make_renderer(packaged_tokenizer(4096)), seed, "train", context, LIMITS)
        assert len(expected.ledgers) > 1 or isinstance(context, Stop)
        for name in ("token_ids", "sampled", "turns"):
            found = [getattr(one, name).tolist() for one in gold.ledgers]
            assert found == [getattr(one, name).tolist() for one in expected.ledgers], name
