"""`agentrl eval`: pass@k and pass^k of a model on an environment's held-out tasks."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

EPILOG = """examples:
  agentrl eval key_value --model runs/quickstart/warm_start
  agentrl eval key_value --model runs/quickstart/final -n 200 -k 4 env.params.calls='[4, 8]'
  agentrl eval key_value --model runs/quickstart/final eval.temperature=0 engine=vllm

The folder --out holds trajectories.jsonl and report.json; the same command again runs only what is missing.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "eval", help="evaluate a model on an environment", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("env", help="an environment's id or short name")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="values of the config's sections")
    parser.add_argument("--model", required=True, help="a model folder or hub name")
    parser.add_argument("-n", "--tasks", type=int, default=100, help="held-out tasks (default 100)")
    parser.add_argument("-k", "--samples", type=int, default=1, help="episodes a task (default 1)")
    parser.add_argument("--split", default="heldout", help="which tasks (default heldout)")
    parser.add_argument("--out", help="folder of the results (default evals/ENV)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns the exit code."""
    from agentrl.config.load import config_from
    from agentrl.errors import ConfigError

    if args.tasks < 1 or args.samples < 1:
        raise ConfigError("-n and -k must be at least 1")
    config = config_from({"name": "eval", "env": {"id": args.env}, "model": {"path": args.model}}, args.overrides)
    from agentrl.run.display import Display
    from agentrl.run.eval import EvalRequest, print_report, run_eval
    from agentrl.run.session import check

    check(config)
    out = Path(args.out or f"evals/{args.env.replace('/', '_')}")
    request = EvalRequest(args.model, args.tasks, args.samples, args.split, out)
    with Display() as display:
        report = asyncio.run(run_eval(config, request, display))
        print_report(report, display.console)
        display.say(f"report and trajectories: {out}")
    return 0
