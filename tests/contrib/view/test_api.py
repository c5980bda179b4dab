"""The viewer's API on small runs: each address against numbers by hand, also while a run goes on."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from agentrl.contrib.view import library as shelves
from agentrl.contrib.view.library import Library
from agentrl.contrib.view.queries import verdict
from agentrl.contrib.view.server import assets, guard_app, make_app
from agentrl.data.trajectory import Message, ToolCall, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.run.evaluate import make_report
from agentrl.utils.files import atomic_write
from tests.run.made_folders import episode, run_folder, touch, unscored
from tests.waits import until

METRICS = [
    {"step": 0, "phase": "before", "success": 0.5},
    {"step": 1, "phase": "train", "success": 0.25, "tokens": 16},
    {"step": 2, "phase": "train", "success": 0.5, "tokens": 20},
    {"step": 2, "phase": "after", "success": 0.75},
]


ALL = (
    "step_000002.0 step_000002.1 after_000002.0 after_000002.1 step_000001.0 step_000001.1 step_000001.2 step_000001.3 "
    "step_000001.4 before_000000.0 before_000000.1"
)


class Asking(TestClient):
    """A client that gives the JSON of an address under /api, which must answer 200."""

    def ask(self, path: str) -> Any:
        found = self.get(f"/api{path}")
        assert found.status_code == 200, found.text
        return found.json()


def client(*paths: Path) -> Asking:
    library = Library(paths)
    for one in library.scan():
        library.refresh(one)
    return Asking(guard_app(make_app(library)), base_url="http://127.0.0.1:8300")


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Asking:
    """A run with two groups at step 1 (one without variance, one with an outage), one at step 2, and held-out episodes."""
    at = tmp_path_factory.mktemp("runs")
    step1 = [episode(1, 0), episode(1, 1), episode(2, 0, 0.0, said="9"), episode(2, 1, 0.5, tool_error="bad"), unscored(2, 2)]
    held = {"before_000000": [0.0, 1.0], "after_000002": [1.0, 1.0]}
    files = {
        "step_000001": step1,
        "step_000002": [episode(3, 0), episode(3, 0, 0.0, said="x")],
        **{name: [episode(seed, 0, r, split="heldout") for seed, r in enumerate(rewards)] for name, rewards in held.items()},
    }
    run_folder(at / "one", files, METRICS)
    (at / "secret.json").write_text('{"password": 1}')
    return client(at)


def test_a_run_in_the_list(asking: Asking) -> None:
    [row] = asking.ask("/runs")
    expected = {
        "run": "one", "name": "one", "status": "done", "live": False, "envs": ["key_value"], "steps": 4, "updates": 2,
        "success_before": 0.5, "success_after": 0.75, "tokens": 36, "seconds": 12.5, "error": None,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    whole = asking.ask("/runs/one")
    assert [(s["file"], s["phase"], s["step"], s["episodes"]) for s in whole["steps"]] == [
        ("before_000000", "before", 0, 2), ("step_000001", "train", 1, 5),
        ("step_000002", "train", 2, 2), ("after_000002", "after", 2, 2),
    ]  # fmt: skip
    assert whole["summary"]["seconds"] == 12.5 and 'id = "key_value"' in whole["config"]


def test_a_row_without_its_end_is_damaged_once_nobody_writes_there(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "r", {"step_000001": [episode(1)]}).trajectories / "step_000001.jsonl"
    with path.open("a") as file:
        file.write('{"task": {"i')
    for seconds, damaged, said in ((-1, 0, None), (-200, 1, "row 2: the file ends within it")):
        touch(path, seconds)
        [step] = client(tmp_path).ask("/runs/r")["steps"]
        assert (step["episodes"], step["damaged"], step["problem"]) == (1, damaged, said)


def test_metrics_from_a_row_on(asking: Asking) -> None:
    first = asking.ask("/runs/one/metrics")
    assert first["rows"] == METRICS and first["next"] == 4
    assert asking.ask("/runs/one/metrics?after=3")["rows"] == METRICS[3:]
    assert asking.ask("/runs/one/metrics?after=4")["rows"] == []
    assert asking.ask("/runs/one/metrics?after=9") == {**first, "anew": True}


@pytest.mark.parametrize(
    "query, ids",
    [
        ("q=report", ALL),
        ("", ALL),
        ("step=1&limit=2&offset=3", "step_000001.3 step_000001.4"),
        ("phase=train&step=2", "step_000002.0 step_000002.1"),
        ("success=none", "step_000001.4"),
        ("success=false&phase=train", "step_000002.1 step_000001.2 step_000001.3"),
        ("min_reward=0.25&max_reward=0.75", "step_000001.3"),
        ("error=bad", "step_000001.3"),
        ("stop=env_error", "step_000001.4"),
        ("tool=get&task=t/train/3", "step_000002.0 step_000002.1"),
        ("term=answer<0.6&phase=train", "step_000002.1 step_000001.2 step_000001.3"),
        ("term=answer=none", "step_000001.4"),
        ("q=connection lo", "step_000001.4"),
        ("group=step_000001.g1", "step_000001.2 step_000001.3 step_000001.4"),
        ("sort=reward&order=desc&phase=train&limit=2", "step_000002.0 step_000001.1"),
        ("sort=reward&order=asc&step=1&limit=2", "step_000001.4 step_000001.2"),
    ],
)  # fmt: skip
def test_pages_of_episodes(asking: Asking, query: str, ids: str) -> None:
    found = asking.ask(f"/runs/one/episodes?{query}")
    assert [row["id"] for row in found["rows"]] == ids.split()
    assert (found["indexed"], found["of"]) == (11, 11)
    if "limit" not in query:
        assert found["total"] == len(ids.split())


def test_a_row_of_a_page(asking: Asking) -> None:
    [row] = asking.ask("/runs/one/episodes?error=bad")["rows"]
    assert row == {
        "id": "step_000001.3", "step": 1, "phase": "train", "env": "numbers", "task": "t/train/2", "split": "train", "member": 1,
        "reward": 0.5, "stop": "done", "error": None, "turns": 2, "calls": 1, "tool_errors": 1, "tokens": 4, "seconds": 2.0,
        "group": "step_000001.g1", "success": False, "terms": {"answer": 0.5}, "suspects": [],
    }  # fmt: skip


def test_facets_count_and_average(asking: Asking) -> None:
    found = asking.ask("/runs/one/facets")
    assert found["step"] == [
        {"value": 0, "episodes": 2, "reward": 0.5, "success": 0.5},
        {"value": 1, "episodes": 5, "reward": 0.625, "success": 0.5},
        {"value": 2, "episodes": 4, "reward": 0.75, "success": 0.75},
    ]
    assert found["tool"] == [{"value": "get", "episodes": 11, "reward": 0.65, "success": 0.6}]
    assert [(f["value"], f["episodes"]) for f in found["stop"]] == [("done", 10), ("env_error", 1)]
    assert {f["value"] for f in found["error"]} == {"bad", "env_error: connection to '...' lost after N s"}


def test_groups_have_mean_deviation_and_whether_they_teach(asking: Asking) -> None:
    one, two = asking.ask("/runs/one/groups?step=1")
    assert (one["group"], one["mean"], one["std"], one["advantage_zero"]) == ("step_000001.g0", 1.0, 0.0, True)
    assert (two["group"], two["mean"], two["std"], two["advantage_zero"]) == ("step_000001.g1", 0.25, 0.25, False)
    assert [m["reward"] for m in two["members"]] == [0.0, 0.5, None]
    # The same member of the same task again: another group of one task.
    again = asking.ask("/runs/one/groups?step=2")
    assert [[m["id"] for m in g["members"]] for g in again] == [["step_000002.0"], ["step_000002.1"]]


def test_failures_that_differ_in_names_and_numbers_are_one(tmp_path: Path) -> None:
    outages = [unscored(n, 0, f"connection to 'host{n}:44{n}' lost after {n}.5 s") for n in range(3)]
    wrong = [episode(9, 0, 0.0, tool_error="bad", answer=f'{{"error": "no key \'k{n}\'"}}') for n in range(2)]
    run_folder(tmp_path / "r", {"step_000001": [*outages, *wrong, episode(5)]})
    found = client(tmp_path).ask("/runs/r/failures")
    assert {(f["kind"], f["reason"]): f["episodes"] for f in found} == {
        ("error", "env_error: connection to '...' lost after N s"): 3,
        ("stop", "env_error"): 3,
        ("tool", "get: bad: {'...': '...'}"): 2,
        ("term", "answer (text.equals) below 0.5"): 2,
    }
    [outage] = [f for f in found if f["kind"] == "error"]
    assert outage["examples"] == ["step_000001.2", "step_000001.1", "step_000001.0"]


def test_no_call_a_cut_call_and_a_malformed_one_are_three_reasons(tmp_path: Path) -> None:
    def broken(seed: int, finish: str) -> Trajectory:
        made = episode(seed, 0, 0.0)
        call = ToolCall("get", None, "call_0", raw='{"name": "get", "arg', error="not valid JSON")
        made.turns = [replace(made.turns[0], message=Message("assistant", "", (call,)), results=[], finish=finish)]
        return made

    silent = episode(4, 0, 0.0)
    silent.turns = [replace(silent.turns[1], index=0)]
    toolless = replace(silent, tools=[])
    run_folder(tmp_path / "r", {"step_000001": [broken(1, "length"), broken(2, "stop"), broken(3, "stop"), silent, toolless]})
    found = {f["reason"]: f["episodes"] for f in client(tmp_path).ask("/runs/r/failures") if f["kind"] == "call"}
    assert found == {"call cut by max_turn_tokens": 1, "malformed call: not valid JSON": 2, "no tool call": 1}


def test_one_episode_whole(asking: Asking) -> None:
    found = asking.ask("/runs/one/episodes/step_000001.3")
    assert [turn["message"]["content"] for turn in found["turns"]] == ["", "2"]
    first = found["turns"][0]
    assert (first["calls"][0]["arguments"], first["results"][0]["content"]) == ({"key": "k2"}, "2")
    assert (first["version"], first["timings"]) == (3, {"sampling_s": 0.5, "tools_s": 0.25})
    assert found["gold"]["answer"] == "2" and found["evidence"]["root"]["of"][0]["id"] == "answer"
    assert found["ledgers"] == [{"tokens": 8, "sampled": 4}]
    group = ["step_000001.2", "step_000001.3", "step_000001.4"]
    assert found["neighbours"] == {"prev": "step_000001.2", "next": "step_000001.4", "group": group}
    assert asking.ask("/runs/one/episodes/step_000001.4")["neighbours"]["next"] is None


def test_two_steps_side_by_side(asking: Asking) -> None:
    found = asking.ask("/compare?a=one:0&b=one:2")
    assert [(p["task"], p["a"][0]["reward"], p["b"][0]["reward"], p["verdict"]) for p in found["pairs"]] == [
        ("t/heldout/0", 0.0, 1.0, "won"),
        ("t/heldout/1", 1.0, 1.0, "both solved"),
    ]
    assert (found["only_a"], found["only_b"]) == ([], [])
    training = asking.ask("/compare?a=one:1&b=one:2")["only_a"]
    assert [t["task"] for t in training] == ["t/train/1", "t/train/2"], "step 1 has no evaluation: of step 2 its training too"
    other = asking.ask("/compare?a=one:step_000001&b=one:step_000002")
    assert other["pairs"] == [] and [t["task"] for t in other["only_a"]] == ["t/train/1", "t/train/2"]
    assert [len(t["episodes"]) for t in other["only_b"]] == [2]


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([0.0], [1.0], "won"),
        ([1.0], [0.0], "lost"),
        ([0.0], [0.9], "neither solved"),  # the higher reward wins nothing
        ([1.0, 1.0], [1.0, 0.0], "lost"),
        ([1.0, 0.0], [0.0, 1.0], "same"),
        ([None], [1.0], "unknown"),
        ([None, 0.0], [0.0], "neither solved"),
    ],
)
def test_a_task_is_won_by_success_and_never_by_reward(a: list[float | None], b: list[float | None], expected: str) -> None:
    sides = [[{"reward": r, "success": None if r is None else r >= 1} for r in side] for side in (a, b)]
    assert verdict(*sides) == expected


def test_an_evaluation_has_the_figures_of_agentrl_eval(tmp_path: Path) -> None:
    """Two tasks, three attempts each: one solved twice, one never with an attempt that an outage ended."""
    rewards = [(0, 0, 1.0), (0, 1, 1.0), (0, 2, 0.0), (1, 0, 0.0), (1, 1, 0.5), (1, 2, None)]
    episodes = [episode(s, m, r, split="heldout") if r is not None else unscored(s, m) for s, m, r in rewards]
    for one in episodes:
        one.task = replace(one.task, split="heldout", id="t/heldout")  # as an author may: their content tells them apart
    folder = tmp_path / "evals" / "mine" / "numbers"
    folder.mkdir(parents=True)
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(one.to_json()) + "\n" for one in episodes))
    (folder / "eval.json").write_text(json.dumps({"identity": {"env.id": "numbers"}}))
    report = make_report(episodes, 3)
    row = {"name": "overall", "value": 0.25, "n": 2, "weight": None, "note": "of two"}
    table = {"version": "4", "split": "heldout", "tasks": 2, "of": 9, "holdout": "", "splits": [], "rows": [row]}
    (folder / "report.json").write_text(json.dumps({**report, "official": {"bfcl": table}}))
    run_folder(tmp_path / "old", {"before_000000": episodes[:1], "after_000002": episodes, "step_000001": [episode(1)]})
    asking = client(tmp_path)
    [ident] = [run["run"] for run in asking.ask("/runs") if run["run"] != "old"]
    found = asking.ask(f"/runs/{ident}")
    [one] = found["evaluations"]
    assert one["rates"] == {name: value for name, value in report.items() if name.startswith("pass")}
    assert one["rates"]["pass@1"]["mean"] == pytest.approx((2 / 3 + 0) / 2)
    assert one["rates"]["pass@2"]["mean"] == pytest.approx((1.0 + 0.0) / 2)
    assert one["rates"]["pass^2"]["mean"] == pytest.approx((1 / 3 + 0) / 2)
    assert one["rates"]["pass@3"]["mean"] == 1.0, "the task with two scored attempts is left out of three"
    assert (one["tasks"], one["episodes"], one["unscored"]) == (2, 6, 1)
    assert found["official"] == {"bfcl": table}
    own = asking.ask("/runs/old")
    assert [(e["phase"], e["step"], e["tasks"]) for e in own["evaluations"]] == [("before", 0, 1), ("after", 2, 2)]
    assert own["official"] == {} and own["evaluations"][1]["rates"] == one["rates"]
    side = asking.ask("/compare?a=old:after_000002&b=old:after_000002")
    assert [(len(pair["a"]), pair["verdict"]) for pair in side["pairs"]] == [(3, "same"), (3, "neither solved")]
    assert len({pair["content"] for pair in side["pairs"]}) == 2


@pytest.mark.parametrize(
    "path, status, said",
    [
        ("/runs/on", 404, "did you mean 'one'?"),
        ("/runs/one/episodes/step_000001.99", 404, "no episode"),
        ("/runs/one/episodes/..%2f..%2fetc.0", 404, ""),
        ("/runs/one/episodes?colour=1", 400, "there is no filter 'colour'"),
        ("/runs/one/episodes?step=x", 400, "step='x': expected a whole number"),
        ("/runs/one/episodes?sort=rewards", 400, "did you mean 'reward'?"),
        ("/runs/one/episodes?min_reward=nan", 400, "expected a number"),
        ("/runs/one/facets?x=1", 400, "no parameter 'x'"),
        ("/compare?a=one&b=one:1", 400, "expected RUN:STEP"),
        ("/compare?a=one:7&b=one:1", 404, "there are before_000000"),
        ("/nothing", 404, "there is no"),
    ],
)
def test_mistakes_are_said(asking: Asking, path: str, status: int, said: str) -> None:
    found = asking.get(f"/api{path}")
    assert found.status_code == status and said in found.json()["error"]


def test_a_bad_page_is_refused_before_the_index_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path / "r", {"step_000001": [episode(1)]})
    monkeypatch.setattr(Library, "want", lambda *_: pytest.fail("it waits"))
    assert client(tmp_path).get("/api/runs/r/episodes?sort=rewards").status_code == 400


# -- a run that goes on


def test_what_a_run_writes_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "POLL_S", 0.02)
    runs = tmp_path / "runs"
    runs.mkdir()
    library = Library([runs])
    asking = Asking(guard_app(make_app(library)), base_url="http://localhost")
    library.start()
    try:
        assert asking.ask("/runs") == []
        row = {"step": 1, "phase": "train", "success": 0.0, "tokens": 4}
        folder = run_folder(runs / "new", {"step_000001": [episode(1)]}, [row])
        assert [(found["run"], found["live"], found["status"]) for found in asking.ask("/runs")] == [("new", True, "running")]
        assert [found["id"] for found in asking.ask("/runs/new/episodes")["rows"]] == ["step_000001.0"], "the first answer waits"
        first = asking.ask("/runs/new/metrics")
        folder.write_trajectories("step_000002", [episode(2)])
        with folder.metrics.open("a") as file:
            file.write(json.dumps({**row, "step": 2}) + "\n" + '{"step": 3, "pha')
        assert until(lambda: asking.ask("/runs/new/episodes")["total"] == 2)
        new = asking.ask(f"/runs/new/metrics?after={first['next']}&edition={first['edition']}")
        assert [found["step"] for found in new["rows"]] == [2] and not new["anew"], "half a row is not read"
        # A resume from step 1 rewinds the rows and writes step 2 again: more rows than before, but others.
        atomic_write(folder.metrics, "".join(json.dumps({**row, "step": n, "success": 0.5}) + "\n" for n in (1, 2, 3)))
        folder.write_trajectories("step_000002", [episode(7), episode(8)])
        again = asking.ask(f"/runs/new/metrics?after={new['next']}&edition={new['edition']}")
        assert again["anew"] and [found["success"] for found in again["rows"]] == [0.5] * 3
        assert until(lambda: asking.ask("/runs/new/episodes")["total"] == 3)
        assert asking.ask("/runs/new/episodes/step_000002.1")["task"] == "t/train/8"
        folder.write_summary({"status": "done", "seconds": 3.0})
        assert [(found["live"], found["status"]) for found in asking.ask("/runs")] == [(False, "done")]
    finally:
        library.close()


def test_an_episode_of_a_file_that_was_written_anew_since_is_not_mixed_up(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r", {"step_000001": [episode(1)]})
    library = Library([tmp_path])
    [one] = library.scan()
    library.refresh(one)
    asking = Asking(guard_app(make_app(library)), base_url="http://localhost")
    folder.write_trajectories("step_000001", [episode(2)])
    found = asking.get("/api/runs/r/episodes/step_000001.0")
    assert found.status_code == 400 and "rewritten since it was indexed" in found.json()["error"]
    library.refresh(one)
    assert asking.ask("/runs/r/episodes/step_000001.0")["task"] == "t/train/2"


# -- the state that an episode began with

TASKS = Path(__file__).parents[3] / "envs" / "mcp" / "tasks.jsonl"


def played(seed: int) -> Trajectory:
    """An episode of key_value in which `set` changed a key and `add` the total."""

    async def play() -> Trajectory:
        env = EnvRef("key_value", {"calls": 2}).build()
        await env.areset(seed=seed, options={"split": "train"})
        key = next(iter(env.task.data["store"]))
        for name, arguments in (("set", {"key": key, "x": 77}), ("add", {"x": 5})):
            await env.astep(Message("assistant", "", (ToolCall(name, arguments, "call_0"),)))
        await env.astep(Message("assistant", "done"))
        await env.aclose()
        return env.trajectory

    return asyncio.run(play())


def test_what_an_episode_changed(tmp_path: Path) -> None:
    one = played(3)
    key, was = next(iter(one.task.data["store"].items()))
    other = played(4)
    other.task.data["store"][key] = 1000  # as if the environment's code had made other tasks then
    stateless = played(5)
    stateless.state = None
    folder = run_folder(tmp_path / "r", {"step_000001": [one, other, stateless]})
    folder.config.write_text('name = "r"\n[env]\nid = "key_value"\n[env.params]\ncalls = 2\n[model.init]\n')
    asking = client(tmp_path)
    found = asking.ask("/runs/r/episodes/step_000001.0")
    assert found["state_before"]["store"] == {**one.state["store"], key: was}
    assert found["state_diff"] == [
        {"path": f"/store/{key}", "kind": "changed", "before": was, "after": 77},
        {"path": "/total", "kind": "changed", "before": 0, "after": 5},
    ]
    changed = asking.ask("/runs/r/episodes/step_000001.1")
    assert changed["state_diff"] is None and "makes another task" in changed["state_problem"]
    assert "recorded no state" in asking.ask("/runs/r/episodes/step_000001.2")["state_problem"]


def test_what_an_episode_of_a_rollout_changed(tmp_path: Path) -> None:
    """Its folder has no config.toml: the note says which environment it was, with which parameters."""
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "trajectories.jsonl").write_text(json.dumps(played(3).to_json()) + "\n")
    note = {"env.id": "key_value", "env.params.calls": 2, "env.eval.split": "heldout", "seed": 0}
    (folder / "rollout.json").write_text(json.dumps({"identity": note}))
    found = client(tmp_path).ask("/runs/r/episodes/trajectories.0")
    assert found["state_problem"] is None and found["state_diff"][1] == {
        "path": "/total", "kind": "changed", "before": 0, "after": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    "env, said",
    [
        ('id = "key_value"\nurl = "http://127.0.0.1:9"', "env.url"),
        (f'id = "mcp"\n[env.params]\ncommand = ["touch", "started"]\ntasks = "{TASKS}"', "starts other processes"),
        ('id = "python"', "starts other processes"),
        ('id = "no_such"', "no_such"),
    ],
)
def test_nothing_is_started_for_it(here: Path, env: str, said: str) -> None:
    """A run folder from elsewhere must not choose what runs on this machine."""
    folder = run_folder(here / "runs" / "r", {"step_000001": [played(3)]})
    folder.config.write_text(f'name = "r"\n[model.init]\n[env]\n{env}\n')
    found = client(here / "runs").ask("/runs/r/episodes/step_000001.0")
    assert found["state_diff"] is None and said in found["state_problem"]
    assert not (here / "started").exists()


# -- who is answered

HOSTS = {
    403: ("evil.example", "127.0.0.1.evil.example:8300", "192.168.0.4:8300", "", "localhost:8300@evil.example", "127.0.0.1:x"),
    200: ("127.0.0.1:8300", "localhost", "LOCALHOST:9", "[::1]:8300", "[::1]"),
}
SITES = {403: ("cross-site", "same-site"), 200: ("same-origin", "none")}


@pytest.mark.parametrize("status, host", [(status, host) for status, hosts in HOSTS.items() for host in hosts])
def test_only_loopback_is_answered(asking: Asking, host: str, status: int) -> None:
    """A page whose name was bound to 127.0.0.1 after it was loaded sends its own name."""
    for path in ("/", "/api/runs"):
        assert asking.get(path, headers={"host": host}).status_code == status


@pytest.mark.parametrize("status, site", [(status, site) for status, sites in SITES.items() for site in sites])
def test_data_is_for_the_viewers_own_page(asking: Asking, site: str, status: int) -> None:
    """Another site's page can ask without being able to read; a link to the page itself works."""
    assert asking.get("/api/runs/one/episodes/step_000001.0", headers={"sec-fetch-site": site}).status_code == status
    assert asking.get("/", headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(asking: Asking, method: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/one"):
        assert asking.request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/none", "/none.js", "/run/one"])
def test_every_answer_has_the_headers_and_allows_no_other_origin(asking: Asking, path: str) -> None:
    found = asking.get(path, headers={"origin": "http://evil.example"})
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert found.headers["x-content-type-options"] == "nosniff" and found.headers["x-frame-options"] == "DENY"
    assert not [name for name in found.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "path",
    ["/../secret.json", "/%2e%2e/secret.json", "/..%2f..%2fsecret.json", "/assets/../../api.py", "/%2fetc%2fpasswd.json",
     "//etc/hosts.json", "/server.py"],
)  # fmt: skip
def test_no_path_leads_out_of_the_page(asking: Asking, path: str) -> None:
    found = asking.get(path)
    assert found.status_code == 404 or found.content == assets()["index.html"]
    assert b"password" not in found.content and b"import" not in found.content[:200]


def test_the_server_listens_on_loopback_only_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    run_folder(tmp_path / "one", {"step_000001": [episode(1)]})
    command = [sys.executable, "-m", "agentrl.cli.main", "view", str(tmp_path), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        address = said.split(" at ")[1].split()[0]
        try:
            assert said.startswith("agentrl view: 1 runs at http://127.0.0.1:")
            with urllib.request.urlopen(f"{address}/api/runs/one/facets", timeout=10) as answer:
                assert b'"value":"numbers"' in answer.read()
            listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
            port = f":{int(address.rsplit(':', 1)[1]):04X}"
            assert [line.split()[1] for line in listening if line.split()[1].endswith(port) and line.split()[3] == "0A"] == [
                f"0100007F{port}"
            ]
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=20)
        assert process.returncode == 0 and rest == ("", "")
