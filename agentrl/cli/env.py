"""`agentrl env`: list, show, create, check, play and serve environments."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from agentrl.cli import env_difficulty, env_floor, env_install
from agentrl.cli.env_subject import reference, subject_of
from agentrl.cli.parser import seed
from agentrl.errors import UserError
from agentrl.shown import say

if TYPE_CHECKING:
    from agentrl.catalog import EnvRef
    from agentrl.env import ToolEnv
    from agentrl.env.check import CheckFinding
    from agentrl.tool import Options

HELP = "list, show, create, check, play and serve environments"
EPILOG = """examples:
  agentrl env list                           which environments there are, and where they come from
  agentrl env show key_value calls=4         its parameters, tools and a sample task
  agentrl env new todo                       a working environment to start from, in envs/todo
  agentrl env install --list                 benchmarks that can be environments (docs/benchmarks.md)
  agentrl env difficulty workspace           how long its gold solutions are, and what they change
  agentrl env floor key_value                what an agent that solves nothing earns in it
  agentrl env check todo                     does it fulfill the contract?
  agentrl env check --all                    the same for every environment on the shelves
  agentrl env play key_value --seed 3        be the agent yourself
  agentrl env check key_value 'tools.sets=["notes"]'     with tools beside its own
  agentrl env serve key_value --mcp          offer its tools to any MCP client
  agentrl env serve key_value --http         a server to train against (env.url), on 127.0.0.1:8100
  agentrl env serve sql --http --host 0.0.0.0 --port 9000 --token-env SQL_TOKEN --max-episodes 256
"""

PORT = 8100
EPISODES, IDLE, BODY = 1024, 3600.0, 16 << 20
"""Limits of `env serve`, as SessionLimits has them; not from there, since every `--help` would load the environments."""
PARAMS = 'a=b: parameters of the environment, values in TOML (a bare word is a string); tool sets: tools.sets=["notes"]'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands with their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="every environment on the shelves")
    listing.add_argument("--json", action="store_true", help="one JSON array")
    listing.set_defaults(run=run_list)
    show = _with_env(actions.add_parser("show", help="parameters, tools, reward spec and a sample task"))
    show.set_defaults(run=run_show)
    new = actions.add_parser("new", help="write a working environment with reward spec and test")
    new.add_argument("name", help="its short name, for example todo: the folder envs/todo")
    new.add_argument("--shelf", default=".", help="the folder that holds envs/ (default: here)")
    new.set_defaults(run=run_new)
    env_install.add_arguments(
        actions.add_parser("install", help="a benchmark's environments, from your checkout or package of it")
    )
    _add_check(actions.add_parser("check", help="does it fulfill the contract? exit code 1 if it does not"))
    env_difficulty.add_arguments(
        _with_env(actions.add_parser("difficulty", help="calls, turns, tokens and state writes of its gold solutions"))
    )
    env_floor.add_arguments(actions.add_parser("floor", help="what an agent that solves nothing earns in it"))
    play = _with_env(actions.add_parser("play", help="be the agent, in the terminal"))
    play.add_argument("--seed", type=seed, default=0, help="which task (default 0)")
    play.add_argument("--split", default="train", help="the task's split (default train)")
    play.add_argument(
        "--model-user", action="store_true", help="the environment's own user, a model say; without it that of the gold solution"
    )
    play.set_defaults(run=run_play)
    _add_serve(_with_env(actions.add_parser("serve", help="offer it, or its tools, to other programs")))


SERVE_EPILOG = """examples:
  agentrl env serve key_value calls=4 --http              a server to train against, on 127.0.0.1:8100; prints its token
  agentrl env serve sql --http --host 0.0.0.0 --port 9000 --token-env SQL_TOKEN --max-episodes 256
  agentrl train run.toml env.url=http://HOST:9000 env.token_env=SQL_TOKEN       the run, on another machine
  agentrl env serve key_value --mcp                       its tools, over stdio, for any MCP client
  agentrl env serve key_value --mcp --http 8000           the same over HTTP
"""


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = SERVE_EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--mcp", action="store_true", help="its tools, as a Model Context Protocol server")
    parser.add_argument(
        "--http",
        type=int,
        nargs="?",
        const=PORT,
        metavar="PORT",
        help=f"its episodes, to train against (env.url) and for OpenEnv's clients (default port {PORT}); with --mcp: over HTTP "
        "on 127.0.0.1 instead of stdio",
    )
    parser.add_argument("--seed", type=seed, default=0, help="with --mcp: which task (default 0)")
    parser.add_argument("--split", default="train", help="with --mcp: the task's split (default train)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default 127.0.0.1: only this machine)")
    parser.add_argument("--port", type=int, help="the port (0: a free one)")
    parser.add_argument(
        "--token-env", metavar="NAME", help="the environment variable with its secret token (default: a new one, printed)"
    )
    parser.add_argument("--max-episodes", type=int, metavar="N", default=EPISODES, help=f"at once (default {EPISODES})")
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=IDLE,
        metavar="S",
        help=f"seconds without a request after which an episode is closed (default {IDLE:g})",
    )
    parser.add_argument("--max-body", type=int, default=BODY, metavar="BYTES", help=f"of a request (default {BODY})")
    parser.set_defaults(run=run_serve)


def _with_env(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("env", help="an id such as agentrl/KeyValue-v0, or a short name such as key_value")
    parser.add_argument("params", nargs="*", metavar="a=b", help=PARAMS)
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", nargs="?", help="an id or short name")
    parser.add_argument("params", nargs="*", metavar="a=b", help=PARAMS)
    parser.add_argument("--all", action="store_true", help="every environment on the shelves")
    parser.add_argument(
        "--tasks", type=int, help="tasks per check (default 12; fewer for an environment that starts a server for each episode)"
    )
    parser.add_argument(
        "--all-tasks", action="store_true", help="gold and idling on every task of an environment that has an end"
    )
    parser.add_argument("--fuzz", type=int, help="random inputs per tool (default 500, or fewer as for --tasks)")
    parser.add_argument("--reward", help="score with this reward spec instead of the environment's own")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.set_defaults(run=run_check)


def run_list(args: argparse.Namespace) -> int:
    """Print every environment; returns the exit code."""
    from agentrl.catalog import broken_files, list_envs

    entries = list_envs()
    if args.json:
        rows = [
            {"id": e.id, "name": e.name, "summary": e.summary, "path": str(e.path or ""), "installed": not e.lacks_source()}
            for e in entries
        ]
        say(json.dumps(rows))
        return 0
    width = max((len(entry.id) for entry in entries), default=0)
    short = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        lacking = f"  [not installed: agentrl env install {entry.suite.suite}]" if entry.suite and entry.lacks_source() else ""
        say(f"{entry.id:{width}}  {entry.name:{short}}  {entry.summary}{lacking}")
    for problem in broken_files().values():
        say(f"skipped: {problem}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Describe an environment; returns the exit code."""
    import inspect

    ref = reference(args.env, args.params)
    entry, env = ref.entry, ref.build()
    say(f"{entry.id}  ({entry.name}, {entry.path or entry.class_name})")
    say(inspect.getdoc(type(env)) or entry.summary)
    say(f"\nreward spec: {ref.default_reward() or 'none'}\nparameters:")
    for line in _parameter_lines(type(env)):
        say(f"  {line}")
    shown: dict[str, tuple[list[str], list[str]]] = {}
    for split in env.splits:
        observation, _ = env.reset(seed=0, options={"split": split})
        shown[split] = [f"  {message.role}: {message.content}" for message in observation], _tool_lines(env)
    differ = len({tuple(tools) for _, tools in shown.values()}) > 1
    for split, (messages, tools) in shown.items():
        say("\n".join([f"\ntask 0 of {split}:", *messages, *(["tools of this task:", *tools] if differ else [])]))
    if not differ:
        say("\n".join(["\ntools:", *_tool_lines(env)]))
    env.close()
    return 0


def _tool_lines(env: ToolEnv) -> list[str]:
    """The tools that the running episode offers."""
    from agentrl.tool.options import MAX_OUTPUT

    lines = []
    for tool in env.toolbox:
        lines.append("  " + json.dumps(tool.schema["function"], ensure_ascii=False))
        if differs := _called_as(tool.options):
            lines.append(f"    {differs}")
    if env.toolbox.max_output != MAX_OUTPUT:
        lines.append(f"  answers of tools that do not say: at most {env.toolbox.max_output} tokens")
    return lines


def _called_as(options: Options) -> str:
    """What a policy may see of a tool's options, if they are not the default."""
    seen = {name: getattr(options, name) for name in ("check", "on_error", "error", "max_output")}
    return ", ".join(f"{name}={value!r}" for name, value in seen.items() if value not in (None, "strict"))


def _parameter_lines(env_class: type) -> list[str]:
    import inspect

    lines = []
    for parameter in inspect.signature(env_class).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            kind = parameter.annotation if isinstance(parameter.annotation, str) else ""
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            lines.append(f"{parameter.name}{': ' if kind else ''}{kind}{default}")
    init = vars(env_class).get("__init__")
    described = inspect.cleandoc(init.__doc__) if init is not None and init.__doc__ else ""
    return [*lines, *described.splitlines()]


def run_new(args: argparse.Namespace) -> int:
    """Write a new environment; returns the exit code."""
    from agentrl.catalog import list_envs
    from agentrl.cli.env_new import write_template

    hidden = [entry.id for entry in list_envs() if entry.name == args.name]
    folder = write_template(args.name, args.shelf)
    config = folder.parents[1] / f"{args.name}.toml"
    installed = importlib.util.find_spec("pytest") is not None
    say(f"{folder}: env.py, reward.json and test_{args.name}.py; {config}: a first config")
    if hidden:
        say(f"in this folder {args.name} is now this one, and no longer {hidden[0]}, which its id still names")
    say(f"next: agentrl env check {args.name}; agentrl env play {args.name}; agentrl train {config}")
    say(f"its test: pytest {folder}{'' if installed else ' (after pip install pytest)'}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Check one environment or all; returns 0 if every check passed, else 1."""
    from agentrl.catalog import EnvRef, list_envs

    if args.all == (args.env is not None):
        raise UserError("agentrl env check: give an environment, or --all")
    there = list_envs() if args.all else []
    refs = [EnvRef(e.id) for e in there if not e.lacks_source()] if args.all else [reference(args.env, args.params)]
    lacking = [e.id for e in there if e.lacks_source()]
    results = {ref.entry.id: _check(ref, args) for ref in refs}
    failed = sum(finding.ok is False for findings in results.values() for finding in findings)
    if args.json:
        rows = {env: [_row(finding) for finding in findings] for env, findings in results.items()}
        say(json.dumps({"failed": failed, "environments": rows, "not_installed": lacking}))
    else:
        for env, findings in results.items():
            _print_table(env, findings)
        for env in lacking:
            say(f"{env}: not checked, its source is not installed (agentrl env install --list)")
    return 1 if failed else 0


def _check(ref: EnvRef, args: argparse.Namespace) -> list[CheckFinding]:
    from agentrl.env.check import CHECKS, check_all, limit_to

    chosen = args.tasks is not None or args.fuzz is not None or args.all_tasks
    tasks, fuzz = (12 if args.tasks is None else args.tasks), (500 if args.fuzz is None else args.fuzz)
    subject = subject_of(ref, args.reward, tasks, fuzz, args.all_tasks)
    done, spoke = 0, time.monotonic()

    def report(finding: CheckFinding) -> None:
        nonlocal done, spoke
        done += 1
        if done < len(CHECKS) and time.monotonic() - spoke > _QUIET_S:
            spoke = time.monotonic()
            say(f"{ref.entry.id}: {done} of {len(CHECKS)} checks are done", file=sys.stderr)

    return check_all(subject if chosen else limit_to(subject), report=report)


_QUIET_S = 5.0
_STATUS = {True: "ok", False: "FAIL", None: "-"}


def _row(finding: CheckFinding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "ok": finding.ok,
        "evidence": finding.evidence,
        "seconds": finding.seconds,
    }


def _print_table(env: str, findings: list[CheckFinding]) -> None:
    failed = sum(finding.ok is False for finding in findings)
    say(f"{env}: {f'{failed} of {len(findings)} checks failed' if failed else 'all checks passed'}")
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        say(f"  {_STATUS[finding.ok]:4}  {finding.check:{width}}  {finding.evidence}")


def run_play(args: argparse.Namespace) -> int:
    """Let a person act; returns the exit code."""
    from agentrl.catalog.scoring import find_spec, make_scorer
    from agentrl.cli.env_play import play_by_hand
    from agentrl.config.schema import RewardConfig

    ref = reference(args.env, args.params)
    scorer = {} if ref.entry.reward is None else {"scorer": make_scorer(find_spec(ref, None), RewardConfig(), ref)}
    return play_by_hand(ref.build(**scorer), args.seed, args.split, input, say, args.model_user)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until the client goes away or Ctrl-C; returns the exit code."""
    ref = reference(args.env, args.params)
    if args.mcp:
        from agentrl.env.serve import serve_mcp

        serve_mcp(ref.build(), seed=args.seed, split=args.split, port=args.http)
        return 0
    if args.http is None:
        raise UserError("agentrl env serve: give --http (its episodes, to train against) or --mcp (its tools, for MCP clients)")
    return _serve_http(ref, args)


def _serve_http(ref: EnvRef, args: argparse.Namespace) -> int:
    from agentrl.catalog.offer import EnvOffer
    from agentrl.env.remote.app import EnvApp
    from agentrl.env.remote.secret import Secret
    from agentrl.env.remote.serving import serve_http
    from agentrl.env.remote.sessions import SessionLimits
    from agentrl.env.remote.wire import Asked
    from agentrl.run.contents import env_digest

    for name in ("max_episodes", "idle_timeout", "max_body"):
        if getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name):g}: expected more than 0")
    offer, secret = EnvOffer(ref, env_digest), Secret.of(args.token_env)
    offer.card(Asked(ref.id))  # a mistake in its parameters is one now, and not a client's
    app = EnvApp(offer, secret, SessionLimits(args.max_episodes, args.idle_timeout, args.max_body))

    def began(url: str) -> None:
        where = f"in {args.token_env}" if args.token_env else secret.token
        say(f"{offer.name}: {url}   (env.url = {url!r}; Ctrl-C ends it)\ntoken: {where}", flush=True)
        say(f"for OpenEnv's clients: {url}/openenv/{secret.player}", flush=True)

    serve_http(app, args.host, args.http if args.port is None else args.port, began)
    return 0
