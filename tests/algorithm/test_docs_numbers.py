"""The example of every row in the tables of docs/algorithms.md, computed."""

import math
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.load import config_from
from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput, LossInput
from agentrl.trainer.algorithms.losses import CORRECTIONS, POLICY_LOSSES, value_loss
from agentrl.trainer.optim import usual_rate
from tests.sources import core_names

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def documented(name: str) -> list[float]:
    """The numbers after the last colon of the row `name` that has an example."""
    rows = [line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |") and re.search(r": [-\d., ]+ \|$", line)]
    assert len(rows) == 1, f"{name}: {len(rows)} rows with an example"
    return [float(number) for number in rows[0].rstrip(" |").rsplit(":", 1)[1].split(",")]


def group_of(
    rewards: list[float], lengths: list[int] | None = None, groups: list[int] | None = None, **more: Any
) -> AdvantageInput:
    """Members of one ledger each, all sampled, the reward on the last token."""
    lengths = lengths or [1] * len(rewards)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    tokens = torch.zeros(int(offsets[-1]), dtype=torch.float64)
    tokens[offsets[1:] - 1] = torch.tensor(rewards, dtype=torch.float64)
    given = {
        "token_rewards": tokens,
        "mask": torch.ones(len(tokens), dtype=torch.bool),
        "offsets": offsets,
        "group": torch.tensor(groups or [0] * len(rewards)),
        "reward": torch.tensor(rewards, dtype=torch.float64),
    }
    return AdvantageInput(**{**given, **more})


PLAIN = group_of([1, 0, 0])
LONG = group_of([1, 0, 0], [1, 1, 2])
TURNS = group_of(
    [3, 4],
    [2, 2],
    token_rewards=torch.tensor([1.0, 2, 0, 4]).double(),
    turns=torch.tensor([0, 1, 0, 1]),
    anchors=torch.tensor([5, 6, 5, 7]),
)
EPISODES: dict[str, tuple[AdvantageInput, dict[str, Any]]] = {
    "opo": (LONG, {}),
    "gpg": (group_of([1, 0, 0, 1, 1], groups=[0, 0, 0, 1, 1]), {}), "pass_at_k": (PLAIN, {"k": 2}),
    "max_variance": (group_of([1, 0, 0, 0]), {"k": 2}),
    "reinforce_pp": (group_of([1], [2]), {"gamma": 0.5}), "reinforce_pp_baseline": (LONG, {}),
    "gae": (group_of([1], [3], values=torch.tensor([0.1, 0.2, 0.3]).double()), {"whitened": False}),
    "gae_turns": (
        group_of([3], [3], turns=torch.tensor([0, 0, 1]), values=torch.tensor([0.2, 9, 0.4]).double()),
        {"gamma": 0.5, "whitened": False},
    ),
    "turn_returns": (TURNS, {"gamma": 0.5}), "gigpo": (TURNS, {"gamma": 1.0, "divide": False}),
    "remax": (group_of([1, 0], groups=[0, 0], baseline=torch.tensor([0.5, 0.5]).double()), {}),
    "multi_reward": (group_of([0, 0, 0], terms=torch.tensor([[1.0, 2], [0, 2], [0, 5]]).double()), {"terms": ["a", "b"]}),
}  # fmt: skip
"""What the example of a row is computed from, if it is another batch than PLAIN, or has arguments."""


@pytest.mark.parametrize("name", core_names(ADVANTAGES))
def test_advantages(name: str) -> None:
    batch, args = EPISODES.get(name, (PLAIN, {}))
    found = advantages(name, args)(batch).advantages
    if name in ("opo", "reinforce_pp_baseline"):
        found = found[batch.offsets[:-1]]  # one number a member
    assert found.tolist() == pytest.approx(documented(name), abs=1e-4)


def tokens_of(logs: list[float], a: list[float], *, at: float = 0.0, behave: float = 0.0, picked: bool = False) -> LossInput:
    """One row of log-ratios; `at` is log pi_old, `behave` log pi_behaviour, and the last token is picked, or none."""
    new, old = torch.tensor(logs).double() + at, torch.full((len(logs),), at).double()
    ends = torch.tensor([False] * (len(logs) - 1) + [picked])
    mask = torch.ones(len(logs), dtype=torch.bool)
    return LossInput(new, old, old + behave, torch.tensor(a).double(), mask, torch.tensor([0, len(logs)]), ends)


L = math.log
TOKENS: dict[str, tuple[LossInput, dict[str, Any]]] = {
    "ppo_clip": (tokens_of([L(1.5), L(0.5), L(4)], [1, -1, -1]), {"clip_high": 0.28}),
    "decoupled_ppo": (tokens_of([L(1.5)], [1], behave=-L(2)), {}),
    "gspo": (tokens_of([L(4), 0.0], [1, 1]), {"clip_high": 0.5}),
    "gmpo": (tokens_of([1, -0.2], [2, 2]), {}),
    "cispo": (tokens_of([L(9)], [1], at=-1 - L(9)), {}),
    "dppo": (tokens_of([L(1.5), L(0.9)], [1, 1], at=-L(2)), {}),
    "sapo": (tokens_of([L(2)], [-1]), {"tau_negative": 1.0}),
    "clip_cov": (tokens_of([L(1.1)] * 2, [1, 1], picked=True), {}),
    "kl_cov": (tokens_of([0.1] * 2, [1, 1], picked=True), {}),
    "reinforce": (tokens_of([0.0], [2], at=-0.5), {}),
}
"""What the example of a row is computed from, if it is not a ratio of 3 with A = 1."""


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_policy_losses(name: str) -> None:
    given, args = TOKENS.get(name, (tokens_of([L(3)], [1]), {}))
    assert policy_loss(name, args)(given).loss.tolist() == pytest.approx(documented(name), abs=1e-4)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_corrections(name: str) -> None:
    proximal, behave = torch.tensor([L(0.6), L(0.08)]).double(), torch.tensor([L(0.2), L(0.2)]).double()
    found = CORRECTIONS.bind(name, {})(proximal, behave, torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    assert found.tolist() == pytest.approx(documented(name), abs=1e-4)


def test_value_loss() -> None:
    one = torch.ones(1)
    assert "prediction 1, return 2, old value 0, clip 0.5: 1.125" in TEXT
    assert value_loss(one, torch.zeros(1), 2 * one, 0.5).item() == pytest.approx(1.125)


def test_the_column_of_our_defaults_is_what_a_config_gets() -> None:
    """docs/hyperparameters.md, next to other trainers: a real model, and an adapter where the two differ."""
    pages = Path(__file__).parents[2] / "docs"
    text = (pages / "hyperparameters.md").read_text(encoding="utf-8").partition("## Defaults next to other trainers")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["key", "agentrl", "verl", "TRL", "prime-rl", "why ours"] and all(map(all, rows[2:]))
    plain = config_from({"env": {"id": "key_value"}, "model": {"path": "m"}})
    adapter = config_from({"env": {"id": "key_value"}, "model": {"path": "m", "lora": {}}})
    clip = [parameter.default for parameter in signature(POLICY_LOSSES["ppo_clip"]).parameters.values()][1:]
    said = {
        "optim.lr": f"{usual_rate('rl', plain.model):g}, LoRA {usual_rate('rl', adapter.model):g}".replace("e-0", "e-"),
        "algorithm.loss": "ppo_clip: {:g}, {:g}, dual {:g}".format(*clip),
        "model.lora.modules": "linear layers" if adapter.model.lora.modules is None else "",
    }
    for key, ours, *_ in rows[2:]:
        value: Any = adapter
        for name in key.strip("`").split("."):
            value = getattr(value, name)
        number = isinstance(value, (int, float))
        shown = f"{value:g}" if number else "none" if value is None else getattr(value, "name", value)
        assert ours == said.get(key.strip("`"), shown), key
