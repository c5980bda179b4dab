"""`agentrl completion`: complete commands, options, configs, environments, runs and keys, without loading torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from agentrl.cli.arguments import COMMANDS
from agentrl.config.keys import all_keys
from agentrl.run.registries import written_names
from agentrl.utils.search_path import shelves
from agentrl.utils.terminal import say

# Completion of a word

MOST = 400
"""Run folders that are offered at most."""


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that set _ARGCOMPLETE, and end the process."""
    import argcomplete

    for action in _actions(parser):
        several = str(action.metavar).startswith("CONFIG")  # configs, each with its overrides
        if found := (configs, overrides) if several else COMPLETERS.get(action.dest):
            action.completer = partial(_offer, found)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _offer(completers: Sequence[Completer], prefix: str, **_: object) -> list[str]:
    words = (word for one in completers for word in one(prefix))
    return [word for word in dict.fromkeys(words) if word.startswith(prefix)]


def configs(prefix: str) -> Iterator[str]:
    """Names of packaged configs, and TOML files and run folders that begin with the prefix."""
    yield from (path.stem for shelf in shelves() for path in sorted(shelf.glob("configs/*.toml")))
    yield from paths(prefix, ".toml")


def environments(prefix: str) -> Iterator[str]:
    """Short names of the environments on the shelves."""
    yield from (path.parent.name for shelf in shelves() for path in sorted(shelf.glob("envs/*/env.py")))


def runs(prefix: str) -> Iterator[str]:
    """Folders of runs: those in `runs`, and those below the folder that is being typed."""
    folder = prefix.rpartition("/")[0] or "runs"
    found = sorted(Path(folder).glob("*/config.toml"), key=lambda path: -path.stat().st_mtime)
    yield from (str(path.parent) for path in found[:MOST])


def models(prefix: str) -> Iterator[str]:
    """Models that runs have written, and folders."""
    for run in runs(""):
        yield from (str(path) for name in ("final", "warm_start") if (path := Path(run) / name).is_dir())
    yield from paths(prefix, "/")


def keys(prefix: str) -> Iterator[str]:
    """Sections and keys of the config."""
    yield from (key.name for key in all_keys())


def overrides(prefix: str) -> Iterator[str]:
    """`section.` and `key=` as far as one word goes, `key=value` of the values that a key has, and both of them behind `~`."""
    sign = "~" if prefix.startswith("~") else ""
    typed, equals, _ = prefix.removeprefix(sign).partition("=")
    if equals:  # the values that a key has, as one writes them; none if they cannot be listed
        owner = typed.removesuffix(".name")
        kind = next((one.type for one in all_keys() if one.name == owner), "")
        choices = [part.strip('"') for part in kind.split(" or ")] if kind.startswith('"') else written_names(owner)
        yield from (f"{typed}={value}" for value in (["true", "false"] if kind == "boolean" else choices))
        return
    # Of a component its name is assigned.
    assigned = {key.name: ".name" if key.type == "table of name and args" else "" for key in all_keys() if not key.section}
    names = [key.name for key in all_keys()] if sign else [name + end for name, end in assigned.items()]
    names = [name for name in names if name.startswith(typed)]
    heads = {name.split(".")[0] for name in names}
    end = "" if sign else "="
    if "." in typed or len(heads) == 1:
        yield from (f"{sign}{name}{end}" for name in names)
    else:
        yield from (f"{sign}{head}{end if head in names else '.'}" for head in sorted(heads))


def paths(prefix: str, end: str) -> Iterator[str]:
    """Folders, and files whose name has the ending, that begin with the prefix."""
    folder, _, start = prefix.rpartition("/")
    above = Path(folder or ("/" if prefix.startswith("/") else "."))
    for path in sorted(above.glob(f"{start}*")) if above.is_dir() else ():
        if not path.name.startswith(".") and (path.is_dir() or path.name.endswith(end)):
            yield prefix[: len(prefix) - len(start)] + path.name + ("/" if path.is_dir() else "")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a command and of those below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


Completer = Callable[[str], Iterator[str]]
COMPLETERS: dict[str, tuple[Completer, ...]] = {
    "config": (configs,),
    "overrides": (overrides,),
    "env": (environments, overrides),
    "key": (keys,),
    "model": (models,),
    "tests": (lambda prefix: paths(prefix, ".py"),),
    **dict.fromkeys(("resume", "run_folder", "folder", "folders", "runs"), (runs,)),
}
"""What completes an argument, by its name."""


# agentrl completion

COMPLETION_EPILOG = """examples:
  eval "$(agentrl completion bash)"                     in ~/.bashrc
  eval "$(agentrl completion zsh)"                      in ~/.zshrc, after compinit
  agentrl completion fish > ~/.config/fish/completions/agentrl.fish
"""


@COMMANDS.register("completion")
def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Print the shell completion of bash, zsh or fish."""
    parser.epilog = COMPLETION_EPILOG
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=run_completion)


def run_completion(args: argparse.Namespace) -> int:
    """Print it; returns the exit code."""
    from argcomplete.shell_integration import shellcode

    say(shellcode(["agentrl"], shell=args.shell))
    return 0
