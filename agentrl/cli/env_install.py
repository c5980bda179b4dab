"""`agentrl env install`: make the environments of a benchmark from the user's own checkout or package."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from agentrl.errors import CatalogError, UserError, did_you_mean
from agentrl.shown import say

if TYPE_CHECKING:
    from agentrl.catalog import EnvEntry
    from agentrl.env.source import InstallRecord

EPILOG = """examples:
  agentrl env install --list                              which suites there are, and which are installed
  agentrl env install bfcl                                from the importable package
  agentrl env install tau2 --from ~/tau2-bench            from a checkout, which stays where it is
  agentrl env install tau2 --remove                       forget it; the checkout stays
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("suite", nargs="?", help="its name, for example bfcl")
    parser.add_argument("--from", dest="source", metavar="FOLDER", help="the checkout or package folder (default: the package)")
    parser.add_argument("--list", action="store_true", help="every suite: installed or not, version, tasks")
    parser.add_argument("--remove", action="store_true", help="delete the record of the installation")
    parser.set_defaults(run=run_install)


def run_install(args: argparse.Namespace) -> int:
    """Install, list or remove; returns the exit code."""
    if args.list:
        return _list()
    if args.suite is None:
        raise UserError("agentrl env install: give a suite, or --list")
    if args.remove:
        from agentrl.env.install import remove

        say(f"removed: {remove(args.suite)}")
        return 0
    entries = suites().get(args.suite)
    if entries is None:
        known = list(suites())
        listed = f"known: {', '.join(known) or 'none'}"
        raise CatalogError(f"no suite {args.suite!r}; {did_you_mean(args.suite, known, listed)}")
    _say(_install(entries, args.source), entries)
    return 0


def suites() -> dict[str, list[EnvEntry]]:
    """The environments of each suite on the shelves."""
    from agentrl.catalog import list_envs

    found: dict[str, list[EnvEntry]] = {}
    for entry in list_envs():
        name = entry.suite.suite if entry.suite is not None else _packaged(entry)
        if name is not None:
            found.setdefault(name, []).append(entry)
    return dict(sorted(found.items()))


def _packaged(entry: EnvEntry) -> str | None:
    """The suite of an environment that another package announces: its class says it, since its source text is not read."""
    from agentrl.env.suite import SuiteEnv

    if entry.entry_point is None:
        return None
    try:
        loaded = entry.load()
    except Exception:  # another package's code: what it raises, `agentrl env check` says
        return None
    return loaded.suite if isinstance(loaded, type) and issubclass(loaded, SuiteEnv) else None


def _install(entries: list[EnvEntry], source: str | None) -> InstallRecord:
    from agentrl.env.install import install
    from agentrl.env.suite import SuiteEnv

    classes: dict[str, type[SuiteEnv]] = {}
    for entry in entries:
        loaded = entry.load()
        if not (isinstance(loaded, type) and issubclass(loaded, SuiteEnv)):
            raise CatalogError(f"{entry.id} names a suite and is no SuiteEnv")
        classes[entry.id] = loaded
    return install(classes, source)


def _say(record: InstallRecord, entries: list[EnvEntry]) -> None:
    say(f"{record.suite} {record.version}: {record.source} ({len(record.files)} files)")
    for env_id, splits in record.tasks.items():
        for split, families in splits.items():
            told = ", ".join(f"{family} {count}" for family, count in sorted(families.items()))
            say(f"  {env_id}  {split}: {sum(families.values())} tasks" + (f" ({told})" if told else ""))
    name = entries[0].name
    say(f"next: agentrl env check {name}; agentrl env show {name}; agentrl eval {name} --model MODEL --split all")


def _list() -> int:
    from agentrl.env.source import read_record

    for name, entries in suites().items():
        record = read_record(name)
        ids = ", ".join(entry.id for entry in entries)
        if record is not None:
            tasks = sum(count for splits in record.tasks.values() for one in splits.values() for count in one.values())
            say(f"{name}  installed {record.installed}: {record.version}, {tasks} tasks, {record.source}  ({ids})")
        else:
            how = f"not installed: agentrl env install {name} --from FOLDER" if entries[0].lacks_source() else "can be used"
            say(f"{name}  {how}  ({ids})")
    return 0
