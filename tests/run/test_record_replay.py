"""A recorded run plays again with everything turned off, to the byte; what differs is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.schema import InitModelConfig
from agentrl.rollout.tape import Recorded, RecordWriter, first_difference
from agentrl.trainer.pretrained import init_model
from agentrl.utils.errors import ReplayError
from tests.rollout.loopback import Loopback, solve
from tests.strict_json import read_strictly
from tests.view.folders import episode, run_folder

ENV = '''
"""A talk with a simulated user (a model), who is told a number by a tool of the environment."""
from agentrl.env import Message, Task, ToolCall, ToolEnv
from agentrl.env.users import ModelUser
from agentrl.utils.errors import ToolError
from agentrl.env import tool


class Talk(ToolEnv):
    id = "test/Talk-v0"
    reward = "judged.json"
    summary = "talk"

    def __init__(self, *, url: str = "", **base):
        super().__init__(**base)
        self.url = url

    def make_task(self, rng_seed, split):
        return Task(f"talk/{split}/{rng_seed}", rng_seed, split, {"number": rng_seed}, {"answer": str(rng_seed)})

    def prompt(self, task):
        return [Message("user", f"Say {task.data['number']}.")]

    async def setup(self, task):
        self.dialed = []
        self.user = Dials("a number", model="openai/user", api_base=self.url, api_key="none", max_retries=0)
        self.heard = 0

    @tool(by="user", inline=True)
    def dial(self, number: int) -> str:
        """dial"""
        if number > 100:
            raise ToolError("too high")
        self.dialed.append(number)
        return f"dialed {number}"

    async def user_reply(self, message):
        self.heard += len(message.content)
        return await super().user_reply(message)

    def state(self):
        odd = [float("inf"), float("nan"), 10**5000, chr(0xD800), chr(0xD83D) + chr(0xDE00), {float("nan"): 1}]
        return {"heard": self.heard, "dialed": self.dialed, "odd": odd}


class Dials(ModelUser):
    """Before it speaks it dials the number of characters that it heard."""

    async def reply(self, conversation):
        if conversation[-1].role == "tool":
            return await super().reply(conversation)
        return Message("user", "", (ToolCall("dial", {"number": len(conversation[-1].content)}),))
'''
JUDGED = {
    "agentrl_reward": 1,
    "name": "judged",
    "root": {"use": "judge", "id": "mark", "args": {"model": "openai/judge", "prompt": "Mark: {answer}", "range": [0, 10]}},
}
ARGS = ["rollout.max_turns=3", "rollout.max_turn_tokens=12"]


def people(body: dict[str, Any], number: int) -> str:
    """The simulated user and the judge: what they say hangs on what they hear, and on when they are asked."""
    heard = body["messages"][-1]["content"]
    if body["model"] == "judge":
        return json.dumps({"score": len(heard) % 11, "reason": f"question {number}"})
    return f"I heard {len(heard)} characters, as number {number}. Go on."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = InitModelConfig(layers=1, hidden=32, mlp=32, heads=2, kv_heads=1, head_dim=16, context=1024)
    return init_model(tiny, tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the run of an embedded engine, a user and a judge over HTTP, recorded; the server is gone, and so
    is the model."""
    place = tmp_path_factory.mktemp("recorded")
    talk = place / "envs" / "talk"
    talk.mkdir(parents=True)
    (talk / "env.py").write_text(ENV)
    (talk / "judged.json").write_text(json.dumps(JUDGED))
    copy = place / "model"
    shutil.copytree(model, copy)
    with pytest.MonkeyPatch.context() as patch, Loopback(people) as server:
        patch.chdir(place)
        patch.setenv("OPENAI_API_KEY", "none")
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would look for a newer one
        args = [
            "rollout",
            "talk",
            "--model",
            "model",
            "-n",
            "3",
            "-k",
            "2",
            "--split",
            "heldout",
            "--seed",
            "3",
            "--out",
            "live",
            "--record",
            "tape",
            f"env.params.url={server.url}",
            f"reward.judge.api_base={server.url}",
            *ARGS,
        ]
        assert main(args) == 0
        assert server.requests
    shutil.rmtree(copy)
    shutil.rmtree(talk)
    yield place


@pytest.fixture(autouse=True)
def there(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_replay_without_engine_environment_user_and_judge_is_equal_to_the_byte(recorded: Path) -> None:
    live = (recorded / "live" / "trajectories.jsonl").read_bytes()
    rows = [json.loads(line) for line in live.splitlines()]
    assert len(rows) == 6 and {row["reward"] is None for row in rows} == {False}
    assert any(message["role"] == "user" and "I heard" in message["content"] for message in rows[0]["messages"])
    for row in rows:
        texts = [len(turn["message"]["content"]) for turn in row["turns"] if not turn["message"]["tool_calls"]]
        assert [one["call"]["arguments"]["number"] for one in row["user_calls"]] == texts and texts
        assert row["state"]["dialed"] == [size for size in texts if size <= 100]
        assert [one["result"]["error"] for one in row["user_calls"]] == [None if n <= 100 else "tool_error" for n in texts]
    assert rows[0]["state"]["heard"] > 0 and rows[0]["ledgers"][0]["logprobs"]
    assert main(["rollout", "--replay", "tape", "--out", "again"]) == 0
    assert (recorded / "again" / "trajectories.jsonl").read_bytes() == live
    assert main(["eval", "--replay", "tape", "--out", "scored", "-n", "2"]) == 0
    assert json.loads((recorded / "scored" / "report.json").read_text())["episodes"] == 4


def test_a_strict_reader_takes_every_file_of_a_record_and_of_its_run(recorded: Path) -> None:
    """Where the environment's state has numbers that JSON lacks, and halves of characters."""
    live = dict(read_strictly(recorded / "live"))
    tape = dict(read_strictly(recorded / "tape"))
    assert {"trajectories.jsonl", "rollout.json"} <= live.keys() and {"record.json", "reward.json", "calls.jsonl"} <= tape.keys()
    odd = [None, None, None, chr(0xD800), chr(0x1F600), {"null": 1}]
    assert [row["state"]["odd"] for row in live["trajectories.jsonl"]] == [odd] * 6
    assert [row["answer"]["state"]["odd"] for row in tape["calls.jsonl"] if row["kind"] == "end"] == [odd] * 6


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--seed", "4"], ["episode heldout0.m0, engine call 0", "/sampling/seed expected ", ", got "]),
        (["--split", "train"], ["episode train0.m0", "expected one of the 6 recorded episodes", "got another one"]),
        (["-n", "9"], ["expected one of the 6 recorded episodes"]),
        (["rollout.max_turn_tokens=11"], ["engine call 0: at /sampling/max_tokens expected 12, got 11"]),
        (["env.params.url='elsewhere'"], ["reset call 0: at /params/url expected", 'got "elsewhere"']),
    ],
)
def test_a_replay_of_something_else_names_episode_call_expected_and_got(
    args: list[str], expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["rollout", "--replay", "tape", "--out", str(tmp_path / "out"), "--max-concurrent", "1", *args]) == 2
    message = capsys.readouterr().err
    for part in expected:
        assert part in message
    assert "Traceback" not in message


def test_a_replay_with_tools_of_its_own_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing would ask them: the record has the answers of the tools of then."""
    assert main(["rollout", "--replay", "tape", "--out", str(tmp_path / "out"), "tools.sets=['calculator']"]) == 2
    assert "tools.sets: a replay has the answers of the recorded run's tools" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["edit", "drop", "swap"])
def test_a_changed_record_is_refused(change: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = tmp_path / "tape"
    shutil.copytree("tape", tape)
    lines = (tape / "calls.jsonl").read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '"kind": "engine"' in line)
    if change == "edit":
        row = json.loads(lines[index])
        row["answer"]["logprobs"][-1] -= 0.25
        lines[index] = json.dumps(row) + "\n"
    elif change == "drop":
        del lines[index]
    else:
        lines[index], lines[index + 1] = lines[index + 1], lines[index]
    (tape / "calls.jsonl").write_text("".join(lines))
    assert main(["rollout", "--replay", str(tape), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert f"calls.jsonl:{index + 1}: episode" in message and "the record was changed after it was written" in message
    assert "expected sum" in message


def test_a_record_that_was_broken_off_says_so_and_goes_on(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut right after the first call of its last episode, as a kill cuts it."""
    tape = tmp_path / "tape"
    shutil.copytree("tape", tape)
    lines = (tape / "calls.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    last = max(index for index, row in enumerate(rows) if row["kind"] == "reset")
    whole = sum(row["kind"] == "done" for row in rows[: last + 1])
    (tape / "calls.jsonl").write_text("".join(lines[: last + 1]))
    assert main(["rollout", "--replay", str(tape), "--out", str(tmp_path / "out"), "--max-concurrent", "1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"the record breaks off inside it ({whole} of its episodes are whole)" in said
    assert "got another one" not in said


def test_a_run_is_no_record_whatever_is_left_of_its_trajectories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", {"step_000003": [episode(3)], "step_000004": [episode(4)]}).path  # older ones rotated away
    (file := tmp_path / "file").write_text("{}")
    for words, fix in (
        (["rollout", "--replay", str(run)], f"agentrl eval --run {run} --record DIR"),
        (["eval", "--replay", str(run)], f"agentrl eval --run {run} --record DIR"),
        (["rollout", "--replay", str(file)], "without record.json"),
    ):
        assert main(words) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "expected a folder that --record wrote, got one without record.json" in said and fix in said


def test_code_that_changed_since_is_found_at_the_end(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every call is the same, and yet something else comes out: here another spec over the same verdicts."""
    tape = tmp_path / "tape"
    shutil.copytree("tape", tape)
    spec = json.loads((tape / "reward.json").read_text())
    spec["root"]["scale"] = [0, 2]
    (tape / "reward.json").write_text(json.dumps(spec))
    assert main(["rollout", "--replay", str(tape), "--out", str(tmp_path / "out")]) == 2
    assert "done call 0: at /reward expected" in capsys.readouterr().err


def test_an_api_model_with_tools_and_an_outage_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def answer(body: dict[str, Any], number: int) -> Any:
        return {"status": 400} if number == 3 else solve(body, number)

    args = ["--model", "api:openai/test", "env.params.set_share=0", "rollout.max_turns=8", "-n", "3"]
    with Loopback(answer) as server:
        record = ["eval", "key_value", "--record", "tape", "--out", "live", f"api.base={server.url}", *args]
        assert main([*record, "--max-concurrent", "2"]) == 0
        cut = json.loads(Path("live/report.json").read_text())
        assert cut["unscored"] == 1 and cut["stops"]["engine_error"] == 1
        assert main(["eval", "--replay", "tape", "--out", "first"]) == 0
        assert Path("first/trajectories.jsonl").read_bytes() == Path("live/trajectories.jsonl").read_bytes()
        assert main(record) == 0  # goes on: only the outage is run again, into the same record
    live = Path("live/trajectories.jsonl").read_bytes()
    rows = [json.loads(line) for line in live.splitlines()]
    assert [row["reward"] for row in rows] == [1.0] * 3
    assert any(result["content"] for row in rows for turn in row["turns"] for result in turn["results"])
    assert main(["eval", "--replay", "tape", "--out", "again"]) == 0
    assert Path("again/trajectories.jsonl").read_bytes() == live
    assert Path("again/report.json").read_bytes() == Path("live/report.json").read_bytes()


def test_a_record_that_a_kill_cut_short_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    writer = RecordWriter(path)
    writer.add("e", "reset", 0, {"seed": 1}, {"x": "\ud800 lone surrogate, ünïcode"})
    writer.add("e", "step", 0, {"a": 1}, {"b": 2.5})
    writer.close()
    with path.open("a") as file:
        file.write('{"episode": "e", "kind": "st')
    writer = RecordWriter(path)
    writer.add("e", "step", 1, {"a": 2}, {})
    writer.close()
    record = Recorded.read(path)
    assert record.take("e", "step", 1, {"a": 2}).answer == {}
    with pytest.raises(ReplayError, match="step call 0: at /a expected 1, got 7"):
        record.take("e", "step", 0, {"a": 7})
    with pytest.raises(ReplayError, match="episode e"):
        record.find("e", "step", 2)


def test_the_first_difference_has_a_pointer() -> None:
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ("/a/1/b", 2, 3)
    assert first_difference([1, 2], [1, 2, 3]) == ("/2", "...", 3)
    assert first_difference({"a": 1}, {}) == ("/a", 1, "...")
