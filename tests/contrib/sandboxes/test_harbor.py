"""The harbor environment: tasks as folders, their tests as the judge, and a policy that would rather write its own verdict."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.contrib.sandboxes.bubblewrap import BubblewrapSandbox
from agentrl.contrib.sandboxes.contract import SANDBOXES
from agentrl.contrib.sandboxes.local import LocalSandbox
from agentrl.contrib.suites.suite import read_record
from agentrl.contrib.toolkit.taskdata import held_out_families
from agentrl.data.trajectory import StopReason
from agentrl.env import Message, ToolCall
from agentrl.env.catalog import find_env, make_env
from agentrl.env.check import check_all
from agentrl.env.check_tools import Subject
from agentrl.env.spaces import run_sync
from agentrl.reward import compile_spec, load_spec
from agentrl.utils.errors import ConfigError, SandboxError, TaskDataError
from agentrl.utils.search_path import load_module
from tests.conftest import proof
from tests.contrib.agents.parts import FUNCTION, LIMITS, Script
from tests.contrib.agents.parts import play as agents_play
from tests.contrib.sandboxes.test_providers import tiny_image
from tests.shelf.conversation_probes import play

FOLDER = Path(str(find_env("harbor").path)).parent
tasks = load_module(FOLDER / "tasks.py")
OWN = {"count-errors": 0, "fix-script": 1, "rename-photos": 2}  # and their seeds in train; merge-tables is held out


@pytest.fixture(params=["local", "bubblewrap"])
def provider(request: pytest.FixtureRequest) -> str:
    """Each of this machine's own: which one is chosen without a word depends on the machine."""
    if reason := SANDBOXES.bind(request.param, {})().unavailable():
        pytest.skip(f"sandbox provider {request.param}: {reason}")
    return str(request.param)


def shell(*commands: str) -> list[Message]:
    return [Message("assistant", tool_calls=(ToolCall("shell", {"command": command}),)) for command in commands]


def played(env: Any, *turns: Message | str, seed: int = 0) -> tuple[float, bool]:
    env.reset(seed=seed)
    return play(env, list(turns))


def verdict(env: Any) -> Any:
    return env.trajectory.state["verdict"]


def task_folder(root: Path, name: str, settings: str = "", test: str = "exit 0", **files: str) -> Path:
    """A task folder that needs its files only."""
    folder = root / name
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(settings or '[metadata.agentrl]\nfiles_only = true\nsplit = "train"\n')
    (folder / "instruction.md").write_text(files.pop("instruction", "Do it.\n"))
    (folder / "tests" / "test.sh").write_text(f"#!/bin/sh\n{test}\n")
    for path, text in files.items():
        place = folder / path.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


# -- the project's own tasks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "seed"),
    [("train", 0), pytest.param("train", 1, marks=proof), pytest.param("train", 2, marks=proof), ("heldout", 0)],
)
def test_the_solution_scores_one_and_nothing_scores_nothing(split: str, seed: int) -> None:
    env = make_env("harbor")
    env.reset(seed=seed, options={"split": split})
    assert play(env, list(env.gold_turns(env.task))) == (1.0, True)
    assert verdict(env)["reward"] == 1.0 and verdict(env)["tests"]["end"] in ("ok", "error")
    env.reset(seed=seed, options={"split": split})
    assert play(env, ["Done."]) == (0.0, True)
    assert env.trajectory.success is not True and verdict(env)["reward"] == 0.0


@proof
def test_any_agent_plays_it_and_its_tests_judge() -> None:
    """The openai client's agent, whose model says what the solution says."""
    env = make_env("harbor", scorer=None)
    turns = env.gold_turns(env.make_task(5, "train"))  # the seed of the episode
    limits = replace(LIMITS, max_turn_tokens=4096, max_episode_tokens=8192, context=8192)
    for model, reward in ((turns, 1.0), (turns[-1:], 0.0)):
        (episode,) = agents_play(Script(model), FUNCTION, env=lambda: make_env("harbor", scorer=None), limits=limits)
        assert episode.stop is StopReason.DONE and episode.state["verdict"]["reward"] == reward, episode.error


def test_half_a_solution_is_worth_the_half_that_its_tests_say() -> None:
    env = make_env("harbor")
    levels = "printf 'DEBUG 1\\nERROR 1\\nINFO 1\\nWARN 1\\n' > counts.txt"
    assert played(env, *shell(levels), "Done.", seed=OWN["count-errors"]) == (0.5, True)
    assert env.scorer.score(env.trajectory).success is False  # type: ignore[union-attr]


def test_an_episode_cut_at_its_limit_is_judged_too() -> None:
    env = make_env("harbor")
    env.reset(seed=OWN["fix-script"])
    env.step(env.gold_turns(env.task)[0])
    assert run_sync(env.aend(StopReason.MAX_TURNS)) == 1.0
    assert env.trajectory.truncated and env.trajectory.stop is StopReason.MAX_TURNS


@proof
def test_the_contract_holds() -> None:
    """What `env check` looks at, with few fuzzed calls."""
    scorer = compile_spec(load_spec(find_env("harbor").default_reward()))
    subject = Subject(lambda: make_env("harbor", scorer=scorer), scorer, tasks=2, fuzz=3)
    wrong = [finding for finding in check_all(subject) if finding.ok is False]
    assert not wrong, wrong


def test_tools_say_what_happened() -> None:
    env = make_env("harbor", command_s=1, output_kb=1)
    env.reset(seed=0)

    def said(name: str, **arguments: Any) -> str:
        return env.step(Message("assistant", tool_calls=(ToolCall(name, arguments),)))[0][0].content

    assert said("shell", command="echo a; echo b >&2; exit 3") == "a\nb\n[exit status 3]"
    assert said("shell", command="sleep 30") == "[stopped: not done after 1 s]"  # and the episode goes on
    assert said("shell", command="head -c 3000 /dev/zero | tr '\\0' x").endswith("x\n[1976 more bytes of output]")
    assert said("write", path="d/n.txt", content="é") == "2 bytes written"
    assert said("read", path="d/n.txt") == "é" and "no such file" in said("read", path="d")
    assert "not a path of a file" in said("write", path="server.log/x", content="")
    assert "zero byte" in said("shell", command="a\0b")


# -- as a suite -------------------------------------------------------------------------------------


def test_a_folder_of_tasks_is_installed_and_held_out_by_category(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    kinds = [f"kind {number}" for number in range(12)]
    for number, kind in enumerate(kinds * 2):
        own = f'[metadata]\ncategory = "{kind}"\n[metadata.agentrl]\nfiles_only = true\n'
        task_folder(tmp_path / "set", f"t{number}", own)
    task_folder(tmp_path / "set", "alone", '[environment]\ndocker_image = "i:1"\n')  # cannot run here, and counts
    assert main(["env", "install", "harbor", "--from", str(tmp_path / "set")]) == 0
    assert "no version" in capsys.readouterr().out
    record = read_record("harbor")
    assert record is not None
    counts = record.tasks["agentrl/Harbor-v0"]
    held = held_out_families([*kinds, "alone"])
    assert set(counts["heldout"]) == held and set(counts["train"]) == {*kinds, "alone"} - held
    env = make_env("harbor", skip_unfit=True)
    found = {env.make_task(seed, "heldout").data["family"] for seed in range(env.task_count("heldout"))}
    assert found == held - {"alone"} and env.task_count("train") + env.task_count("heldout") == 24
    with pytest.raises(ConfigError, match=r"params.source and params.tasks name the same folder"):
        make_env("harbor", source="a", tasks="b")


def test_a_solution_of_several_files_is_gold_if_the_sandbox_has_a_root_of_its_own(tmp_path: Path) -> None:
    files = {"solution__solve.sh": '. "$(dirname "$0")/part"\n', "solution__part": 'echo "$WORD"\n'}
    task_folder(tmp_path, "t", '[solution.env]\nWORD = "it is done"\n', **files)
    (task,) = tasks.read_tasks(tmp_path)
    assert task.solved(images=False) is None
    command = task.solved(images=True)
    done = subprocess.run(["sh", "-c", str(command).replace("/solution", f"'{tmp_path}/root'")], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("it is done\n", "")


# -- the tests and their verdict belong to the judge -------------------------------------------------


def test_a_policy_neither_sees_tests_nor_leaves_a_verdict(tmp_path: Path, provider: str) -> None:
    """Files, links and late writers; programs, and /proc beyond its processes, are not looked through."""
    secret = "expected-4711"
    test = f'[ "$(cat answer 2>/dev/null)" = {secret} ] && echo 1 > "$LOGS_DIR/reward.txt"; sleep 0.2'
    env = make_env("harbor", tasks=str(task_folder(tmp_path, "a", test=test)), sandbox={"provider": provider}, command_s=10)
    rest = " ".join(f"--exclude-dir={name}" for name in ("usr", "opt", "proc", "python3*"))
    tries = [
        f"cat ../tests/* /tests/* 2>&1; ls ..; grep -rs {rest} expected-47 .. / | head; echo looked",
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | tr '\\0' ' '; echo looked",
        "mkdir -p ../logs/verifier ../tests; cd ../logs/verifier; echo 1 > reward.txt; echo '{\"r\": 1}' > reward.json",
        "printf '#!/bin/sh\\necho 1 > $LOGS_DIR/reward.txt' > ../tests/test.sh",
        "rm -rf ../tests ../logs; ln -s app ../logs; ln -s app ../tests; mkdir -p verifier; echo 1 > verifier/reward.txt",
        "(while :; do mkdir -p ../logs/verifier; echo 1 > ../logs/verifier/reward.txt; sleep 0.02; done) >/dev/null 2>&1 &",
        "mkdir bin; printf '#!/bin/sh\\necho " + secret + "' > bin/cat; PATH=$PWD/bin; export PATH",
    ]
    env.reset(seed=0)
    observations = [env.step(turn)[0][0].content for turn in shell(*tries)]
    assert secret not in "\n".join(observations)
    assert not [said for said in observations if "stopped" in said] and all("looked" in said for said in observations[:2])
    assert play(env, ["Done."]) == (0.0, True)
    assert verdict(env) == {"reward": 0.0, "reason": "the tests left no verdict", "tests": {"code": 0, "end": "ok", "output": ""}}
    assert played(env, *shell(f"echo {secret} > answer"), "Done.") == (1.0, True)


CHEATS = {
    "writes the verdict": 'echo 1 > "$LOGS_DIR/reward.txt"',
    "writes the one that goes before": 'echo \'{"reward": 1}\' > "$LOGS_DIR/reward.json"',
    "writes it and ends the tests": 'echo 1 > "$LOGS_DIR/reward.txt"; kill -9 $PPID',
    "writes it later": '(while :; do mkdir -p "$LOGS_DIR"; echo 1 > "$LOGS_DIR/reward.txt"; done) >/dev/null 2>&1 &',
    "changes the tests": 'mkdir -p "$TESTS_DIR"; printf "#!/bin/sh\\necho 1 > \\$LOGS_DIR/reward.txt" > "$TESTS_DIR/test.sh"',
    "makes a link of it": 'rm -rf "$LOGS_DIR"; ln -s "$PWD" "$LOGS_DIR"; echo 1 > reward.txt',
}
"""What a script of the policy's own does when the tests run it."""


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_a_script_that_the_tests_run_does_not_write_their_verdict(cheat: str, provider: str) -> None:
    env = make_env("harbor", sandbox={"provider": provider})
    write = Message("assistant", tool_calls=(ToolCall("write", {"path": "backup.sh", "content": f"#!/bin/sh\n{cheat}\n"}),))
    assert played(env, write, "Done.", seed=OWN["fix-script"]) == (0.0, True), verdict(env)


@pytest.mark.parametrize(("test", "reward", "reason"), [
    ('echo 1 > "$LOGS_DIR/reward.json"; echo 0 > "$LOGS_DIR/reward.txt"', 0.0, None),
    ('echo 0.25 > "$LOGS_DIR/reward.txt"', 0.25, None),
    ('echo 1 > "$LOGS_DIR/reward.txt"; echo \'{"reward": 0.5, "speed": 3}\' > "$LOGS_DIR/reward.json"', 0.5, None),
    ('echo \'{"only": 0.75}\' > "$LOGS_DIR/reward.json"', 0.75, None),
    ('echo \'{"reward": 0.5, "notes": "fine", "ok": true}\' > "$LOGS_DIR/reward.json"', 0.5, None),
    ('echo 0.25 > "$LOGS_DIR/reward.txt"; echo \'{"passed": 3, "of": 4}\' > "$LOGS_DIR/reward.json"', 0.25, None),
    ('echo \'{"notes": "fine"}\' > "$LOGS_DIR/reward.json"', 0.0, "reward.json is no verdict: it has no number"),
    ('echo yes > "$LOGS_DIR/reward.txt"', 0.0, "reward.txt is no verdict"),
    ('echo nan > "$LOGS_DIR/reward.txt"', 0.0, "reward.txt is no verdict"),
    ('printf "1%0400d" 0 > "$LOGS_DIR/reward.json"', 0.0, "reward.json is no verdict: int too large"),
    ('head -c 60000 /dev/zero | tr "\\0" "[" > "$LOGS_DIR/reward.json"', 0.0, "reward.json is no verdict: maximum recursion"),
    ("exit 1", 0.0, "the tests left no verdict"),
    ('echo 1 > "$LOGS_DIR/reward.txt.part"; sleep 60', 0.0, "the tests were ended (wall"),
    ('echo 1 > "$LOGS_DIR/reward.txt"; sleep 60', 0.0, "the tests were ended (wall"),
    ('echo 1 > "$LOGS_DIR/reward.txt"; kill -9 $$', 0.0, "the tests were ended"),
    ('echo 1 > "$LOGS_DIR/reward.txt"; kill -TERM $$', 0.0, "the tests were ended"),
    ('echo 1 > "$LOGS_DIR/reward.txt"; sh -c \'kill -9 $PPID\'', 0.0, "the tests were ended"),
])  # fmt: skip
def test_how_a_verdict_is_read(tmp_path: Path, test: str, reward: float, reason: str | None) -> None:
    seconds = 0.5 if "sleep" in test else 20.0  # a busy machine takes its time
    settings = f'[metadata.agentrl]\nfiles_only = true\nsplit = "train"\n[verifier]\ntimeout_sec = {seconds}\n'
    env = make_env("harbor", tasks=str(task_folder(tmp_path, "a", settings, test)))
    assert played(env, "Done.") == (reward, True)
    assert (verdict(env).get("reason") or "").startswith(reason or "") and (reason is None) == ("reason" not in verdict(env))
    assert (verdict(env)["tests"]["end"] == "wall") == ("sleep" in test)


LEFT = 'echo 1 > "$LOGS_DIR/reward.txt"; ls -A'
"""A test that is content with everything, so that an episode without a reward is one whose test could not run."""


@pytest.mark.parametrize("breaks", ["rm -r app; touch app", "rm -r app; ln -s /nothing app", "chmod 0 app"])
def test_a_policy_that_breaks_its_working_folder_has_failed(tmp_path: Path, provider: str, breaks: str) -> None:
    """And where it cannot break it, its tests judge what is in it: bubblewrap's is a mount, the local one changes no modes."""
    env = make_env("harbor", tasks=str(task_folder(tmp_path, "a", test=LEFT)), sandbox={"provider": provider})
    env.reset(seed=0)
    said = env.step(shell(f"echo x > kept; cd ..; {breaks}; cd app 2>&1 && ls -A; :")[0])[0][0].content
    broken = ("chmod" in breaks) == (provider == "bubblewrap")
    assert play(env, ["Done."]) == (0.0 if broken else 1.0, True)
    if broken:
        assert verdict(env)["reason"] == "the tests left no verdict" and verdict(env)["tests"]["code"] == 127
        assert "kept" not in said
    else:
        left = "nothing\n" if "ln" in breaks else "" if breaks.startswith("rm") else "kept\n"
        assert verdict(env)["tests"] == {"code": 0, "end": "ok", "output": left}
        assert ("Read-only file system" in said) == (provider == "bubblewrap")


@pytest.mark.parametrize("place", ["environment/key", "tests/key", "environment", "instruction.md"])
def test_a_task_s_links_do_not_lead_out_of_its_folder(tmp_path: Path, place: str) -> None:
    root = task_folder(tmp_path / "tasks", "a", environment__data="x")
    inner, secret = root / "a" / place, tmp_path / "secret"
    shutil.rmtree(inner) if inner.is_dir() else inner.unlink(missing_ok=True)
    secret.mkdir() if place == "environment" else secret.write_text("4711")
    inner.symlink_to(secret)
    with pytest.raises(TaskDataError, match="a link out of the task's folder"):
        make_env("harbor", tasks=str(root))


def test_a_sandbox_that_fails_at_the_end_leaves_the_episode_unscored(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env("harbor", sandbox={"provider": provider})
    env.reset(seed=0)

    async def broken(*_: object, **__: object) -> None:
        raise SandboxError("gone")

    monkeypatch.setattr({"local": LocalSandbox, "bubblewrap": BubblewrapSandbox}[provider], "exec", broken)
    with pytest.raises(SandboxError, match="gone"):
        env.step("Done.")
    assert env.trajectory.stop is StopReason.ENV_ERROR and env.trajectory.reward is None
    assert not env.is_open


def test_copies_of_an_episode_are_judged_apart() -> None:
    env = make_env("harbor")
    env.reset(seed=OWN["rename-photos"])
    turns = env.gold_turns(env.task)
    copied = env.fork()
    env.step(turns[0])
    solved = env.snapshot()
    env.step(shell("rm -r photos")[0])
    assert play(copied, ["Done."]) == (0.0, True)
    assert play(env, ["Done."]) == (0.0, True)
    env.restore(solved)
    assert play(env, ["Done."]) == (1.0, True)


# -- folders of others -------------------------------------------------------------------------------

IMAGE = 'schema_version = "1.1"\n[environment]\n'


@pytest.mark.parametrize(
    ("settings", "more", "reason"),
    [
        (IMAGE, {}, "needs an image (environment/Dockerfile or docker_image), which this sandbox provider does not run"),
        ("[[steps]]\nname = 'a'\n", {}, "several steps"),
        (IMAGE, {"environment__docker-compose.yaml": ""}, "several containers"),
        (IMAGE + "gpus = 2\n", {}, "needs 2 GPUs"),
        (IMAGE + 'os = "windows"\n', {}, "for windows"),
        (IMAGE + 'network_mode = "allowlist"\n', {}, "network_mode is 'allowlist'"),
        ("[verifier]\nuser = 'judge'\n", {}, "runs as user 'judge'"),
        ("[verifier]\nenvironment_mode = 'separate'\n", {}, "an environment of their own"),
        (IMAGE + "allowed_hosts = ['pypi.org']\n", {}, "a list of hosts (allowed_hosts)"),
        ("[agent]\nnetwork_mode = 'no-network'\n", {}, "another network than its environment"),
        (IMAGE + "env = { KEY = '${NO_SUCH_NAME}' }\n", {}, "needs the environment variable NO_SUCH_NAME"),
        ("[verifier]\nenv = { A = '${NO_SUCH_NAME}', B = '${B:-b}' }\n", {}, "needs the environment variable NO_SUCH_NAME"),
    ],
)
def test_what_cannot_run_is_refused_with_its_name_and_reason(
    tmp_path: Path, provider: str, settings: str, more: dict[str, str], reason: str
) -> None:
    root, box = task_folder(task_folder(tmp_path, "fine"), "theirs", settings, **more), {"provider": provider}
    with pytest.raises(ConfigError) as refused:
        make_env("harbor", tasks=str(root), sandbox=box)
    assert f"1 tasks cannot run with env.sandbox.provider = '{provider}'" in str(refused.value)
    assert "theirs: it" in str(refused.value) and reason in str(refused.value)
    env = make_env("harbor", tasks=str(root), sandbox=box, skip_unfit=True)
    assert list(env.unwrapped.pool) == ["fine"]  # type: ignore[attr-defined]


def test_variables_are_those_of_this_process_or_their_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD_OF_TASK", "own")
    given = "A = '${WORD_OF_TASK}', B = '${WORD_OF_TASK:-other}', C = '${NO_SUCH_NAME:-a:-b}', D = '${NO_SUCH_NAME:-}', E = '$A'"
    settings = "".join(f"[{part}]\nenv = {{ {given} }}\n" for part in ("environment", "verifier"))
    lacking = "[solution]\nenv = { X = '${NO_SUCH_NAME}' }\n[metadata.agentrl]\nfiles_only = true\n"
    files, shown = {"solution__solve.sh": "echo"}, 'echo "$A/$B/$C/$D/$E"'
    task_folder(tmp_path, "t", settings + lacking, f"{shown}; echo 1 > $LOGS_DIR/reward.txt", **files)
    env = make_env("harbor", tasks=str(tmp_path), sandbox={"provider": "local"})
    assert played(env, *shell(shown), "Done.") == (1.0, True) and tasks.read_tasks(tmp_path)[0].solved(images=True) is None
    assert verdict(env)["tests"]["output"] == env.trajectory.turns[0].results[0].content + "\n" == "own/own/a:-b//$A\n"


def test_task_folders_are_read_as_harbor_writes_them(tmp_path: Path) -> None:
    older = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\ncpus = 2\nallow_internet = false\nnew_key = 1\n'
    task_folder(tmp_path / "set", "old", older, environment__Dockerfile="FROM a\nWORKDIR /one\nRUN x\nworkdir /work\n")
    task_folder(tmp_path / "set", "image", '[environment]\ndocker_image = "i:1"\n', environment__a="b")
    (tmp_path / "set" / ".hidden").mkdir()
    canary = "<!-- canary GUID 1 -->\n# canary 2\n\nThe canary is yellow.\n"
    task_folder(tmp_path / "set", "marked", instruction=canary, solution__solve__sh="x")
    old, image, marked = (next(t for t in tasks.read_tasks(tmp_path) if t.name == name) for name in ("old", "image", "marked"))
    spec = old.spec(images=True)
    assert (spec.memory, spec.cpus, spec.network, spec.workdir) == (2 << 30, 2.0, "none", "/work")
    assert (spec.build, old.settings.environment.storage_mb) == (old.folder / "environment", 512)
    assert (image.spec(True).image, image.spec(True).network, dict(image.spec(True).files)) == ("i:1", "all", {"a": b"b"})
    assert marked.instruction == "The canary is yellow.\n" and marked.spec(False).network == "all"
    (old.folder / "task.toml").write_text("[environment]\nmemory = 'much'\n")
    with pytest.raises(TaskDataError, match=r"task.toml: environment: .*a size like '2G' was expected, not 'much'"):
        tasks.read_tasks(tmp_path)
    with pytest.raises(ConfigError, match=r"params.source is '.*nowhere', and there is no such folder"):
        make_env("harbor", tasks=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("params", [{"command_s": 0}, {"output_kb": 2000}])
def test_knobs_have_ranges(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        make_env("harbor", **params)


# -- in containers -----------------------------------------------------------------------------------


@proof
@pytest.mark.parametrize("provider", ["podman", "docker"])
def test_tasks_with_images_run_in_containers(provider: str, tmp_path: Path) -> None:
    if reason := SANDBOXES.bind(provider, {})().unavailable():
        pytest.skip(reason)
    image = tiny_image(provider)
    test = '[ "$(cat /app/answer)" = "$(cat /tests/expected)" ] && echo 1 > /logs/verifier/reward.txt'
    none = "[environment]\nallow_internet = false\n"
    root = task_folder(
        tmp_path, "built", none + '[metadata.agentrl]\nsplit = "train"\n', test,
        environment__Dockerfile=f"FROM {image}\nWORKDIR /app\nRUN echo 42 > given\n", tests__expected="42\n",
    )  # fmt: skip
    task_folder(
        root, "pulled", f'{none}docker_image = "{image}"\n[metadata.agentrl]\nsplit = "heldout"\n', test,
        environment__given="17\n", tests__expected="17\n",
    )  # fmt: skip
    env = make_env("harbor", tasks=str(root), sandbox={"provider": provider, "warm": 0, "limit": 2})
    for split in ("train", "heldout"):
        for command, reward in (("cp given answer; ls /tests /logs 2>&1", 1.0), ("sleep 300 & echo 0 > answer", 0.0)):
            env.reset(seed=0, options={"split": split})
            assert "No such file" in env.step(shell(command)[0])[0][0].content or reward == 0.0
            assert play(env, ["Done."]) == (reward, True), verdict(env)
    shutil.rmtree(root)
