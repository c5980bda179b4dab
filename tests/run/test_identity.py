"""Results are continued by their own config only: what differs is named, with both values, before anything is played."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.schema import InitModelConfig
from agentrl.trainer.pretrained import init_model
from tests.contrib.mcp.test_mcp import SERVER
from tests.rollout.loopback import Loopback, solve
from tests.run.test_api_eval import evaluate
from tests.run.test_api_reasoning import elsewhere as elsewhere  # a fixture


def refused(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    message = capsys.readouterr().err
    for part in parts:
        assert part in message
    assert "Traceback" not in message


def shop(prefix: str, key: str = "sesame") -> str:
    command = json.dumps([sys.executable, "shop.py"])
    return f'tools.mcp.shop={{command={command},prefix="{prefix}",tools=["count"],env={{SHOP_KEY="{key}"}}}}'


def test_other_tools_of_a_server_are_another_evaluation_and_no_key_is_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    Path("shop.py").write_text(SERVER)
    with Loopback(solve) as server:
        evaluate(server, "-n", "1", shop("a_"))
        evaluate(server, "-n", "1", shop("b_"), code=2)
        refused(capsys, "evaluation of something else", 'tools.mcp.shop.prefix was "a_", is "b_"')
        evaluate(server, "-n", "1", shop("a_", key="mustard"), code=2)
        refused(capsys, "tools.mcp.shop.env.SHOP_KEY was sha256:", "(a digest)")
        evaluate(server, "-n", "1", shop("a_"))
    for file in (path for path in Path("out").rglob("*") if path.is_file()):
        assert "sesame" not in file.read_text() and "shop.py" not in file.read_text(), file


def test_the_model_that_plays_is_the_one_of_the_identity(capsys: pytest.CaptureFixture[str]) -> None:
    """An override of `model.path` is what is asked, whatever --model says."""
    with Loopback(solve) as server:
        evaluate(server, "-n", "1", "model.path=api:openai/other")
        assert {body["model"] for body in server.requests} == {"other"}
        evaluate(server, "-n", "1", code=2)
        refused(capsys, 'model.path was "api:openai/other", is "api:openai/test"')


def test_a_model_or_an_environment_that_was_rewritten_is_another_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was started over leaves other weights under the old name: episodes of both are no one's evaluation."""
    tiny = InitModelConfig(layers=1, hidden=32, mlp=32, heads=2, kv_heads=1, head_dim=16, context=1024)
    init_model(tiny, Path("model"), seed=0)
    assert main(["env", "new", "mine"]) == 0
    short = ["engine=embedded", "rollout.max_turns=2", "rollout.max_turn_tokens=4", "--out", "out"]
    roll = ["rollout", "mine", "--model", "model", *short]
    assert main([*roll, "-n", "1"]) == 0
    shutil.rmtree("model")
    init_model(tiny, Path("model"), seed=1)
    assert main([*roll, "-n", "2"]) == 2
    refused(capsys, "rollout of something else", "the files of model.path was sha256:", "use another --out")
    shutil.rmtree("model")
    init_model(tiny, Path("model"), seed=0)
    assert main([*roll, "-n", "2"]) == 0
    source = Path("envs/mine/env.py")
    source.write_text(source.read_text().replace("Look each one up", "Look them up"))
    assert main([*roll, "-n", "3"]) == 2
    refused(capsys, "rollout of something else", "the files of env.id was sha256:")
    assert len(Path("out/trajectories.jsonl").read_text().splitlines()) == 2


def test_all_that_differs_is_named_and_what_cannot_matter_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    with Loopback(solve) as server:
        evaluate(server, "-n", "1")
        asked = len(server.requests)
        evaluate(server, "-n", "1", "rollout.max_episodes=3", "api.retries=7", "eval.tasks=5")
        for free in ("optim.lr=0.5", "rollout.temperature=0.5", "out=x"):
            evaluate(server, "-n", "1", free, code=2)
            refused(capsys, f"{free.partition('=')[0]}: agentrl eval does not read it")
        evaluate(server, "-n", "1", "rollout.max_turns=5", "--seed", "4", "--split", "train", "env.params.set_share=1", code=2)
        refused(
            capsys,
            "out: it holds an evaluation of something else (out/eval.json): --split was",
            '--split was "heldout", is "train"',
            "env.params.set_share was 0, is 1",
            "rollout.max_turns was 8, is 5",
            "seed was 0, is 4",
            "use another --out",
        )
        assert len(server.requests) == asked


def test_a_folder_without_an_identity_is_not_gone_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    with Loopback(solve) as server:
        evaluate(server, "-n", "1")
        Path("out/eval.json").write_text(json.dumps({"env": {"id": "key_value"}, "model": "api:openai/test"}))
        evaluate(server, "-n", "1", code=2)
        refused(capsys, "out/eval.json", "its values are not recorded; use another --out")
