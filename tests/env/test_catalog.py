"""From id to environment: search order, lookalikes, references that travel, Gymnasium's registry."""

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.env.address import module_folder
from agentrl.env.catalog import EnvRef, find_config, find_env, find_reward, find_tools, list_envs, shelf_problems
from agentrl.utils.errors import CatalogError
from agentrl.utils.search_path import shelves

SOURCE = '''
from agentrl.env import Message, Task, ToolEnv
from .words import GREETING

raise_if_run = open("{marker}", "a").write("run ")

class Hello(ToolEnv):
    """Say hello."""
    id = "{id}"
    reward = "reward.json"
    summary = "says {summary}"

    def __init__(self, *, word: str = GREETING, **base):
        super().__init__(**base)
        self.word = word

    def make_task(self, rng_seed, split):
        return Task(f"{{split}}/{{rng_seed}}", rng_seed, split)

    def prompt(self, task):
        return [Message("user", self.word)]
'''


def alone(env_id: str, word: str, marker: Path) -> str:
    """The environment in one file."""
    text = SOURCE.format(id=env_id, summary="one", marker=marker)
    return text.replace("from .words import GREETING", f"GREETING = {word!r}")


def shelf(folder: Path, env_id: str = "My/Hello-v0", summary: str = "hi") -> Path:
    place = folder / "envs" / "hello"
    place.mkdir(parents=True)
    (place / "env.py").write_text(SOURCE.format(id=env_id, summary=summary, marker=folder / "ran"))
    (place / "words.py").write_text('GREETING = "hello"\n')
    (place / "reward.json").write_text("{}")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(shelf(tmp_path / "cwd"))
    monkeypatch.delenv("AGENTRL_PATH", raising=False)
    return tmp_path / "cwd"


def test_listing_reads_and_does_not_run(here: Path) -> None:
    entries = {entry.id: entry for entry in list_envs()}
    assert entries["My/Hello-v0"].summary == "says hi" and "agentrl/KeyValue-v0" in entries
    assert not (here / "ran").exists()
    env = EnvRef("hello").build()
    assert (here / "ran").read_text() == "run "
    assert env.reset(seed=0)[0][0].content == "hello"
    assert EnvRef("hello").default_reward() == str(here / "envs" / "hello" / "reward.json")


def test_the_nearer_shelf_wins(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    far = shelf(tmp_path / "far", summary="far away")
    monkeypatch.setenv("AGENTRL_PATH", f"{far}{os.pathsep}{tmp_path / 'missing'}")
    assert shelves()[:2] == shelves()[:2] == [here, far]
    assert caplog.messages == [f"AGENTRL_PATH: {tmp_path / 'missing'} is no folder. Correct it; nothing is found there"]
    assert find_env("My/Hello-v0").summary == "says hi"
    monkeypatch.chdir(tmp_path)
    assert find_env("My/Hello-v0").summary == "says far away"


def test_a_single_file_is_an_environment_too(here: Path) -> None:
    (here / "envs" / "one.py").write_text(alone("My/One-v0", "x", here / "ran"))
    assert EnvRef("one").build().reset(seed=0)[0][0].content == "x"


def test_same_names_on_two_shelves_do_not_mix(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = shelf(tmp_path / "other", env_id="Other/Hello-v0")
    (other / "envs" / "hello" / "words.py").write_text('GREETING = "bye"\n')
    monkeypatch.setenv("AGENTRL_PATH", str(other))
    assert EnvRef("My/Hello-v0").build().reset(seed=0)[0][0].content == "hello"
    assert EnvRef("Other/Hello-v0").build().reset(seed=0)[0][0].content == "bye"
    assert "envs" not in sys.modules and "words" not in sys.modules


@pytest.mark.parametrize(("call", "says"), [
    (lambda: find_env("key_valu"), "did you mean 'key_value'"),
    (lambda: find_env("agentrl/KeyValu-v0"), "'agentrl/KeyValue-v0'"),
    (lambda: EnvRef("key_value", {"cals": 3}).build(), "no parameter 'cals'; did you mean 'calls'"),
    (lambda: EnvRef("key_value", {"keys": []}).build(), "parameter keys = []: Input should be a valid integer"),
    (lambda: EnvRef("key_value", {"max_value": "9"}).build(), "parameter max_value = '9': Input should be a valid integer"),
    (lambda: find_reward("no_such"), "no reward spec 'no_such'"), (lambda: find_config("no_such"), "no config 'no_such'"),
    (lambda: find_tools("no_such"), "no tool set 'no_such'"),
])  # fmt: skip
def test_a_miss_names_the_nearest(call: object, says: str) -> None:
    with pytest.raises(CatalogError) as caught:
        call()  # type: ignore[operator]
    assert says in str(caught.value)


def test_a_broken_file_hides_nothing_else_and_is_reported(here: Path) -> None:
    (here / "envs" / "bad.py").write_text("class Bad(:\n")
    assert find_env("key_value").id == "agentrl/KeyValue-v0"
    [problem] = shelf_problems()
    assert problem.startswith(f"{here}/envs/bad.py: not a Python file")
    with pytest.raises(CatalogError, match=r"bad\.py: not a Python file"):
        find_env("bad")


def test_a_file_that_fails_to_load_says_why(here: Path) -> None:
    (here / "envs" / "hello" / "words.py").write_text("1 / 0\n")
    with pytest.raises(CatalogError, match="ZeroDivisionError"):
        EnvRef("hello").build()


def test_a_reference_travels_to_a_process_with_another_working_directory(here: Path, tmp_path: Path) -> None:
    data = pickle.dumps(EnvRef("hello", {"word": "from afar"}, seed=5))
    code = (
        "import pickle, sys; ref = pickle.load(sys.stdin.buffer); env = ref.build();"
        "observation, info = env.reset(); print(observation[0].content, info['task_id'])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[0] == "from afar train/5"


def test_paths_are_found_before_names(here: Path) -> None:
    (here / "rewards").mkdir()
    (here / "rewards" / "mine.json").write_text("{}")
    assert find_reward("mine") == here / "rewards" / "mine.json"
    assert find_reward("rewards/mine.json") == here / "rewards" / "mine.json"
    assert find_config("quickstart").name == "quickstart.toml"


def test_entry_points_of_other_packages(here: Path, tmp_path: Path) -> None:
    """A third-party pack: an installed distribution that announces an environment."""
    pack = tmp_path / "site"
    pack.mkdir()
    (pack / "my_pack.py").write_text(alone("Pack/Hello-v0", "pack", here / "ran"))
    info = pack / "my_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.envs]\nPack/Hello-v0 = my_pack:Hello\n")
    code = "from agentrl.env.catalog import EnvRef; print(EnvRef('Pack/Hello-v0').build().reset(seed=0)[0][0].content)"
    env = {**os.environ, "PYTHONPATH": str(pack)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=here, capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "pack"


def test_gymnasium_make_by_module_and_by_id(here: Path) -> None:
    import gymnasium

    import agentrl.env.gym

    for name in ("agentrl.env.gym:KeyValue-v0", "agentrl.env.gym:agentrl/KeyValue-v0"):
        env = gymnasium.make(name, scorer=None, calls=2)
        assert env.unwrapped.id == "agentrl/KeyValue-v0"
        assert env.spec is not None and env.spec.to_json()
        env.reset(seed=0)
    importlib.reload(agentrl.env.gym)  # the shelf has an environment more now
    made = gymnasium.registry["My/Hello-v0"]
    assert gymnasium.make("My/Hello-v0", scorer=None).reset(seed=0)[0][0].content == "hello"
    importlib.reload(agentrl.env.gym)
    assert gymnasium.registry["My/Hello-v0"] is made
    gymnasium.registry.pop("My/Hello-v0")
    gymnasium.registry.pop("Hello-v0")


def test_a_reference_finds_the_shipped_copy_of_its_file_and_not_the_drivers(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a worker of a joined cluster: AGENTRL_PATH holds copies of the driver's shelves (AGENTRL_SHIPPED)."""
    copy = shelf(tmp_path / "copy")
    (copy / "envs" / "hello" / "words.py").write_text('GREETING = "the copy"\n')
    ref = pickle.loads(pickle.dumps(EnvRef("hello")))
    monkeypatch.chdir(tmp_path)
    assert ref.entry.path == here / "envs" / "hello" / "env.py"
    monkeypatch.setenv("AGENTRL_PATH", os.pathsep.join([str(tmp_path / "other"), "copy"]))
    monkeypatch.setenv("AGENTRL_SHIPPED", os.pathsep.join(["/somewhere", str(here)]))
    assert pickle.loads(pickle.dumps(ref)).build().reset(seed=0)[0][0].content == "the copy"


def test_a_file_that_is_not_on_this_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CatalogError, match=r"its file was /elsewhere/env.py, which is not on this machine"):
        EnvRef("nowhere", source="/elsewhere/env.py").build()


def test_a_package_is_found_without_an_import_of_it() -> None:
    assert module_folder("json") == Path(os.__file__).resolve().parent / "json" and module_folder("no_such_package") is None
