"""Digests of the files that a config names, so that new weights under an old path count as a different evaluation."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentrl.config import TrainConfig
from agentrl.config.identity import Identity, Purpose, cannot_matter, digest_of, identity_of
from agentrl.env.catalog import EnvRef, find_spec, find_tools
from agentrl.env.official import Benchmark
from agentrl.run.services import RunServices
from agentrl.utils.redaction import resolve_references, texts
from agentrl.utils.search_path import PRIVATE, source_digest, used_names, value_of

SOURCE = "the source of "
VERSIONS = "the versions of agentrl, torch and transformers"
_ARGUMENTS = ("params", "gate_params", "args", "wrappers", "chat_template")
"""Key parts below which strings may name files."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CHUNK, _CHUNKS, _WHOLE = 64 << 10, 128, 1 << 30


@dataclass(frozen=True, slots=True)
class Contents:
    """Digests of files by key. `code`: keys of code: environments, tools, plug-ins, named functions, and agentrl itself."""

    digests: Identity
    code: list[str]


def contents_of(config: TrainConfig, purpose: Purpose) -> Contents:
    """Compute the digests of an identity: reward specs, files of models, environments and tool sets, and named data files.

    Models on a hub or behind an API, and environments of installed packages, have no digest. Raises CatalogError or
    RewardSpecError if a reward spec, an environment or a tool set is not found.
    """
    models = {
        "model.path": _files(config.model.path),
        **{key: _files(path) for key, path in config.other_models().items() if key != "critic.path"},
        **{f"{one.key}.path": _files(one.model.path) for one in RunServices(config).engines()},
    }
    digests = _digests({key: paths for key, paths in models.items() if not cannot_matter(key, purpose)})
    suites, code = list[str](), [VERSIONS, "the files of tools.sets"]
    for entry in () if config.data is not None else config.envs:  # a run on data reads no environment
        with config.name_entry_in_errors(entry):
            env = EnvRef.of(entry, config.tools)
            at = f"env.{entry.called}" if isinstance(config.env, list) else "env"
            digests[f"the content of {at}.reward"] = digest_of(find_spec(env, entry.reward))
            tools = f"{at}.tools" if entry.tools is not None else "tools"
            code += [f"the files of {at}.id", f"the files of {at}.tools.sets"]
            if (card := env.card()) is not None:  # a remote environment: its server sends the digest of files and tool sets
                digests |= {f"the files of {at}.id": card["files"]} if card["files"] is not None else {}
            else:
                files = [] if env.at is not None else _sources(env.entry.path)
                digests |= _digests({f"{at}.id": files, f"{tools}.sets": [find_tools(name) for name in env.tools.sets]})
            if (suite := suite_env(env)) is not None:
                digests[f"the files of {at}.params.source"] = suite.source_digest()
                suites.append(f"{at}.params")
    named: dict[str, list[Path]] = defaultdict(list)
    for key, value in identity_of(config, purpose).items():
        parts = key.split(".")
        of = next((".".join(parts[: parts.index(part) + 1]) for part in _ARGUMENTS if part in parts), None)
        if of is not None and of not in suites:
            named[of] += _named_files(resolve_references(value, key))
    digests |= _digests({key: sorted(paths) for key, paths in named.items()})
    if purpose == "train":
        # Loaded files of plug-ins and of modules whose functions the config names.
        named_here = re.findall(r'"([\w.]+):[A-Za-z_]\w*"', config.model_dump_json())
        modules = [(name, Path(getattr(module, "__file__", None) or "")) for name, module in list(sys.modules.items())]
        own_code = {
            f"{file.parent.name}/{file.name}": [file]
            for name, file in modules
            if (name in named_here or (name.startswith(PRIVATE) and file.parent.name == "plugins")) and file.is_file()
        }
        digests |= _digests(own_code)
        code += [f"the files of {key}" for key in own_code]
        digests[VERSIONS] = f"{sys.modules['agentrl'].__version__}, {version('torch')}, {version('transformers')}"
    for name in used_names(config.model_dump(mode="json", exclude_none=True)):
        if (digest := source_digest(name)) is not None:
            digests[f"{SOURCE}{name}"] = digest
        code += [] if isinstance(value_of(name), Mapping) else [f"{SOURCE}{name}"]  # a reward spec is data, not code
    return Contents(digests, code)


def files_digest(folder: str) -> str | None:
    """Compute the digest of the files in a model's folder; None for a model on a hub."""
    return _digest_all(_files(folder))


def suite_env(env: EnvRef) -> Benchmark | None:
    """Build the environment if it is a local benchmark; None otherwise."""
    if env.at is not None or not (env.entry.suite or env.entry.entry_point or env.entry.made):
        return None  # remote, or its source text shows that it is no suite
    built = env.build()
    inner = built.unwrapped
    return inner if isinstance(inner, Benchmark) else None


def env_digest(env: EnvRef) -> str | None:
    """Compute the digest of an environment's files; None for an installed package."""
    return _digest_all(_sources(env.entry.path))


def _digests(files: Mapping[str, Sequence[Path]]) -> Identity:
    return {f"the files of {key}": digest for key, paths in files.items() if (digest := _digest_all(paths)) is not None}


def _digest_all(paths: Sequence[Path]) -> str | None:
    """Compute the digest of names, sizes and contents, of large files only of `_CHUNKS` chunks. None without files."""
    found = []
    for path in paths:
        size, digest = path.stat().st_size, sha256()
        digest.update(str(size).encode())
        with path.open("rb") as file:
            if size <= _CHUNK * _CHUNKS or (size <= _WHOLE and path.suffix not in _WEIGHTS):  # a single row of data may change
                while chunk := file.read(_CHUNK * _CHUNKS):
                    digest.update(chunk)
            else:
                # Sample evenly: a training step changes nearly all weights, and reading 100 GB would take minutes.
                for number in range(_CHUNKS):
                    file.seek(number * (size - _CHUNK) // (_CHUNKS - 1))
                    digest.update(file.read(_CHUNK))
        found.append([path.name, digest.hexdigest()])
    return digest_of(found) if found else None


def _named_files(value: Any) -> Iterator[Path]:
    """Yield the files named by strings of a JSON value, and the files in folders named by them."""
    for _, text in texts(value):
        with suppress(OSError, ValueError, RuntimeError):  # a prompt is not a valid path
            path = Path(text).expanduser()
            if path.is_file():
                yield path
            elif path.is_dir() and not Path.cwd().is_relative_to(path.resolve()):  # the working directory holds the runs too
                yield from _plain_files(path.rglob("*"))


def _files(folder: str | None) -> list[Path]:
    return sorted(_plain_files(Path(folder).iterdir())) if folder is not None and Path(folder).is_dir() else []


def _sources(path: Path | None) -> list[Path]:
    """Return the environment's file and, if it has a folder, the other files there except tests; sorted."""
    if path is None or path.name != "env.py":
        return [] if path is None else [path]
    files = _plain_files(path.parent.rglob("*"))
    return sorted(file for file in files if "__pycache__" not in file.parts and not file.name.startswith("test_"))


def _plain_files(paths: Iterator[Path]) -> Iterator[Path]:
    return (path for path in paths if path.is_file() and not path.name.startswith("."))
