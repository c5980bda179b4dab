"""`agentrl push` and `pull` through huggingface_hub, with a hub on loopback: all files arrive, and no secrets leave."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.cli.main import main
from agentrl.contrib.hub.transfer import pull, push
from agentrl.env.catalog import make_env
from agentrl.utils.errors import RepositoryError, ResourceError
from tests.contrib.hub.hub import Hub

RUN = """
    quickstart name=lora steps=1 sft=false stop_at_success=false model.init.layers=1 model.init.hidden=32 model.init.mlp=32
    model.lora.rank=2 rollout.groups=1 rollout.group_size=2 rollout.max_turns=1 rollout.max_turn_tokens=8 algorithm.minibatch=2
    cluster.backend=inline eval.tasks=1 api.base=http://me:hunter2hunter2@127.0.0.1:9/v1
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter, whose config has a password in an address."""
    here = tmp_path_factory.mktemp("run")
    before = Path.cwd()
    try:
        os.chdir(here)
        assert main(["train", *RUN]) == 0
    finally:
        os.chdir(before)
    return here / "runs/lora"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield hub


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def environment(at: Path, text: str = "") -> Path:
    made = shutil.copytree(Path(__file__).parents[3] / "examples/own_environment/envs/thermostat", at / "thermostat")
    (made / "notes.md").write_text(text or "warm\n")
    return Path(made)


def test_a_run_s_model_and_its_adapter_there_and_back(run: Path, hub: Hub, tmp_path: Path, capsys: Any) -> None:
    assert main(["push", str(run), "hf:me/lora"]) == 0
    assert main(["pull", "me/lora", str(tmp_path / "model")]) == 0
    assert f"at revision {hub.repos['models/me/lora'][-1][0]}" in capsys.readouterr().out
    was, now = (load_file(folder / "model.safetensors") for folder in (run / "final", tmp_path / "model"))
    assert was.keys() == now.keys() and all(was[name].equal(now[name]) for name in was)
    card = (tmp_path / "model/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- agentrl") and "| steps | 1 |" in card
    assert main(["push", str(run), "me/adapter", "--adapter"]) == 0
    pull("me/adapter", str(tmp_path / "adapter"))
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {p.name for p in (tmp_path / "adapter").iterdir()}
    assert hub.private == ["models/me/lora", "models/me/adapter"]
    kept = [word for word in RUN if not word.startswith("model.")]
    pulled = (f"model.path={tmp_path / 'model'}", "model.init=false", "--dry-run")
    assert main(["train", *kept, *pulled]) == 0, "the pulled folder is a model.path"


@pytest.mark.parametrize("words", [["--step", "0"], ["--step", "0", "--adapter"]])
def test_the_figures_are_those_of_the_pushed_model(run: Path, hub: Hub, tmp_path: Path, words: list[str]) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    scores = {"before": 0.25, "after": 0.75}
    rows = [{**row, "success": scores.get(row["phase"], 0.5)} for row in rows]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for more, step, success in ((words, 0, 0.25), (words[2:], 1, 0.75)):
        assert main(["push", str(copy), "me/one", *more]) == 0
        figures = json.loads(hub.repos["models/me/one"][-1][1]["figures.json"])
        assert (figures["steps"], figures["success_after"]) == (step, success)


def test_the_config_that_is_pushed_has_no_secret(run: Path, hub: Hub, tmp_path: Path) -> None:
    """Of an address, nor of a variable that only its name gives away."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    server = 'mcp = { shop = { command = ["server"], env = { SHOP_PASSWORD = "correct horse battery" } } }'
    text = (copy / "config.toml").read_text()
    assert "\nmcp = {}" in text and "hunter2hunter2" in text
    (copy / "config.toml").write_text(text.replace("\nmcp = {}", f"\n{server}"))
    push(str(copy), "me/x")
    pushed = hub.repos["models/me/x"][-1][1]
    assert len(pushed) > 5 and not any(b"hunter2hunter2" in one or b"correct horse" in one for one in pushed.values())
    for kept in (b"[redacted]", b"group_size = 2", b"SHOP_PASSWORD"):
        assert kept in pushed["config.toml"]


def test_an_environment_is_pushed_changed_and_both_revisions_pulled(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    env = environment(tmp_path / "mine")
    (env / "config.toml").write_text("name = 'its own, and no run's'\n")
    (env / ".env").write_text("SHOP_API_KEY=planted-value-1234")
    (env / "__pycache__").mkdir()
    (env / "__pycache__/env.pyc").write_bytes(b"x")
    one = push(str(env), "me/thermostat")
    (env / "notes.md").write_text("warmer\n")
    assert push(str(env), "me/thermostat") != one
    pull("datasets/me/thermostat", str(tmp_path / "envs/thermostat"), one)
    assert (tmp_path / "envs/thermostat/notes.md").read_text() == "warm\n"
    assert not {".env", "__pycache__/env.pyc"} & tree(tmp_path / "envs/thermostat").keys()
    monkeypatch.chdir(tmp_path)
    assert make_env("thermostat").reset(seed=1)[0][0].content.startswith("Check")
    pull("datasets/me/thermostat", str(tmp_path / "new"))
    assert (tmp_path / "new/notes.md").read_text() == "warmer\n"
    with pytest.raises(RepositoryError, match="already exists"):
        pull("datasets/me/thermostat", str(tmp_path / "new"))


def test_a_download_that_fails_leaves_nothing_and_continues(hub: Hub, tmp_path: Path) -> None:
    env = environment(tmp_path / "mine")
    push(str(env), "me/thermostat")
    hub.fails_at = "notes.md"
    with pytest.raises(ResourceError, match="me/thermostat: the hub failed"):
        pull("datasets/me/thermostat", str(tmp_path / "got"))
    assert not (tmp_path / "got").exists()
    hub.fails_at, first = None, hub.sent.count("env.py")
    pull("datasets/me/thermostat", str(tmp_path / "got"))
    assert tree(env).items() <= tree(tmp_path / "got").items() and hub.sent.count("env.py") == first == 1


def test_a_model_without_its_weights_is_not_pushed(hub: Hub, tmp_path: Path, run: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(run / "final", model)
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    with pytest.raises(RepositoryError, match=r"it has no weights \(model.safetensors, or shards"):
        push(str(model), "me/x")
    index = model / "model.safetensors.index.json"
    shards = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate("ab", 1)}
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(RepositoryError, match=r"it lacks model-00002-of-00002.safetensors, .* \(1 of 2 are missing\)"):
        push(str(model), "me/x")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(RepositoryError, match=r"no weights \(adapter_model.safetensors"):
        push(str(tmp_path / "adapter"), "me/x")
    assert hub.repos == {}
    shutil.copyfile(model / shards["a"], model / shards["b"])
    push(str(model), "me/x")
    assert {*shards.values()} <= hub.repos["models/me/x"][-1][1].keys()


def test_secrets_links_and_pickles_are_refused_by_name(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentrl.utils.redaction._read", [])
    monkeypatch.setenv("SHOP_API_KEY", "planted-value-1234")
    env, token = environment(tmp_path / "a"), "hf_" + "a1B2" * 8
    noted = dict.fromkeys(("explore.ipynb", "page.html", "Makefile"), f'{{"source":\n "token = {token}"}}')
    for name, text in {"key.md": "one\nkey is planted-value-1234\n", "token.md": f"one\n{token}", **noted}.items():
        (env / name).write_text(text)
        with pytest.raises(RepositoryError, match=rf"{name}:2: holds text that is, or looks like, a key or password"):
            push(str(env), "me/x")
        (env / name).unlink()
    for name, make in (("pipe", os.mkfifo), ("link", lambda path: path.symlink_to("/etc/hostname"))):
        make(env / name)
        with pytest.raises(RepositoryError, match=rf"{name}: a link, pipe or device"):
            push(str(env), "me/x")
        (env / name).unlink()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n')
    push(str(rows), "me/rows")
    assert hub.repos.pop("datasets/me/rows")[-1][1]["rows.jsonl"] == b'{"a": 1}\n'
    rows.write_text(f'{{"a": 1}}\n{{"a": "{token}"}}\n')
    with pytest.raises(RepositoryError, match=r"rows\.jsonl:2: holds"):
        push(str(rows), "me/x")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(RepositoryError, match="weights as a pickle"):
        push(str(model), "me/x")
    assert hub.repos == {}
    (env / "README.md").write_text("# my own words\n")
    push(str(env), "me/x")
    assert hub.repos["datasets/me/x"][-1][1]["README.md"] == b"# my own words\n"


def test_mistakes_are_named(hub: Hub, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    for words, message in (
        ([str(tmp_path / "nowhere"), "me/x"], "no such run, folder or file"),
        ([str(tmp_path / "empty"), "me/x"], "neither a run"),
        ([str(environment(tmp_path / "e")), "../up"], "'../up': not the name of a repository"),
        ([str(tmp_path / "e/thermostat"), "me/x", "--best"], "--step, --best and --adapter need a run"),
    ):
        assert main(["push", *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["pull", "me/none", str(tmp_path / "got")]) == 2
    assert "me/none: the hub failed" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_an_error_of_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match="me/x: the hub failed"):
        push(str(environment(tmp_path)), "hf:me/x")
    with pytest.raises(ResourceError, match="me/x: the hub failed"):
        pull("hf:me/x", str(tmp_path / "got"))
    assert not (tmp_path / "got").exists()
