"""`push` and `pull`: what a run made, data and environments, to a shared folder or a hub, and back."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from agentrl.config import load_config
from agentrl.errors import RepositoryError, ResourceError
from agentrl.files import full_disk_said
from agentrl.redaction import learn, redacted
from agentrl.run.folder import RunFolder
from agentrl.run.of_run import model_of, run_folder
from agentrl.run.repository import (
    KINDS,
    check_secrets,
    check_weights,
    copy_snapshot,
    files_of,
    kind_of,
    publish,
    repository,
    revision_of,
    staging,
)
from agentrl.train.export import export_run

HUB = "hf:"
FILE = "file:"
TYPES = {"models": "model", "datasets": "dataset", "environments": "dataset"}
"""What the hub calls them; it has no kind of its own for environments."""
_SUMMED = ("status", "steps", "success_before", "success_after")


@dataclass(frozen=True, slots=True)
class Pushed:
    """`place`: the repository; `new`: whether this revision was not there before."""

    place: str
    revision: str
    new: bool


def push(source: str, share: str, name: str | None = None, which: str = "last", adapter: bool = False) -> Pushed:
    """Push a run's model (`which`: last, best or a step; `adapter`: its adapter alone), or a folder or file of a model, an
    adapter, data or an environment. `share`: a folder, or "hf:NAME" of a hub.

    Raises RepositoryError for what should not be pushed (links, pickles, secrets), and what finding the model raises.
    """
    path = Path(source)
    if not path.exists():
        raise RepositoryError(f"{source}: no such run, folder or file")
    if (path / "config.toml").is_file() and not any((path / name).is_file() for name in ("config.json", "env.py")):
        kind, fill = "models", partial(_fill_from_run, run_folder(path), which, adapter)
    else:
        if which != "last" or adapter:
            raise RepositoryError(f"{source}: --step, --best and --adapter choose a model of a run, and this is none")
        kind = "datasets" if path.is_file() else kind_of(path)
        fill = partial(_fill_from_files, path, kind)
    name = name or (share.removeprefix(HUB) if share.startswith(HUB) else path.absolute().name)
    if share.startswith(HUB):
        return _push_to_hub(share.removeprefix(HUB), kind, fill)
    folder = Path(share.removeprefix(FILE))
    if not folder.is_dir():
        raise RepositoryError(f"{folder}: no such folder; make it (mkdir) if it is the right one, or mount it")
    repo = repository(folder, kind, name)
    staged = staging(repo)
    try:
        with full_disk_said(repo, "repeat the command"):
            fill(staged)
            _card(staged, kind, name)
            return Pushed(str(repo), *publish(staged, repo))
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def pull(source: str, target: str, revision: str | None = None) -> Pushed:
    """The newest revision of a repository, or the one that is named, as a folder at `target`, each file verified. `source`:
    SHARE/models/NAME, or "hf:NAME" ("hf:datasets/NAME"). Raises RepositoryError, ResourceError."""
    if source.startswith(HUB):
        return _pull_from_hub(source.removeprefix(HUB), Path(target), revision)
    repo = Path(source.removeprefix(FILE))
    found = revision_of(repo, revision)
    return Pushed(target, found, copy_snapshot(repo / "snapshots" / found, found, Path(target)))


def _fill_from_run(folder: RunFolder, which: str, adapter: bool, staged: Path) -> None:
    config = load_config(folder.config)
    if adapter:
        export_run(folder.path, staged, int(which) if which.isdigit() else None, best=which == "best", adapter=True)
    else:
        _copy(Path(model_of(folder, which).path), "models", staged)
    dumped = config.model_dump(mode="json", exclude_none=True)
    learn(dumped)
    (staged / "config.toml").write_text(tomli_w.dumps(redacted(dumped, said=True)), encoding="utf-8")
    summary = folder.read_summary() or {}
    kept = {key: summary[key] for key in _SUMMED if key in summary}
    (staged / "figures.json").write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    check_secrets(staged, list(files_of(staged, "models")))


def _fill_from_files(path: Path, kind: str, staged: Path) -> None:
    if path.is_file():
        if path.suffix not in (".jsonl", ".parquet", ".arrow"):
            raise RepositoryError(f"{path}: data are *.jsonl, *.parquet or *.arrow")
        check_secrets(path.parent, [Path(path.name)])
        shutil.copyfile(path, staged / path.name)
        return
    _copy(path, kind, staged)


def _copy(folder: Path, kind: str, staged: Path) -> None:
    files = list(files_of(folder, kind))
    if kind == "models":
        check_weights(folder, files)
    check_secrets(folder, files)
    for file in files:
        (staged / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file, staged / file)


def _card(staged: Path, kind: str, name: str) -> None:
    """README.md, unless there is one: front matter as the hub reads it, what a run measured, and how to use it."""
    card = staged / "README.md"
    if card.exists():
        return
    adapter = (staged / "adapter_config.json").is_file()
    library = {"models": "peft" if adapter else "transformers"}.get(kind)
    head = [
        "---",
        *([f"library_name: {library}"] if library else []),
        "tags:",
        "- agentrl",
        f"- {kind}",
        "---",
        "",
        f"# {name}",
        "",
    ]
    lines = [*head, *_told(staged), "", "    agentrl pull SHARE/" + f"{kind}/{name} {name.rpartition('/')[2]}", ""]
    card.write_text("\n".join(lines), encoding="utf-8")


def _told(staged: Path) -> list[str]:
    if not (staged / "figures.json").is_file():
        return ["Pushed by agentrl."]
    figures: Mapping[str, Any] = json.loads((staged / "figures.json").read_text())
    lines = ["Trained by agentrl; `config.toml` is the run's config, without secrets.", "", "| | |", "|---|---|"]
    return [*lines, *(f"| {key} | {_figure(value)} |" for key, value in figures.items())]


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- a hub -------------------------------------------------------------------------------------------


def _push_to_hub(name: str, kind: str, fill: Callable[[Path], None]) -> Pushed:
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as made:
        staged = Path(made)
        fill(staged)
        _card(staged, kind, name)

        def upload() -> Any:
            api = HfApi()
            api.create_repo(name, repo_type=TYPES[kind], private=True, exist_ok=True)
            message = "Pushed by agentrl"
            return api.upload_folder(repo_id=name, folder_path=made, repo_type=TYPES[kind], commit_message=message)

        info = _asked(name, upload)
    return Pushed(f"{HUB}{name}", str(info.oid), True)


def _pull_from_hub(name: str, target: Path, revision: str | None) -> Pushed:
    from huggingface_hub import snapshot_download

    first, _, rest = name.partition("/")
    kind, repo = (first, rest) if first in KINDS and "/" in rest else ("models", name)
    if target.exists() and any(target.iterdir()):
        raise RepositoryError(f"{target}: already exists; give a path that does not exist")
    aside = target.parent / f".{target.name}.hub"  # what a download that was cut short has whole is kept by the library
    load = partial(snapshot_download, repo, repo_type=TYPES[kind], revision=revision, local_dir=aside)
    _asked(name, load)
    shutil.rmtree(aside / ".cache", ignore_errors=True)
    aside.rename(target)
    return Pushed(str(target), revision or "main", True)


def _asked(name: str, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as problem:  # the library's own errors are of these
        said = str(problem).strip().splitlines() or [type(problem).__name__]
        raise ResourceError(
            f"{HUB}{name}: the hub did not do it: {said[0][:300]}; is it reachable, and HF_TOKEN set?"
        ) from problem
