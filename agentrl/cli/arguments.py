"""Shared parts of commands: registry, a parser that suggests similar words, and the process of a command with Ray."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from agentrl.cluster.ray_parent import end_of_driver, exit_by_signal, report_to_parent, restarting
from agentrl.run.interrupt import handle_stop_signals
from agentrl.utils.errors import ConfigError, UserError, WorkerDiedError, fault_text, hint_text
from agentrl.utils.registry import Registry
from agentrl.utils.terminal import say

COMMANDS: Registry[Callable[[argparse.ArgumentParser], None]] = Registry("command", "COMMANDS", "agentrl.cli")
"""Subcommands. Each function adds arguments, `run` (returns the exit code) and `epilog`; its docstring is the help."""

ENV_ACTION = "env "
"""Prefix in `COMMANDS` of actions of `agentrl env`."""


def add_command(commands: Any, name: str) -> None:
    """Add a command to the subparsers. A plug-in's command that fails to load raises when called; others still work."""
    module, word = "a plug-in", name.removeprefix(ENV_ACTION)
    try:
        add_arguments = COMMANDS[name]
        module = add_arguments.__module__
        line = " ".join((add_arguments.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
        add_arguments(commands.add_parser(word, help=line))
    except Exception as error:
        if module.startswith("agentrl."):
            raise
        problem = UserError(f"command {name}: its plug-in does not load: {fault_text(error)}. Fix or remove its file")
        commands.choices.pop(word, None)
        commands.add_parser(word, help="(its plug-in does not load)").set_defaults(run=partial(_refuse, problem))


def _refuse(problem: UserError, args: argparse.Namespace) -> int:
    raise problem


# The parser

_CHOICE = re.compile(r"invalid choice: '?(?P<word>.*?)'? \(choose from (?P<known>.*)\)$")
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<word>--?[\w-]+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def whole_number(least: int) -> Callable[[str], int]:
    """Make the type of an option: a whole number of at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return number

    return read


def check_read(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ConfigError if one of these options was given; `why`: the reason why it has no effect, and the fix."""
    for name in names:
        if getattr(args, name) != args.parser.get_default(name):
            options = [option for one in args.parser._actions if one.dest == name for option in one.option_strings[-1:]]
            raise ConfigError(f"{' / '.join(options) or name}: {why}")  # two options may set one value: --model, --policy


class Parser(argparse.ArgumentParser):
    """Argument parser, also of subcommands, whose epilogs keep their lines; `parser` of the result is the innermost parser."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})
        self.set_defaults(parser=self)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument; optional words (`a.b=c`) are not reported as missing."""
        if options.get("nargs") == "*" and not names[0].startswith("-"):
            options.setdefault("default", [])
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; a command with a default for `passed_on` gets the words behind `--` in it, unparsed."""
        if args is None or "--" not in args or self.get_default("passed_on") is None:
            return super().parse_known_args(args, namespace)
        words = list(args)
        found, rest = super().parse_known_args(words[: words.index("--")], namespace)
        found.passed_on = words[words.index("--") + 1 :]
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Exit with code 2, the usage and the message, with a similar known name if there is one."""
        # Parse the text, because argparse gives nothing else: it suggests names itself only since Python 3.14.
        if choice := _CHOICE.search(message):
            known = choice["known"].replace("'", "").split(", ")
            message = f"{message}{hint_text(choice['word'], known)}"
        elif unknown := _UNKNOWN.search(message):
            message = f"{message}{hint_text(unknown['word'], _OPTION.findall(self.format_help()))}"
        super().error(message)


# A command that uses Ray

Drive = Callable[[argparse.Namespace, int], int]
"""Work of a command, given its arguments and the number of restarts; returns the exit code."""


def with_parent(args: argparse.Namespace, drive: Drive, again: Drive | None = None) -> int:
    """Run `drive` in a child process if this process is the command; returns its exit code, or dies of the same signal.

    Forks before any import that starts threads (such as OpenBLAS of numpy), so before it is known whether the command uses Ray.
    The child reports its run (`report_to_parent`); if Ray ended the child, `again` resumes the run, up to `max_restarts` times
    in all. Raises WorkerDiedError if it cannot resume.
    """
    if not args.program:
        return drive(args, 0)
    restarts = 0
    while (end := end_of_driver()) is not None:
        if end.code < 0:
            if "folder" in end.facts:
                name = signal.Signals(-end.code).name
                say(f"agentrl: the driver (pid {end.pid}) was ended by {name}; {end.facts['then']}", file=sys.stderr)
            return exit_by_signal(-end.code)
        error = end.facts.get("error", "")
        if end.silent and error:
            say(f"agentrl: {error}", file=sys.stderr)
        if not end.by_ray:
            if end.silent and not error:
                say(f"agentrl: the driver (pid {end.pid}) has ended silently; {end.facts['then']}", file=sys.stderr)
            return end.code
        restarts, limit = end.facts["restarts"] + 1, end.facts["max_restarts"]
        if end.stopping and not error:  # the stop signal also reached the processes of Ray
            if again is not None:  # only a run has checkpoints; finished episodes are all kept
                from agentrl.trainer.checkpoint import newest_checkpoint

                say(f"newest checkpoint           {newest_checkpoint(Path(end.facts['folder']))}", file=sys.stderr)
            say(f"interrupted; {end.facts['then']}", file=sys.stderr)
            return 130
        if again is None or restarts > limit or error:
            raise WorkerDiedError(f"{end.by_ray}; {end.facts['then']}")
        say(restarting(end.by_ray, restarts, limit))
        # The resumed run has its options in its config.
        given = dict.fromkeys(("config", "data", "loss", "min_reward", "success", "per_task"))
        vars(args).update(given, resume=end.facts["folder"], overrides=[], overwrite=False)
        drive = again
    try:
        with handle_stop_signals():
            return drive(args, restarts)
    finally:
        report_to_parent(over=True)
