"""A run that is broken off and resumed equals the unbroken one to the digit, next to what else has a state."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from tests.conftest import proof
from tests.contrib.judges.judge_models import build
from tests.contrib.remote_envs.served import VARIABLE, served
from tests.e2e.inside import episodes, updates
from tests.run import damage
from tests.run.broken_off import TINY, WAYS, assert_same, begun, broken_and_resumed, command, in_process

STEPS, AT = 6, 3
ROOT = Path(__file__).parents[2]
BFCL = ROOT / "tests/contrib/suites/bfcl_toy/bfcl_eval"
STAGES = "{stages=[{calls=2},{calls=4},{calls=6}],threshold=0.5,window=3,review=0.3}"
ROUNDS = [
    "env.id=bfcl",
    f"env.params={{category=['multi_turn_base','multi_turn_miss_func'],source='{BFCL}'}}",
    "eval.split=train",
]
CASES: dict[str, list[str]] = {
    "staged": [f"rollout.sampler={{name='staged',args={STAGES}}}"],
    "weighted mixture": ["rollout.mixture={name='by_success',args={floor=0.2,decay=0.7}}"],
    "user rounds": ROUNDS,
    # Users go on whatever is answered, so there are turns to branch at. Without the cache as below.
    "branches": [*ROUNDS, "rollout.branch={roots=2}", "algorithm.advantage={name='tree'}", "engine_args={cache=false}"],
    "rotation": ["keep.trajectories=2"],
    "experience": ["algorithm.experience={rare=0.9,share=0.5,size=5,max_age=3}", "algorithm.demonstrations={}",
     "algorithm.minibatch=4"],
    "moving reference": ["algorithm.kl={coef=0.1,reference='moving',decay=0.75}", "optim.lr=1e-3", "checkpoint.keep=9"],
    "samplers": ["rollout.groups=8", "rollout.group_size=2"],
    "start": ["rollout.start={left=1,step=1,threshold=0.4,window=2,whole=0.3}",
     "env.params={calls=[3,5],set_share=0.5}", "rollout.group_size=2", "rollout.groups=6", "rollout.max_turns=7",
     "rollout.max_turn_tokens=12"],
    # One episode at a time: which requests share a step of the engine depends on when the server answers.
    "remote": ["rollout.max_episodes=1", "rollout.group_size=2", f"env.token_env={VARIABLE}"],
    "own judge": ["rollout.max_turn_tokens=8", "reward.judge.retries=0"],
    "own judge, workers": ["cluster.backend=ray", "rollout.workers=2", "engine_args={cache=false}", "rollout.max_turn_tokens=8"],
    # Without the cache the last digits do not depend on which requests share a step.
    "workers": ["cluster.backend=ray", "rollout.workers=2", "engine_args={cache=false}"],
}  # fmt: skip
SAMPLERS = {
    "success_weighted": "{buckets=[{calls=2},{calls=5}]}",
    "staged": "{stages=[{calls=2},{calls=4},{calls=6}],threshold=0.5,window=1}",
}
CHANGED = {"workers": ["rollout.workers=1"], "own judge, workers": ["rollout.workers=1"]}
"""What a resume gives in place of what the run began with."""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rewards that differ, and a success that a model that knows nothing has at times: a digit in its answer."""
    folder = tmp_path_factory.mktemp("specs")
    short = json.loads((ROOT / "tests/e2e/short.json").read_text())
    digit = {"use": "format.regex", "args": {"pattern": "[0-9]", "match": "search"}}
    suite = json.loads((ROOT / "rewards/bfcl.json").read_text())["root"]
    for name, success in (("digit", digit), ("suite", suite)):
        (folder / f"{name}.json").write_text(json.dumps(short | {"name": name, "success": success}))
    judge = {"use": "judge", "args": {"model": "engine:strict", "prompt": "{answer}", "max_tokens": 64}}
    (folder / "judged.json").write_text(json.dumps({"agentrl_reward": 1, "name": "judged", "success": digit, "root": judge}))
    build(folder / "judge", 1)
    return folder


PLAIN = {"own judge": "", "own judge, workers": ",engine_args={cache=false}"}


def overrides(case: str, specs: Path, url: str) -> list[str]:
    more = [*TINY, f"steps={STEPS}", "eval.every=2", "eval.tasks=2", *CASES[case]]
    digit = specs / "digit.json"
    if case == "remote":
        more.append(f"env.url={url}")
    if case == "weighted mixture":
        one = "{{name='{}', id='key_value', reward='{}', params={{calls={}}}, limits={{max_turns={}}}}}"
        return [*more, f"env=[{one.format('few', digit, 2, 3)}, {one.format('many', digit, 6, 9)}]"]
    if case == "samplers":
        one = "{{name='{0}', id='key_value', reward='{1}', sampler={{name='{0}',args={2}}}}}"
        return [*more, f"env=[{', '.join(one.format(name, digit, args) for name, args in SAMPLERS.items())}]"]
    if case.startswith("own judge"):
        return [
            *more,
            f"env.reward={specs / 'judged.json'}",
            f"reward.judge.engines.strict={{path='{specs / 'judge'}'{PLAIN[case]}}}",
        ]
    more.append(f"env.reward={specs / 'suite.json' if case in ('user rounds', 'branches') else digit}")
    return more


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    """Where the environment is served before and after a run is broken off."""
    with served("key_value") as first, served("key_value") as second:
        yield first.url, second.url


QUICK = ("user rounds", "ctrl-c")
PAIRS = [(case, way) for case in CASES for way in WAYS]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("case", "way"), [pair if pair == QUICK else pytest.param(*pair, marks=proof) for pair in PAIRS])
def test_it_equals_the_unbroken_run(
    case: str, way: str, specs: Path, wholes: dict[str, Path], urls: tuple[str, str], tmp_path: Path
) -> None:
    words = overrides(case, specs, urls[0])
    out = tmp_path / "unbroken"
    if case not in wholes:
        out.mkdir()
        assert in_process(begun, str(out), "whole", words, "", 0, code_file=out / "code") == 0
        wholes[case] = out / "whole"
    whole = wholes[case]
    changed = [f"env.url={urls[1]}"] if case == "remote" else CHANGED.get(case, [])
    run = broken_and_resumed(tmp_path, "broken", words, way, AT, changed)
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


def branched(run: Path) -> None:
    turns = [episode.branch_turn for episode in episodes(run, STEPS) if episode.parent is not None]
    assert turns and min(turns) > 0, turns


def rotated(run: Path) -> None:
    kept = {int(path.stem.rpartition("_")[2]) for path in (run / "trajectories").glob("step_*.jsonl")}
    assert kept == {STEPS - 1, STEPS}
    shown = damage.command(["show", str(run), "--json"])
    steps = {file["step"] for file in json.loads(shown.said)["steps"] if file["phase"] == "train"}
    assert steps == kept
    score = ["reward", "score", str(load_config(run / "config.toml").envs[0].reward)]
    rescored = damage.command([*score, str(run / f"trajectories/step_{STEPS:06d}.jsonl")])
    values = [row["value"] for row in map(json.loads, re.findall(r"(?m)^{.*$", rescored.said))]
    assert rescored.code == 0 and values == [episode.reward for episode in episodes(run, STEPS)], rescored.said


def played_elsewhere(run: Path) -> None:
    assert "url = " in (run / "config.toml").read_text()


def by_workers(run: Path) -> None:
    assert any(key.startswith("rollout/worker") for row in updates(run) for key in row), updates(run)[-1]


def kept_and_shown(run: Path) -> None:
    rows = updates(run)
    assert rows[0]["experience/episodes"] == 0 and rows[AT]["experience/episodes"] > 0, rows[AT]  # the first after the resume
    assert {row["optimizer_steps"] for row in rows} == {2}  # as without what is added
    ages = [row["experience/age_max"] for row in rows[2:] if row["experience/episodes"]]  # none is drawn if none is kept
    assert max(ages) in (2, 3) and any(row["demonstrations/episodes"] for row in rows), rows
    assert (run / f"checkpoints/step_{STEPS:06d}/experience.safetensors").is_file()


def followed(run: Path) -> None:
    """By its saved policies; that of the start is not saved, so the recursion begins with the first reference."""
    rows, found = updates(run), [saved(run / f"checkpoints/step_{step:06d}") for step in range(1, STEPS + 1)]
    assert rows[0]["kl_reference"] == 0 and min(row["kl_reference"] for row in rows[1:]) > 1e-7, rows
    for (_, before), (policy, now) in pairwise(found):
        for name in before:
            assert float((now[name] - 0.75 * before[name] - 0.25 * policy[name]).abs().max()) < 5e-7, name
    policy, last = found[-1]
    assert max(float((last[name] - policy[name]).abs().max()) for name in last) > 1e-5


def learned_by_each(run: Path) -> None:
    """Each has moved by the break, and moves on after it; `staged` goes up and back."""
    rows = updates(run)

    def seen(name: str) -> list[float]:
        return [row[f"sampler/{name}"] for row in rows]

    found = seen("success_weighted/calls=5/share")
    assert len({found[0], *found[AT:]}) > 2, found
    stages = seen("staged/stage")
    assert {later - stage for stage, later in pairwise(stages)} >= {1.0, -1.0} and len(set(stages[AT:])) > 1, stages


def begun_later(run: Path) -> None:
    """Fewer calls are given as time goes by, to tasks of each length by itself."""
    rows = updates(run)
    left = {calls: [row.get(f"sampler/left/{calls}", 1.0) for row in rows] for calls in (3, 4, 5)}
    assert all(values == sorted(values) for values in left.values()), left
    assert any(values[AT] < values[-1] for values in left.values()) and sum(map(len, map(set, left.values()))) > 4, left
    assert len({row["given"] for row in rows}) > 2, rows


def saved(checkpoint: Path) -> list[dict[str, Any]]:
    """The weights of the policy and of the reference, in float64."""
    from agentrl.trainer.train_state import saved_tensors

    parts = [saved_tensors(checkpoint / role) for role in ("actor", "reference")]
    return [{name: read(name).double() for name in names if name.startswith("model.")} for names, read in parts]


def judged(run: Path) -> None:
    rows = updates(run)
    assert min(row["judge/strict/verdicts"] for row in rows) >= 8 and {row["judge/strict/failed"] for row in rows} == {0}
    assert len({episode.reward for episode in episodes(run, STEPS)}) > 1


SHOWN: dict[str, Any] = {
    "own judge": judged, "own judge, workers": judged, "moving reference": followed, "experience": kept_and_shown,
    "staged": in_a_stage, "weighted mixture": shares_moved, "user rounds": rounds_played, "branches": branched,
    "rotation": rotated, "samplers": learned_by_each, "start": begun_later, "remote": played_elsewhere, "workers": by_workers,
}  # fmt: skip


MAY = ["steps=3", "eval.every=2", "trajectories_every=1", "keep={trajectories=9}", "rollout.max_episodes=8"]
MAY_NOT = {"rollout.groups": "16", "rollout.group_size": "8", "optim.name": "sgd", "seed": "9", "rollout.temperature": "0.9",
           "env.params.calls": "3"}  # fmt: skip


@proof
@pytest.mark.timeout(900)
def test_what_may_change_is_in_the_config_that_ran_and_what_may_not_is_refused_by_name(tmp_path: Path) -> None:
    assert in_process(begun, str(tmp_path), "run", [*TINY, "steps=2", "eval.tasks=2"], "", 0, code_file=tmp_path / "code") == 0
    run = tmp_path / "run"
    before, metrics = (run / "config.toml").read_text(), (run / "metrics.jsonl").read_bytes()
    for key, value in MAY_NOT.items():
        refused = damage.command(["train", "--resume", str(run), f"{key}={value}"])
        shown = value if value[0].isdigit() else f'"{value}"'
        assert refused.code == 2 and f"{key} was " in refused.said and f"is {shown}" in refused.said, refused.said
    assert (run / "config.toml").read_text() == before and (run / "metrics.jsonl").read_bytes() == metrics
    assert in_process(command, ["train", "--resume", str(run), *MAY], code_file=tmp_path / "code") == 0
    now = load_config(run / "config.toml")
    assert (now.steps, now.eval.every, now.keep.trajectories, now.rollout.max_episodes) == (3, 2, 9, 8)
    assert (run / "config_history/until_000002.toml").read_text() == before
    assert [row["step"] for row in updates(run)] == [1, 2, 3]
