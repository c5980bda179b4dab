"""`agentrl doctor`: checks whether this machine or cluster can run a training, without starting one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from agentrl.cli.configs import add_config, read_config
from agentrl.shown import say

if TYPE_CHECKING:
    from agentrl.cluster.checks import MachineFinding

HELP = "check this machine and cluster without starting a run"
EPILOG = """examples:
  agentrl doctor                                     this machine, and a local Ray
  agentrl doctor configs/quickstart.toml             also whether the config's pools and rollout workers fit
  agentrl doctor configs/quickstart.toml cluster.address=10.0.0.1:6379
  agentrl doctor --no-ray --json                     the quick checks, for a script

Exit code 2 if a check failed; a warning alone does not fail.
"""
MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config(parser, "a config whose cluster section is checked")
    parser.add_argument("--no-ray", action="store_true", help="do not start or join Ray")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check; returns 0, or 2 if a check failed."""
    from agentrl.cluster.checks import all_checks
    from agentrl.config.schema import ClusterConfig
    from agentrl.run.engines import workers_apart

    config = None if args.config is None else read_config(args)
    cluster = ClusterConfig() if config is None else config.cluster
    workers = 0 if config is None else workers_apart(config)
    findings: list[MachineFinding] = []
    for finding in all_checks(cluster, not args.no_ray and cluster.backend == "ray", workers):
        findings.append(finding)
        if not args.json:
            say(line(finding), flush=True)
    failed = [finding.check for finding in findings if finding.level == "fail"]
    if args.json:
        say(json.dumps({"findings": [asdict(finding) for finding in findings], "failed": failed}))
    else:
        say(f"{len(findings)} checks, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return 2 if failed else 0


def line(finding: MachineFinding) -> str:
    """One finding as a line of text, with its advice on the next line."""
    advice = f"\n       -> {finding.advice}" if finding.advice else ""
    return f"{MARKS[finding.level]} {finding.check:<20} {finding.found}{advice}"
