"""Every sampled token is counted once, and those that are thrown away by why: against the engine's own count; and its speed."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentrl
from agentrl.config import Choice, RolloutConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Message, Task, ToolCall, Trajectory
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec
from agentrl.rollout.collector import Acceptance, Collector
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy
from agentrl.rollout.group_ledger import GroupState
from agentrl.rollout.mixtures import MixedTasks, Part
from agentrl.rollout.player import Job, LocalPlayer, RunEnv
from agentrl.rollout.stats import EngineMeter, RolloutStats
from agentrl.run.metrics import info_of
from agentrl.run.run_log import shown_of, thrown_away, train_row
from tests.publishing import exchange
from tests.rollout.conftest import LENGTH, FaultyEngine, resume, trained, until
from tests.rollout.in_process import pool_in_process

ENV = EnvRef("key_value")
CALL = Message("assistant", tool_calls=(ToolCall("get", {"key": "a"}),))


class Counting(FaultyEngine):
    """Counts the tokens that it gave, by request. `first`: the first turn of each episode, if it is to call a tool. `held`:
    episodes whose keys begin so get no second turn. `paced`: episodes whose keys begin so sleep so many turns of the loop."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.gave: Counter[str] = Counter()
        self.first: list[int] = []
        self.held: tuple[str, ...] = ()
        self.paced: dict[str, int] = {}
        self.waits = False

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        for _ in range(next((pace for start, pace in self.paced.items() if request_key.startswith(start)), 0)):
            await asyncio.sleep(0)
        if self.first and request_key not in self.gave:
            found = Generation(self.first, [-1.0] * len(self.first), [self.version] * len(self.first), "stop")
        else:
            if self.held and request_key.startswith(self.held):
                self.waits = True
                await asyncio.sleep(3600)
            found = await super().generate(token_ids, sampling, request_key)
        self.gave[request_key] += len(found.token_ids)
        return found

    def of(self, *starts: str) -> int:
        return sum(count for key, count in self.gave.items() if key.startswith(starts))


def made(renderer: Renderer, *, odd: bool = False, greedy: bool = False, **more: Any) -> tuple[Counting, Collector]:
    faults = {key: more.pop(key) for key in ("fail", "max_delay", "seed", "stuck") if key in more}
    engine = Counting(renderer.stop_token_ids[0], **faults)
    config = RolloutConfig(**{"groups": 2, "group_size": 2, "max_turns": 3, "stall_timeout": 20.0, **more})
    part = RunEnv("kv", ENV, Policy(engine, renderer), compile_spec(LENGTH), Limits.of(config, 2048))
    tasks = MixedTasks([Part("kv", ENV, config.sampler)], config.mixture, 0)
    accept = Acceptance(Choice(name=agentrl.give(lambda group: group.index % 2 == 0, "even"))) if odd else None
    collect = Collector(LocalPlayer([part]), [part], tasks, config, seed=0, greedy=["kv"] if greedy else [], accept=accept)
    return engine, collect


async def rows_of(collect: Collector, updates: int) -> tuple[list[dict[str, float]], list[list[Group]]]:
    rows, batches = [], []
    for _ in range(updates):
        batches.append(await collect.collect())
        rows.append(collect.metrics())
        collect.trained(batches[-1])
        await exchange(collect)
    return rows, batches


def tokens(groups: list[Group]) -> int:
    return sum(t.sampled_tokens for group in groups for t in [*group.trajectories, *([group.baseline] if group.baseline else [])])


def dropped(batches: list[list[Group]], last: int) -> list[str]:
    """Groups up to the last one that were never trained, as their requests begin."""
    trained = {group.index for groups in batches for group in groups}
    return [f"g{index}." for index in range(last + 1) if index not in trained]


@pytest.mark.parametrize("greedy", [False, True])
async def test_a_filtered_group_is_thrown_away_and_a_refused_one_too(renderer: Renderer, greedy: bool) -> None:
    for why, options in (("filtered", {"filter_zero_variance": True}), ("refused", {"odd": True})):
        engine, collect = made(renderer, greedy=greedy, **options)
        rows, batches = await rows_of(collect, 6)
        for row, groups in zip(rows, batches, strict=True):
            assert row["tokens_sampled"] == tokens(groups) + row["tokens_thrown"]
            assert row["tokens_thrown"] == row.get(f"tokens_thrown/{why}", 0)
        last = max(group.index for groups in batches for group in groups)
        away = engine.of(*dropped(batches, last))
        assert sum(row["tokens_sampled"] for row in rows) == sum(engine.gave.values())
        assert 0 < away <= sum(row["tokens_thrown"] for row in rows), "those after the last one that was trained are among them"
        spent = thrown_away(rows)
        assert spent["thrown"] == {why: spent["tokens_thrown"]} and spent["tokens_sampled"] == sum(engine.gave.values())


async def test_what_is_tried_again_or_fails_is_thrown_away(renderer: Renderer) -> None:
    engine, collect = made(renderer, fail=0.35, seed=3, retries=1, min_survivors=2)
    engine.first = renderer.assistant(CALL)
    rows, batches = await rows_of(collect, 6)
    again = sum(n for key, n in engine.gave.items() if ".a0" in key and key.replace(".a0", ".a1") in engine.gave)
    assert sum(row.get("tokens_thrown/retried", 0) for row in rows) == again > 0
    assert sum(row["tokens_sampled"] for row in rows) == sum(engine.gave.values())
    assert sum(row["tokens_thrown"] for row in rows) == sum(engine.gave.values()) - sum(map(tokens, batches))
    assert collect.ledger.counts()["failed"] > 0 and sum(row.get("tokens_thrown/failed", 0) for row in rows) > 0


async def test_cancelled_episodes_count_with_the_turns_that_were_over(renderer: Renderer) -> None:
    """Group 1 hangs in its second turn: what it sampled before is told with the next update, after its cancellation."""
    engine, collect = made(renderer, oversample=1.5)
    engine.first, engine.held = renderer.assistant(CALL), ("g1.",)
    rows = []
    for update in range(3):
        [row], [groups] = await rows_of(collect, 1)
        rows.append(row)
        if update == 0:
            assert [group.index for group in groups] == [0, 2], "the update does without the one that hangs"
        await collect.rest()
    await collect.close()
    assert engine.of("g1.") == 2 * len(engine.first) and "tokens_thrown/cancelled" not in rows[0]
    assert rows[1]["tokens_thrown/cancelled"] >= engine.of("g1."), "told with the next update"
    assert all(row["tokens_thrown"] == row.get("tokens_thrown/cancelled", 0) for row in rows)


def test_a_checkpoint_has_what_was_thrown_since_the_update_and_what_waits_for_one() -> None:
    """Of group 0 one attempt of 5 tokens is made again; its member of 7 is complete, and dropped after the resume."""

    def episode(count: int) -> Trajectory:
        ledger = TokenLedger()
        ledger.append_sampled([1] * count, [0.0] * count, [0] * count, 0)
        return Trajectory("kv", Task("t", 0), ledgers=[ledger])

    def taken(stats: RolloutStats) -> dict[str, float]:
        return {name: value for name, value in stats.take([], False).items() if name.startswith("tokens")}

    before, after = (RolloutStats(RolloutConfig(), Watch()) for _ in range(2))
    group = Group(0, 0, [episode(7)], baseline=episode(2))
    for count, again in ((5, True), (7, False), (2, False)):
        before.attempt(0, episode(count), again, True)
    before.count_group(group)
    before.attempt(3, episode(4), False, True)
    after.load_json(json.loads(json.dumps(before.to_json())), 0, [group])
    assert taken(before) == {"tokens_sampled": 18.0, "tokens_thrown": 5.0, "tokens_thrown/retried": 5.0}
    begun_anew = {"tokens_thrown": 9.0, "tokens_thrown/cancelled": 4.0, "tokens_thrown/retried": 5.0}
    assert taken(after) == {"tokens_sampled": 18.0, **begun_anew}, "a group that ran is played again from its beginning"
    for spent in (before, after):
        spent.count_drop(0, "kv", GroupState.STALE, "old")
        assert taken(spent) == {"tokens_sampled": 0.0, "tokens_thrown": 9.0, "tokens_thrown/stale": 9.0}
        spent.count_drop(0, "kv", GroupState.STALE, "old")
        assert taken(spent)["tokens_thrown"] == 0.0, "it is told once"


@pytest.mark.parametrize("oversample", ["oversample", "oversample_members"])
async def test_an_episode_that_ends_as_its_group_is_given_up_is_thrown_away(renderer: Renderer, oversample: str) -> None:
    """Among the delays is the one in which its group no longer waits for it and has not stopped it."""

    async def scenario(pace: int) -> tuple[int, float, float, float]:
        engine, collect = made(renderer, **{oversample: 1.5})
        engine.paced = {"g1.m1." if oversample == "oversample" else "g1.m2.": pace}
        rows, batches = await rows_of(collect, 1)
        await collect.close()
        rest = collect.stats.take([], False)
        sampled, thrown = (rows[0][key] + rest[key] for key in ("tokens_sampled", "tokens_thrown"))
        return sum(engine.gave.values()), sampled, thrown, tokens(batches[0]) + tokens(collect.ledger.complete_groups())

    ends = set[float]()
    for pace in range(80):
        gave, sampled, thrown, kept = await scenario(pace)
        assert gave >= sampled == kept + thrown, pace
        ends.add(thrown)
    assert len(ends) > 1, "some ended in time and some did not"


async def test_a_worker_tells_what_an_episode_that_is_cancelled_had_sampled(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.workers.rollout_worker.REPORT_S", 0.02)
    engine = Counting(renderer.stop_token_ids[0])
    engine.first, engine.held = renderer.assistant(CALL), ("g0.",)
    limits = Limits.of(RolloutConfig(max_turns=3), 2048)

    def make(engine: Engine) -> list[RunEnv]:
        return [RunEnv("kv", ENV, Policy(engine, renderer), compile_spec(LENGTH), limits)]

    pool, _ = pool_in_process(engine, make, 1)
    await pool.start()
    task = asyncio.create_task(pool.play(Job("kv", EpisodeSpec(3, "train", 77, 0, "g0.m0.a0")), watch := Watch()))
    await until(lambda: engine.waits)
    task.cancel()
    await until(lambda: watch.cut)
    assert watch.cut == len(engine.first) == engine.of("g0.")
    await asyncio.sleep(0.1)
    assert watch.cut == len(engine.first), "told once"
    await pool.close()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.003]), st.integers(0, 2**30), st.booleans(),
    st.sampled_from([1.0, 1.5]), st.sampled_from([1.0, 1.5]), st.integers(0, 3),
)  # fmt: skip
async def test_no_token_is_lost_or_counted_twice(
    renderer: Renderer, eta: int, fail: float, delay: float, seed: int, filters: bool, groups: float, members: float, killed: int
) -> None:
    options: dict[str, Any] = {
        "fail": fail, "max_delay": delay, "seed": seed, "max_staleness": eta, "filter_zero_variance": filters,
        "oversample": groups, "oversample_members": members, "odd": seed % 2 == 0,
    }  # fmt: skip
    engine, collect = made(renderer, **options)
    found, engines = list[tuple[dict[str, float], list[Group]]](), [engine]
    for update in range(3):
        rows, batches = await rows_of(collect, 1)
        found.append(({key: value for key, value in rows[0].items() if key.startswith("tokens")}, batches[0]))
        if update == killed and eta == 0:
            await collect.rest()
            first, (engine, collect) = collect, made(renderer, **options)
            engines.append(engine)
            await resume(first, collect)
    await collect.close()
    waiting = collect.ledger.complete_groups()
    rest = collect.stats.take([], False)
    gave = sum(sum(engine.gave.values()) for engine in engines)
    sampled = sum(row["tokens_sampled"] for row, _ in found) + rest["tokens_sampled"]
    # What is cancelled in the moment in which a turn ends has not read it.
    assert gave == sampled if eta == 0 and groups == members == 1 else gave >= sampled
    thrown = sum(row["tokens_thrown"] for row, _ in found) + rest["tokens_thrown"]
    kept = sum(tokens(batch) for _, batch in found) + tokens(waiting)
    if eta == 0:
        assert sampled == kept + thrown
    for row, _ in found:
        assert row["tokens_thrown"] == sum(value for key, value in row.items() if "/" in key)
        assert all(info_of(key) for key in row)


def test_the_display_says_the_share_that_was_thrown_away() -> None:
    row: dict[str, Any] = {"success": 0.5, "reward": None, "throughput/sampled_tokens_per_s": 10.0, "unscored": 0}
    assert "thrown away" not in shown_of(row | {"tokens_sampled": 10.0, "tokens_thrown": 0.0}, ["a"])[0]
    for sampled, share in ((400.0, "25.0 %"), (0.0, "100.0 %")):  # with staleness, groups of earlier tokens alone may be dropped
        assert shown_of(row | {"tokens_sampled": sampled, "tokens_thrown": 100.0}, ["a"])[0]["thrown away"] == share


def test_a_run_from_a_config_says_it_in_rows_summary_and_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each update 4 groups are filtered, the limit, and 2 trained."""
    rollout = "groups = 2, group_size = 2, max_turns = 3, max_turn_tokens = 6, filter_zero_variance = true, max_filtered = 2.0"
    rows = trained(tmp_path, f"steps = 3\neval = {{ tasks = 1 }}\nrollout = {{ {rollout} }}")
    rows = [row for row in rows if row["phase"] == "train"]
    assert len(rows) == 3
    for row in rows:
        assert row["tokens_sampled"] == row["tokens"] + row["tokens_thrown"] and row["groups_filtered"] == 4
        seconds = sum(row[f"time/{part}_s"] for part in ("rollout", "batch", "update", "publish"))
        assert 0 < row["throughput/sampled_tokens_per_s"] <= row["tokens_sampled"] / seconds * (1 + 1e-6)
        assert 0.5 < row["tokens_thrown"] / row["tokens_sampled"] < 0.8
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    sampled, away = (sum(row[key] for row in rows) for key in ("tokens_sampled", "tokens_thrown"))
    assert (summary["tokens_sampled"], summary["tokens_thrown"], summary["thrown"]) == (sampled, away, {"filtered": away})
    said = capsys.readouterr().out
    share = f"{100 * away / sampled:.1f} %"
    assert f"{away:,.0f} of {sampled:,.0f} sampled tokens ({share}: filtered {share})" in " ".join(said.split())
    assert "thrown away" in next(line for line in said.splitlines() if "[train] 3/3" in line and "tokens/s" in line)


# -- what the engine did since it was last asked ---------------------------------------------------


def prompt_of(length: int) -> list[int]:
    return [7 + 31 * place % 400 for place in range(length)]


async def test_what_the_engine_did_since_the_last_reading(tiny: str) -> None:
    engine = EmbeddedEngine(tiny, device="cpu", max_slots=2)
    await engine.start()
    meter = EngineMeter(engine)
    begun = await meter.read()  # nothing is known yet: no time has passed, and no prompt has come
    assert (begun["throughput/sampled_tokens_per_s"], begun["engine/cache_hit"]) == (None, None)
    await engine.generate(prompt_of(100), Sampling(max_tokens=10, seed=1), "a")
    first = await meter.read()
    assert first["throughput/sampled_tokens_per_s"] > 0 and first["engine/cache_hit"] == 0
    # the second turn of the episode finds its first one in the cache
    await engine.generate([*prompt_of(100), 1, 2, 3, 4], Sampling(max_tokens=10, seed=1), "a")
    second = await meter.read()
    assert second["engine/cache_hit"] == pytest.approx(100 / 104, abs=0.01)
    assert second["engine/steps"] > first["engine/steps"]
    idle = await meter.read()
    assert idle["throughput/sampled_tokens_per_s"] == idle["engine/running"] == 0 and idle["engine/cache_hit"] is None
    # three requests on two slots: one waits
    tasks = [asyncio.ensure_future(engine.generate(prompt_of(9), Sampling(max_tokens=480), f"{i}")) for i in range(3)]

    async with asyncio.timeout(30):
        while True:
            busy = await meter.read()
            if (busy["engine/running"], busy["engine/waiting"]) == (2, 1) and 0 < (busy["engine/kv_used"] or 0) < 1:
                break
            await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.close()


async def test_a_step_whose_groups_lay_ready_has_the_speed_of_what_was_sampled_meanwhile() -> None:
    """With `max_staleness` above 0 the wait for groups may be nothing, and no episode may have ended since the last row."""
    sampled = 0

    async def stats() -> EngineStats:
        return EngineStats(sampled_tokens=sampled)

    engine: Any = SimpleNamespace(stats=stats)
    session: Any = SimpleNamespace(
        collector=SimpleNamespace(metrics=lambda: {"tokens_sampled": 0.0}, ledger=SimpleNamespace(counts=dict)),
        player=SimpleNamespace(metrics=dict),
        services={},
        display=SimpleNamespace(took=dict.fromkeys(("rollout", "batch", "update", "publish"), 0.2)),
    )
    meter = EngineMeter(engine)
    await meter.read()
    began = time.monotonic()
    await asyncio.sleep(0.2)  # an update, beside which the engine goes on
    sampled += 100
    row = train_row(session, {"success": None, "reward": None, "unscored": 0}, await meter.read())
    said, _ = shown_of(row, ["a"])
    assert 0 < 100 / (time.monotonic() - began) <= said["tokens/s"] <= 100 / 0.2
