"""Small run folders, written by the classes that runs write them with, of episodes made up here."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.run.folder import RunFolder
from agentrl.run.metrics import info_of


def episode(seed: int = 0, member: int = 0, reward: float | None = 1.0, **given: Any) -> Trajectory:
    """Two turns: get k<seed>, which answers <seed>, then the text `said`; gold is this call and this answer."""
    said = given.pop("said", str(seed))
    env, phase, error = given.pop("env", "numbers"), given.pop("split", "train"), given.pop("tool_error", None)
    call = ToolCall("get", {"key": given.pop("key", f"k{seed}")}, "call_0", raw="<call>")
    answer = given.pop("answer", str(seed))
    result = ToolResult("call_0", "get", answer, seed, error, 0.25)
    ledger = TokenLedger()
    ledger.append_context([1, 2, 3], 0)
    ledger.append_sampled([4, 5], [-0.5, -0.25], [3, 3], 0)
    ledger.append_context([6], 1)
    more = given.pop("tokens", 2)
    ledger.append_sampled([7] * more, [-0.125] * more, [4] * more, 1)
    turns = [
        Turn(0, Message("assistant", "", (call,)), [result], None, 3, 2, 0, 4, 0.75),
        Turn(1, Message("assistant", said), [], None, 6, 2, 0, 7, 0.5),
    ]
    terms = [{"node": "text.equals", "at": "/root/of/0", "value": reward, "id": "answer", "evidence": {"text": said}}]
    terms += given.pop("leaves", [])
    told = Message("tool", answer, tool_call_id="call_0", name="get")
    task = Task(
        f"t/{phase}/{seed}",
        seed,
        phase,
        {"goal": f"report k{seed}"},
        {"answer": str(seed), "calls": [{"name": "get", "arguments": {"key": f"k{seed}"}}]},
    )
    out = Trajectory(
        "test/Numbers-v0", task, seed * 100 + member, member,
        [Message("user", f"report k{seed}"), turns[0].message, told, turns[1].message],
        turns, [ledger], tools=[{"type": "function", "function": {"name": "get"}}], state={"total": seed},
        reward=reward, success=None if reward is None else reward >= 1, metrics={"answer": reward},
        evidence={"spec": "s", "value": reward, "root": {"node": "all", "at": "/root", "value": reward, "of": terms}},
        timings={"episode_s": 2.0}, env=env, terminated=True,
    )  # fmt: skip
    for name, value in given.items():
        setattr(out, name, value)
    return out


def run_folder(at: Path, files: dict[str, Sequence[Trajectory]], rows: Sequence[dict[str, Any]] = ()) -> RunFolder:
    """A run folder with these trajectory files and metrics rows; a summary if the last row is of phase "after"."""
    folder = RunFolder(at)
    folder.trajectories.mkdir(parents=True)
    folder.config.write_text(f'name = "{at.name}"\nsteps = 4\n[env]\nid = "key_value"\n')
    for name, trajectories in files.items():
        folder.write_trajectories(name, trajectories)
    for row in rows:
        folder.append_metrics(row)
    if rows and rows[-1]["phase"] == "after":
        folder.write_summary({"name": at.name, "status": "done", "error": None, "seconds": 12.5})
    return folder


def unscored(seed: int = 0, member: int = 0, text: str = "connection to '10.0.0.7:4431' lost after 30.5 s") -> Trajectory:
    """An episode that an outage ended."""
    out = episode(seed, member, None, stop=StopReason.ENV_ERROR, error=text, terminated=False)
    out.evidence = {"spec": "s", "value": None, "unscored": "infrastructure: env_error"}
    return out


def rows_of(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.trajectories / f"{name}.jsonl").read_text().splitlines()]


def touch(path: Path, seconds: float) -> None:
    """Set a file's time of change `seconds` from now."""
    import time

    os.utime(path, (time.time() + seconds,) * 2)


def unknown_keys(row: dict[str, Any]) -> list[str]:
    """The keys of a row that the table of metrics does not have in its phase."""
    known = {key for key in row if (info := info_of(key)) is not None and row["phase"] in info.phases}
    return sorted(row.keys() - known - {"step", "phase"})
