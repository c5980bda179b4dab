"""A run that is broken off and resumed equals the unbroken one to the digit, next to what else has a state: a curriculum, a
mixture, and a suite's user rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import proof
from tests.e2e.inside import episodes, updates
from tests.run.broken_off import TINY, WAYS, assert_same, begun, broken_and_resumed, in_process

STEPS, AT = 6, 3
ROOT = Path(__file__).parents[2]
BFCL = ROOT / "tests/shelf/bfcl_toy/bfcl_eval"
STAGES = "{stages=[{calls=2},{calls=4},{calls=6}],threshold=0.5,window=3,review=0.3}"
CASES: dict[str, list[str]] = {
    "staged": [f"rollout.sampler={{name='staged',args={STAGES}}}"],
    "weighted mixture": ["rollout.mixture={name='by_success',args={floor=0.2,decay=0.7}}"],
    "user rounds": [
        "env.id=bfcl",
        f"env.params={{category=['multi_turn_base','multi_turn_miss_func'],source='{BFCL}'}}",
        "eval.split=train",
    ],
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rewards that differ, and a success that a model that knows nothing has at times: a digit in its answer."""
    folder = tmp_path_factory.mktemp("specs")
    short = json.loads((ROOT / "tests/e2e/short.json").read_text())
    digit = {"use": "format.regex", "args": {"pattern": "[0-9]", "match": "search"}}
    suite = json.loads((ROOT / "rewards/bfcl.json").read_text())["root"]
    for name, success in (("digit", digit), ("suite", suite)):
        (folder / f"{name}.json").write_text(json.dumps(short | {"name": name, "success": success}))
    return folder


def overrides(case: str, specs: Path) -> list[str]:
    more = [*TINY, f"steps={STEPS}", "eval.every=2", "eval.tasks=2", *CASES[case]]
    digit = specs / "digit.json"
    if case == "weighted mixture":
        one = "{{name='{}', id='key_value', reward='{}', params={{calls={}}}, limits={{max_turns={}}}}}"
        return [*more, f"env=[{one.format('few', digit, 2, 3)}, {one.format('many', digit, 6, 9)}]"]
    more.append(f"env.reward={specs / 'suite.json' if case == 'user rounds' else digit}")
    return more


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def unbroken(case: str, words: list[str], wholes: dict[str, Path], out: Path) -> Path:
    if case not in wholes:
        out.mkdir()
        assert in_process(begun, str(out), "whole", words, "", 0, code_file=out / "code") == 0
        wholes[case] = out / "whole"
    return wholes[case]


QUICK = ("user rounds", "ctrl-c")
PAIRS = [(case, way) for case in CASES for way in WAYS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("case", "way"), [pair if pair == QUICK else pytest.param(*pair, marks=proof) for pair in PAIRS])
def test_it_equals_the_unbroken_run(case: str, way: str, specs: Path, wholes: dict[str, Path], tmp_path: Path) -> None:
    words = overrides(case, specs)
    whole = unbroken(case, words, wholes, tmp_path / "unbroken")
    run = broken_and_resumed(tmp_path, "broken", words, way, AT)
    assert_same(run, whole)
    SHOWN[case](whole)


def in_a_stage(run: Path) -> None:
    stages = [row["sampler/stage"] for row in updates(run)]
    assert stages[0] == 0.0 and stages[-1] > 0.0, stages


def shares_moved(run: Path) -> None:
    shares = [row["mixture/few/share"] for row in updates(run)]
    assert len(set(shares)) > 2, shares


def rounds_played(run: Path) -> None:
    users = [sum(message.role == "user" for message in episode.messages) for episode in episodes(run, STEPS)]
    assert max(users) > 1, users


SHOWN: dict[str, Any] = {
    "staged": in_a_stage,
    "weighted mixture": shares_moved,
    "user rounds": rounds_played,
}
