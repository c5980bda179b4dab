"""Load a config: resolve paths, join the layers of files, apply overrides, and validate."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from agentrl.config.envs import as_list, check_envs, entry_of, find_entry, name_of
from agentrl.config.keys import find_keys, inline, section_at, section_of, takes_switch
from agentrl.config.schema import ONE, SEVERAL, AgentConfig, Choice, EnvConfig, McpServerConfig, ModelConfig, TrainConfig
from agentrl.config.schema.episodes import entry_name
from agentrl.utils.errors import ConfigError, UserError, hint_text
from agentrl.utils.files import expand_home, read_text
from agentrl.utils.parsing import toml_table
from agentrl.utils.redaction import learn

# Keys without effect


def check_unread(at: str, section: BaseModel, keys: tuple[str, ...], needs: str) -> None:
    """Raise ConfigError if one of `keys` in section `at` differs from its default. `needs`: the setting that reads it."""
    for key in keys:
        value = getattr(section, key)
        if value != type(section).model_fields[key].get_default(call_default_factory=True):
            name, value = f"{at}.{key}".lstrip("."), value.name if isinstance(value, Choice) else value
            raise ConfigError(f"{name} = {value!r} is read with {needs} alone; set that too, or leave this out")


_NORM = "seq_mean_token_sum_norm"
_NO_FILES, _NO_SERVERS = ("ipc", "memory", "nccl", "shared"), ("auto", "embedded", "vllm")  # a plug-in may read any key
_READERS: tuple[tuple[str, str, Callable[[TrainConfig], object], str], ...] = (
    ("", "stop_at_success", lambda c: c.eval.every, "eval.every, evaluations during training,"),
    ("rollout", "max_filtered", lambda c: c.rollout.filter_zero_variance, "rollout.filter_zero_variance"),
    ("rollout", "mixture", lambda c: isinstance(c.env, list), "several environments, [[env]],"),
    ("env", "weight", lambda c: not isinstance(c.env, EnvConfig), "several environments, [[env]],"),
    ("env.eval", "weight", lambda c: not isinstance(c.env, EnvConfig) or c.env.eval is None, "several environments, [[env]],"),
    ("checkpoint", "best", lambda c: c.checkpoint.keep_best, "checkpoint.keep_best above 0"),
    ("algorithm.kl", "kind where", lambda c: c.algorithm.kl.coef, "algorithm.kl.coef above 0"),
    ("algorithm.kl", "horizon", lambda c: c.algorithm.kl.target, "algorithm.kl.target"),
    ("algorithm", "length_norm", lambda c: c.algorithm.aggregate == _NORM, f'algorithm.aggregate = "{_NORM}"'),
    ("sglang", "servers seeds timeout api_key_env", lambda c: c.engine not in _NO_SERVERS, 'engine = "sglang"'),
    ("weights", "route bucket_mib folder", lambda c: c.weights.lora == "merged", 'weights.lora = "merged"'),
    ("weights", "folder", lambda c: c.engine not in _NO_SERVERS or c.weights.route not in _NO_FILES, 'weights.route = "disk"'),
)
"""Keys read only under a condition: section, keys, condition, and a description of the setting that enables it."""


def check_idle_keys(config: TrainConfig, given: Sequence[str] = ("",)) -> None:
    """Raise ConfigError for a key that is set but not read; only keys that begin with one of `given`."""
    for at, keys, reader, needs in _READERS:
        if not reader(config):
            names = tuple(key for key in keys.split() if f"{at}.{key}.".startswith(tuple(given)))
            check_unread(at, reduce(getattr, filter(None, at.split(".")), config), names, needs)


# Paths: one that begins with `./` or `../` in a config file is relative to that file. If it does not exist there, it is resolved
# as all others, and those of the command line, are: from the working folder, or as a name on a shelf or hub.

Table = dict[str, Any]

READ = (
    ("env", "reward"),
    ("env", "params", "source"),
    ("env", "tools", "sets"),
    ("tools", "sets"),
    ("model", "path"),
    ("model", "chat_template"),
    ("data", "path"),
    ("critic", "path"),
    ("reward_model", "path"),
    ("algorithm", "distillation", "path"),
    ("reward", "judge", "engines", "*", "path"),
)
"""Keys of inputs: a path, or a list of paths."""
_WORDS = (("agent", "command"), ("tools", "args", "*", "*"), ("tools", "mcp", "*", "command"))
WORDS = (*_WORDS, *(("env", *key) for key in _WORDS), ("env", "params", "*"))
"""Keys with words, of which those that begin with `./` or `../` are paths; "*" is any key."""
WRITTEN = (("reward", "judge", "cache"), ("weights", "folder"), ("out",))
"""Keys of output folders, relative to the working folder."""


def resolve_near_paths(file: Path, table: Table) -> Table:
    """Make paths relative to a config file absolute. Raises ConfigError if both that file's folder and the working folder have
    one."""

    def found(path: str, key: str) -> str:
        near, here = file.parent / path, Path(path)
        if not path.startswith(("./", "../")) or not near.exists():
            return path
        if here.exists() and not here.samefile(near):
            raise ConfigError(
                f"{file}: {key} = {path!r}: {near.resolve()} and {here.resolve()} both exist; write the absolute path of one"
            )
        return str(near.resolve())

    changed: Table = change_strings(table, READ + WORDS, found)
    return changed


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Make paths of this machine absolute, so that the config is independent of the working folder. Names on a shelf or hub
    stay."""

    def there(path: str, key: str) -> str:
        if not path:  # Path would take it for the working folder
            raise ConfigError(f"{key}: '' is no path and no name. Leave the key out, or write one")
        named = key == "model.chat_template" and not Path(path).suffix  # one of agentrl's templates, even if a file has its name
        return path if named or not Path(path).exists() else str(Path(path).absolute())

    table = change_strings(config.model_dump(), READ, there)
    table = change_strings(table, WORDS, lambda word, key: there(word, key) if word.startswith(("./", "../")) else word)
    table = change_strings(table, WRITTEN[:-1], lambda path, key: str(Path(there(path, key)).absolute()))
    return TrainConfig.model_validate(table)


def change_strings(
    value: Any, keys: Sequence[tuple[str, ...]], change: Callable[[str, str], str], path: tuple[str, ...] = ()
) -> Any:
    """Copy tables and lists with the strings at `keys` changed; items of a list have its key. `[env.NAME]` counts as `[env]`."""
    if isinstance(value, dict):
        return {key: change_strings(inner, keys, change, (*path, str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [change_strings(item, keys, change, path) for item in value]
    if path[:1] == ("env",) and len(path) > 2 and path[1] not in EnvConfig.model_fields:
        path = ("env", *path[2:])
    fits = (key for key in keys if len(key) == len(path) and all(part in ("*", one) for part, one in zip(key, path, strict=True)))
    found = next(fits, None) if isinstance(value, str) else None
    return value if found is None else change(value, ".".join(found))


# Layers of config files

Find = Callable[[str], Path]
Layers = Sequence[tuple[Path, Table]]
IN_PYTHON = Path("the overrides in Python"), Path("the config in Python")
"""Names of layers that have no file."""

ALTERNATIVES: dict[type[BaseModel], tuple[str, ...]] = {
    ModelConfig: ("path", "init"),
    McpServerConfig: ("command", "url"),
    AgentConfig: ("command", "python", "url"),
}
"""Mutually exclusive keys: one set by a file or override replaces the others of the layer below."""


def read_layers(file: Path, find: Find = Path) -> Layers:
    """Read a file and its chain of `base` files, each with its own keys, topmost first. Raises ConfigError for a missing file and
    circular bases."""
    layers: list[tuple[Path, Table]] = []
    while True:
        if any(file.resolve() == above.resolve() for above, _ in layers):
            circle = " -> ".join(part.name for part in (*(above for above, _ in layers), file))
            raise ConfigError(f"{layers[-1][0]}: base: the bases form a circle: {circle}")
        table = read_toml(file)
        base = table.pop("base", None)
        layers.append((file, resolve_near_paths(file, table)))
        if base is None:
            return layers
        if not isinstance(base, str) or not base:
            raise ConfigError(f"{file}: base: expected the name of a config or a path to one, got {base!r}")
        near = file.parent / (base if base.endswith(".toml") else f"{base}.toml")
        try:
            file = near if near.is_file() else find(base)
        except UserError as error:
            raise ConfigError(f"{file}: base: {error}") from None


def join_layers(layers: Layers) -> Table:
    """Join the layers into one table. Raises ConfigError, which names the file."""
    table: Table = {}
    for file, layer in reversed(layers):
        try:
            table = _join_models(table, layer, TrainConfig)
        except ConfigError as problem:
            raise ConfigError(f"{file}: {problem}") from None
    return table


def read_toml(file: Path) -> Table:
    """Read a TOML file. Raises ConfigError if it is missing, unreadable or invalid."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        there = [p.stem for p in file.parent.glob("*.toml")]
        hint = hint_text(file.stem, there, show=lambda name: f"{file.parent / name}.toml")
        raise ConfigError(f"{file}: no such config file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: a folder; name a TOML file") from None
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    try:
        return toml_table(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def _join_models(below: Table, table: Table, model: type[BaseModel]) -> Table:
    """Merge `table` over `below`, both tables of the section `model`.

    Sections are merged key by key; other values replace the base's, also tables, as the arguments of one loss do not apply to
    another. [env] has the parameters and reward spec of one environment: with another `id`, nothing of the base's [env] is kept.
    """
    if model is EnvConfig and below.get("id") != table.get("id", below.get("id")):
        return table
    joined, keys = dict(below), ALTERNATIVES.get(model, ())
    if any(table.get(key) not in (None, False) for key in keys):  # remove keys with an alternative in `table`
        joined = {key: value for key, value in below.items() if key not in keys or key in table}
    for key, value in table.items():
        field = model.model_fields.get(key)
        section = section_of(field.annotation) if field is not None else None
        old = joined.get(key)
        if section is EnvConfig and isinstance(old, list):
            joined[key] = _join_envs(old, value)
        elif section is None or issubclass(section, Choice) or not (isinstance(old, dict) and isinstance(value, dict)):
            joined[key] = value
        else:
            joined[key] = _join_models(old, value, section)
    return joined


def _join_envs(below: list[Any], given: Any) -> Any:
    """Merge `[[env]]`, `[env]` or `[env.NAME]` over the base's `[[env]]`."""
    if isinstance(given, dict) and "id" not in given:
        joined = list(below)
        for key, entry in given.items():
            place = entry_of(joined, key)
            if isinstance(entry, dict):
                joined[place] = _join_models(joined[place], {"id": joined[place].get("id"), **entry}, EnvConfig)
            else:
                raise ConfigError(f"env.{key}: expected a table, got {entry!r}; the base has several environments")
        return joined
    if not isinstance(given, list):
        return given
    named = {name_of(entry): entry for entry in below}
    return [
        _join_models({"id": None, **named[name]}, {"id": named[name].get("id"), **entry}, EnvConfig)
        if (name := name_of(entry)) in named
        else entry
        for entry in given
    ]


# Overrides of the command line

_ONE = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^."'=]+)"""
_PART = re.compile(_ONE)
_KEY = re.compile(rf"~?{_ONE}(?:\.{_ONE})*")
_NO_TOML = re.compile(r"\b(?:None|null|Null|NULL|True|TRUE|False|FALSE)\b")
"""Spellings of true, false and null in Python, JSON and YAML; TOML has no null."""
_QUOTED = re.compile(r"""\"(?:[^"\\]|\\.)*"|'[^']*'""")

UNSET = object()
"""Value of an override that unsets its key."""


class Override(NamedTuple):
    """One override: the parts of its key, its value (or `UNSET`), and its text."""

    keys: list[str]
    value: Any
    text: str


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse `a.b=c` into (["a", "b"], value, text); `~a.b` has the value `UNSET`. A value that is not TOML is a string. Raises
    ConfigError for other texts."""
    found = []
    for text in overrides:
        match = _KEY.match(text)
        key = "" if match is None else match[0]
        rest, unsets = text[len(key) :], key.startswith("~")
        equals, raw = rest[:1] == "=", rest[1:]
        keys = [_unquote_key(part) for part in _PART.findall(key.removeprefix("~"))]
        if unsets and equals:
            raise ConfigError(f"override {text!r}: ~ unsets a key and takes no value; write {'.'.join(keys)}=VALUE to set it")
        if not (equals or (unsets and not rest)) or not keys or not all(keys):
            raise ConfigError(f"override {text!r}: expected KEY=VALUE or ~KEY, for example rollout.group_size=8")
        value: Any = UNSET if unsets else raw
        if not unsets:
            try:
                read = toml_table(f"value = {raw}")
            except ValueError:
                # A bare word: name=seed3 needs no TOML quotes inside the shell's.
                _check_words(".".join(keys), raw.strip(), text)
            else:
                whole = "#" not in raw
                with suppress(ValueError):  # `4#2`: as TOML a comment would swallow the bracket, so keep the text
                    whole = whole or bool(toml_table(f"value = [{raw}]"))
                # More than one key: text with a line break that looks like TOML.
                value = read["value"] if len(read) == 1 and whole else raw
        found.append(Override(keys, value, text))
    return found


def apply_overrides(table: Table, overrides: Sequence[Override]) -> Table:
    """Copy a config's table and apply the overrides in order.

    A key that they set replaces its alternatives in `table`: `model.path=X` replaces `[model.init]`, and vice versa. Raises
    ConfigError, which names the override.
    """
    table = deepcopy(table)
    # Remove the keys whose alternatives the overrides set.
    named: dict[tuple[str, ...], set[str]] = {}
    for keys, value, _ in overrides:
        for place, key in enumerate(keys if value is not UNSET and value is not False else ()):
            if key in ALTERNATIVES.get(section_at(keys[:place]) or BaseModel, ()):
                named.setdefault(tuple(keys[:place]), set()).add(key)
    for parents, chosen in named.items():
        inner = value_at(table, parents)
        for other in ALTERNATIVES[section_at(parents) or BaseModel] if isinstance(inner, dict) else ():
            if other not in chosen:
                inner.pop(other, None)
    for keys, value, text in overrides:
        try:
            _apply(table, keys, value)
        except ConfigError as problem:
            raise ConfigError(f"override {text!r}: {problem}") from None
    return table


def _apply(table: Table, keys: list[str], value: Any) -> None:
    """Set or unset a key; `~env.NAME` removes an entry of `[[env]]`."""
    if keys == ["base"]:
        raise ConfigError("base can only be set in a config file; name the other config instead")
    name, above, entries = ".".join(keys), list[str](), as_list(table)
    if keys[0] == "env" and len(keys) > 1 and entries:
        place = entry_of(entries, keys[1])
        if len(keys) == 2 and value is UNSET:
            del entries[place]
            return
        if len(keys) == 2:
            raise ConfigError(f"expected a key of this environment, for example env.{keys[1]}.weight=2")
        table, keys, above = entries[place], keys[2:], ["env"]
    for key in keys[:-1]:
        table = table.get(key, {}) if value is UNSET else table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key!r} is a value, not a section")
    if value is not UNSET:
        table[keys[-1]] = value
    elif keys[-1] in table:
        del table[keys[-1]]
    elif (section := section_at([*above, *keys[:-1]])) is None:  # a table of user-defined names, where only set keys are known
        raise ConfigError(f"{name} is not set{hint_text(keys[-1], table)}")
    elif keys[-1] not in section.model_fields:
        find_keys(".".join([*above, *keys]))  # raises


def _check_words(key: str, raw: str, text: str) -> None:
    """Raise ConfigError for an unquoted None, null or True, alone or in a list, which would become a text."""
    found = _NO_TOML.search(_QUOTED.sub("", raw))
    if found is None or (found[0] != raw and raw[:1] not in ("[", "{")):
        return
    word = found[0].lower()
    if found[0] != raw:
        fix = f"{word} there" if word in ("true", "false") else "the list without it"
    else:
        fix = f"{key}=true" if word == "true" else f"{key}=false, or ~{key} for its default"
    raise ConfigError(f"override {text!r}: {key}: TOML has no {found[0]}. Write {fix} (a text of that name in quotes)")


def _unquote_key(part: str) -> str:
    """Remove the TOML quotes of a key part with dots or spaces."""
    try:
        return next(iter(toml_table(f"{part} = 0"))) if part[:1] in ('"', "'") else part.strip()
    except ValueError:
        return ""


ABSENT = object()


def value_at(table: Any, keys: Sequence[str | int]) -> Any:
    """Return the value at `keys`, which may name an entry of `[[env]]`; else `ABSENT`."""
    for key in keys:
        if isinstance(table, list):
            place = key if isinstance(key, int) else find_entry(table, key)
            table = ABSENT if place is None else table[place]
        else:
            table = table.get(key, ABSENT) if isinstance(table, dict) else ABSENT
    return table


def find_source(ways: Sequence[list[str]], layers: Layers, overrides: Sequence[Override]) -> Override | Path | None:
    """Return the source of a key's value: the last override that sets or unsets it, else the topmost file. `ways`: its paths."""
    given = (one for one in reversed(overrides) if any(one.keys == way[: len(one.keys)] for way in ways))
    return next(given, None) or next((file for file, layer in layers for way in ways if value_at(layer, way) is not ABSENT), None)


# Load and validate


def load_config(path: str | Path, overrides: Sequence[str] = (), find: Find = Path) -> TrainConfig:
    """Load a TOML file on top of its `base`, apply overrides, and validate.

    `find` locates a base that is not next to its file, for example on a shelf. Raises ConfigError, which names the file or
    override, the key, the expected value and the nearest key.
    """
    layers = read_layers(Path(path), find)
    return config_from(join_layers(layers), overrides, layers)


def config_from(table: Table, overrides: Sequence[str] = (), layers: Layers = ()) -> TrainConfig:
    """Validate a config's table after overrides. Raises ConfigError, which names the file in `layers` that sets the key."""
    parsed = parse_overrides(overrides)
    table = _without_false(apply_overrides(table, parsed), TrainConfig)
    table = change_strings(table, READ + WRITTEN, lambda path, key: expand_home(path))
    if table.get("env") is None and not table.get("data"):
        raise ConfigError(f"{layers[0][0] if layers else 'command line'}: env: required key is missing")
    try:
        config = TrainConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain(error, table, layers, parsed)) from None
    check_envs(config.envs, config.sft)
    learn(config.model_dump(mode="json", exclude_none=True))
    return config


def _without_false(table: Table, model: type[BaseModel]) -> Table:
    """Remove sections and keys set to false, which unsets those of the base, as TOML has no null."""
    kept: Table = {}
    for key, value in table.items():
        field = model.model_fields.get(key)
        section = section_of(field.annotation) if field is not None else None
        if field is not None and value is False and NoneType in get_args(field.annotation) and not takes_switch(field.annotation):
            if field.default is not None:
                kept[key] = None
            continue
        if section is not None and isinstance(value, dict):
            value = _without_false(value, section)
        elif section is EnvConfig and isinstance(value, list):
            value = [_without_false(entry, section) if isinstance(entry, dict) else entry for entry in value]
        kept[key] = value
    return kept


def _explain(error: ValidationError, table: Table, layers: Layers, overrides: Sequence[Override]) -> str:
    lines: dict[str, None] = {}
    entries, top = as_list(table), layers[0][0] if layers else "command line"
    for item in error.errors():
        parts = [part for part in item["loc"] if part not in (ONE, SEVERAL)]
        while len(parts) > 1 and item["type"] != "missing" and value_at(table, parts) is ABSENT:
            parts = parts[:-1]  # a member of a union ("int"), not a key
        first = 2 if entries and parts[0] == "env" and len(parts) > 2 else 0  # the index of an environment is part of its key
        formed = item["type"].endswith("_type") or item["type"] in ("missing", "too_long")
        while formed and first < len(parts) and isinstance(parts[-1], int):  # an item of a list has no key of its own
            parts = parts[:-1]
            item = {**item, "type": "item", "input": value_at(table, parts)}
        location = names = [str(part) for part in parts]
        if first:
            name = name_of(entries[int(location[1])])
            names = [entry_name(int(location[1]), name), *location[2:]]
            location = ["env", name or location[1], *location[2:]]
        within = location[:-1] if item["type"] == "missing" else location
        said = find_source([within, [str(part) for part in parts[: len(within)]]], layers, overrides)
        if said is None:  # an override below it created the table with the unknown or missing key
            said = next((one for one in overrides if within == one.keys[: len(within)]), None)
        overridden = isinstance(said, Override)
        source = f"override {said.text!r}" if isinstance(said, Override) else str(said or top)
        problem = _problem(item, location, [*location[: first // 2], *location[first:]])
        problem += _fix(item, table, parts, location, overridden, source)
        lines[f"{source}: {'.'.join(names)}: {problem}"] = None
    return "\n".join(lines)


_COMPLETE = ("extra_forbidden", "missing", "value_error")
"""Error types whose messages are complete."""


def _fix(
    item: Mapping[str, Any], table: Table, path: Sequence[str | int], location: Sequence[str], overridden: bool, source: str
) -> str:
    """Format the fix for a value of the wrong form, in the syntax of its source: a similar value that is valid, else the syntax
    of the section."""
    if item["type"] in _COMPLETE:
        return ""
    at, last, section = ".".join(location), location[-1], section_at(location)
    python = source in map(str, IN_PYTHON)
    sections = [one for one in (section, section_at([*location, "0"])) if one is not None]
    named = next(("id" if one is EnvConfig else "name" for one in sections if issubclass(one, Choice | EnvConfig)), None)
    for value in _similar_values(item["input"], named):
        if _loads(table, path, value):
            if python:
                return f"; write {at!r}: {value!r}"
            return f"; write {shlex.quote(f'{at}={inline(value)}') if overridden else f'{last} = {inline(value)}'}"
    if section is None or item["type"] == "item":
        return ""
    if python or overridden:
        return f"; write {f'{at}.KEY'!r}: VALUE" if python else f"; write {at}.KEY=VALUE (agentrl config docs {at})"
    listed = isinstance(item["input"], list)
    return f"; write [{at}], not [[{at}]]" if listed else f"; write [{at}] with keys below it (agentrl config docs {at})"


def _similar_values(value: Any, named: str | None) -> Iterator[Any]:
    """Yield values that the user may have meant. `named`: the key that identifies a table's component."""
    items = value if isinstance(value, list) else [value]
    if named is not None and all(isinstance(one, str | dict) for one in items):
        tables = [{named: one} if isinstance(one, str) else one for one in items]
        yield from (tables[0], tables) if isinstance(value, str) else (tables,)
    if isinstance(value, str):
        for text in (f"value = {value}", value):
            with suppress(ValueError):
                found = toml_table(text)
                yield found.get("value", found)
    if value is True:
        yield {}
    elif isinstance(value, list):
        yield from value[:1] if len(value) == 1 else ()
    else:
        yield from ([value], str(value)) if type(value) in (str, int, float) else ([value],)


def _loads(table: Table, path: Sequence[str | int], value: Any) -> bool:
    """Return True if the config has no error at `path` with this value."""
    table = deepcopy(table)
    value_at(table, path[:-1])[path[-1]] = value
    try:
        TrainConfig.model_validate(table)
    except ValidationError as error:
        found = [[part for part in item["loc"] if part not in (ONE, SEVERAL)] for item in error.errors()]
        return not any(loc[: len(path)] == list(path) for loc in found)
    return True


def _problem(item: Mapping[str, Any], location: list[str], key: list[str]) -> str:
    """Describe an error at `location`; `key`: the same without the name of an entry of [[env]]."""
    if item["type"] == "extra_forbidden":
        above, section = ".".join(location[:-1]), section_at(location[:-1])
        valid = [] if section is None else [*([] if above else ["base"]), *section.model_fields]
        hint = hint_text(location[-1], valid, show=lambda name: repr(".".join([*location[:-1], name])))
        where = f"[{above}]" if above else "the top level"
        hint += f"; as an argument it is {'.'.join([above, 'args', location[-1]])!r}" if "args" in valid else ""
        return f"unknown key{hint} (keys of {where}: {', '.join(valid)})"
    if item["type"] == "missing":
        # Arguments alone do not name their component; suggest the default's name.
        section = section_at(location[:-2]) if len(location) > 2 and location[-1] == "name" else None
        field = None if section is None else section.model_fields.get(location[-2])
        name = None if field is None else getattr(field.get_default(call_default_factory=True), "name", None)
        hint = "" if name is None else f"; arguments are given with the name that they are of (default: {name!r})"
        return f"required key is missing{hint}"
    if item["type"] == "value_error":  # raised by the schema; the message is complete
        return f"{item['ctx']['error']}"
    value, message = item["input"], str(item["msg"])
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    if item["type"] in ("model_type", "model_attributes_type"):
        return f"expected one table, got a list of {len(value)}" if isinstance(value, list) else f"expected a table, got {shown}"
    if item["type"] in ("item", "list_type", "dict_type", "tuple_type"):
        kind = "table"  # of a key inside a user-defined table
        with suppress(ConfigError):
            kind = find_keys(".".join(key))[0].type
        points = ", such as [[0, 1.0], [40, 0.5]]" if "list of pairs" in kind else ""
        return f"expected a {kind}{points}, got {shown}"
    return f"{message[0].lower()}{message[1:]}, got {shown}"
