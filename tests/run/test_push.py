"""`agentrl push` and `pull`: what arrives is what was pushed, whole, verified, and without secrets."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.catalog import make_env
from agentrl.cli.main import main
from agentrl.errors import RepositoryError, ResourceError
from agentrl.run import repository
from agentrl.run.push import pull, push
from agentrl.run.repository import SUMS

ROOT = Path(__file__).parents[2]
CONFIG = """
base = "quickstart"
name = "lora"
steps = 1
sft = false
stop_at_success = false
[model.init]
layers = 1
hidden = 32
mlp = 32
[model.lora]
rank = 2
[rollout]
groups = 1
group_size = 2
max_turns = 1
max_turn_tokens = 8
[algorithm]
minibatch = 2
[cluster]
backend = "inline"
[eval]
tasks = 1
[api]
base = "http://me:hunter2hunter2@127.0.0.1:9/v1"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter, whose config has a password in an address."""
    here = tmp_path_factory.mktemp("run")
    before = Path.cwd()
    try:
        os.chdir(here)
        Path("run.toml").write_text(CONFIG)
        assert main(["train", "run.toml"]) == 0
    finally:
        os.chdir(before)
    return here / "runs/lora"


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def environment(at: Path, text: str = "") -> Path:
    made = shutil.copytree(ROOT / "examples/own_environment/envs/thermostat", at / "thermostat")
    (made / "notes.md").write_text(text or "warm\n")
    return Path(made)


def test_a_run_s_model_and_its_adapter_there_and_back(run: Path, share: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["push", str(run), f"file:{share}"]) == 0
    assert main(["pull", str(share / "models/lora"), str(tmp_path / "model")]) == 0
    was, now = (load_file(folder / "model.safetensors") for folder in (run / "final", tmp_path / "model"))
    assert was.keys() == now.keys() and all(was[name].equal(now[name]) for name in was)
    card = (tmp_path / "model/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- agentrl") and "| steps | 1 |" in card
    assert main(["push", str(run), str(share), "--adapter", "--name", "me/lora-adapter"]) == 0
    pull(str(share / "models/me/lora-adapter"), str(tmp_path / "adapter"))
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", SUMS} <= {
        p.name for p in (tmp_path / "adapter").iterdir()
    }
    assert "get it with: agentrl pull" in capsys.readouterr().out
    config = CONFIG.replace("[model.init]\nlayers = 1\nhidden = 32\nmlp = 32\n", "").replace("[model.lora]\nrank = 2\n", "")
    config += f"[model]\npath = '{tmp_path / 'model'}'\ninit = false\n"
    (tmp_path / "next.toml").write_text(config)
    assert main(["train", str(tmp_path / "next.toml"), "--dry-run"]) == 0, "the pulled folder is a model.path"


def test_the_config_that_is_pushed_has_no_secret(run: Path, share: Path) -> None:
    assert "hunter2hunter2" in (run / "config.toml").read_text()
    push(str(run), str(share))
    pushed = [path.read_bytes() for path in share.rglob("*") if path.is_file()]
    assert len(pushed) > 5 and not any(b"hunter2hunter2" in content for content in pushed)
    assert any(b"[redacted]" in content and b"group_size = 2" in content for content in pushed)


def test_a_secret_that_only_its_name_gives_away_stays_too(run: Path, share: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    server = 'mcp = { shop = { command = ["server"], env = { SHOP_PASSWORD = "correct horse battery" } } }'
    text = (copy / "config.toml").read_text()
    assert "\nmcp = {}" in text
    (copy / "config.toml").write_text(text.replace("\nmcp = {}", f"\n{server}"))
    done = push(str(copy), str(share))
    text = (Path(done.place) / "snapshots" / done.revision / "config.toml").read_text()
    assert "correct horse" not in text and "SHOP_PASSWORD" in text


def test_the_same_content_is_one_revision(run: Path, share: Path) -> None:
    first = push(str(run), str(share))
    before = {path: path.stat().st_mtime_ns for path in sorted(share.rglob("*"))}
    second = push(str(run), str(share))
    assert first.new and not second.new and second.revision == first.revision
    after = {path: path.stat().st_mtime_ns for path in sorted(share.rglob("*"))}
    snapshots = share / "models/lora/snapshots"
    assert {p: t for p, t in after.items() if p != snapshots} == {p: t for p, t in before.items() if p != snapshots}


def test_an_environment_is_pushed_changed_and_both_revisions_pulled(share: Path, tmp_path: Path, monkeypatch: Any) -> None:
    env = environment(tmp_path / "mine")
    one = push(str(env), str(share))
    (env / "notes.md").write_text("warmer\n")
    two = push(str(env), str(share))
    assert one.revision != two.revision and two.new
    repo = share / "environments/thermostat"
    assert (repo / "refs/main").read_text() == two.revision
    pull(str(repo), str(tmp_path / "envs/thermostat"), one.revision[:6])
    assert (tmp_path / "envs/thermostat/notes.md").read_text() == "warm\n"
    monkeypatch.chdir(tmp_path)
    assert make_env("thermostat").reset(seed=1)[0][0].content.startswith("Check")
    pull(str(repo), str(tmp_path / "new"))
    assert (tmp_path / "new/notes.md").read_text() == "warmer\n"
    assert not pull(str(repo), str(tmp_path / "new")).new, "it is there already"
    with pytest.raises(RepositoryError, match=r"no revision '.*'; there are "):
        pull(str(repo), str(tmp_path / "short"), two.revision[:3])
    twins = "0" * 39
    for end in "12":
        shutil.copytree(repo / "snapshots" / two.revision, repo / "snapshots" / f"{twins}{end}")
    with pytest.raises(RepositoryError, match=f"no revision '{twins}'; there are "):
        pull(str(repo), str(tmp_path / "either"), twins)
    (tmp_path / "new/notes.md").write_text("changed\n")
    with pytest.raises(RepositoryError, match=r"new/notes.md: missing, or not as it was pushed"):
        pull(str(repo), str(tmp_path / "new"))
    with pytest.raises(RepositoryError, match="already exists, with other content"):
        pull(str(repo), str(tmp_path / "new"), one.revision)
    with pytest.raises(RepositoryError, match=rf"no revision 'ffff'; there are .*{one.revision}"):
        pull(str(repo), str(tmp_path / "x"), "ffff")


def test_data_as_a_file(share: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n')
    push(str(rows), str(share), "rows")
    pull(str(share / "datasets/rows"), str(tmp_path / "got"))
    assert (tmp_path / "got/rows.jsonl").read_text() == '{"a": 1}\n'


# -- what is damaged or hostile ------------------------------------------------------------------------


@pytest.fixture
def pushed(share: Path, tmp_path: Path) -> Path:
    """The snapshot of an environment."""
    done = push(str(environment(tmp_path / "mine")), str(share))
    return share / "environments/thermostat/snapshots" / done.revision


def test_a_changed_file_is_named_and_nothing_is_at_the_target(pushed: Path, tmp_path: Path) -> None:
    (pushed / "notes.md").write_text("cold\n")
    with pytest.raises(RepositoryError, match=r"notes.md: not as it was pushed \(SHA-256 differs\); nothing was pulled"):
        pull(str(pushed.parents[1]), str(tmp_path / "got"))
    assert not (tmp_path / "got").exists()
    (pushed / "notes.md").unlink()
    with pytest.raises(RepositoryError, match=r"notes.md: is missing"):
        pull(str(pushed.parents[1]), str(tmp_path / "got"))


def test_a_changed_list_is_not_believed(pushed: Path, tmp_path: Path) -> None:
    (pushed / "notes.md").write_text("cold\n")
    sums = json.loads((pushed / SUMS).read_text())
    sums["files"]["notes.md"] = {"size": 5, "sha256": hashlib.sha256(b"cold\n").hexdigest()}
    (pushed / SUMS).write_text(json.dumps(sums))
    with pytest.raises(RepositoryError, match=r"not the list of revision .*: it was changed after it was pushed"):
        pull(str(pushed.parents[1]), str(tmp_path / "got"))


@pytest.mark.parametrize("name", ["../../outside.txt", "/etc/outside.txt", "a/../../outside.txt", "..\\outside.txt", ""])
def test_a_path_that_leaves_the_folder_is_refused_whoever_listed_it(name: str, share: Path, tmp_path: Path) -> None:
    content = b"x"
    text = json.dumps({"files": {name: {"size": 1, "sha256": hashlib.sha256(content).hexdigest()}}})
    revision = hashlib.sha256(text.encode()).hexdigest()[:40]
    place = share / "models/evil/snapshots" / revision
    place.mkdir(parents=True)
    (place / SUMS).write_text(text)
    (share / "outside.txt").write_bytes(content)
    with pytest.raises(RepositoryError, match="leads out of the folder"):
        pull(str(share / "models/evil"), str(tmp_path / "got"), revision)
    assert [path for path in tmp_path.rglob("outside.txt") if share not in path.parents] == []


def test_a_link_is_not_followed_out_of_the_repository(pushed: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("warm\n")
    (pushed / "notes.md").unlink()
    (pushed / "notes.md").symlink_to(secret)
    with pytest.raises(RepositoryError, match="a link, which may lead out of the folder"):
        pull(str(pushed.parents[1]), str(tmp_path / "got"))


def test_a_copy_that_was_cut_short_goes_on(pushed: Path, tmp_path: Path) -> None:
    partial = tmp_path / f".got.{pushed.name[:12]}"
    partial.mkdir()
    shutil.copy(pushed / "env.py", partial / "env.py")
    (partial / "notes.md").write_text("wa")
    (partial / "README.md.part").write_text("half")
    (partial / "of another.py").write_text("raise SystemExit")
    inode = (partial / "env.py").stat().st_ino
    assert pull(str(pushed.parents[1]), str(tmp_path / "got")).new
    assert (tmp_path / "got/env.py").stat().st_ino == inode, "not copied again"
    assert tree(tmp_path / "got") == tree(pushed) and not partial.exists()


def test_a_push_that_dies_shows_nothing_and_the_next_one_cleans_up(share: Path, tmp_path: Path, monkeypatch: Any) -> None:
    env = environment(tmp_path / "mine")
    first = push(str(env), str(share))
    (env / "notes.md").write_text("warmer\n")
    snapshots = share / "environments/thermostat/snapshots"
    (snapshots / f".new.{socket.gethostname()}-999999999-0").mkdir()  # of a process that was killed
    other = snapshots / ".new.elsewhere-999999999-0"  # of one that pushes from another machine
    other.mkdir()
    old = snapshots / ".new.elsewhere-1-0"
    old.mkdir()
    os.utime(old, (0, 0))
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(repository, "check_snapshot", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        push(str(env), str(share))
    assert (share / "environments/thermostat/refs/main").read_text() == first.revision, "readers still get the old one, whole"
    second = push(str(env), str(share))
    assert sorted(path.name for path in snapshots.iterdir()) == sorted([first.revision, second.revision, other.name])


def test_two_that_push_at_once_do_not_write_into_each_other(share: Path) -> None:
    """Containers on two machines often have the same number."""
    one, two = (repository.staging(share / "datasets/x") for _ in range(2))
    assert one != two and one.is_dir() and two.is_dir()
    assert one.stat().st_mode == share.stat().st_mode, "whoever reads the share reads it"


def test_a_list_of_checksums_in_a_subfolder_is_a_file_like_any_other(share: Path, tmp_path: Path) -> None:
    """Data that were pulled into an environment bring theirs; it was left behind without a word."""
    env = environment(tmp_path / "mine")
    (env / "data").mkdir()
    (env / "data" / SUMS).write_text('{"files": {}}')
    done = push(str(env), str(share))
    assert pull(done.place, str(tmp_path / "got")).new
    assert tree(env).items() <= tree(tmp_path / "got").items()


def test_a_model_without_its_weights_is_not_pushed(share: Path, tmp_path: Path, run: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(run / "final", model)
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    with pytest.raises(RepositoryError, match=r"it has no weights \(model.safetensors, or shards"):
        push(str(model), str(share))
    index = model / "model.safetensors.index.json"
    shards = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate("ab", 1)}
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(RepositoryError, match=r"it lacks model-00002-of-00002.safetensors, .* \(1 of 2 are missing\)"):
        push(str(model), str(share))
    shutil.copyfile(model / shards["a"], model / shards["b"])
    assert push(str(model), str(share)).new
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(RepositoryError, match=r"no weights \(adapter_model.safetensors"):
        push(str(tmp_path / "adapter"), str(share))
    assert [path.name for path in (share / "models").iterdir()] != [] and not list(share.glob("models/adapter/snapshots/*"))


def test_an_environment_with_a_config_beside_it_is_no_run(share: Path, tmp_path: Path) -> None:
    env = environment(tmp_path / "mine")
    (env / "config.toml").write_text("name = 'its own'\n")
    assert push(str(env), str(share)).place == str(share / "environments/thermostat")


# -- what should not leave ------------------------------------------------------------------------------


def test_secrets_links_and_pickles_are_refused_by_name(share: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentrl.redaction._read", [])
    monkeypatch.setenv("SHOP_API_KEY", "planted-value-1234")
    env = environment(tmp_path / "a", "one\nkey is planted-value-1234\n")
    with pytest.raises(RepositoryError, match=r"notes.md:2: holds what is, or looks like, a key or password"):
        push(str(env), str(share))
    (env / "notes.md").write_text("hf_" + "a1B2" * 8)
    with pytest.raises(RepositoryError, match=r"notes.md:1: holds"):
        push(str(env), str(share))
    (env / "notes.md").unlink()
    for name in ("explore.ipynb", "page.html", "Makefile"):
        (env / name).write_text('{"source":\n "token = hf_' + "a1B2" * 8 + '"}')
        with pytest.raises(RepositoryError, match=rf"{name}:2: holds what is, or looks like"):
            push(str(env), str(share))
        (env / name).unlink()
    (env / ".env").write_text("SHOP_API_KEY=planted-value-1234")
    done = push(str(env), str(share))
    assert ".env" not in tree(Path(done.place) / "snapshots" / done.revision), "what begins with a dot stays"
    os.mkfifo(env / "pipe")
    with pytest.raises(RepositoryError, match=r"pipe: a link, pipe or device"):
        push(str(env), str(share))
    (env / "pipe").unlink()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n{"a": "hf_' + "a1B2" * 8 + '"}\n')
    with pytest.raises(RepositoryError, match=r"rows\.jsonl:2: holds"):
        push(str(rows), str(share))
    (env / "README.md").write_text("# my own words\n")
    done = push(str(env), str(share))
    assert (Path(done.place) / "snapshots" / done.revision / "README.md").read_text() == "# my own words\n"
    (env / "link").symlink_to("/etc/hostname")
    with pytest.raises(RepositoryError, match="link: a link, pipe or device"):
        push(str(env), str(share))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(RepositoryError, match="weights as a pickle"):
        push(str(model), str(share))
    assert not list((share / "models").glob("model/snapshots/*"))


def test_mistakes_are_named(share: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    for words, message in (
        ([str(tmp_path / "nowhere"), str(share)], "no such run, folder or file"),
        ([str(tmp_path / "empty"), str(share)], "neither a run"),
        ([str(environment(tmp_path / "e")), str(tmp_path / "unmounted")], "no such folder; make it"),
        ([str(tmp_path / "e/thermostat"), str(share), "--name", "../up"], "--name '../up': expected letters"),
        (
            [str(tmp_path / "e/thermostat"), str(share), "--name", "me/snapshots"],
            "'snapshots' and 'refs' are parts of a repository",
        ),
        ([str(tmp_path / "e/thermostat"), str(share), "--best"], "choose a model of a run, and this is none"),
    ):
        assert main(["push", *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["pull", str(share), str(tmp_path / "got")]) == 2
    assert "no repository (it has no snapshots/); expected SHARE/models/NAME" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_an_error_of_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match="hf:me/x: the hub did not do it"):
        push(str(environment(tmp_path)), "hf:me/x")
    with pytest.raises(ResourceError, match="hf:me/x: the hub did not do it"):
        pull("hf:me/x", str(tmp_path / "got"))
    assert not (tmp_path / "got").exists()
