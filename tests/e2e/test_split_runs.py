"""`agentrl train` on four ranks that split matrices or experts has the numbers of one actor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cluster.ray_cluster import stop_ray
from tests.conftest import proof
from tests.e2e.inside import config_of, execute, updates
from tests.tiny_families import build_family

pytestmark = [pytest.mark.timeout(400), proof]
FOUR = ["cluster.backend=ray", "cluster.actors=4", "cluster.pools={four={per_node=4,cpus=0.25}}", "cluster.roles={actor='four'}"]
SPLIT = {
    "qwen3": ["model.tensor_parallel=2"],
    "qwen3_moe": ["model.expert_parallel=2", "model.tensor_parallel=2"],
    "qwen3_moe, experts alone": ["model.expert_parallel=4"],
}


@pytest.fixture(scope="module", autouse=True)
def _no_ray_left() -> Iterator[None]:
    stop_ray()
    yield
    stop_ray()


@pytest.mark.parametrize("name", SPLIT)
def test_a_config_on_split_ranks_trains_as_on_one(tmp_path: Path, name: str) -> None:
    path = build_family(tmp_path / "model", name.split(",")[0])
    keys = [f"model.path={path}", "steps=2", "eval.tasks=1", "optim.lr=1e-4", "rollout.max_turns=3"]
    # A gradient, whatever so small a model scores; and no prefix that several ranks compute, whose tokens would be counted (as
    # loads of experts) on each of them.
    keys += ["algorithm.entropy_bonus=0.1", "optim.prefix_sharing=off"]
    one = updates(execute(config_of(tmp_path, "one", *keys)))
    run = execute(config_of(tmp_path, "many", *keys, *FOUR, *SPLIT[name]))
    many = updates(run)
    assert len(one) == len(many) == 2
    for mine, theirs in zip(one, many, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"phase"}:
            if not key.startswith(("time/", "throughput/", "balance", "route")):
                wanted = mine[key]  # no rate of errors if nothing was called
                assert theirs[key] == (None if wanted is None else pytest.approx(wanted, rel=1e-5, abs=1e-5)), key
        assert theirs["grad_norm"] > 0.01 and theirs["mismatch_max"] < 1e-5
