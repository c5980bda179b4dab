"""The program `agentrl`. Commands of the core, contrib and plug-ins register themselves (`COMMANDS`).

Heavy imports stay inside the commands, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Sequence
from traceback import walk_tb

from agentrl import __version__
from agentrl.cli.arguments import COMMANDS, ENV_ACTION, Parser, add_command
from agentrl.run.config_file import is_override
from agentrl.utils.errors import AgentrlError, UserError, fault_text
from agentrl.utils.files import disk_full, expand_home, full_text
from agentrl.utils.network import exempt
from agentrl.utils.processor import PASSIVE
from agentrl.utils.redaction import guarded_output
from agentrl.utils.terminal import say

ORDER = ("train", "view", "runs", "show", "eval", "rollout", "init-model", "sft", "env", "reward", "metrics", "config")
"""Commands that `--help` lists first."""

EPILOG = """examples:
  agentrl train configs/quickstart.toml              learn the key-value task on a laptop
  agentrl train configs/quickstart.toml seed=1       override any key: a.b=c
  agentrl train --resume runs/quickstart             continue a run that stopped
  agentrl env list                                   which environments there are
"""


def build_parser() -> Parser:
    parser = Parser(prog="agentrl", description="Reinforcement learning for tool-calling agents.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"agentrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in sorted(COMMANDS, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)):
        if not name.startswith(ENV_ACTION):  # `agentrl env` adds its actions itself
            add_command(commands, name)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides may follow an option."""
    parser = build_parser()
    # Expand `~/`: a shell does so only at the beginning of a word, not in `--out=~/x` or `data.path=~/x`.
    home = re.compile(r"^([\w.-]+=)?(~/.*)$", re.DOTALL)
    given = sys.argv[1:] if argv is None else argv
    words = [home.sub(lambda found: (found[1] or "") + expand_home(found[2]), word) for word in given]
    for word in words:
        if not word.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in word):
            parser.error(f"{word!a} is not UTF-8: no name, path or value can hold it")
    # argparse takes no optional words after an option: the rest of `eval -n 5 ENV a.b=c` or `env play ENV --seed 1 a=b`.
    args: argparse.Namespace
    args, rest = parser.parse_known_args(words)
    name = next((one for one in ("overrides", "params", "words") if one in args), "")
    optional = "env" in args and name in args and "python" not in args  # --env of `reward` is an option
    if rest and optional and args.env is None and not is_override(rest[0]) and rest[0][0] != "-":
        args.env = rest.pop(0)
    if not rest:
        return args
    if not name or any(text.startswith("-") or not is_override(text) for text in rest):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    setattr(args, name, [*getattr(args, name), *rest])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 the run failed, 2 a user error, 130 interrupted."""
    if argv is None:  # before torch is imported, which reads these variables once
        os.environ.update({name: os.environ.get(name, value) for name, value in PASSIVE.items()})
        exempt()  # reach agents, judges, users and the endpoint on this machine without a proxy
    args = None
    with guarded_output():
        try:
            try:
                args = _parse(argv)
            except SystemExit:  # --help
                sys.stdout.flush()
                raise
            args.program = argv is None  # this process is the command, not a program that calls `main`
            code: int = args.run(args)
            sys.stdout.flush()  # report a failed write here
            return code
        except UserError as error:
            say(f"agentrl: {error}", file=sys.stderr)
            return 2
        except AgentrlError as error:
            say(f"agentrl: {fault_text(error)}", file=sys.stderr)
            return 1
        except BrokenPipeError:  # the reader has closed the pipe: `agentrl ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (Exception, SystemExit) as error:
            name = error.filename if isinstance(error, OSError) else None
            text: str | None
            if disk_full(error):
                then = "repeat the command"
                text = full_text(name, then) if name is not None else f"the disk is full: {error}: free some space and {then}"
            elif isinstance(error, OSError) and name is not None:
                text = f"{name}: {error.strerror}: fix that and repeat the command"
            elif (text := _shelf_fault(error, args)) is None:
                raise
            say(f"agentrl: {text}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            say("agentrl: interrupted", file=sys.stderr)
            return 130


def _shelf_fault(error: BaseException, args: argparse.Namespace | None) -> str | None:
    """Describe an error of a file on a shelf: FILE:LINE and function, or the hook with a wrong signature; else None.
    None also if a command on a shelf exits."""
    from agentrl.env import ToolEnv
    from agentrl.utils.search_path import PRIVATE

    if isinstance(error, SystemExit) and (args is None or args.run.__module__.startswith(PRIVATE)):
        return None
    fault = fault_text(error)
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").startswith(PRIVATE):
            return f"{frame.f_code.co_filename}:{line}: {frame.f_code.co_name} raised {fault}. Correct it there"
    called = re.match(r"(\w+)\.(\w+)", str(error)) if isinstance(error, TypeError | NotImplementedError) else None
    shelf = [module for name, module in sys.modules.items() if name.startswith(PRIVATE)]  # not classes of agentrl
    if called is None or not any(called[1] in vars(one) for one in shelf) or not callable(getattr(ToolEnv, called[2], None)):
        return None
    return f"{fault}. An environment has {called[2]}{inspect.signature(getattr(ToolEnv, called[2]))}"


if __name__ == "__main__":
    sys.exit(main())
