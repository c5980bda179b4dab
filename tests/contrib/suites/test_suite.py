"""A suite over a benchmark's own folder: where its source comes from, its splits, its record, and what commands say of it."""

import hashlib
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import build_parser, main
from agentrl.cluster.ray_cluster import shipped_env
from agentrl.contrib.suites.measures import find_leaks, ngrams
from agentrl.contrib.suites.suite import SuiteEnv, SuiteTask, by_split, read_record, record_file
from agentrl.contrib.toolkit.taskdata import held_out_families
from agentrl.data.trajectory import Task
from agentrl.env import Message, ToolCall
from agentrl.env.address import DRIVER_SOURCES
from agentrl.env.authoring import content_split
from agentrl.env.catalog import EnvRef, find_env
from agentrl.run.digests import suite_env
from agentrl.utils.errors import CatalogError, ConfigError, TaskDataError
from tests.contrib.suites.toysuite import ENV, write_source, write_suite
from tests.env.toyenvs import Notes


def run(*words: str) -> int:
    args = build_parser().parse_args(["env", *words])
    code: int = args.run(args)
    return code


def build(**params: object) -> SuiteEnv:
    env = EnvRef("sums", params).build()
    assert isinstance(env, SuiteEnv)
    return env


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy suite on a shelf and its source beside it, not installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    write_suite(tmp_path)
    return write_source(tmp_path / "checkout")


def test_a_suite_without_source_is_listed_and_every_error_says_what_helps(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as missing:
        build()
    assert "git clone sums" in str(missing.value) and "agentrl env install sums --from FOLDER" in str(missing.value)
    assert run("list") == 0
    line = next(text for text in capsys.readouterr().out.splitlines() if "toys/Sums-v0" in text)
    assert line.endswith("[not installed: agentrl env install sums]")
    run("list", "--json")
    rows = {row["name"]: row["installed"] for row in json.loads(capsys.readouterr().out)}
    assert (rows["sums"], rows["key_value"]) == (False, True)
    run("install", "--list")
    assert "sums  not installed" in capsys.readouterr().out
    with pytest.raises(CatalogError, match="no suite 'sum'; did you mean 'sums'"):
        run("install", "sum")
    # `check --all` passes over what is not installed.
    monkeypatch.setattr("agentrl.env.catalog.list_envs", lambda: [find_env("sums")])
    assert run("check", "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"failed": 0, "environments": {}, "not_installed": ["toys/Sums-v0"]}


def test_install_records_source_version_counts_and_files(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("install", "sums", "--from", str(source)) == 0
    assert "sums 1.2" in capsys.readouterr().out
    record = read_record("sums")
    assert record is not None and (record.source, record.version) == (str(source), "1.2")
    counts = record.tasks["toys/Sums-v0"]
    assert dict.fromkeys(("easy", "hard", "odd"), 2) == {**counts["train"], **counts["heldout"]}
    # By hand: the sha256 of the two bytes "{}".
    assert record.files["data/extra.json"].sha256 == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert sorted(record.files) == ["data/extra.json", "data/tasks.json"]
    assert build().source == source
    assert run("check", "sums", "--fuzz", "20") == 0, capsys.readouterr().out
    assert run("show", "sums") == 0
    assert run("install", "sums", "--remove") == 0 and not record_file("sums").exists() and source.is_dir()
    with pytest.raises(ConfigError, match="sums is not installed"):
        run("install", "sums", "--remove")


def test_given_goes_before_the_drivers_before_the_recorded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second, third = write_source(source.parent / "second"), write_source(source.parent / "third")
    run("install", "sums", "--from", str(source))
    assert build().source == source
    monkeypatch.setenv(DRIVER_SOURCES, json.dumps({"sums": str(second)}))
    assert build().source == second
    assert build(source=str(third)).source == third


def test_workers_on_other_machines_get_the_drivers_source_and_say_if_it_is_not_there(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("install", "sums", "--from", str(source))
    shipped = shipped_env(source.parent / "staged")
    monkeypatch.setenv("AGENTRL_HOME", str(source.parent / "another_home"))
    monkeypatch.setenv(DRIVER_SOURCES, shipped[DRIVER_SOURCES])
    assert build().source == source
    source.rename(source.with_name("moved"))
    with pytest.raises(ConfigError, match=r"the source on the driver's machine is '.*checkout', and there is no such folder on "):
        build()


def test_a_source_that_lacks_a_file_is_refused_by_its_name(source: Path) -> None:
    (source / "data" / "tasks.json").unlink()
    with pytest.raises(ConfigError, match=r"data/tasks.json is missing\nTo get it: git clone sums"):
        run("install", "sums", "--from", str(source))
    with pytest.raises(ConfigError, match="no such folder"):
        build(source=str(source / "nowhere"))
    for given, says in (
        (
            str(source / "nope"),
            r"--from is '.*nope', and there is no such folder on .*expected the folder that holds the benchmark",
        ),
        (str(source / "data" / "tasks.json.old"), r"--from is '.*\.old', and that is a file; expected .*`git clone sums`"),
        ("", r"--from is empty; expected the folder that holds the benchmark, which you get by `git clone sums`"),
    ):
        (source / "data" / "tasks.json.old").touch()
        with pytest.raises(ConfigError, match=says):
            run("install", "sums", "--from", given)
    with pytest.raises(ConfigError, match=r"params\.source is empty"):
        build(source=" ")
    assert read_record("sums") is None
    record_file("sums").parent.mkdir(parents=True)
    record_file("sums").write_text("{}")
    with pytest.raises(ConfigError, match=r"sums.json: not a record"):
        build()


def test_changed_files_are_named_and_touched_ones_are_not(source: Path) -> None:
    run("install", "sums", "--from", str(source))
    os.utime(source / "data" / "tasks.json", (1, 1))
    assert build().source_notes() == ()
    before = build().source_digest()
    assert before == build(source=str(write_source(source.parent / "same"))).source_digest()
    (source / "data" / "tasks.json").write_text((source / "data" / "tasks.json").read_text().replace("easy0", "easy9"))
    (source / "data" / "extra.json").unlink()
    (source / "data" / "more.json").write_text("[]")
    (note,) = build().source_notes()
    assert "data/more.json is new, data/extra.json is gone, data/tasks.json was changed" in note and "1.2" in note
    assert build().source_digest() != before
    other = write_source(source.parent / "other")
    assert build(source=str(other)).source_notes() == ()


def test_whole_families_are_held_out_or_the_benchmarks_own_split_is_kept(source: Path) -> None:
    env = build(source=str(source))
    found = {
        split: {env.family(env.make_task(seed, split)) for seed in range(env.task_count(split))} for split in ("train", "heldout")
    }
    assert found["train"] | found["heldout"] == {"easy", "hard", "odd"} and not found["train"] & found["heldout"]
    assert found["heldout"] == held_out_families(["easy", "hard", "odd"]) and env.task_count("all") == 6
    own = build(source=str(write_source(source.parent / "own", splits=True)))
    assert [own.make_task(seed, "heldout").id for seed in range(own.task_count("heldout"))] == ["odd0", "odd1"]
    assert own.make_task(2, "heldout").id == "odd0", "beyond the last task they begin again"
    # A selection of families holds out what the whole benchmark does.
    for family in ("easy", "hard", "odd"):
        one = build(source=str(source), families=[family])
        held = family in found["heldout"]
        assert (one.task_count("train"), one.task_count("heldout")) == ((0, 2) if held else (2, 0))
    alone = by_split("s", [SuiteTask(str(n), "x", {}, {}) for n in range(40)])
    assert 0 < len(alone["heldout"]) < 20, "a single family is split by task"
    with pytest.raises(TaskDataError, match="no tasks of split 'heldot'; did you mean 'heldout'"):
        env.make_task(0, "heldot")


def test_an_eighth_of_many_families_is_held_out_and_one_of_few() -> None:
    names = [f"family {number}" for number in range(800)]
    held = held_out_families(names)
    assert held >= {name for name in names if content_split(name) == "heldout"} and 100 <= len(held) < 130
    few = [name for name in names if content_split(name) == "train"][:5]
    assert len(held_out_families(few)) == 1 and held_out_families(few) <= set(few)
    # None of 40 by the hash alone: five, an eighth, with the least hashes.
    forty = [name for name in names if content_split(name) == "train"][:40]
    order = sorted(forty, key=lambda name: hashlib.blake2b(name.encode(), digest_size=4).hexdigest())
    assert held_out_families(forty) == set(order[:5])
    every = [name for name in names if content_split(name) == "heldout"][:4]
    assert len(held_out_families(every)) == 3
    assert held_out_families(["alone"]) == frozenset() == held_out_families([])


def test_a_part_of_a_suite_is_spread_over_its_kinds_and_the_same_for_the_same_seed(source: Path) -> None:
    env = build(source=str(source))
    families = [env.family(env.make_task(number, "all")) for number in range(6)]
    for seed in range(8):
        parts = [env.spread("all", count, seed) for count in range(1, 7)]
        assert [sorted({families[number] for number in part}) for part in parts[2:]] == [["easy", "hard", "odd"]] * 4
        assert all(set(less) < set(more) for less, more in pairwise(parts)) and parts[5] == tuple(range(6))
        assert parts == [env.spread("all", count, seed) for count in range(1, 7)]
    assert len({env.spread("all", 3, seed) for seed in range(8)}) > 1
    by_terms = type("ByTerms", (type(env),), {"kind": "terms"})(source=str(source))
    assert len({str(by_terms.make_task(number, "all").data["terms"]) for number in by_terms.spread("all", 4)}) == 4


def test_tasks_of_a_suite_are_told_apart() -> None:
    with pytest.raises(TaskDataError, match="two tasks have the id 'a'"):
        by_split("s", [SuiteTask("a", "x", {}, {}), SuiteTask("a", "y", {}, {})])
    with pytest.raises(TaskDataError, match="family 'x' have a split of their own"):
        by_split("s", [SuiteTask("a", "x", {}, {}, "train"), SuiteTask("b", "x", {}, {})])
    with pytest.raises(TaskDataError, match="no tasks"):
        by_split("s", [])


def test_what_an_agent_that_solves_nothing_earns_is_counted_by_hand(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = source / "data" / "tasks.json"
    rows = json.loads(file.read_text())
    # Two of six tasks are solved by doing nothing, both of one family: 2 of 6, Wilson's interval 9.7 % to 70.0 %.
    rows = [{**row, "terms": [0, *(0 for _ in row["terms"][1:])]} if row["family"] == "odd" else row for row in rows]
    file.write_text(json.dumps(rows))
    run("install", "sums", "--from", str(source))
    capsys.readouterr()
    assert run("floor", "sums", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["tasks"], found["every"], found["split"], found["version"]) == (6, True, "all", "1.2")
    for one in found["agents"].values():
        assert (one["paid"], one["ids"], one["families"], one["unscored"]) == (2, ["odd0", "odd1"], {"odd": [2, 2]}, 0)
        assert one["mean"] == pytest.approx(2 / 6)
        own = {row["name"]: row["value"] for row in one["official"]}
        assert own == {"easy": 0, "hard": 0, "odd": 100, "overall": pytest.approx(100 / 3)}
        assert (one["low"], one["high"]) == (pytest.approx(0.0968, abs=1e-4), pytest.approx(0.7000, abs=1e-4))
    assert found["any"]["paid"] == 2
    assert run("floor", "sums", f"source={source}", "--tasks", "1") == 0
    assert "the first 1 tasks of all (1)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("floor", "sums", "--tasks", "0")
    assert "--tasks: expected a whole number of at least 1, got '0'" in capsys.readouterr().err


def test_a_suite_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    site = tmp_path / "site"
    info = site / "sums_pack-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "sums_pack.py").write_text(ENV)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sums-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.envs]\ntoys/Sums-v0 = sums_pack:Sums\n")
    monkeypatch.syspath_prepend(site)
    assert run("install", "sums", "--from", str(write_source(tmp_path / "checkout"))) == 0
    assert "sums 1.2" in capsys.readouterr().out
    found = suite_env(EnvRef("toys/Sums-v0"))
    assert found is not None and found.source == tmp_path / "checkout"
    assert suite_env(EnvRef("key_value")) is None


# -- what training and held-out tasks share ------------------------------------------------------------

PROMPTS = {
    "train": ["Add one and two to three", "Say hello"],
    "heldout": ["please add ONE and two, to four", "Say  HELLO!", "nothing alike here"],
}
GOLD: dict[str, list[dict[str, Any]]] = {
    "train": [{"text": "a", "n": 1}, {}],
    "heldout": [{"n": 1, "text": "a"}, {}, {"text": "b"}],
}


class Leaky(Notes):
    """Prompts and gold calls from the tables above; the last held-out task has no gold."""

    id = "tests/Leaky-v0"

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"{split}/{rng_seed}", rng_seed, split, {"words": ["x"]}, {})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "the same for all of them"), Message("user", PROMPTS[task.split][task.seed])]

    def gold_turns(self, task: Task) -> list[Message]:
        if (task.split, task.seed) == ("heldout", 2):
            raise NotImplementedError("no gold")
        return [Message("assistant", "", (ToolCall("write", GOLD[task.split][task.seed]),))]


def test_shared_contents_are_counted_by_kind() -> None:
    functions, grams, gold = find_leaks(Leaky(scorer=None), range(2), range(3), n=4)
    names = len(Leaky(scorer=None).toolbox.names)
    assert (functions.shared, functions.tasks, functions.half, functions.of) == (names, 3, 3, 3)
    # "add one and two", "one and two to" of the first task's four 4-grams, and "say hello", which is shorter.
    assert (grams.shared, grams.tasks, grams.half, grams.of) == (3, 2, 2, 3)
    assert grams.examples == [("add one and two", "heldout/0", "train/0"), ("say hello", "heldout/1", "train/1")]
    # Arguments are compared in any order; calls without arguments are in no count.
    assert (gold.shared, gold.tasks, gold.half, gold.of) == (1, 1, 1, 1)
    assert gold.examples == [('{"n": 1, "text": "a"}', "heldout/0", "train/0")]
    assert ngrams("A b, c d", 3) == {"a b c", "b c d"} and ngrams("A!", 3) == {"a"} and ngrams("...", 3) == set()


def test_the_command_prints_what_is_shared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_suite(here)
    source = write_source(here / "checkout", splits=True)
    assert main(["env", "leaks", "sums", f"source={source}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Held out are "odd0" (adds 2, 3) and "odd1" (3, 3); training tasks add 2, 3 and 2 (with 2), 3 (with 2).
    assert (found["train"], found["heldout"]) == (4, 2)
    assert [(one["kind"], one["shared"], one["tasks"]) for one in found["leaks"]] == [
        ("functions", 1, 2), ("n-grams", 0, 0), ("gold arguments", 2, 2),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        main(["env", "leaks", "sums", f"source={source}", "--ngram", "0"])
    assert "--ngram: expected a whole number of at least 1, got '0'" in capsys.readouterr().err
