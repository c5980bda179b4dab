"""Reading a benchmark's code where it is: modules of a package in a checkout, and texts that its source has as constants.

Only what a suite needs is imported. A benchmark's own `__init__` often imports its runner, its clients of models and all that
these need; a suite needs none of it.
"""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from agentrl.errors import ConfigError, DependencyError
from agentrl.executors import fork_safe
from agentrl.python_source import module_of

_LOCK = fork_safe(threading.RLock())


def import_in_place(module: str, folder: Path, *, extra: str | None = None) -> ModuleType:
    """The module of a package whose folder is `folder` ("toy.rules" of .../src/toy), without running the package's own
    `__init__`. What is installed beside it (`pip install --target`) is found while it is imported. `extra`: the extra of agentrl
    that installs what the module imports, if one does, for errors.

    Raises ConfigError if the package was imported from elsewhere in this process, or does not load on this Python;
    DependencyError for a package that is not installed.
    """
    top = module.partition(".")[0]
    with _LOCK:
        package = sys.modules.get(top)
        if package is None:
            package = sys.modules[top] = ModuleType(top, f"{top}, read in place from {folder}")
            package.__path__ = [str(folder)]
        places = [Path(place).resolve() for place in getattr(package, "__path__", ())]
        if folder.resolve() not in places:
            raise ConfigError(f"{top} is to be read from {folder}, but this process has imported it from {places or 'a file'}")
        sys.path.append(str(folder.parent))
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as problem:
            if (problem.name or "").partition(".")[0] == top:
                raise ConfigError(f"{folder} has no {problem.name}: is it the version that this suite reads?") from problem
            wanted = problem.name if extra is None else f"'agentrl[{extra}]'"
            raise DependencyError(f"{module} needs {problem.name}: pip install {wanted}") from problem
        except SyntaxError as problem:
            running = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise ConfigError(f"{module} does not load on Python {running}: {problem}; use a newer Python") from problem
        finally:
            sys.path.remove(str(folder.parent))


class PackageInPlace:
    """A package's folder and its modules. Copies of an environment share it, and it is a key of caches: it is its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __hash__(self) -> int:
        return hash(self.folder)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, PackageInPlace) and other.folder == self.folder

    def module(self, name: str) -> ModuleType:
        """A module by its name in the package ("constants.enums"); raises as `import_in_place`."""
        return import_in_place(f"{self.folder.name}.{name}", self.folder)


@contextmanager
def named_if_missing(suite: str) -> Iterator[None]:
    """What a benchmark's code raises for a file that it does not find becomes a ConfigError with the file's name."""
    try:
        yield
    except FileNotFoundError as missing:
        raise ConfigError(f"{suite}: {missing.filename} is missing") from missing


@cache
def text_constant(file: Path, name: str) -> str:
    """The text that a module's source assigns to a name at its top level: the longest string in the assigned expression, with
    white space around it removed. Nothing is run. Raises ConfigError if there is none."""
    if not file.is_file():
        raise ConfigError(f"{file} is missing")
    for node in module_of(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            inside = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            texts = [text for text in inside if isinstance(text, str)]
            if texts:
                return max(texts, key=len).strip()
    raise ConfigError(f"{file} assigns no text to {name}: is it the version that this suite reads?")
