"""The means for long episodes (docs/howto/long_horizon.md) on two ranks have the numbers of one actor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.cluster.ray_cluster import stop_ray
from agentrl.run import session
from tests.conftest import proof
from tests.e2e.inside import config_of, episodes, execute, updates

pytestmark = [pytest.mark.timeout(600), proof]
STEPS = 4
RANKS = ["cluster.backend=ray", "cluster.actors=2", "cluster.pools={half={per_node=2,cpus=0.5}}", "cluster.roles={actor='half'}"]
TINY = [
    "model.init={layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=16}",
    "health={lint=false,preflight=false,max_unsolvable=1}",
    f"steps={STEPS}",
    "eval.tasks=1",
    "rollout={groups=4,group_size=4,max_turns=6,max_turn_tokens=16,max_episode_tokens=512,temperature=0.8}",
    "optim={lr=1e-3,micro_tokens=1500,schedule='constant'}",
    # Each turn is computed by itself: its last digits do not depend on which others are at the engine in the same moment.
    "engine_args={cache=false}",
]
STAGED = "{name='staged',args={stages=[{calls=3},{calls=5}],threshold=0.3,window=2}}"
BEGUN = "rollout.start={left=1,step=1,threshold=0.4,window=2,whole=0.4}"
KEPT = "algorithm.experience={rare=0.9,share=0.5,max_age=3,size=8"
SHOWN = "algorithm.demonstrations={episodes=2,coef=0.3}"
MOVING = "algorithm.kl={coef=0.1,reference='moving',decay=0.5}"
CASES: dict[str, list[str]] = {
    "experience": [KEPT + "}", "algorithm.minibatch=3"],
    "supervised experience, demonstrations": [KEPT + ",term='supervised'}", SHOWN, "algorithm.aggregate=seq_mean_token_mean"],
    "moving reference": [MOVING],
    "start": [BEGUN, "algorithm.groups=kept"],
    "all, by workers": [KEPT + "}", SHOWN, MOVING, BEGUN, f"rollout.sampler={STAGED}"],
}
MORE = {"all, by workers": ["rollout.workers=2"]}
LAYOUT = ("time/", "throughput/", "balance", "route", "loop/", "engine/", "rollout/", "prefix_ratio")
"""Names of metrics that are of the machine or of how rows lie on ranks."""


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Iterator[None]:
    """All runs of this file use one Ray."""
    stop_ray()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "stop_ray", lambda: None)
        yield
    stop_ray()


@pytest.fixture(scope="module")
def digit(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rewards that differ, and a success that a model that knows nothing has at times: a digit in its answer."""
    path = tmp_path_factory.mktemp("specs") / "digit.json"
    short = json.loads(Path(__file__).with_name("short.json").read_text())
    success = {"use": "format.regex", "args": {"pattern": "[0-9]", "match": "search"}}
    path.write_text(json.dumps(short | {"name": "digit", "success": success}))
    return f"env={{id='key_value',reward='{path}',params={{calls=[3,5],set_share=0.5}}}}"


def acted(case: str, rows: list[dict[str, Any]]) -> None:
    """That each of the means did something: what two runs without it would agree on says nothing."""
    if "experience" in case or "all" in case:
        assert max(row["experience/tokens"] for row in rows if row["experience/episodes"]) > 0
    if "demonstrations" in case or "all" in case:
        assert sum(row["demonstrations/episodes"] for row in rows) > 0
    if "moving" in case or "all" in case:
        assert rows[0]["kl_reference"] < 1e-9 and rows[-1]["kl_reference"] > 1e-7
    if "start" in case or "all" in case:
        assert max(row.get("given", 0) for row in rows) > 0


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_numbers_and_the_weights_of_one_actor(digit: str, tmp_path: Path, case: str) -> None:
    keys = [*TINY, digit, *CASES[case]]
    one = execute(config_of(tmp_path, "one", *keys))
    two = execute(config_of(tmp_path, "two", *keys, *RANKS, *MORE.get(case, [])))
    assert len(updates(one)) == len(updates(two)) == STEPS
    for mine, theirs in zip(updates(one), updates(two), strict=True):
        told = {name for name in mine.keys() | theirs.keys() if not name.startswith(LAYOUT)}
        assert told >= {"loss", "grad_norm"}
        for name in told:
            number = isinstance(mine[name], float | int)
            assert theirs[name] == (pytest.approx(mine[name], rel=1e-4, abs=1e-5) if number else mine[name]), (mine["step"], name)
        assert mine["mismatch_max"] < 1e-4
    acted(case, updates(one))
    left, right = (load_file(run / "final/model.safetensors") for run in (one, two))
    far = {name: float((right[name] - tensor).abs().max()) for name, tensor in left.items()}
    assert max(far.values()) < 1e-5, far  # of 4 updates at a rate of 1e-3


without_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
VLLM = [
    *("engine=vllm", "vllm={kv_cache_mib=64,max_model_len=1024}", "model.init={layers=1}", "engine_args={}"),
    # vLLM's log probabilities are not the trainer's to the last digit: ratios are to what the trainer computes.
    *("algorithm.proximal=recompute", "algorithm.loss.name=decoupled_ppo"),
]
ENGINES = {"embedded": ["rollout.workers=2"], "vllm": [*VLLM, "rollout.workers=1"]}


@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=without_vllm)])
def test_beside_updates_that_overlap_nothing_is_trained_or_shown_twice(digit: str, tmp_path: Path, engine: str) -> None:
    """A bound on staleness of 1, all of the means, two ranks, episodes played by two workers, or by one in a replica of vLLM."""
    keys = [*TINY, digit, *CASES["all, by workers"], "rollout.max_staleness=1", "steps=6"]
    # What is sampled depends here on who is first: of 48 groups of two surely some have no success (of 24 of four once none had).
    keys += ["rollout.groups=8", "rollout.group_size=2"]
    run = execute(config_of(tmp_path, "stale", *keys, *RANKS, *ENGINES[engine]))
    rows = updates(run)
    trained = Counter((one.task.id, one.member) for step in range(1, 7) for one in episodes(run, step))
    assert set(trained.values()) == {1}
    for row in rows:
        assert row["scored"] == row["episodes_trained"] and row["staleness_max"] <= 1
        assert row["experience/held"] <= 8 and row.get("experience/age_max", 0) <= 3
        assert row["experience/episodes"] <= 0.5 * row["scored"] + 1 and row["demonstrations/episodes"] <= 2
    assert rows[0]["mismatch_max"] < 1e-3  # no weights but the first have sampled
    assert max(row["staleness_max"] for row in rows) == 1
    acted("all", rows)
