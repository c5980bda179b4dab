"""Faults planted in real runs: each is named in the log once, and in the summary; a run without them is not spoken of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from agentrl.engines.weights.base import ROUTES, Bucket, Named, Offer
from agentrl.engines.weights.host_routes import MemoryReceiver, MemorySender
from agentrl.env.base import ToolEnv
from agentrl.env.spaces import Observation
from agentrl.env.wrappers import WRAPPERS, ToolWrapper
from agentrl.run.checks import check_config
from agentrl.run.driver import execute
from agentrl.run.folder import RunFolder
from tests.conftest import proof
from tests.e2e.inside import config_of, logging_kept, updates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WARM = ("sft.max_steps=200", "sft.min_steps=200", "sft.gate_every=200", "sft.gate=0.0", "sft.gate_tasks=4")
"""A model that makes calls, most of which are wrong."""


class OldReceiver(MemoryReceiver):
    """Delivers the weights of the first publish, whatever is published: the engine counts versions, and samples with old ones."""

    def receive(self, bucket: Bucket) -> list[Named]:
        first: dict[str, torch.Tensor] = self.__dict__.setdefault("first", {})
        return [(name, first.setdefault(name, tensor.clone())) for name, tensor in super().receive(bucket)]


@ROUTES.register("old_weights", traits={"one_process"})
class OldWeights(MemorySender):
    receiver = OldReceiver

    def open(self) -> Offer:
        return replace(super().open(), route="old_weights")


@WRAPPERS.register("two_start")
class TwoStart(ToolWrapper):
    """Of each task that is played in training, the environment starts twice and no more."""

    started: ClassVar[Counter[str]] = Counter()

    def __init__(self, env: ToolEnv) -> None:
        super().__init__(env)

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        begun = await super().areset(seed=seed, options=options)
        self.started[self.task.id] += 1
        if self.started[self.task.id] > 2 and self.task.split == "train":
            raise RuntimeError("no third connection")
        return begun


def ran(out: Path, *overrides: str, code: int = 0) -> tuple[Path, dict[str, Any], Counter[str]]:
    """The folder of a run, its summary, and how often its log warns of each finding."""
    config = config_of(out, "run", *overrides)
    with logging_kept():
        check_config(config)
        folder = RunFolder.create(config)
        assert execute(config, folder, resumed=False) == code
    summary = json.loads(folder.summary.read_text())
    text = folder.log.read_text()
    return (
        folder.path,
        summary,
        Counter({f["name"]: text.count(f"{f['name']}, from update") for f in summary.get("findings", [])}),
    )


def spec(out: Path, root: dict[str, Any]) -> str:
    """A reward that has nothing to do with success."""
    success = {"use": "number.close", "args": {"expect": {"$": "/task/gold/answer"}}}
    (out / "paid.json").write_text(json.dumps({"agentrl_reward": 1, "name": "paid", "success": success, "root": root}))
    return f"env.reward={out / 'paid.json'}"


@pytest.fixture(autouse=True)
def _no_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_SURVEY", "0")  # limits are tiny


def test_an_engine_that_keeps_old_weights_is_named(tmp_path: Path) -> None:
    more = ("steps=8", "optim.lr=0.02")
    run, summary, said = ran(tmp_path, "weights.route=old_weights", *more)
    [finding] = summary["findings"]
    assert said == {"weights not delivered": 1} and (finding["since"], finding["until"]) == (2, None)
    assert summary["status"] == "done" and "weights.route" in finding["advice"] and "mismatch_kl is" in finding["cause"]
    for row in updates(run)[1:]:
        assert row["mismatch_kl"] > 0.01 and row["staleness_max"] == 0, "by its versions the engine is up to date"
    (tmp_path / "fine").mkdir()
    assert "findings" not in ran(tmp_path / "fine", "weights.route=memory", *more)[1]


def test_a_reward_that_pays_silence_ends_in_a_collapse_with_three_signs(tmp_path: Path) -> None:
    paid = spec(tmp_path, {"op": "sum", "of": [{"use": "cost.tokens", "args": {"max": 120}, "weight": -1.0}]})
    more = (
        "steps=20",
        "rollout.group_size=8",
        "optim.lr=3e-2",
        "health.lint=false",
    )  # a rate at which each of three seeds collapses
    run, summary, said = ran(tmp_path, *WARM, paid, *more, code=1)
    assert said == {"tool calls vanished": 1, "one answer for all": 1, "entropy collapsed": 1}
    last = updates(run)[-1]
    assert (last["tool_calls"], last["same_answer"]) == (0.0, 1.0) and last["entropy"] < 0.05
    assert summary["status"] == "trained nothing", "nothing varies any more; that is the run's end, and these are why"


@proof
def test_a_reward_that_pays_length_ends_in_loops(tmp_path: Path) -> None:
    paid = spec(tmp_path, {"use": "cost.tokens", "args": {"max": 400}})
    more = ("steps=12", "rollout.group_size=8", "rollout.max_turn_tokens=60", "optim.lr=1e-2", "health.lint=false")
    _, summary, said = ran(tmp_path, *WARM, paid, *more)
    # The loops of one seed are calls, of another the same answer for all.
    assert said["text repeats itself"] == 1 and summary["status"] == "done"


def test_groups_that_keep_two_members_of_eight_are_named_with_the_first_fault(tmp_path: Path) -> None:
    more = ("env.wrappers=[{name='two_start'}]", "rollout.group_size=8", "rollout.retries=0", "eval.tasks=2", "steps=6")
    _, summary, said = ran(tmp_path, *more, "health.max_unscored=0.9")
    [finding] = summary["findings"]
    assert said == {"thin baselines": 1} and "no third connection" in finding["cause"] and summary["status"] == "done"
    assert "thin_groups is 1 " in finding["cause"] and "min_survivors" in finding["advice"]
