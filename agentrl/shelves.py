"""The shelves: folders with `envs/`, `tools/`, `rewards/`, `configs/` and `plugins/` in them, and how their files are loaded.

A file on a shelf is not importable by name. It is loaded under a private module name derived from its path,
so two shelves may have files of the same name; files next to an `env.py` are imported relatively.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentrl.errors import CatalogError, ConfigError, did_you_mean
from agentrl.given import is_given, taken

_PACKAGE = Path(__file__).resolve().parent
PRIVATE = "_agentrl_shelf_"
"""Prefix of the names of modules that were loaded from a shelf."""

SHIPPED = "AGENTRL_SHIPPED"
"""Set on the workers of a cluster: the driver's folders whose shelves were copied to AGENTRL_PATH, in order."""


def user_folder() -> Path:
    """What agentrl keeps for a user beside runs (which suites are installed): AGENTRL_HOME, by default ~/.agentrl."""
    return Path(os.environ.get("AGENTRL_HOME") or "~/.agentrl").expanduser()


def here(path: str) -> Path:
    """The path in this process of a file that the driver names: in the shipped copy of its shelf if there is
    one, else the same path."""
    copies = os.environ.get("AGENTRL_PATH", "").split(os.pathsep)
    for root, copy in zip(os.environ.get(SHIPPED, "").split(os.pathsep), copies, strict=False):
        if root and Path(path).is_relative_to(root):
            return Path(copy).resolve() / Path(path).relative_to(root)
    return Path(path)


def shelves() -> list[Path]:
    """The folders to search, in order; only existing ones, each once."""
    folders = [
        Path.cwd(),
        *(Path(part) for part in os.environ.get("AGENTRL_PATH", "").split(os.pathsep) if part),
    ]
    packaged = _PACKAGE / "_shelf"
    if packaged.is_dir():
        folders.append(packaged)
    elif (_PACKAGE.parent / "pyproject.toml").is_file():
        # In a source checkout the shelf is not copied into the package: it is next to it.
        folders.append(_PACKAGE.parent)
    unique: list[Path] = []
    for folder in folders:
        resolved = folder.expanduser().resolve()
        if resolved.is_dir() and resolved not in unique:
            unique.append(resolved)
    return unique


def find_file(name: str, folder: str, suffix: str, what: str) -> Path:
    """The file at a path, or `FOLDER/NAME` with the suffix on a shelf. `what`: the kind, for the error. Raises CatalogError
    naming near ones."""
    direct = Path(name).expanduser()
    if direct.is_file():
        return direct.resolve()
    known: list[str] = []
    for shelf in shelves():
        place = shelf / folder
        own = [shelf / name] if name.startswith(f"{folder}/") else []  # configs/quickstart.toml is found from anywhere
        for candidate in (place / f"{name}{suffix}", place / name, *own):
            if candidate.is_file():
                return candidate
        known += [str(p.relative_to(place).with_suffix("")) for p in sorted(place.rglob(f"*{suffix}"))]
    searched = ", ".join(str(shelf / folder) for shelf in shelves())
    raise CatalogError(f"no {what} {name!r}: no such file, and none in {searched}; {nearest(name, known)}")


def nearest(name: str, known: list[str]) -> str:
    """What of `known` is near to `name`, or what there is."""
    return did_you_mean(name, known, f"known: {', '.join(sorted(set(known))[:20]) or 'none'}", most=3)


def load_module(path: Path) -> types.ModuleType:
    """The module of a content file, loaded once per process. Raises CatalogError with the cause."""
    path = path.resolve()
    package = PRIVATE + blake2b(str(path.parent).encode(), digest_size=6).hexdigest()
    if package not in sys.modules:
        parent = types.ModuleType(package)
        parent.__path__ = [str(path.parent)]
        sys.modules[package] = parent
    name = f"{package}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CatalogError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and pickle look a class's module up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        raise CatalogError(f"{path} does not load: {type(problem).__name__}: {problem}") from problem
    return module


def function_named(key: str, target: str) -> Callable[..., Any]:
    """The function that the config key names as "module:function", or "given:NAME" (agentrl/given.py). Raises ConfigError if
    there is none."""
    if is_given(target):
        made: Callable[..., Any] = taken(target, key).value
        return made
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f"{key}: {target!r} is not of the form 'module:function'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        here = Path(*module_name.split(".")).with_suffix(".py").is_file()
        fix = "; it is in this folder, which Python imports from with PYTHONPATH=." if here else ""
        raise ConfigError(f"{key}: cannot import {module_name!r}: {error}{fix}") from error
    found: Any = vars(module).get(attribute)
    if not callable(found):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(f"{key}: {module_name} has no function {attribute!r}; it has: {known or 'none'}")
    function: Callable[..., Any] = found
    return function
