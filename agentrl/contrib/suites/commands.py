"""Commands `agentrl env install`, `floor` and `leaks`: install benchmarks and measure tasks."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentrl.cli.arguments import COMMANDS, check_read, whole_number
from agentrl.cli.env import reference, subject_of, with_env
from agentrl.utils.errors import CatalogError, UserError, did_you_mean
from agentrl.utils.terminal import cell, console, folding, say

if TYPE_CHECKING:
    from agentrl.env.catalog import EnvEntry

# agentrl env floor

FLOOR_EPILOG = """examples:
  agentrl env floor key_value sql                         rewards for doing nothing, on 200 held-out tasks each
  agentrl env floor bfcl                                  on every task of a benchmark, with the ids of rewarded tasks
  agentrl env floor tau2 domain=retail --json
  agentrl env floor key_value --reward my_spec.json --tasks 1000
"""
SHOWN = 12


@COMMANDS.register("env floor")
def add_floor_arguments(parser: argparse.ArgumentParser) -> None:
    """measure the rewards of agents that solve no task."""
    parser.epilog = FLOOR_EPILOG
    parser.add_argument("words", nargs="+", metavar="ENV|a=b", help="environments; with one, also its parameters")
    parser.add_argument("-n", "--tasks", type=whole_number(1), help="tasks (default: all of a suite, 200 of another environment)")
    parser.add_argument("--split", help="split of the tasks (default: all tasks of a suite, heldout of another environment)")
    parser.add_argument("--reward", help="score with this reward spec instead of the environment's own")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of tables")
    parser.set_defaults(run=run_floor)


def run_floor(args: argparse.Namespace) -> int:
    """Measure the environments and print the results; return the exit code."""
    names = [word for word in args.words if "=" not in word]
    params = [word for word in args.words if "=" in word]
    if not names or (params and len(names) > 1):
        raise UserError("agentrl env floor: give environments, or one with parameters a=b")
    from agentrl.contrib.suites.measures import headline

    floors = [floor_of(name, params, args.reward, args.split, args.tasks) for name in names]
    if args.json:
        say(json.dumps(floors))
        return 0
    for found in floors:
        every = "every task" if found["every"] else f"the first {found['tasks']} tasks"
        version = f" {found['version']}" if found["version"] else ""
        say(f"{found['env']}{version}: {every} of {found['split']} ({found['tasks']})")
        for agent, one in found["agents"].items():
            own = f", {headline(one)}" if headline(one) else ""
            mean = "-" if one["mean"] is None else f"{one['mean']:.3f}"
            lost = f", {one['unscored']} unscored" if one["unscored"] else ""
            share = f"{100 * one['low']:.1f} to {100 * one['high']:.1f} %, 95 %"
            say(f"  {agent:15} mean {mean}, paid in full on {one['paid']} ({share}){lost}{own}")
            if one["ids"]:
                more = f" and {len(one['ids']) - SHOWN} more (--json has all)" if len(one["ids"]) > SHOWN else ""
                say(f"    {', '.join(one['ids'][:SHOWN])}{more}")
    return 0


def floor_of(
    name: str, params: list[str], reward: str | None = None, split: str | None = None, tasks: int | None = None
) -> dict[str, Any]:
    """Measure the rewards of idle agents on an environment. Raises UserError if it has no reward spec."""
    from agentrl.contrib.suites.measures import measure

    ref = reference(name, params)
    subject = subject_of(ref, reward)
    if subject.scorer is None:
        raise UserError(f"{name} names no reward spec, so nothing is paid; --reward SPEC scores with one")
    return measure(subject, split, tasks)


# agentrl env leaks

LEAKS_EPILOG = """examples:
  agentrl env leaks bfcl holdout=tasks                    every task of a benchmark
  agentrl env leaks bfcl holdout=tasks category=live --ngram 13 --json
  agentrl env leaks key_value --tasks 1000                the first 1,000 tasks of each split
"""


@COMMANDS.register("env leaks")
def add_leaks_arguments(parser: argparse.ArgumentParser) -> None:
    """find content that held-out tasks share with training tasks."""
    parser.epilog = LEAKS_EPILOG
    with_env(parser)
    parser.add_argument(
        "--tasks", type=whole_number(1), help="tasks of each split (default: all of a suite, 200 of another environment)"
    )
    parser.add_argument("--ngram", type=whole_number(1), default=8, metavar="N", help="words per n-gram (default 8)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.set_defaults(run=run_leaks)


def run_leaks(args: argparse.Namespace) -> int:
    """Compare training and held-out tasks and print shared content; return the exit code."""
    from dataclasses import asdict

    from agentrl.contrib.suites.measures import counted_tasks, find_leaks

    env = reference(args.env, args.params).with_gold_user().build(scorer=None)
    train, heldout = (counted_tasks(env, split, args.tasks)[1] for split in ("train", "heldout"))
    if not (train and heldout):
        raise UserError(f"{env.id}: {train} training and {heldout} held-out tasks. Choose parameters with tasks of both splits.")
    found = find_leaks(env, range(train), range(heldout), args.ngram)
    if args.json:
        say(json.dumps({"env": env.id, "train": train, "heldout": heldout, "leaks": [asdict(one) for one in found]}))
        return 0
    title = f"{env.id}: contents of {heldout} held-out tasks that one of {train} training tasks has"
    table = folding("", "shared", "held-out tasks", "with half of theirs", "of", "example", title=title)
    for one in found:
        example = " | ".join(one.examples[0]) if one.examples else ""
        name = f"{args.ngram}-grams" if one.kind == "n-grams" else one.kind
        table.add_row(name, str(one.shared), str(one.tasks), str(one.half), str(one.of), cell(example))
    console(highlight=False).print(table)
    return 0


# agentrl env install

INSTALL_EPILOG = """examples:
  agentrl env install --list                              list the suites, installed or not
  agentrl env install bfcl                                from the importable package
  agentrl env install tau2 --from ~/tau2-bench            from a checkout, which stays where it is
  agentrl env install tau2 --remove                       delete the record; the checkout stays
"""


@COMMANDS.register("env install")
def add_install_arguments(parser: argparse.ArgumentParser) -> None:
    """install a benchmark's environments from your checkout or package."""
    parser.epilog = INSTALL_EPILOG
    parser.add_argument("suite", nargs="?", help="its name, for example bfcl")
    parser.add_argument("--from", dest="source", metavar="FOLDER", help="the checkout or package folder (default: the package)")
    parser.add_argument("--list", action="store_true", help="every suite: installed or not, version, tasks")
    parser.add_argument("--remove", action="store_true", help="delete the record of the installation")
    parser.set_defaults(run=run_install)


def run_install(args: argparse.Namespace) -> int:
    """Install, list or remove a suite; return the exit code."""
    from agentrl.contrib.suites.suite import SuiteEnv, install, read_record, remove

    if args.list:
        check_read(args, ("suite", "source", "remove"), "--list shows every suite, and changes nothing. Leave it out")
        for name, envs in suites().items():
            noted, ids = read_record(name), ", ".join(entry.id for entry in envs)
            if noted is not None:
                tasks = sum(count for splits in noted.tasks.values() for one in splits.values() for count in one.values())
                say(f"{name}  installed {noted.installed}: {noted.version}, {tasks} tasks, {noted.source}  ({ids})")
            else:
                how = f"not installed: agentrl env install {name} --from FOLDER" if envs[0].lacks_source() else "can be used"
                say(f"{name}  {how}  ({ids})")
        return 0
    if args.suite is None:
        raise UserError("agentrl env install: give a suite, or --list")
    if args.remove:
        check_read(args, ("source",), "--remove reads no folder. Leave it out")
        say(f"removed: {remove(args.suite)}")
        return 0
    entries = suites().get(args.suite)
    if entries is None:
        known = list(suites())
        listed = f"known: {', '.join(known) or 'none'}"
        raise CatalogError(f"no suite {args.suite!r}; {did_you_mean(args.suite, known, listed)}")
    classes: dict[str, type[SuiteEnv]] = {}
    for entry in entries:
        loaded = entry.load()
        if not (isinstance(loaded, type) and issubclass(loaded, SuiteEnv)):
            raise CatalogError(f"{entry.id}: it names a suite, but its class is not a SuiteEnv. Derive it from SuiteEnv")
        classes[entry.id] = loaded
    record = install(classes, args.source)
    say(f"{record.suite} {record.version}: {record.source} ({len(record.files)} files)")
    for env_id, splits in record.tasks.items():
        for split, families in splits.items():
            counts = ", ".join(f"{family} {count}" for family, count in sorted(families.items()))
            say(f"  {env_id}  {split}: {sum(families.values())} tasks" + (f" ({counts})" if counts else ""))
    name = entries[0].name
    say(f"next: agentrl env check {name}; agentrl env show {name}; agentrl eval {name} --model MODEL --split all")
    return 0


def suites() -> dict[str, list[EnvEntry]]:
    """Return suite -> environments on the shelves."""
    from agentrl.contrib.suites.suite import SuiteEnv
    from agentrl.env.catalog import list_envs

    found: dict[str, list[EnvEntry]] = {}
    for entry in list_envs():
        name = entry.suite
        if entry.entry_point is not None:
            with suppress(Exception):  # another package's code may fail to load: `agentrl env check` reports why
                loaded = entry.load()
                name = loaded.suite if isinstance(loaded, type) and issubclass(loaded, SuiteEnv) else None
        if name:
            found.setdefault(name, []).append(entry)
    return dict(sorted(found.items()))
