"""The tokens of an episode: what was sampled, what training made of it, and their text."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import agentrl.trainer
from agentrl.contrib.view.api import Api
from agentrl.contrib.view.library import Library
from agentrl.run.reader import check_of, token_lines
from tests.contrib.view.test_api import client
from tests.run import damage
from tests.run.made_folders import episode, run_folder, unscored

TOKENIZER = Path(agentrl.trainer.__file__).parent / "assets" / "tokenizer.json"


class Made:
    """Row k: advantages k, k + 0.5, ...; log ratio ln 2 for even rows, none for odd ones."""

    def row(self, number: int) -> tuple[Any, Any]:
        advantages = number + 0.5 * np.arange(4, dtype=np.float32)
        return advantages, (np.full(4, np.log(2), dtype=np.float16) if number % 2 == 0 else None)


def test_columns_of_a_trained_episode(tmp_path: Path) -> None:
    members = [episode(1, 0), unscored(1, 1), episode(1, 2)]
    folder = run_folder(tmp_path / "r", {"step_000001": members})
    folder.write_tokens("step_000001", token_lines(members, Made()))  # type: ignore[arg-type]
    asking = client(tmp_path)
    first = asking.ask("/runs/r/episodes/step_000001.0/tokens")
    assert first["id"] == [1, 2, 3, 4, 5, 6, 7, 7] and first["total"] == 8
    assert first["sampled"] == [False, False, False, True, True, False, True, True]
    assert first["logprob"] == [None, None, None, -0.5, -0.25, None, -0.125, -0.125]
    assert first["version"] == [None, None, None, 3, 3, None, 4, 4]
    assert first["turn"] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert first["advantage"] == [None, None, None, 0.0, 0.5, None, 1.0, 1.5]
    assert first["ratio"][3:] == [pytest.approx(2, rel=1e-3)] * 2 + [None] + [pytest.approx(2, rel=1e-3)] * 2
    # The second scored member is row 1: its advantages begin at 1, and it was not visited.
    last = asking.ask("/runs/r/episodes/step_000001.2/tokens?offset=3&limit=2")
    assert (last["advantage"], last["ratio"], last["id"]) == ([1.0, 1.5], None, [4, 5])
    none = asking.ask("/runs/r/episodes/step_000001.1/tokens")
    assert none["advantage"] is None and none["ratio"] is None and none["logprob"][3] == -0.5
    found = asking.get("/api/runs/r/episodes/step_000001.0/tokens?ledger=1")
    assert found.status_code == 400 and "1 ledgers" in found.json()["error"]


@pytest.mark.parametrize(("file", "kind"), [("tokens/step_000001.jsonl", "a pipe"), ("model", "unreadable")])
def test_what_cannot_be_read_is_unknown_and_no_wait(file: str, kind: str) -> None:
    temporary = tempfile.TemporaryDirectory()
    open_tmp = Path(temporary.name)
    open_tmp.chmod(0o755)  # others than root may enter
    folder = run_folder(open_tmp / "r", {"step_000001": [episode(1, 0)]})
    folder.write_tokens("step_000001", token_lines([episode(1, 0)], Made()))  # type: ignore[arg-type]
    folder.model.mkdir()
    shutil.copy(TOKENIZER, folder.model / "tokenizer.json")
    library = Library([open_tmp])
    for one in library.scan():
        library.refresh(one)
    api = Api(library)  # in this thread, which an alarm reaches
    assert api.tokens("r", "step_000001.0", {})["advantage"] is not None
    with damage.as_nobody(open_tmp):
        damage.KINDS[kind](folder.path / file, folder.path / file)
        with damage.limited(20):
            found = api.tokens("r", "step_000001.0", {})
    (folder.path / file).chmod(0o755)
    temporary.cleanup()
    assert (found["advantage"] is None) == (kind == "a pipe") and (found["text_problem"] is None) == (kind == "a pipe")


def test_text_by_the_runs_tokenizer_also_of_characters_of_several_tokens(tmp_path: Path) -> None:
    ids = Tokenizer.from_file(str(TOKENIZER)).encode("get 4 ü", add_special_tokens=False).ids
    one = episode(1, 0)
    one.ledgers[0].append_context(ids, 1)
    folder = run_folder(tmp_path / "r", {"step_000001": [one]})
    asking = client(tmp_path)
    before = asking.ask("/runs/r/episodes/step_000001.0/tokens?offset=8")
    assert before["text"] == [None] * len(ids) and "no tokenizer" in before["text_problem"]
    folder.model.mkdir()
    shutil.copy(TOKENIZER, folder.model / "tokenizer.json")
    found = asking.ask("/runs/r/episodes/step_000001.0/tokens?offset=8")
    assert "".join(found["text"]) == "get 4 ü" and len(found["text"]) == len(ids)
    assert found["text"][-2:] == ["", "ü"] and found["text_problem"] is None


@pytest.mark.parametrize("at, value, cause", [
    (("turns", 0, "index"), [1], "TypeError: unhashable"),
    (("turns", 0, "seconds"), "x", "TypeError: unsupported operand"), (("messages", 0), {}, "KeyError: 'role'"),
    (("ledgers", 0, "spans", 0, 0), 10**30, "OverflowError: Python int too large"),
    (("ledgers", 0, "spans", 0, 0), 10**10, "ValueError: ledger columns differ in length: 10000000005 tokens in spans, 8 to"),
    (("task", "seed"), {"a": 1}, "TypeError: int()"),
])  # fmt: skip
def test_a_damaged_row_is_named_and_hides_no_other(tmp_path: Path, at: tuple[Any, ...], value: Any, cause: str) -> None:
    folder = run_folder(tmp_path / "r", {"step_000001": [episode(1, 0), episode(2, 0)]})
    path = folder.trajectories / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    part = rows[0]
    for key in at[:-1]:
        part = part[key]
    part[at[-1]] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asking = client(tmp_path)
    found = [asking.get(f"/api/runs/r/episodes/step_000001.0{more}") for more in ("", "/tokens")]
    said = [answer.json()["error"] for answer in found if answer.status_code != 200]
    assert {answer.status_code for answer in found} <= {200, 400, 404} and said
    assert any(cause in one and ("step_000001.jsonl:1: " in one or "step_000001.jsonl: row 1: " in one) for one in said)
    assert asking.ask("/runs/r/episodes/step_000001.1")["task_seed"] == 2
    assert len(asking.ask("/runs/r/episodes/step_000001.1/tokens")["id"]) == 8


@pytest.mark.parametrize(
    "row", ["[1]", '{"check": 1', '{"check": CHECK, "ledgers": [{"advantage": 1%s, "log_ratio": null}]}' % ("0" * 400)]
)
def test_a_damaged_row_of_a_token_file_is_named_and_the_tokens_stay(tmp_path: Path, row: str) -> None:
    members = [episode(1, 0)]
    folder = run_folder(tmp_path / "r", {"step_000001": members})
    folder.write_tokens("step_000001", iter([row.replace("CHECK", str(check_of(members[0].ledgers))) + "\n"]))
    found = client(tmp_path).ask("/runs/r/episodes/step_000001.0/tokens")
    assert found["id"][:3] == [1, 2, 3] and found["advantage"] is None
    assert "tokens/step_000001.jsonl:1: " in found["trained_problem"]
