"""`agentrl config` and `agentrl metrics`: explain keys and metrics, show and compare configs."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.arguments import COMMANDS, check_read
from agentrl.run.config_file import find_config_file, is_override, load_whole
from agentrl.utils.errors import ConfigError, hint_text
from agentrl.utils.terminal import columns, say

if TYPE_CHECKING:
    from agentrl.config import TrainConfig
    from agentrl.config.envs import Keys
    from agentrl.config.keys import Key
    from agentrl.config.origin import Origins


# agentrl config

CONFIG_EPILOG = """examples:
  agentrl config docs                                  every key: type, default, unit, meaning
  agentrl config docs rollout                          a section
  agentrl config docs algorithm.advantage.name         a key, with the names that it takes and their arguments
  agentrl config show configs/ppo.toml --origin        the whole config, and which file or override each value is from
  agentrl config show my.toml optim.lr=1e-5 --given    only what files and overrides set
  agentrl config diff runs/a runs/b                    keys with different values; files, run folders, shelf names
  agentrl config diff my.toml steps=3 '~sft'           what overrides change
"""
CONFIG = "a TOML file, a run's folder, or the name of a packaged config"


@COMMANDS.register("config")
def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Explain keys, show and compare configs."""
    parser.epilog = CONFIG_EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    docs = actions.add_parser("docs", help="meaning, type, default and unit of keys", epilog=CONFIG_EPILOG)
    docs.add_argument("key", nargs="?", help="a key or a section, for example rollout.groups (default: all)")
    docs.add_argument("--json", action="store_true", help="one JSON array")
    docs.set_defaults(run=run_docs)
    show = actions.add_parser("show", help="the resolved config", epilog=CONFIG_EPILOG)
    show.add_argument("config", help=CONFIG)
    show.add_argument("overrides", nargs="*", metavar="a.b=c", help="as for train; ~a.b unsets a key")
    show.add_argument("--origin", action="store_true", help="show the source of each value")
    show.add_argument("--given", action="store_true", help="only what a file or an override sets")
    show.add_argument("--json", action="store_true", help="one JSON object: key -> value (with --origin: value and origin)")
    show.set_defaults(run=run_show)
    diff = actions.add_parser("diff", help="keys in which two configs differ", epilog=CONFIG_EPILOG)
    diff.add_argument("overrides", nargs="+", metavar="CONFIG [a.b=c ...]", help=f"one or two of: {CONFIG}; each with overrides")
    diff.add_argument("--json", action="store_true", help="one JSON object: key -> [first value, second value]")
    diff.set_defaults(run=run_diff)


def run_docs(args: argparse.Namespace) -> int:
    """Print the meanings of keys; returns the exit code."""
    import textwrap

    from agentrl.config.keys import all_keys, find_keys
    from agentrl.run.registries import names_of

    keys = list(all_keys()) if args.key is None else find_keys(args.key)
    names = {key.name: [] if key.section or args.key is None else names_of(key.name) for key in keys}
    if args.json:
        rows = []
        for key in keys:
            fields = {name: getattr(key, name) for name in ("section", "type", "default", "unit", "meaning")}
            choices = [asdict(one) for one in names[key.name]]
            rows.append({"key": key.name, **fields, **({"choices": choices} if choices else {})})
        say(json.dumps(rows, indent=2))
        return 0
    if args.key is None:
        say("\n".join(_table(keys, shutil.get_terminal_size((160, 0)).columns)))
        return 0
    entries = []  # the lines of each key
    for key in keys:
        meaning = [f"  {line}" for line in textwrap.wrap(key.meaning, 98)]
        if key.section:
            off = "  (off unless it is set)" if key.default == "unset" else ""
            entries.append([f"[{key.name}]{off}", *meaning])
            continue
        unit = "" if key.unit is None else f"; unit: {'a ratio' if key.unit == '1' else key.unit}"
        entries.append([key.name, *meaning, f"  type: {key.type}; default: {key.default}{unit}"])
        for one in names[key.name]:
            given = ", ".join(f"{name} = {default}" for name, default in one.args.items())
            entries[-1].append(f"  {one.name}" + (f"({given})" if given else ""))
            entries[-1] += [f"      {line}" for line in textwrap.wrap(one.meaning, 94)[:3]]
    say("\n\n".join(map("\n".join, entries)))
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print a resolved config; returns the exit code."""
    from agentrl.config.origin import ConfigText

    config, origins = _load_with_origins(args.config, args.overrides)
    here: dict[str, str] = {}
    if args.origin:
        from agentrl.run.plan import Planner

        here = Planner(config).derived_values()

    def origin(keys: Keys) -> str:
        derived = here.get(".".join(map(str, keys)))
        return origins.of(keys) + (f"; here: {derived}" if derived else "") if args.origin else ""

    def is_shown(keys: Keys) -> bool:
        return not args.given or not origins.of(keys).startswith("default")

    if args.json:
        from agentrl.config.envs import named_leaves

        leaves = named_leaves(config.model_dump(exclude_none=True), config.envs)
        rows = {name: (keys, value) for name, keys, value in leaves if is_shown(keys)}
        found = {name: {"value": value, "origin": origin(keys)} if args.origin else value for name, (keys, value) in rows.items()}
        say(json.dumps(found, indent=2))
        return 0
    say("\n".join(ConfigText(origin, meanings=False, shown=is_shown).section(config)).lstrip("\n"))
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Print the keys in which two configs differ; returns the exit code."""
    from agentrl.config.keys import inline
    from agentrl.config.origin import differing

    # `A a.b=c B d=e` -> [("A", ["a.b=c"]), ("B", ["d=e"])]; a single config is compared without and with its overrides.
    sides: list[tuple[str, list[str]]] = []
    for word in args.overrides:
        if not is_override(word):
            sides.append((word, []))
        elif sides:
            sides[-1][1].append(word)
        else:
            raise ConfigError(f"{word}: a config comes first, for example: agentrl config diff configs/ppo.toml {word}")
    if len(sides) == 1 and sides[0][1]:
        sides.insert(0, (sides[0][0], []))
    if len(sides) != 2:
        raise ConfigError(f"expected two configs, or one with overrides, got {' '.join(args.overrides)}")
    one, other = (_load_with_origins(*side)[0] for side in sides)
    found = differing(one, other)
    if args.json:
        say(json.dumps({key: list(pair) for key, pair in found.items()}, indent=2))
        return 0
    shown = {key: ["unset" if value is None else inline(value) for value in pair] for key, pair in found.items()}
    for line in columns([(key, before, "->", after) for key, (before, after) in shown.items()]):
        say(line)
    if not shown:
        say("no key differs")
    return 0


def _load_with_origins(name: str, overrides: Sequence[str]) -> tuple[TrainConfig, Origins]:
    """Load the config of a file, a shelf's name or a run's folder, with absolute paths, and the sources of its values."""
    from agentrl.config.origin import read_origins

    folder = Path(name) / "config.toml"
    file = folder if folder.is_file() else find_config_file(name)
    return load_whole(file, overrides), read_origins(file, overrides, find_config_file)


def _table(keys: Sequence[Key], width: int) -> list[str]:
    """Format one line per key: default, unit, and its meaning cut to `width`."""
    values = [key for key in keys if not key.section]
    name, default = (
        max(len(text) for text in column) for column in zip(*((k.name, k.default[:24]) for k in values), strict=True)
    )
    unit = max(len(key.unit or "") for key in values)
    lines = []
    for key in keys:
        if key.section:
            lines += ["", f"[{key.name}]  {key.meaning}"]
        else:
            cells = f"{key.name:{name}}  {key.default[:24]:{default}}  {'' if key.unit in (None, '1') else key.unit:{unit}}  "
            lines.append((cells + key.meaning)[: max(width, len(cells) + 20)])
    return [line[:width].rstrip() for line in lines]


# agentrl metrics

METRICS_EPILOG = """examples:
  agentrl metrics                                    all of them, with units and formulas
  agentrl metrics entropy                            those whose name or meaning has this word
  agentrl metrics --json                             for a script
  agentrl metrics --markdown > metrics.md            as a page
"""


@COMMANDS.register("metrics")
def add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    """Explain the numbers in metrics.jsonl."""
    parser.epilog = METRICS_EPILOG
    parser.add_argument("words", nargs="*", metavar="WORD", help="only names and meanings with one of these")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON array")
    form.add_argument("--markdown", action="store_true", help="print the page that `make docs` shows")
    parser.set_defaults(run=run_metrics)


def run_metrics(args: argparse.Namespace) -> int:
    """Print the table; returns 0, or 1 if no entry has one of the words."""
    from agentrl.run.metrics import as_markdown, info_of, metrics_table

    if args.markdown:
        check_read(args, ("words",), "--markdown prints the whole page. Leave the words out")
        say(as_markdown(), end="")
        return 0
    exact = {entry.name for word in args.words if (entry := info_of(word)) is not None}
    found = [
        entry
        for _, entry in metrics_table()
        if not args.words
        or entry.name in exact
        or any(word.lower() in f"{entry.name} {entry.meaning}".lower() for word in args.words)
    ]
    if not found:
        words = ", ".join(map(repr, args.words))
        near = hint_text(args.words[0], [entry.name for _, entry in metrics_table()])
        say(f"agentrl: no metric has {words} in its name or meaning{near}", file=sys.stderr)
    if args.json:
        say(json.dumps([asdict(entry) for entry in found], indent=2))
    else:
        for entry in found:
            say(f"{entry.name}  [{entry.unit}; {', '.join(entry.phases)}]\n    {entry.meaning}")
    return 0 if found else 1
