"""Configs of the shelf: each passes the checks of a run; DAPO's overlong shaping is the paper's."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, Trajectory, Turn
from agentrl.run.assembly import scorer_of
from agentrl.run.checks import check_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_a_config_of_the_shelf_can_run(path: Path) -> None:
    assert all(note.startswith("reward spec") for note in check_config(load_config(path)))


def differing(frozen: Any, resolved: Any, key: str = "") -> list[str]:
    """Keys of `frozen` that `resolved` has otherwise; a key that is new since is no difference."""
    if isinstance(frozen, dict) and isinstance(resolved, dict) and key.split(".")[-1] not in ("args", "params", "teacher"):
        return [found for name in frozen for found in differing(frozen[name], resolved.get(name), f"{key}.{name}")]
    return [] if frozen == resolved else [f"{key}: {frozen!r} is now {resolved!r}"]


@pytest.mark.parametrize("name", ["quickstart", "ppo", "dapo"])
def test_what_a_config_of_the_shelf_resolves_to_is_frozen(name: str) -> None:
    """Their figures stand in the docs: no default that moves may change them."""
    frozen = json.loads((ROOT / "tests" / "config" / "shelf_resolved.json").read_text())[name]
    assert differing(frozen, load_config(ROOT / "configs" / f"{name}.toml").model_dump(mode="json")) == []


def answered(text: str, tokens: int) -> Trajectory:
    ledger = TokenLedger()
    ledger.append_context([5], 0)
    ledger.append_sampled([6] * tokens, [-1.0] * tokens, [0] * tokens, 0)
    message = Message("assistant", text)
    turn = Turn(0, message, ledger=0, end=tokens, sampled_tokens=tokens)
    return Trajectory("KeyValue-v0", Task("t", 0, gold={"answer": "7"}), messages=[message], turns=[turn], ledgers=[ledger])


@pytest.mark.parametrize(("tokens", "penalty"), [(3, 0.0), (96, 0.0), (104, -0.25), (112, -0.5), (128, -1.0), (500, -1.0)])
def test_overlong_answers_are_punished_softly(tokens: int, penalty: float) -> None:
    """(L_max - L_cache - length) / L_cache between the two, L_max = 128, L_cache = 32 (DAPO, equation 13)."""
    config = load_config(ROOT / "configs" / "dapo.toml")
    scorer = scorer_of(config)
    assert scorer.range[1] == 1.0
    assert scorer.score(answered("7", tokens)).value == pytest.approx(1 + penalty)
    assert scorer.score(answered("8", tokens)).value == pytest.approx(penalty)
