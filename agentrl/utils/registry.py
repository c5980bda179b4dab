"""Registries of components by name: estimators, losses, engines, samplers, context policies, routes, trackers, wrappers.

    ADVANTAGES: Registry[...] = Registry("algorithm.advantage", "ADVANTAGES", "agentrl.trainer.algorithms.advantages",
    needs={...})

        @ADVANTAGES.register("remax", needs={"baseline"})       # no other file names it
    def remax(batch, *, ...): ...

A component declares its requirements and properties (`needs`, `traits`) next to its function, with words that the registry
defines; code that prepares a batch or places an engine reads these words and never compares names.

A name is found in the registry's package, in `plugins/` of the shelves (the user's first), and in other packages' entry points
of group `agentrl.plugins`, called "KIND/NAME" with a module as value. Files are searched as text; only the one that registers
the name is loaded."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from agentrl.utils.errors import ConfigError, fault_text, hint_text, is_alien, place_of, user_code
from agentrl.utils.parsing import module_of
from agentrl.utils.search_path import PRIVATE, given_object, is_given, load_module, shelves

T = TypeVar("T", bound=Callable[..., Any])
GROUP = "agentrl.plugins"
FOLDER = "plugins"
CONTRIB = "agentrl.contrib"
"""Package of optional features, which the core does not import."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One registered component: its factory, requirements and properties."""

    name: str
    make: T
    needs: frozenset[str]
    traits: frozenset[str]


_registries: list[Registry[Any]] = []


class Registry(Mapping[str, T]):
    """Maps names to the components of one kind."""

    def __init__(
        self,
        kind: str,
        symbol: str,
        home: str,
        *,
        given: int = 0,
        needs: Mapping[str, str] | None = None,
        traits: Mapping[str, str] | None = None,
    ) -> None:
        """`kind`: the config key, for messages. `symbol`: this object's name in files that register components. `home`: package
        or module of agentrl's own components. `given`: number of leading parameters that the caller passes; a config sets the
        others. `needs`, `traits`: the allowed words with their meanings."""
        self.kind, self.symbol, self.home, self.given = kind, symbol, home, given
        self.words = {"needs": dict(needs or {}), "traits": dict(traits or {})}
        self._entries: dict[tuple[str, str], Entry[T]] = {}
        self._own: dict[str, Entry[T]] = {}
        _registries.append(self)

    def register(
        self, name: str, *, needs: Collection[str] = frozenset(), traits: Collection[str] = frozenset()
    ) -> Callable[[T], T]:
        """Decorate a function or class to register it. Raises ValueError for a word that the registry does not define."""
        for field, given in (("needs", needs), ("traits", traits)):
            for word in given:
                if word not in self.words[field]:
                    listed = ", ".join(self.words[field]) or "none"
                    raise ValueError(
                        f"{self.kind} {name!r}: {field}={word!r}{hint_text(word, self.words[field])}; known: {listed}"
                    )

        def keep(make: T) -> T:
            self._entries[name, make.__module__] = Entry(name, make, frozenset(needs), frozenset(traits))
            return make

        return keep

    # -- lookup ------------------------------------------------------------------------------------

    def entry(self, name: str) -> Entry[T]:
        """Return a component's entry; "given:NAME" is an object given in Python (agentrl/utils/search_path.py). Raises
        ConfigError for an unknown name (with a hint), a name registered by two files, and an entry point that cannot be
        imported; CatalogError for a file that does not load."""
        if name in self._own:  # cached, because losses are looked up per micro-batch
            return self._own[name]
        if is_given(name):
            given = given_object(name, self.kind)
            return Entry(name, given.value, given.needs, given.traits)
        files = self._files_by_name().get(name, [])
        if not files:
            listed = ", ".join(sorted(self)) or "none. Its code is missing here: restore its folder of agentrl/contrib"
            raise ConfigError(f"{self.kind}: unknown name {name!r}{hint_text(name, self)}; known: {listed}")
        if len(files) > 1:
            raise ConfigError(f"{self.kind}: two files register {name!r}: {files[0]} and {files[1]}; rename one")
        module = files[0]
        if module.endswith(".py"):  # on a shelf; raises CatalogError if it does not load
            module = load_module(Path(module)).__name__
        else:
            try:
                import_module(module)
            except BaseException as problem:
                if module.startswith("agentrl.") or not is_alien(problem):  # a fault in agentrl, not in the name
                    raise
                point, reason = f"{self.kind}/{name}", fault_text(problem)
                raise ConfigError(f"the entry point {point} names {module!r}, which does not import: {reason}") from problem
        found = self._entries.get((name, module))
        if found is None:
            # The source contains the call, but it was not executed (a condition, or a function that was not called).
            raise ConfigError(f"{self.kind}: {files[0]} does not register {name!r} when it is loaded")
        if name in dict(_packaged_entries(self.home, self.symbol)):
            self._own[name] = found
        return found

    def __getitem__(self, name: str) -> T:
        """Return a component. Raises the errors of `entry`."""
        return self.entry(name).make

    def get(self, name: str, default: Any = None) -> Any:
        return self.entry(name).make if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._files_by_name()))

    def __len__(self) -> int:
        return len(self._files_by_name())

    def __contains__(self, name: object) -> bool:
        return name in self._files_by_name()

    def own(self) -> list[Entry[T]]:
        """Return agentrl's own components by name, without loading users' files."""
        return [self.entry(name) for name in sorted(dict(_packaged_entries(self.home, self.symbol)))]

    def that_are(self, word: str, yes: bool = True) -> str:
        """List agentrl's own components with (or without) the need or trait `word`, for a message."""
        assert word in self.words["needs"] or word in self.words["traits"], word
        names = [entry.name for entry in self.own() if (word in entry.needs | entry.traits) == yes]
        return ", ".join(f'"{name}"' for name in sorted(names)) or "none"

    # -- arguments ---------------------------------------------------------------------------------

    def bind(self, name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the component with keyword arguments bound.

        False unsets an argument that may be None. Raises ConfigError for an unknown name, an unknown or missing argument, a value
        of the wrong type or range, and for numbers `low` >= `high` (given or default).
        """
        return bind(f"{self.kind} {name!r}", self.entry(name).make, self.parameters(name), args)

    def build(self, name: str, args: Mapping[str, Any], *given: Any, kind: type[Any]) -> Any:
        """Call the component with `given` arguments and a config's `args`. Raises ConfigError as `bind`, or if the result is not
        a `kind`; CallbackError if a plug-in raises."""
        make = self.bind(name, args)
        with user_code(f"{self.kind} {name!r}: it", make):
            made = make(*given)
        own = [word for word in vars(kind) if not word.startswith("_")]
        if not (isinstance(made, kind) or all(callable(getattr(made, word, None)) for word in own)):
            at = place_of(self.entry(name).make)
            raise ConfigError(f"{self.kind} {name!r}: it made {made!r:.80}, expected a {kind.__name__}. Correct it at {at}")
        return made

    def arguments(self, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of the call: defaults overridden by `args`. Raises ConfigError as `bind`."""
        bound: partial[Any] = self.bind(name, args)  # type: ignore[assignment]
        known = self.parameters(name)
        return {key: bound.keywords.get(key, parameter.default) for key, parameter in known.items()}

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters that a config may set, in order. Raises the errors of `entry`."""
        named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        rest = list(inspect.signature(self.entry(name).make).parameters.items())[self.given :]
        return {key: parameter for key, parameter in rest if parameter.kind in named}

    # -- sources of names --------------------------------------------------------------------------

    def _files_by_name(self) -> dict[str, list[str]]:
        """Map each name to the modules or files that register it."""
        packaged = _packaged_entries(self.home, self.symbol)
        found = [*packaged, *((name, module) for name, module in self._entries if not module.startswith(PRIVATE))]
        own, seen = {name for name, _ in packaged}, {name for name, _ in found}
        for shelf in shelves():
            files = [path for path in sorted(shelf.glob(f"{FOLDER}/*.py")) if path.is_file()]  # no editor's lock file
            here = [(name, path) for path in files for name in registered_in(path, self.symbol)]
            found += [(name, str(path)) for name, path in here if name not in seen or name in own]
            seen |= {name for name, _ in here}
        found += [(name, module) for kind, name, module in _entry_points() if kind == self.kind and name not in seen]
        places: dict[str, list[str]] = {}
        for name, place in dict.fromkeys(found):
            places.setdefault(name, []).append(place)
        return places


def bind(
    label: str, make: Callable[..., Any], known: Mapping[str, inspect.Parameter], args: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return `make` with a config's keyword arguments bound; `known`: the allowed parameters. Raises ConfigError as
    `Registry.bind`, with messages that begin with `label`."""
    hints = hints_of(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]  # not of an instance
    bound = {}
    for key, value in args.items():
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{label}: unknown argument {key!r}{hint_text(key, known)}; known: {listed}")
        kinds = get_args(hints.get(key))
        value = None if value is False and NoneType in kinds and bool not in kinds else value  # TOML has no null
        try:
            bound[key] = TypeAdapter(hints.get(key, Any)).validate_python(value, strict=True)
        except (PydanticSchemaGenerationError, PydanticUserError):  # of an author's own class
            bound[key] = value
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{label}: argument {key} = {value!r}: {reason}") from None
    missing = [key for key, p in known.items() if p.default is inspect.Parameter.empty and key not in bound]
    if missing:
        raise ConfigError(f"{label}: argument {missing[0]!r} is required")
    low, high = (bound.get(key, known[key].default) if key in known else None for key in ("low", "high"))
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        raise ConfigError(f"{label}: argument low = {low:g} must be below high = {high:g}")
    return partial(make, **bound)


def hints_of(function: Any) -> dict[str, Any]:
    """Read the annotations of a function, without those that cannot be read (a type imported for checkers alone)."""
    found, space = dict[str, Any](), getattr(inspect.unwrap(function), "__globals__", {})
    for name, hint in getattr(function, "__annotations__", {}).items():
        with suppress(NameError, TypeError, AttributeError):
            found |= get_type_hints(SimpleNamespace(__annotations__={name: hint}), space, include_extras=True)
    return found


@contextmanager
def second_load(registry: Registry[Any], name: str) -> Iterator[Any]:
    """Load a plug-in's file a second time for the context; state that calls leave in that module is dropped."""
    module = registry.entry(name).make.__module__
    kept, entries = sys.modules.pop(module), [(one, dict(one._entries)) for one in _registries]
    try:
        yield registry.entry(name).make
    finally:
        sys.modules[module] = kept
        for one, before in entries:
            one._entries = before


def registered_in(path: Path, symbol: str) -> tuple[str, ...]:
    """Return the names that a file registers with `SYMBOL.register("name", ...)`, without running it."""
    stat = path.stat()
    return _registered_names(path, symbol, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _registered_names(path: Path, symbol: str, modified: int, size: int) -> tuple[str, ...]:
    source = path.read_bytes()  # as bytes, so that Python's encoding rules apply
    if f"{symbol}.register(".encode() not in source:
        return ()
    try:
        tree = module_of(source)
    except (SyntaxError, ValueError) as problem:
        raise ConfigError(f"{path}: not a Python file: {problem}") from problem
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register":
            owner = node.func.value
            called = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else None
            first = next(iter([*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]), None)
            if called == symbol and isinstance(first, ast.Constant):
                names.append(str(first.value))
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: it registers {name!r} twice; rename one")
    return tuple(names)


@lru_cache(maxsize=64)
def _packaged_entries(home: str, symbol: str) -> tuple[tuple[str, str], ...]:
    """Return (name, module) of the components in `home` and contrib; cached, as files do not change during a process."""
    return (*(() if home.startswith(CONTRIB) else _registering(home, symbol)), *_registering(CONTRIB, symbol))


def _registering(home: str, symbol: str) -> tuple[tuple[str, str], ...]:
    spec = find_spec(home)
    assert spec is not None and spec.origin is not None, home
    if spec.submodule_search_locations is None:
        return tuple((name, home) for name in registered_in(Path(spec.origin), symbol))
    root = Path(spec.origin).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join([home, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        found += [(name, module) for name in registered_in(path, symbol)]
    return tuple(found)


@lru_cache(maxsize=1)
def _entry_points() -> tuple[tuple[str, str, str], ...]:
    """Return (kind, name, module) of installed packages' entry points."""
    return tuple((*point.name.rpartition("/")[::2], point.value) for point in entry_points(group=GROUP))
