"""The table of metric names: it knows what the code logs, and the page is made from it. Rows of real runs: tests/e2e/runs.py."""

import re
from pathlib import Path

import pytest
import torch

from agentrl.cli.main import main
from agentrl.run.metrics import PHASES, info_of, metrics_table
from agentrl.trainer.algorithms import policy_loss
from agentrl.trainer.algorithms.base import LossInput
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from tests.conftest import Agentrl
from tests.run.made_folders import unknown_keys

PACKAGE = Path(__file__).resolve().parents[2] / "agentrl"


@pytest.mark.parametrize(("key", "name"), [
    ("term/tests_passed", "term/<id>"),
    ("n/term/tests_passed", "n/<key>"),
    ("env/a.b/term/x", "term/<id>"),
    ("env/two words/n/metric/y", "n/<key>"),
    ("env/a/groups_failed", "env/<name>/groups_<state>"),
    ("env/a/loss", None),  # an update is of all environments
    ("rollout/worker_12/turn_ms", "rollout/worker_<i>/turn_ms"),
    ("rollout/worker_a/turn_ms", None),
    ('sampler/level=2,kind="x"/share', "sampler/<arm>/share"),
    ("sampler/sums/epoch", "sampler/<env>/<key>"),
    ("terms", None),
])  # fmt: skip
def test_a_key_is_found_by_its_name_or_pattern(key: str, name: str | None) -> None:
    found = info_of(key)
    assert (found and found.name) == name


def test_a_row_may_not_have_a_key_of_another_phase_or_of_none() -> None:
    assert unknown_keys({"step": 1, "phase": "train", "loss": 1.0, "entropi": 0.1}) == ["entropi"]
    assert unknown_keys({"step": 1, "phase": "eval", "loss": 1.0, "success": 0.1, "n/loss": 3}) == ["loss", "n/loss"]


def test_every_loss_logs_what_the_table_knows() -> None:
    """Also an entry for what no run of the suite uses."""
    seen = {}
    for entry in POLICY_LOSSES.own():
        ones = torch.full((3,), -0.5)
        given = LossInput(
            ones.clone().requires_grad_(), ones, ones, torch.tensor([1.0, -1.0, 0.5]), torch.ones(3, dtype=torch.bool),
            torch.tensor([0, 3]), torch.tensor([True, False, False]),
        )  # fmt: skip
        seen[entry.name] = set(policy_loss(entry.name, {})(given).metrics)
    assert {name: keys for name, keys in seen.items() if any(info_of(key) is None for key in keys)} == {}
    assert {"ratio", "clip_fraction"} <= seen["ppo_clip"]


def test_the_page_is_made_from_the_table(agentrl: Agentrl) -> None:
    rows = agentrl("metrics", "--markdown").out.splitlines()
    assert [entry.name for _, entry in metrics_table() if not any(row.startswith(f"| `{entry.name}` |") for row in rows)] == []
    names = [entry.name for _, entry in metrics_table() if entry.unit and entry.phases and set(entry.phases) <= PHASES.keys()]
    assert len(names) == len(set(names)) == len([*metrics_table()]) > 100, "whole entries, and no name twice"
    made = [re.findall(r"EngineStats\(.*?extra=\{(.*?)\}", file.read_text(), re.DOTALL) for file in PACKAGE.rglob("*.py")]
    extras = {name for found in made for text in found for name in re.findall(r'"(\w+)":', text)}
    assert len(extras) >= 5 and {name for name in extras if info_of(f"engine/{name}") is None} == set()


def test_the_command_finds_words(agentrl: Agentrl) -> None:
    assert agentrl("metrics", "term/anything").out.startswith("term/<id>  [reward; gate, before, train, eval, after]\n")
    assert main(["metrics", "no such thing"]) == 1
