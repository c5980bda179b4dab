"""`agentrl eval`: pass@k and pass^k of a model on an environment's held-out tasks."""

from __future__ import annotations

import argparse
import asyncio

from agentrl.cli.rollout import add_options, check_request, read_request, say_interrupted

HELP = "evaluate a model on an environment"
EPILOG = """examples:
  agentrl eval key_value --model runs/quickstart/warm_start
  agentrl eval key_value --model runs/quickstart/final -n 200 -k 4 env.params.calls='[4, 8]'
  agentrl eval key_value --model runs/quickstart/final eval.temperature=0 engine=vllm
  agentrl eval key_value --model api:openai/gpt-4.1-mini -n 50 --max-concurrent 8
  agentrl eval key_value --model api:openai/my-model api.base=http://127.0.0.1:8000/v1      your own server

The folder --out holds trajectories.jsonl and report.json; the same command again runs only what is missing. API keys
are read from the environment variables that litellm names, such as OPENAI_API_KEY.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_options(parser, tasks=100, split="heldout", folder="evals")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns the exit code."""
    config, request = read_request(args, "eval")
    config = check_request(config, request)
    from agentrl.run.display import Display
    from agentrl.run.eval import run_eval
    from agentrl.run.report import print_report

    with Display() as display:
        report, outcome = asyncio.run(run_eval(config, request, display))
        if report is None:
            return say_interrupted(display.say, request, len(outcome.episodes))
        print_report(report, display.console)
        display.say(f"report and trajectories: {request.out}")
    return 0
