"""The teacher every environment with gold turns has."""

import json
import random
import sys
from pathlib import Path

import pytest

from agentrl.data.trajectory import Message
from agentrl.env import ToolEnv
from agentrl.env.authoring import GIVES_UP, GoldTeacher
from agentrl.env.catalog import EnvRef, find_env, make_env
from agentrl.rollout.warm_start import Transcripts
from agentrl.utils.errors import ConfigError
from tests.shelf.conversation_probes import teacher_success

TURNS = [Message("assistant", text) for text in ("one", "two", "three")]


def said(stop: float, seed: int) -> list[str]:
    teacher = GoldTeacher(TURNS, random.Random(seed), stop=stop)
    return [turn.content for turn in iter(lambda: teacher.act([]), None)]


def test_it_plays_gold_or_gives_up_as_often_as_asked() -> None:
    assert said(0.0, 0) == ["one", "two", "three"]
    assert said(1.0, 0) == ["one", GIVES_UP]
    played = [said(0.5, seed) for seed in range(2000)]
    assert all(words[0] == "one" for words in played)
    whole = sum(words[-1] == "three" for words in played) / len(played)
    assert whole == pytest.approx(0.25, abs=0.04)
    with pytest.raises(ValueError, match=r"stop = 2"):
        GoldTeacher(TURNS, random.Random(0), stop=2)


def test_it_is_the_default_of_an_environment() -> None:
    env = make_env("mcp", level=1)
    assert type(env).teacher is ToolEnv.teacher
    assert teacher_success(env, 1) == 1.0
    with pytest.raises(TypeError):
        env.teacher(env.task, random.Random(0), wrong=0.1)


async def test_without_gold_turns_a_warm_start_says_so(tmp_path: Path) -> None:
    """A task file without gold calls: an answer to compare with, but nobody to learn from."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"split": "train", "prompt": "how many?", "gold": {"answer": 3}}))
    server = Path(str(find_env("mcp").path)).parent / "server.py"
    ref = EnvRef("mcp", {"command": [sys.executable, str(server)], "tasks": str(tasks)})
    with pytest.raises(ConfigError, match=r"has no gold calls, so \[sft\] cannot warm"):
        await Transcripts(ref, None, {}, 0).take(0, 1)  # type: ignore[arg-type]  # it fails before a renderer is needed


@pytest.mark.parametrize(("params", "told"), [({"wrong": 0.1}, "'wrong'"), ({"stop": 7}, "0..1")])
async def test_a_parameter_that_no_teacher_takes_is_a_mistake_in_the_config(params: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=f"sft.teacher.*{told}"):
        await Transcripts(EnvRef("mcp"), None, params, 0).take(0, 1)  # type: ignore[arg-type]


SHARES = {
    "color_square": ["wrong"], "errands": ["skip", "stop"], "function_calling": ["wrong", "fewer", "abstain"],
    "key_value": ["wrong", "malformed", "stop"], "python": ["wrong", "hasty", "broken"], "search": ["wrong", "stop"],
    "service_desk": ["careless", "wrong", "stop"], "sql": ["wrong", "typo", "hasty"], "workspace": ["skip", "hasty", "stop"],
}  # fmt: skip


@pytest.mark.parametrize("name", SHARES)
async def test_a_share_outside_of_0_to_1_is_named(name: str) -> None:
    for share in SHARES[name]:
        for value in (1.5, -0.1, float("nan")):
            with pytest.raises(ConfigError, match=f"sft.teacher = .*: teacher: {share} = {value}; expected a share"):
                await Transcripts(EnvRef(name), None, {share: value}, 0).take(0, 1)  # type: ignore[arg-type]
