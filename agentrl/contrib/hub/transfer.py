"""Push a run's model, data or an environment to a Hugging Face hub, and pull them.

`huggingface_hub` transfers, versions and verifies files (`HF_TOKEN`; `HF_ENDPOINT` for another hub). This module selects the
files and refuses links, pickles and secrets before a file leaves the machine.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from agentrl.config import load_config
from agentrl.run.outcomes import EVALUATED, points
from agentrl.run.provenance import model_of, run_folder
from agentrl.trainer.model_folder import export_run
from agentrl.utils.errors import RepositoryError, ResourceError
from agentrl.utils.files import open_plain, read_plain
from agentrl.utils.parsing import read_json
from agentrl.utils.redaction import known, learn, redact_json, redact_said

HUB = "hf:"
"""Optional prefix of a repository name."""
DATA = (".jsonl", ".parquet", ".arrow")
_NAME = re.compile(r"(?:datasets/)?[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_FIGURES = ("status", "steps", "success_before", "success_after")
_CHUNK = 1 << 22


def push(source: str, name: str, which: str = "last", adapter: bool = False) -> str:
    """Upload a run's model (`which`: last, best or a step; `adapter`: only its adapter), or a folder or file of a model, an
    adapter, data or an environment, to the private repository `name`. Returns the commit.

    Raises RepositoryError for files that must not be pushed (links, pickles, secrets), ResourceError if the hub fails.
    """
    from huggingface_hub import HfApi

    repo, _ = _repository(name)
    path = Path(source)
    if not path.exists():
        raise RepositoryError(f"{source}: no such run, folder or file")
    with tempfile.TemporaryDirectory() as made:
        staged = Path(made)
        if (path / "config.toml").is_file() and not any((path / file).is_file() for file in ("config.json", "env.py")):
            kind, folder = "model", run_folder(path)  # push the model, the config without secrets, and figures
            config = load_config(folder.config)
            if adapter:
                number = int(which) if which.isdigit() else None
                step = export_run(folder.path, staged, number, best=which == "best", adapter=True)
            else:
                model = model_of(folder, which)
                _stage_files(Path(model.path), "model", staged)
                step = model.step
            dumped = config.model_dump(mode="json", exclude_none=True)
            learn(dumped)
            (staged / "config.toml").write_text(tomli_w.dumps(redact_json(dumped, said=True)), encoding="utf-8")
            summary = folder.read_summary() or {}
            held = dict(points(folder.read_metrics(), EVALUATED, "success"))
            # Of the pushed model, which need not be the run's last.
            kept = {key: summary[key] for key in _FIGURES if key in summary} | {"steps": step, "success_after": held.get(step)}
            (staged / "figures.json").write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            _check_secrets(staged, list(_files_of(staged, "model")))
        elif which != "last" or adapter:
            raise RepositoryError(f"{source}: --step, --best and --adapter need a run. Leave them out, or name a run's folder")
        else:
            data = path.is_file() or (path / "env.py").is_file()  # on the hub, an environment is a data set
            kind = "dataset" if data or any(file.suffix in DATA for file in path.rglob("*")) else ""
            if path.is_dir() and ((path / "config.json").is_file() or (path / "adapter_config.json").is_file()):
                kind = "model"
            if not kind:
                raise RepositoryError(
                    f"{path}: neither a run (config.toml), a model (config.json, *.safetensors), an adapter "
                    "(adapter_config.json), an environment (env.py) nor data (*.jsonl, *.parquet)"
                )
            _stage_files(path, kind, staged)
        if not (staged / "README.md").exists():
            library = "peft" if (staged / "adapter_config.json").is_file() else "transformers"
            named = [f"library_name: {library}"] if kind == "model" else []
            head = ["---", *named, "tags:", "- agentrl", "---", "", f"# {repo}", ""]
            if (figures := staged / "figures.json").is_file():
                head += ["Trained by agentrl; `config.toml` is the run's config, without secrets.", "", "| | |", "|---|---|"]
                values: dict[str, Any] = json.loads(figures.read_text())
                head += [f"| {key} | {f'{value:.4g}' if isinstance(value, float) else value} |" for key, value in values.items()]
            full = repo if kind == "model" else f"datasets/{repo}"
            text = "\n".join([*head, "", f"    agentrl pull {full} {repo.rpartition('/')[2]}", ""])
            (staged / "README.md").write_text(text, encoding="utf-8")

        def upload() -> Any:
            api = HfApi()
            api.create_repo(repo, repo_type=kind, private=True, exist_ok=True)
            return api.upload_folder(repo_id=repo, folder_path=made, repo_type=kind, commit_message="Push by agentrl")

        return str(_ask_hub(repo, upload).oid)


def pull(name: str, target: str, revision: str | None = None) -> None:
    """Download a repository ("NAME", or "datasets/NAME") to the folder `target`. Repeat the call to continue an interrupted
    download. Raises RepositoryError if `target` exists and is not empty, ResourceError if the hub fails.
    """
    from huggingface_hub import snapshot_download

    repo, kind = _repository(name)
    folder = Path(target)
    if folder.exists() and any(folder.iterdir()):
        raise RepositoryError(f"{target}: already exists. Give a path that does not exist")
    partial = folder.parent / f".{folder.name}.hub"  # the library keeps completed files here, to continue later
    _ask_hub(repo, lambda: snapshot_download(repo, repo_type=kind, revision=revision, local_dir=partial))
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    partial.rename(folder)


def _repository(name: str) -> tuple[str, str]:
    """Return the repository's ID on the hub and its type. Raises RepositoryError for an invalid name."""
    bare = name.removeprefix(HUB)
    if not _NAME.fullmatch(bare) or ".." in bare:
        raise RepositoryError(
            f"{name!r}: not the name of a repository. Use letters, digits, '.', '_', '-' and one '/': me/my-model"
        )
    repo = bare.removeprefix("datasets/")
    return repo, "model" if repo == bare else "dataset"


def _stage_files(path: Path, kind: str, staged: Path) -> None:
    """Copy a file or folder to `staged`. Raises RepositoryError for forbidden files, and for a model with missing weights."""
    if path.is_file() and path.suffix not in DATA:
        raise RepositoryError(f"{path}: not a data file. Data are *.jsonl, *.parquet or *.arrow")
    folder, files = (path.parent, [Path(path.name)]) if path.is_file() else (path, list(_files_of(path, kind)))
    whole = "adapter_model.safetensors" if Path("adapter_config.json") in files else "model.safetensors"
    if kind == "model" and Path(whole) not in files:
        index = Path(f"{whole}.index.json")
        if index not in files:
            raise RepositoryError(f"{folder}: it has no weights ({whole}, or shards with {index})")
        try:
            shards = set(map(str, read_json(read_plain(folder / index))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise RepositoryError(f"{folder / index}: cannot be read: {problem}") from None
        if missing := sorted(shards - set(map(str, files))):
            raise RepositoryError(
                f"{folder}: it lacks {missing[0]}, which {index} lists ({len(missing)} of {len(shards)} are missing)"
            )
    _check_secrets(folder, files)
    for file in files:
        (staged / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file, staged / file)


def _files_of(folder: Path, kind: str) -> Iterator[Path]:
    """Yield sorted relative paths of the files to push, without hidden files and __pycache__. Raises RepositoryError for links,
    pickled weights (loading them runs code), and a folder without files."""
    found = False
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RepositoryError(f"{path}: a link, pipe or device. Push plain files")
        if kind == "model" and path.suffix in _PICKLES:
            raise RepositoryError(f"{path}: weights as a pickle, which can run code. Push safetensors")
        if path.is_file():
            found = True
            yield relative
    if not found:
        raise RepositoryError(f"{folder}: there is no file to push")


def _check_secrets(folder: Path, files: list[Path]) -> None:
    """Refuse secrets. Raises RepositoryError with file and line for a known secret, or text that looks like one."""
    secrets = [secret.encode("utf-8", "surrogateescape") for secret in known()]
    for relative in files:
        path = folder / relative
        if path.suffix == ".safetensors":
            continue
        with open_plain(path) as file:
            plain = b"\0" not in file.read(_CHUNK)  # text by content, regardless of the file name (a notebook, a page)
            file.seek(0)
            for number, line in enumerate(file, start=1):
                text = plain and line.decode("utf-8", "replace")
                if any(secret in line for secret in secrets) or (text and redact_said(text) != text):
                    where = f"{path}:{number}" if plain else str(path)
                    raise RepositoryError(
                        f"{where}: holds text that is, or looks like, a key or password. Remove it before you push"
                    )


def _ask_hub(name: str, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as problem:  # base classes of the library's errors
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        raise ResourceError(f"{name}: the hub failed: {lines[0][:300]}. Check HF_ENDPOINT, the network and HF_TOKEN") from problem
