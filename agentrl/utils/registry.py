"""One way to register things by name: estimators, losses, engines, samplers, context policies, routes, trackers, wrappers.

    ADVANTAGES: Registry[...] = Registry("algorithm.advantage", "ADVANTAGES", "agentrl.trainer.algorithms.advantages",
    needs={...})

    @ADVANTAGES.register("remax", needs={"baseline"})       # in one file; no table elsewhere names it
    def remax(batch, *, ...): ...

What a component needs and what it is (`needs`, `traits`) are declared next to its function with words that the registry
defines, so that the code that prepares a batch or places an engine reads these words and never compares names.

A name is found in the registry's own package, in `plugins/` of the shelves (the user's before all others), and among other
packages' entry points in the group `agentrl.plugins`, called "KIND/NAME" with a module as value. Files are searched by
their source text; only the one that registers the name is loaded."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agentrl.utils.errors import ConfigError, fault_text, hint_text, place_of, user_code
from agentrl.utils.parsing import module_of
from agentrl.utils.search_path import PRIVATE, given_object, is_given, load_module, shelves

T = TypeVar("T", bound=Callable[..., Any])
GROUP = "agentrl.plugins"
FOLDER = "plugins"
CONTRIB = "agentrl.contrib"
"""The package of features that the core does not import."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One registered component: its factory, what it needs from others, and what others must know about it."""

    name: str
    make: T
    needs: frozenset[str]
    traits: frozenset[str]


_registries: list[Registry[Any]] = []


class Registry(Mapping[str, T]):
    """The components of one kind; maps a name to its component."""

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
        """`kind`: the config key, for messages. `symbol`: the name of this object in the source of files that register.
        `home`: the package (or module) with agentrl's own components. `given`: the number of leading parameters that the
        caller passes; the others are a config's arguments. `needs`, `traits`: the allowed words, each with its meaning."""
        self.kind, self.symbol, self.home, self.given = kind, symbol, home, given
        self.words = {"needs": dict(needs or {}), "traits": dict(traits or {})}
        self._entries: dict[tuple[str, str], Entry[T]] = {}
        self._own: dict[str, Entry[T]] = {}
        _registries.append(self)

    def register(
        self, name: str, *, needs: Collection[str] = frozenset(), traits: Collection[str] = frozenset()
    ) -> Callable[[T], T]:
        """Decorator for the function or class. Raises ValueError for a word that the registry does not define."""
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

    # -- looking up --------------------------------------------------------------------------------

    def entry(self, name: str) -> Entry[T]:
        """Raises ConfigError for an unknown name, with the nearest, for one that two files register, and for an entry point that
        does not import; CatalogError for a file that does not load. "given:NAME" is what the program gave
        (agentrl/utils/search_path.py)."""
        if name in self._own:  # cached, because losses are looked up for every micro-batch
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
        if module.endswith(".py"):  # of a shelf; raises CatalogError if it does not load
            module = load_module(Path(module)).__name__
        else:
            try:
                import_module(module)
            except Exception as problem:
                if module.startswith("agentrl."):  # agentrl's own file: a fault of its own, not the name of one
                    raise
                point, reason = f"{self.kind}/{name}", fault_text(problem)
                raise ConfigError(f"the entry point {point} names {module!r}, which does not import: {reason}") from problem
        found = self._entries.get((name, module))
        if found is None:
            # The source text has the call, but the code did not reach it (a condition, or a function that was not called).
            raise ConfigError(f"{self.kind}: {files[0]} does not register {name!r} when it is loaded")
        if name in dict(_packaged_entries(self.home, self.symbol)):
            self._own[name] = found
        return found

    def __getitem__(self, name: str) -> T:
        """Raises ConfigError as `entry` does."""
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
        """agentrl's own components, by name: a user's file is loaded only if its name is requested."""
        return [self.entry(name) for name in sorted(dict(_packaged_entries(self.home, self.symbol)))]

    def that_are(self, word: str, yes: bool = True) -> str:
        """The names of agentrl's own components with the need or trait `word` (or without it), for a message."""
        assert word in self.words["needs"] or word in self.words["traits"], word
        names = [entry.name for entry in self.own() if (word in entry.needs | entry.traits) == yes]
        return ", ".join(f'"{name}"' for name in sorted(names)) or "none"

    # -- arguments ---------------------------------------------------------------------------------

    def bind(self, name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
        """The component registered under the name, with its keyword arguments bound.

        Raises ConfigError for an unknown name, an unknown argument, a missing one, a value of the wrong type or range, and
        for numbers `low` >= `high` (given or default).
        """
        return bind(f"{self.kind} {name!r}", self.entry(name).make, self.parameters(name), args)

    def build(self, name: str, args: Mapping[str, Any], *given: Any, kind: type[Any]) -> Any:
        """Call the component with what the caller passes and a config's arguments. Raises ConfigError as `bind` does, and if it
        makes something else than a `kind`; CallbackError if a plug-in's code raises."""
        make = self.bind(name, args)
        with user_code(f"{self.kind} {name!r}: it", make):
            made = make(*given)
        own = [word for word in vars(kind) if not word.startswith("_")]
        if not (isinstance(made, kind) or all(callable(getattr(made, word, None)) for word in own)):
            at = place_of(self.entry(name).make)
            raise ConfigError(f"{self.kind} {name!r}: it made {made!r:.80}, expected a {kind.__name__}. Correct it at {at}")
        return made

    def arguments(self, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the name's call: the defaults, overridden by `args`. Raises ConfigError as `bind` does."""
        bound: partial[Any] = self.bind(name, args)  # type: ignore[assignment]
        known = self.parameters(name)
        return {key: bound.keywords.get(key, parameter.default) for key, parameter in known.items()}

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """The arguments that a config may give to the name, in order. Raises ConfigError as `entry` does."""
        named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        rest = list(inspect.signature(self.entry(name).make).parameters.items())[self.given :]
        return {key: parameter for key, parameter in rest if parameter.kind in named}

    # -- where names are ---------------------------------------------------------------------------

    def _files_by_name(self) -> dict[str, list[str]]:
        """The module or file that registers each name."""
        packaged = _packaged_entries(self.home, self.symbol)
        found = [*packaged, *((name, module) for name, module in self._entries if not module.startswith(PRIVATE))]
        own, seen = {name for name, _ in packaged}, {name for name, _ in found}
        for shelf in shelves():
            files = [path for path in sorted(shelf.glob(f"{FOLDER}/*.py")) if path.is_file()]  # no folder, no editor's lock
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
    """`make` with a config's keyword arguments bound; `known` has the allowed ones. Raises ConfigError as `Registry.bind`
    does; its messages begin with `label`."""
    called: Any = make.__init__ if isinstance(make, type) else make  # type: ignore[misc] # of the class, whatever its instances have
    hints = get_type_hints(called, include_extras=True)
    bound = {}
    for key, value in args.items():
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{label}: unknown argument {key!r}{hint_text(key, known)}; known: {listed}")
        try:
            bound[key] = TypeAdapter(hints.get(key, Any)).validate_python(value, strict=True)
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


@contextmanager
def second_load(registry: Registry[Any], name: str) -> Iterator[Any]:
    """The component of a plug-in from another load of its file: what calls leave in its module is gone afterwards."""
    module = registry.entry(name).make.__module__
    kept, entries = sys.modules.pop(module), [(one, dict(one._entries)) for one in _registries]
    try:
        yield registry.entry(name).make
    finally:
        sys.modules[module] = kept
        for one, before in entries:
            one._entries = before


def registered_in(path: Path, symbol: str) -> tuple[str, ...]:
    """The names that a file registers with `SYMBOL.register("name", ...)`, read without running it."""
    stat = path.stat()
    return _registered_names(path, symbol, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _registered_names(path: Path, symbol: str, modified: int, size: int) -> tuple[str, ...]:
    source = path.read_bytes()  # as bytes, Python's own rules of encoding hold
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
    """(name, module) of the components in `home` and in contrib; cached, since files do not change while a process runs."""
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
    """(kind, name, module) of the installed packages' entry points."""
    return tuple((*point.name.rpartition("/")[::2], point.value) for point in entry_points(group=GROUP))
