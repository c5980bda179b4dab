"""Which file a path of a config means: the one beside the config file that names it, or the one in the working folder.

A path that begins with `./` or `../` in a config file is beside that file. If nothing is there, it is taken as all other
paths are, and as those of the command line: from the working folder, or as a name on a shelf or a hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from agentrl.config.schema import EnvConfig, TrainConfig
from agentrl.errors import ConfigError

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
"""Keys that name what a run reads: a path, or a list of them."""
WORDS = (("env", "agent", "command"), ("agent", "command"), ("tools", "args", "*", "*"), ("env", "tools", "args", "*", "*"))
"""Keys with words of which only those that begin with `./` or `../` are taken for paths; "*" is any key."""
WRITTEN = (("reward", "judge", "cache"), ("weights", "folder"))
"""Keys that name folders that a run writes; like `out`, they are relative to the working folder."""


def beside(file: Path, table: Table) -> Table:
    """The table of a config file, with the paths that are beside it made independent of the working folder.

    Raises ConfigError if there is something both beside the file and in the working folder.
    """

    def found(path: str, key: str) -> str:
        near, here = file.parent / path, Path(path)
        if not path.startswith(("./", "../")) or not near.exists():
            return path
        if here.exists() and not here.samefile(near):
            raise ConfigError(
                f"{file}: {key} = {path!r}: there are two, {near.resolve()} and {here.resolve()}; write the whole path of one"
            )
        return str(near.resolve())

    return _changed(table, READ + WORDS, found)


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The config with the files and folders of this machine by their whole paths, so that it means the same from any working
    folder. Names on a shelf or a hub stay names."""

    def there(path: str, key: str) -> str:
        named = key == "model.chat_template" and not Path(path).suffix  # one of agentrl's, whatever else has that name
        return path if named or not Path(path).exists() else str(Path(path).absolute())

    def marked(word: str, key: str) -> str:
        return there(word, key) if word.startswith(("./", "../")) else word

    table = _changed(config.model_dump(), READ, there)
    table = _changed(table, WORDS, marked)
    table = _changed(table, WRITTEN, lambda path, key: str(Path(path).absolute()))
    return TrainConfig.model_validate(table)


def _changed(table: Table, keys: tuple[tuple[str, ...], ...], change: Callable[[str, str], str]) -> Table:
    """A copy of the table, with the strings at `keys` changed; what is not a string is left for the validation to refuse."""
    table = deepcopy(table)
    for key in keys:
        for inner in _tables(table, key[:-1]):
            for last in list(inner) if key[-1] == "*" else [key[-1]]:
                value, name = inner.get(last), ".".join(key)
                if isinstance(value, str):
                    inner[last] = change(value, name)
                elif isinstance(value, list):
                    inner[last] = [change(item, name) if isinstance(item, str) else item for item in value]
    return table


def _tables(table: Table, keys: Sequence[str]) -> Iterator[Table]:
    """The tables at `keys`: one, or one of each entry of a list of tables. `[env.NAME]` on top of a list counts as one."""
    found: list[Any] = [table]
    for key in keys:
        tables = [table for table in found if isinstance(table, dict)]
        found = [item for table in tables for item in (table.values() if key == "*" else [table.get(key)])]
        found = [one for item in found for one in (item if isinstance(item, list) else [item])]
        if key == "env":
            parts = [one for one in found if isinstance(one, dict) and "id" not in one]
            found += [inner for one in parts for name, inner in one.items() if name not in EnvConfig.model_fields]
    return (one for one in found if isinstance(one, dict))
