"""`agentrl eval`: a model or an API on the held-out tasks of environments, with a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.config import TrainConfig
from agentrl.config.envs import alone, eval_weights
from agentrl.errors import UserError
from agentrl.files import atomic_write
from agentrl.plain_data import json_text
from agentrl.redaction import redacted
from agentrl.run.display import Display
from agentrl.run.eval_session import EvalSession, open_live
from agentrl.run.interrupt import Interrupt
from agentrl.run.official import official
from agentrl.run.report import make_report
from agentrl.run.rollout import RolloutOutcome, RolloutRequest, dated_as, run_rollout
from agentrl.trajectory import Trajectory

NOTHING: Mapping[str, Any] = MappingProxyType({})


async def run_eval(
    config: TrainConfig,
    request: RolloutRequest,
    display: Display,
    shared: EvalSession | None = None,
    about: Mapping[str, Any] = NOTHING,
) -> tuple[dict[str, Any] | None, RolloutOutcome]:
    """Run the missing episodes of the evaluation. Returns its report, also written to `request.out` (None after Ctrl-C), and
    the episodes. Of a suite the report has the benchmark's own table, too ("official"). `shared`: as of `run_rollout`; `about`:
    what the report says beside the numbers. Raises ConfigError if `request.out` has an evaluation of something else.
    """
    outcome = await run_rollout(config, request, display, shared)
    if outcome.interrupted:
        return None, outcome
    report = make_report([outcome.episodes[pair] for pair in request.pairs], request.samples)
    found = _official(config, request, [outcome.episodes[pair] for pair in request.pairs])
    report |= {"model": request.model, **about, **({"official": found} if found else {})}
    atomic_write(request.out / "report.json", json_text(redacted(report, said=True), indent=2) + "\n")
    return report, outcome


def _official(config: TrainConfig, request: RolloutRequest, episodes: list[Trajectory]) -> dict[str, Any]:
    try:
        return official(config, {config.envs[0].called: episodes}, request.split)
    except UserError:
        if request.replay is None:
            raise
        return {}  # a replay needs no environment, and its machine may lack it, or a suite's source


async def run_evals(
    config: TrainConfig, requests: Mapping[str, RolloutRequest], display: Display, about: Mapping[str, Any] = NOTHING
) -> tuple[dict[str, Any] | None, RolloutOutcome, RolloutRequest]:
    """The evaluations of several environments, one after the other with one engine, by their names: `requests`, each in a folder
    of one root, into which their common report is written. Returns that (None after Ctrl-C), and the last outcome with its
    request. With a record, each has an engine of its own, since an engine's answers are recorded for one environment.
    """
    config = dated_as(config, next(iter(requests.values())))
    envs = {env.called: env for env in config.envs}
    Interrupt(display.say).install()  # each of them takes over, once what they share is open
    recorded = any(request.record is not None for request in requests.values())
    shared = None if recorded else open_live(config, config.eval.temperature, None)
    reports: dict[str, Any] = {}
    episodes: dict[str, list[Trajectory]] = {}
    try:
        for name, request in requests.items():
            display.say(f"[{name}] {request.tasks} tasks of {envs[name].id}")
            report, outcome = await run_eval(alone(config, envs[name]), request, display, shared)
            if report is None:
                return None, outcome, request
            reports[name], episodes[name] = report, [outcome.episodes[pair] for pair in request.pairs]
    finally:
        if shared is not None:
            await shared.close()
    found = official(config, episodes, request.split)
    own = {"official": found} if found else {}
    whole = {"success": mean_success(reports, eval_weights(config)), "model": request.model, **about, **own, "envs": reports}
    atomic_write(request.out.parent / "report.json", json_text(redacted(whole, said=True), indent=2) + "\n")
    return whole, outcome, request


def mean_success(reports: Mapping[str, Any], weights: Mapping[str, float]) -> float | None:
    """The mean of the environments' pass@1, by the weights; None if one that counts is unknown."""
    found = {name: report["pass@1"] for name, report in reports.items() if weights[name] > 0}
    if not found or any(value is None for value in found.values()):
        return None
    return float(sum(weights[name] * value["mean"] for name, value in found.items()) / sum(weights[name] for name in found))


def write_comparison(folder: Path, comparison: Mapping[str, Any]) -> Path:
    """Write comparison.json into `folder`; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "comparison.json"
    atomic_write(file, json_text(redacted(comparison, said=True), indent=2) + "\n")
    return file
