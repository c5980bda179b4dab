"""`agentrl doctor`: check this machine and cluster, without a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from agentrl.cli.arguments import COMMANDS
from agentrl.cluster.machine import MachineFinding
from agentrl.config.schema import ClusterConfig
from agentrl.run.config_file import add_config, find_config_file, load_whole
from agentrl.utils.terminal import say

DOCTOR_EPILOG = """examples:
  agentrl doctor                                     this machine, and a local Ray
  agentrl doctor configs/quickstart.toml             also whether the config's pools and rollout workers fit
  agentrl doctor configs/quickstart.toml cluster.address=10.0.0.1:6379
  agentrl doctor --no-ray --json                     the quick checks, for a script

Exit code 2 if a check failed; a warning alone does not fail.
"""
MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@COMMANDS.register("doctor")
def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Check this machine and cluster without starting a run."""
    parser.epilog = DOCTOR_EPILOG
    add_config(parser, "a config whose cluster section is checked")
    parser.add_argument("--no-ray", action="store_true", help="do not start or join Ray")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Check this machine and cluster; returns 0, or 2 if a check failed."""
    from agentrl.contrib.doctor.machine_checks import all_checks
    from agentrl.run.engine_choice import EngineChoice

    config = None if args.config is None else load_whole(find_config_file(args.config), args.overrides)
    cluster = ClusterConfig() if config is None else config.cluster
    workers = 0 if config is None else EngineChoice(config).worker_processes()
    findings: list[MachineFinding] = []
    for finding in all_checks(cluster, not args.no_ray and cluster.backend == "ray", workers):
        findings.append(finding)
        if not args.json:
            advice = f"\n       -> {finding.advice}" if finding.advice else ""
            say(f"{MARKS[finding.level]} {finding.check:<20} {finding.found}{advice}", flush=True)
    failed = [finding.check for finding in findings if finding.level == "fail"]
    if args.json:
        say(json.dumps({"findings": [asdict(finding) for finding in findings], "failed": failed}))
    else:
        say(f"{len(findings)} checks, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return 2 if failed else 0
