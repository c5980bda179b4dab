"""Find environments, tools, rewards, configs and plug-ins on the search path, and objects given in Python."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import traceback
import types
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import cloudpickle

from agentrl.utils.errors import CatalogError, ConfigError, checks_arguments, did_you_mean, fault_text, hint_text, is_alien
from agentrl.utils.parsing import parse_alone
from agentrl.utils.redaction import texts
from agentrl.utils.threads import setting

# Objects that a program gives to agentrl in Python and a config names "given:NAME": environments, reward functions and specs,
# losses, filters, policies.
#
# Other processes cannot import a class or function of a notebook cell; they receive it pickled by value (`pack_given`).

PREFIX = "given:"


@dataclass(frozen=True, slots=True)
class Given:
    """One given object; `needs` and `traits` as in `Registry.register`."""

    value: Any
    needs: frozenset[str] = frozenset()
    traits: frozenset[str] = frozenset()


_TABLE: dict[str, Given] = {}
HELD = ContextVar("agentrl_given", default=ChainMap(_TABLE))  # noqa: B039 - outside of calls, the table itself
"""Objects of the Python call under way, which another call's object of the same name does not replace."""


def holding(before: ChainMap[str, Given] | None = None) -> AbstractContextManager[None]:
    """Hold the objects that this call gives and uses, and those of the call `before` it (default: around it)."""
    return setting(HELD, (HELD.get() if before is None else before).new_child())


def _find(name: str) -> Given | None:
    held, key = HELD.get(), name.removeprefix(PREFIX)
    if key in _TABLE and not any(key in call for call in held.maps[:-1]):
        held.maps[0][key] = _TABLE[key]
    return held.get(key)


@checks_arguments
def give(value: Any, name: str | None = None, *, needs: Collection[str] = (), traits: Collection[str] = ()) -> str:
    """Register a class, function or reward spec, by default under its own name, and return its config name "given:NAME".

    Replaces an earlier object of that name (a cell that is run again) for runs that start afterwards. `needs`, `traits`: as
    declared by a registered component, such as `needs={"proximal"}` of a loss. Raises ConfigError for an object without a name,
    and for a second object of one name in the same call.
    """
    if not (callable(value) or isinstance(value, Mapping)):
        raise ConfigError(f"give: value = {value!r:.80}; expected a class, a function, or a reward spec as a dict")
    held, own = HELD.get(), name is None
    name = name or next((known for known, one in _TABLE.items() if one.value is value), None)
    if not name and isinstance(value, Mapping):
        name = str(value.get("name", ""))
    elif not name:
        name = str(getattr(value, "__name__", "") or getattr(getattr(value, "func", None), "__name__", ""))
    if not name or name.startswith(PREFIX) or name == "<lambda>":
        raise ConfigError(f"{value!r:.80}: it needs a name to be called by: agentrl.give(value, 'name')")
    before = _TABLE.get(name)
    if before is not None and isinstance(before.value, Mapping) != isinstance(value, Mapping):
        raise ConfigError(f"{name!r} was given already, as something else (a reward spec, or a function); give it another name")
    made = _TABLE[name] = Given(value, frozenset(needs), frozenset(traits))
    other = held.maps[0].get(name, made).value
    if own and not (other is value or (isinstance(value, Mapping) and other == value)):
        two = f"{other!r:.80} and {value!r:.80}"
        raise ConfigError(f"{name!r}: it names two objects of this call, {two}. Rename one, or agentrl.give(IT, 'NAME')")
    held[name] = made
    return PREFIX + name


def own_reward(made: Any) -> str | None:
    """Return the spec name of the attribute `reward` of an environment class; an inline spec or function is given as
    "given:ID.reward" (without an id by the class), as two files may have classes of one name."""
    reward = inspect.getattr_static(made, "reward", None)
    reward = reward.__func__ if isinstance(reward, staticmethod) else reward
    if reward is None or isinstance(reward, str):
        return reward
    given = next((name for name, one in _TABLE.items() if one.value is made), "")
    return give(reward, f"{given or getattr(made, 'id', '') or made.__name__}.reward")


def is_given(name: object) -> bool:
    """Return True if a config's value names a given object."""
    return isinstance(name, str) and name.startswith(PREFIX)


def given_object(name: str, key: str) -> Given:
    """Return the object given under "given:NAME". Raises ConfigError, naming the config's `key`, if this process lacks it."""
    found = _find(name)
    if found is None:
        raise ConfigError(
            f"{key}: {name!r} was defined in Python, and this process does not have it{hint_text(name, names())}; give it again "
            "before it is used: agentrl.give(IT), then agentrl.train(resume=RUN); or put it into a file of envs/, rewards/ or "
            "plugins/"
        )
    return found


def value_of(name: str) -> Any:
    """Return the object given under "given:NAME", or None."""
    found = _find(name)
    return None if found is None else found.value


def names() -> list[str]:
    """Return all given names that a config may use in this process."""
    return sorted(PREFIX + name for name in HELD.get())


def used_names(table: Any) -> list[str]:
    """Return the given names in a config's dump, sorted, including names that these objects use (functions of a spec, the reward
    of an environment class)."""
    found: set[str] = set()
    rest = [table]
    while rest:
        for name in {text for _, text in texts(rest.pop()) if is_given(text)} - found:
            found.add(name)
            rest += [value_of(name), *(other for other in names() if other.startswith(f"{name}."))]
    return sorted(found)


def pack_given(used_names: Iterable[str]) -> bytes:
    """Pickle given objects by value, for `unpack` in another process; b"" for none. Raises ConfigError if pickling fails."""
    found: dict[str, bytes] = {}
    for name in used_names:
        try:
            found[name.removeprefix(PREFIX)] = cloudpickle.dumps(given_object(name, "given"))
        except ConfigError:
            raise
        except Exception as problem:  # raised by its attributes or globals during pickling
            raise ConfigError(
                f"{name!r} cannot be sent to another process: {fault_text(problem)}; define what it uses inside of "
                "it, put it into a file of envs/ or plugins/, or set rollout.workers = 0 and cluster.backend = 'inline'"
            ) from problem
    return cloudpickle.dumps(found) if found else b""


def unpack(content: bytes) -> None:
    """Register the objects of `pack_given` in this process."""
    if content:
        for name, given in cloudpickle.loads(content).items():
            _TABLE[name] = cloudpickle.loads(given)


def source_digest(name: str) -> str | None:
    """Digest an object's source text; None for an unknown name, or without source (typed at a prompt)."""
    value = value_of(name)
    source = partial(inspect.getsource, value)  # of a class, it parses the file
    try:
        text = json.dumps(value, sort_keys=True, default=str) if isinstance(value, Mapping) else parse_alone(source)
    except (OSError, TypeError):  # a class of a notebook: only its functions have source
        parts = list(vars(value).values()) if isinstance(value, type) else []
        inside = [getattr(part, "__func__", getattr(part, "function", part)) for part in parts]
        try:
            text = "\n".join(inspect.getsource(part) for part in inside if inspect.isfunction(part))
        except (OSError, TypeError):
            text = ""
    return "sha256:" + sha256(text.encode()).hexdigest()[:16] if text else None


# Shelves: folders with `envs/`, `tools/`, `rewards/`, `configs/` and `plugins/`, and how their files are loaded.
#
# A shelf file is loaded under a private module name derived from its path, not imported by name. So two shelves may have files of
# the same name; files next to an `env.py` are imported relatively.

_PACKAGE = Path(__file__).resolve().parents[1]
PRIVATE = "_agentrl_shelf_"
"""Prefix of the module names of shelf files."""

SHIPPED = "AGENTRL_SHIPPED"
"""Environment variable of cluster workers: the driver's folders whose shelves were copied to AGENTRL_PATH, in order."""


def here(path: str) -> Path:
    """Map the driver's path of a file to this process: into the shipped copy of its shelf if there is one."""
    copies = os.environ.get("AGENTRL_PATH", "").split(os.pathsep)
    for root, copy in zip(os.environ.get(SHIPPED, "").split(os.pathsep), copies, strict=False):
        if root and Path(path).is_relative_to(root):
            return Path(copy).resolve() / Path(path).relative_to(root)
    return Path(path)


log = logging.getLogger(__name__)


def shelves() -> list[Path]:
    """Return the existing folders to search, in order, without duplicates."""
    folders = [Path.cwd(), *(Path(part) for part in os.environ.get("AGENTRL_PATH", "").split(os.pathsep) if part)]
    packaged = _PACKAGE / "_shelf"
    if packaged.is_dir():
        folders.append(packaged)
    elif (_PACKAGE.parent / "pyproject.toml").is_file():
        # In a source checkout the shelf is next to the package.
        folders.append(_PACKAGE.parent)
    unique: list[Path] = []
    for folder in folders:
        resolved = folder.expanduser().resolve()
        if resolved.is_dir() and resolved not in unique:
            unique.append(resolved)
        elif not resolved.is_dir() and resolved not in _MISSED:  # else a name would silently come from another shelf
            _MISSED.add(resolved)
            log.warning("AGENTRL_PATH: %s is no folder. Correct it; nothing is found there", folder)
    return unique


_MISSED: set[Path] = set()
"""Missing folders that were already reported."""


def find_file(name: str, folder: str, suffix: str, what: str) -> Path:
    """Find a file by path, or as `FOLDER/NAME` with the suffix on a shelf. `what`: its kind, for the error. Raises CatalogError,
    which names similar ones."""
    direct = Path(name).expanduser()
    if direct.is_file():
        return direct.resolve()
    known: list[str] = []
    for shelf in shelves():
        place = shelf / folder
        own = [shelf / name] if name.startswith(f"{folder}/") else []  # so that configs/quickstart.toml works in any folder
        for candidate in (place / f"{name}{suffix}", place / name, *own):
            if candidate.is_file():
                return candidate
        known += [str(p.relative_to(place).with_suffix("")) for p in sorted(place.rglob(f"*{suffix}"))]
    searched = ", ".join(str(shelf / folder) for shelf in shelves())
    raise CatalogError(f"no {what} {name!r}: no such file, and none in {searched}; {nearest(name, known)}")


def nearest(name: str, known: list[str]) -> str:
    """Format the names of `known` nearest to `name`, or all of them."""
    return did_you_mean(name, known, f"known: {', '.join(sorted(set(known))[:20]) or 'none'}", most=3)


def reward_of(made: Any) -> str | None:
    """Return the reward spec of an environment's class: "given:NAME", or the path of a file next to that of the class that names
    it, or on a shelf; None without one. Raises CatalogError if the file is not found."""
    name = own_reward(made)
    if name is None or is_given(name):
        return name
    owner = next((base for base in getattr(made, "__mro__", ()) if "reward" in vars(base)), made)
    with suppress(OSError, TypeError):  # a class defined interactively has no file
        if (local := Path(inspect.getfile(owner)).parent / name).is_file():
            return str(local)
    return str(find_file(name, "rewards", ".json", "reward spec"))


def load_module(path: Path) -> types.ModuleType:
    """Load the module of a shelf file once per process. Raises CatalogError with the cause."""
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
    # Registered before execution: dataclasses and pickle look up a class's module there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as problem:
        del sys.modules[name]
        if not is_alien(problem):
            raise
        raise CatalogError(f"{path} does not load: {fault_text(problem)}") from problem
    return module


def function_named(key: str, target: str) -> Callable[..., Any]:
    """Resolve "module:function" or "given:NAME" of config key `key`. Raises ConfigError if it is missing."""
    if is_given(target):
        made: Callable[..., Any] = given_object(target, key).value
        return made
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f"{key}: {target!r} is not of the form 'module:function'")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        if not is_alien(error):
            raise
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            here = Path(*module_name.split(".")).with_suffix(".py").is_file()
            fix = "; it is in this folder, which Python imports from with PYTHONPATH=." if here else ""
            raise ConfigError(f"{key}: cannot import {module_name!r}: {error}{fix}") from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}:{last.lineno}"
        if isinstance(error, SyntaxError) and place.startswith("<frozen"):  # raised by no line of the module
            place = f"{error.filename}:{error.lineno}"
        raise ConfigError(f"{key}: cannot import {module_name!r}: {fault_text(error)} ({place}). Correct it there") from error
    found: Any = vars(module).get(attribute)
    if not callable(found):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(f"{key}: {module_name} has no function {attribute!r}; it has: {known or 'none'}")
    function: Callable[..., Any] = found
    return function
