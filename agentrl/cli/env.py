"""`agentrl env`: list, show, create, install, check, play and serve environments."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentrl.cli.arguments import COMMANDS, ENV_ACTION, add_command, whole_number
from agentrl.utils.errors import ConfigError, UserError
from agentrl.utils.terminal import say

if TYPE_CHECKING:
    from agentrl.env import ToolEnv
    from agentrl.env.catalog import EnvRef
    from agentrl.env.check_tools import CheckFinding, Subject


# The environment of a command


def reference(env_id: str, params: list[str]) -> EnvRef:
    """Make the reference to an environment from its id and `a=b` strings: parameters, and keys of [tools]
    (`tools.sets=["notes"]`). Raises CatalogError or ConfigError."""
    from agentrl.config.load import UNSET, parse_overrides
    from agentrl.env.catalog import EnvRef

    values: dict[str, Any] = {}
    tools: list[str] = []
    for keys, value, text in parse_overrides([word.removeprefix("env.params.") for word in params]):
        if keys[0] == "tools" and len(keys) > 1:
            tools.append(text)
            continue
        if len(keys) != 1:
            raise ConfigError(f"{text!r}: a parameter is one word, not {'.'.join(keys)} (only keys of `tools` have several)")
        if value is UNSET:
            raise ConfigError(f"{text!r}: there is nothing to unset; leave the parameter out for its default")
        values[keys[0]] = value
    if not tools:
        return EnvRef(env_id, values)
    from agentrl.config.load import config_from

    config = config_from({"name": "env", "env": {"id": env_id}, "model": {"path": "none"}}, tools)
    return EnvRef(env_id, values, tools=config.tools)


def subject_of(ref: EnvRef, reward: str | None, tasks: int = 12, fuzz: int = 500, every: bool = False) -> Subject:
    """Make the subject of checks: an environment with the scorer of a spec (by default its own).
    Raises UserError for a mistake in its parameters or in the spec."""
    import pickle

    from agentrl.config.schema import RewardConfig
    from agentrl.env.catalog import find_spec, make_scorer
    from agentrl.env.check_tools import Subject

    ref = ref.with_gold_user()
    ref.build().close()  # report a mistake in the parameters once, not as the result of every check
    named = reward or ref.default_reward()
    scorer = make_scorer(find_spec(ref, named), RewardConfig(), ref) if named else None
    return Subject(ref.build, scorer, tasks, fuzz, pickle.dumps(ref), every, str(named or ""))


# agentrl env

ENV_EPILOG = """examples:
  agentrl env list                           which environments there are, and where they come from
  agentrl env show key_value calls=4         its parameters, tools and a sample task
  agentrl env new todo                       a working environment to start from, in envs/todo
  agentrl env check todo                     does it fulfill the contract?
  agentrl env check --all                    the same for every environment on the shelves
  agentrl env play key_value --seed 3        be the agent yourself
  agentrl env check key_value 'tools.sets=["notes"]'     with tools next to its own
  agentrl env serve key_value --mcp          offer its tools to any MCP client
  agentrl env serve key_value --http         a server to train against (env.url), on 127.0.0.1:8100
  agentrl env serve sql --http --host 0.0.0.0 --port 9000 --token-env SQL_TOKEN --max-episodes 256
"""

PARAMS = 'a=b: parameters of the environment, values in TOML (a bare word is a string); tool sets: tools.sets=["notes"]'


@COMMANDS.register("env")
def add_env_arguments(parser: argparse.ArgumentParser) -> None:
    """List, show, create, check, play and serve environments."""
    parser.epilog = ENV_EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="every environment on the shelves")
    listing.add_argument("--json", action="store_true", help="one JSON array")
    listing.set_defaults(run=run_list)
    show = with_env(actions.add_parser("show", help="parameters, tools, reward spec and a sample task"))
    show.set_defaults(run=run_show)
    new = actions.add_parser("new", help="write a working environment with reward spec and test")
    new.add_argument("name", help="its short name, for example todo: the folder envs/todo")
    new.add_argument(
        "--template", choices=("stateless", "sqlite", "mcp"), default="stateless", help="what it starts from (default stateless)"
    )
    new.add_argument("--shelf", default=".", help="the folder that holds envs/ (default: here)")
    new.set_defaults(run=run_new)
    check = actions.add_parser("check", help="does it fulfill the contract? exit code 1 if it does not")
    check.add_argument("env", nargs="?", help="an id or short name")
    check.add_argument("params", nargs="*", metavar="a=b", help=PARAMS)
    check.add_argument("--all", action="store_true", help="every environment on the shelves")
    check.add_argument("-n", "--tasks", type=int, help="tasks per check (default 12; fewer if each episode starts a server)")
    check.add_argument("--all-tasks", action="store_true", help="play gold and idle on every task, if there are finitely many")
    check.add_argument("--fuzz", type=int, help="random inputs per tool (default 500, or fewer as for --tasks)")
    check.add_argument("--reward", help="score with this reward spec instead of the environment's own")
    check.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    check.set_defaults(run=run_check)
    play = with_env(actions.add_parser("play", help="be the agent, in the terminal"))
    play.add_argument("--seed", type=whole_number(0), default=0, help="which task (default 0)")
    play.add_argument("--split", default="train", help="the task's split (default train)")
    play.add_argument(
        "--model-user", action="store_true", help="play with the environment's user, which may be a model, not the gold script"
    )
    play.set_defaults(run=run_play)
    for name in COMMANDS:
        if name.startswith(ENV_ACTION):
            add_command(actions, name)


def with_env(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add arguments for an environment and its parameters."""
    parser.add_argument("env", help="an id such as agentrl/KeyValue-v0, or a short name such as key_value")
    parser.add_argument("params", nargs="*", metavar="a=b", help=PARAMS)
    return parser


def run_list(args: argparse.Namespace) -> int:
    from agentrl.env.catalog import list_envs, shelf_problems

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
        lacking = f"  [not installed: agentrl env install {entry.suite}]" if entry.suite and entry.lacks_source() else ""
        say(f"{entry.id:{width}}  {entry.name:{short}}  {entry.summary}{lacking}")
    for problem in shelf_problems():
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
    for parameter in inspect.signature(type(env)).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            kind = parameter.annotation if isinstance(parameter.annotation, str) else ""
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            say(f"  {parameter.name}{': ' if kind else ''}{kind}{default}")
    init = vars(type(env)).get("__init__")
    for line in inspect.cleandoc(init.__doc__).splitlines() if init is not None and init.__doc__ else ():
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
    """Format the tools that the current episode offers."""
    from agentrl.env.call_options import MAX_OUTPUT

    lines = []
    for tool in env.toolbox:
        lines.append("  " + json.dumps(tool.schema["function"], ensure_ascii=False))
        # Options that a policy may notice, if they differ from the default.
        seen = {name: getattr(tool.options, name) for name in ("check", "on_error", "error", "max_output")}
        if differs := [f"{name}={value!r}" for name, value in seen.items() if value not in (None, "strict")]:
            lines.append(f"    {', '.join(differs)}")
    if env.toolbox.max_output != MAX_OUTPUT:
        lines.append(f"  answers of tools without a limit of their own: at most {env.toolbox.max_output} tokens")
    return lines


def run_new(args: argparse.Namespace) -> int:
    from agentrl.cli.env_new import TEMPLATES, write_template
    from agentrl.env.catalog import list_envs
    from agentrl.utils.search_path import shelves

    hidden = [entry.id for entry in list_envs() if entry.name == args.name]
    folder = write_template(args.name, args.shelf, args.template)
    config = folder.parents[1] / f"{args.name}.toml"
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    say(f"{folder}: {files}; {config}: a first config ({TEMPLATES[args.template]})")
    if args.template == "mcp":
        params = f"""'command=["python", "{folder}/server.py"]' tasks={folder}/tasks.jsonl"""
        say(f"next: agentrl env check mcp {params}; agentrl env play mcp {params}; agentrl train {config}")
        return 0
    if hidden:
        say(f"in this folder {args.name} now means this environment; use the full id for {hidden[0]}")
    root = folder.parents[1].resolve()
    shelf = "" if root in shelves() else f"export AGENTRL_PATH={shlex.quote(str(root))}${{AGENTRL_PATH:+:$AGENTRL_PATH}}; "
    say(f"next: {shelf}agentrl env check {args.name}; agentrl env play {args.name}; agentrl train {shlex.quote(str(config))}")
    installed = importlib.util.find_spec("pytest") is not None
    say(f"its test: pytest {shlex.quote(str(folder))}{'' if installed else ' (after pip install pytest)'}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Check one environment or all; returns 0 if every check passed, else 1."""
    from agentrl.env.catalog import EnvRef, list_envs
    from agentrl.env.check import CHECKS, check_all, limit_to

    if args.all == (args.env is not None):
        raise UserError("agentrl env check: give an environment, or --all")
    known = list_envs() if args.all else []
    refs = [EnvRef(e.id) for e in known if not e.lacks_source()] if args.all else [reference(args.env, args.params)]
    lacking = [e.id for e in known if e.lacks_source()]
    chosen = args.tasks is not None or args.fuzz is not None or args.all_tasks
    tasks, fuzz = (12 if args.tasks is None else args.tasks), (500 if args.fuzz is None else args.fuzz)
    results: dict[str, list[CheckFinding]] = {}
    done, spoke = Counter[str](), time.monotonic()

    def report(finding: CheckFinding) -> None:
        nonlocal spoke
        done[ref.entry.id] += 1
        if done[ref.entry.id] < len(CHECKS) and time.monotonic() - spoke > _QUIET_S:
            spoke = time.monotonic()
            say(f"{ref.entry.id}: {done[ref.entry.id]} of {len(CHECKS)} checks are done", file=sys.stderr)

    for ref in refs:
        subject, spoke = subject_of(ref, args.reward, tasks, fuzz, args.all_tasks), time.monotonic()
        results[ref.entry.id] = check_all(subject if chosen else limit_to(subject), report=report)
    failed = sum(finding.ok is False for findings in results.values() for finding in findings)
    if args.json:
        rows = {env: [asdict(finding) for finding in findings] for env, findings in results.items()}
        say(json.dumps({"failed": failed, "environments": rows, "not_installed": lacking}))
    else:
        for env, findings in results.items():
            print_findings(env, findings)
        for env in lacking:
            say(f"{env}: not checked, its source is not installed (agentrl env install --list)")
    return 1 if failed else 0


_QUIET_S = 5.0
_STATUS = {True: "ok", False: "FAIL", None: "-"}


def print_findings(env: str, findings: list[CheckFinding]) -> None:
    failed = sum(finding.ok is False for finding in findings)
    say(f"{env}: {f'{failed} of {len(findings)} checks failed' if failed else 'all checks passed'}")
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        say(f"  {_STATUS[finding.ok]:4}  {finding.check:{width}}  {finding.evidence}")


def run_play(args: argparse.Namespace) -> int:
    """Let a person play; returns the exit code."""
    from agentrl.cli.env_play import play_by_hand
    from agentrl.config.schema import RewardConfig
    from agentrl.env.catalog import find_spec, make_scorer

    ref = reference(args.env, args.params)
    scorer = {} if ref.default_reward() is None else {"scorer": make_scorer(find_spec(ref, None), RewardConfig(), ref)}
    return play_by_hand(ref.build(**scorer), args.seed, args.split, input, say, args.model_user, scorer.get("scorer"))
