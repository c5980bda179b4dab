"""A plan has places: `--nodes 4x8` assigns each process to a card, by the code of a run, and refuses what has none by its key."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster.placement import planned_elsewhere
from agentrl.config import load_config
from agentrl.env.catalog import find_config
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.role_placement import RunRoles, placement_table
from agentrl.utils.errors import ResourceError
from tests.conftest import Agentrl, proof

ROOT = Path(__file__).resolve().parents[2]
EIGHT = "0 1 2 3 4 5 6 7"


def table(name: str, nodes: tuple[int, int] | None, *given: str) -> list[list[str]]:
    """Rows of the printed table: role, ranks, the node's number, cards."""
    config = load_config(ROOT / "configs" / "gpu" / f"{name}.toml", [*given], find=find_config)
    with planned_elsewhere(nodes):
        rows = placement_table(RunRoles(EngineChoice(config, "vllm")).locations()).splitlines()[1:]
    return [[role, ranks, node, cards] for role, ranks, _, node, cards in (row.split(maxsplit=4) for row in rows)]


@pytest.mark.parametrize(("name", "nodes", "found"), [
    ("multi_node", (4, 8), ["actor 0-7 1", "actor 8-15 2", "rollout 0-7 3", "rollout 8-15 4"]),
    ("async_2x8", (2, 8), ["actor 0-7 1", "rollout 0-7 2"]),
    ("async_2x8", (4, 4), ["actor 0-3 1", "actor 4-7 2", "rollout 0-3 3", "rollout 4-7 4"]),
])  # fmt: skip
def test_each_rank_has_a_card_of_a_node(name: str, nodes: tuple[int, int], found: list[str]) -> None:
    cards = EIGHT if nodes[1] == 8 else "0 1 2 3"
    assert [" ".join(row) for row in table(name, nodes)] == [f"{row} {cards}" for row in found]


def test_without_nodes_one_has_as_many_cards_as_the_run_takes() -> None:
    sixteen = " ".join(map(str, range(8, 16)))
    assert table("async_2x8", None) == [["actor", "0-7", "1", EIGHT], ["rollout", "0-7", "1", sixteen]]
    assert table("colocated_8", None)[1] == ["rollout", "0-3", "1", "0,1 2,3 4,5 6,7"]
    assert table("split_4_4", (1, 8))[1] == ["rollout", "0-3", "1", "4 5 6 7"]


REFUSED: dict[str, tuple[str, tuple[int, int] | None, str, str]] = {
    "a replica over nodes": ("async_2x8", (4, 8), "vllm.tensor_parallel=16 vllm.replicas=1",
                             r"vllm\.tensor_parallel = 16: these GPUs are on one node, and the largest has 8\. Lower it"),
    "nine colocated": ("colocated_8", (1, 8), "cluster.actors=9 vllm.replicas=9 vllm.tensor_parallel=1",
                       r"cluster\.actors = 9 take 9 GPUs, and 8 are left"),
    "colocated over nodes": ("colocated_8", (4, 4), "cluster.actors=8 vllm.replicas=1 vllm.tensor_parallel=8",
                             r"vllm\.tensor_parallel = 8: these GPUs are on one node, and the largest has 4"),
    "too few cards": ("async_2x8", (1, 8), "", r"cluster\.actors = 8 and vllm\.replicas = 8 take 16 GPUs, and 8 are left"),
    "too few nodes": ("multi_node", (2, 8), "", r"the pools do not fit the cluster"),
    "a pool of more nodes": ("multi_node", (1, 64), "", r"cluster\.pools\.train\.nodes = 2, and the number of nodes is 1"),
    "one node, not said": ("multi_node", None, "", r"cluster\.pools\.train\.nodes = 2, .* is 1\. Lower it, add nodes, or plan "
                                                   r"for more \(--nodes 2x8\)"),
    "a wide pool": ("multi_node", (8, 4), "", r"\.train\.per_node = 8, each with 1 GPUs, and the largest node has 4\. Lower it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_place_is_refused_by_its_key(case: str) -> None:
    name, nodes, given, said = REFUSED[case]
    with pytest.raises(ResourceError, match=said):
        table(name, nodes, *given.split())


def test_the_command_prints_who_is_where_and_refuses_nodes_that_are_none(agentrl: Agentrl) -> None:
    asked = ["train", str(ROOT / "configs/recipes/qwen3_0.6b.toml"), "--dry-run"]
    said = agentrl(*asked, "--gpu-memory", "80", "--nodes", "2x8").out
    assert "actor    0      node 1  0" in said and "planned for --nodes 2x8, of whose 16 cards 1 are used" in said
    assert "model        Qwen/Qwen3-0.6B, computed in bfloat16" in said
    for wrong, problem in (("4*8", "expected nodes x cards of each"), ("0x8", "expected nodes"), ("4x8", "Add --gpu-memory")):
        assert problem in agentrl(*asked, "--nodes", wrong, code=2).err
    assert "--nodes: it is for planning" in agentrl(*asked[:2], "--nodes", "4x8", code=2).err


PLAN = """
import contextlib, io, sys
from agentrl.cli.main import main
for config in sys.argv[1:]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["train", config, "--dry-run", "--gpu-memory", "80", "--nodes", "4x8"])
    print(code, config, said.getvalue().strip().splitlines()[0], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [["gpu/multi_node"], pytest.param([], marks=proof)], ids=["some", "all"])
def test_each_packaged_config_has_a_plan_without_a_network(tmp_path: Path, names: list[str]) -> None:
    """With an empty home, and a hub that is not asked."""
    every = (ROOT / "configs").rglob("*.toml")  # of configs/results model and benchmark are on the user's disk
    found = sorted(path for path in every if path.name != "base.toml" and path.parent.name != "results")
    configs = [str(path) for path in found if not names or str(path.relative_to(ROOT / "configs").with_suffix("")) in names]
    env: dict[str, Any] = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    made = subprocess.run([sys.executable, "-c", PLAN, *configs], env=env, cwd=tmp_path, text=True, capture_output=True)
    lines = made.stdout.splitlines()
    assert [line for line in lines if not line.startswith("0 ")] == [] and len(lines) == len(configs), made.stderr[-2000:]
