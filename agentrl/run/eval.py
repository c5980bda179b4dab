"""`agentrl eval`: a model on the held-out tasks of an environment, resumable, with a report."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.catalog import EnvRef
from agentrl.cluster.runtime import start_ray, stop_ray
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError
from agentrl.render import make_renderer
from agentrl.rollout.episode import Limits
from agentrl.rollout.evaluate import full_marks, run_tasks
from agentrl.rollout.passk import mean_with_interval, pass_at_k, pass_hat_k
from agentrl.run.display import Display
from agentrl.run.engines import make_engine, resolve_engine
from agentrl.run.folder import atomic_write
from agentrl.run.policy import longest, make_policy
from agentrl.run.session import build_scorer
from agentrl.train.pretrained import load_tokenizer
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What to evaluate: `tasks` held-out tasks, `samples` episodes each, written to `out`."""

    model: str
    tasks: int
    samples: int
    split: str
    out: Path


async def run_eval(config: TrainConfig, request: EvalRequest, display: Display) -> dict[str, Any]:
    """Run what is missing of the evaluation and return the report; both are written to `request.out`.

    Raises ConfigError where `out` holds an evaluation of something else.
    """
    done = _resume(config, request)
    pairs = [(task, member) for task in range(request.tasks) for member in range(request.samples)]
    missing = [pair for pair in pairs if pair not in done]
    display.phase("eval", len(pairs), first=len(done))
    env = EnvRef.of(config)
    scorer = build_scorer(config, env)
    if missing:
        name = resolve_engine(config.engine)
        if name == "vllm":
            start_ray(config.cluster)
        renderer = make_renderer(load_tokenizer(request.model))
        engine = make_engine(name, request.model, config)
        rollout = config.rollout
        policy = make_policy(config, engine, renderer, config.eval.temperature)
        try:
            await engine.start()
            with (request.out / "trajectories.jsonl").open("a") as file:

                def keep(trajectory: Trajectory) -> None:
                    file.write(json.dumps(trajectory.to_json()) + "\n")
                    file.flush()
                    done[(trajectory.task.seed, trajectory.member)] = trajectory
                    display.step(len(done), {"reward": trajectory.reward})

                await run_tasks(env, policy, scorer, Limits.of(rollout, longest(config, name, request.model)), missing,
                                seed=config.seed, max_episodes=rollout.max_episodes, split=request.split, on_episode=keep)
        finally:
            await engine.close()
            if name == "vllm":
                stop_ray()
    report = make_report([done[pair] for pair in pairs], request.samples, scorer.range[1])
    atomic_write(request.out / "report.json", json.dumps(report, indent=2) + "\n")
    return report


def _resume(config: TrainConfig, request: EvalRequest) -> dict[tuple[int, int], Trajectory]:
    request.out.mkdir(parents=True, exist_ok=True)
    what = {"env": config.env.model_dump(), "model": request.model, "split": request.split, "seed": config.seed,
            "temperature": config.eval.temperature}
    note = request.out / "eval.json"
    if note.exists() and json.loads(note.read_text()) != what:
        raise ConfigError(f"{request.out}: it holds an evaluation of something else ({note}); use another --out")
    atomic_write(note, json.dumps(what, indent=2) + "\n")
    path = request.out / "trajectories.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    trajectories = [Trajectory.from_json(json.loads(line)) for line in lines]
    scored = [t for t in trajectories if t.reward is not None]  # an outage is run again
    atomic_write(path, "".join(json.dumps(t.to_json()) + "\n" for t in scored))
    return {(t.task.seed, t.member): t for t in scored}


def make_report(trajectories: Sequence[Trajectory], samples: int, full: float) -> dict[str, Any]:
    """pass@k and pass^k with 95 % intervals over tasks, stop reasons, and what an episode costs."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.task.id].append(trajectory)
    counts = [(len(scored), sum(full_marks(t, full) for t in scored))
              for members in by_task.values() if (scored := [t for t in members if t.reward is not None])]
    report: dict[str, Any] = {"tasks": len(by_task), "episodes": len(trajectories),
                              "unscored": sum(t.reward is None for t in trajectories)}
    for k in range(1, samples + 1):
        usable = [(n, c) for n, c in counts if n >= k]
        if usable:
            report[f"pass@{k}"] = _interval([pass_at_k(n, c, k) for n, c in usable])
            report[f"pass^{k}"] = _interval([pass_hat_k(n, c, k) for n, c in usable])
    names = sorted({name for t in trajectories for name in t.metrics})
    report["metrics"] = {name: _mean([t.metrics.get(name) for t in trajectories]) for name in names}
    report["reward"] = _mean([t.reward for t in trajectories])
    report["stops"] = dict(Counter(t.stop.value for t in trajectories))
    report["errors"] = dict(Counter((t.error or "").split(":")[0] for t in trajectories if t.error))
    report["tool_errors"] = dict(Counter(r.error for t in trajectories for _, _, r in t.calls() if r and r.error))
    report["turns"] = _mean([float(len(t.turns)) for t in trajectories])
    report["tokens"] = _mean([float(t.sampled_tokens) for t in trajectories])
    report["seconds"] = _mean([t.timings.get("episode_s") for t in trajectories])
    return report


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report as a table."""
    table = Table("", "value", "95 % interval", title=f"{report['episodes']} episodes of {report['tasks']} tasks")
    for key, value in report.items():
        if isinstance(value, dict) and "mean" in value:
            table.add_row(key, f"{value['mean']:.3f}", f"{value['low']:.3f} to {value['high']:.3f}")
        elif isinstance(value, dict):
            for name, inner in value.items():
                table.add_row(f"{key} / {name}", "-" if inner is None else f"{inner:,.3f}".rstrip("0").rstrip("."), "")
        elif key not in ("tasks", "episodes"):
            table.add_row(key, "-" if value is None else f"{value:,.3f}".rstrip("0").rstrip("."), "")
    console.print(table)


def _interval(values: list[float]) -> dict[str, float]:
    mean, low, high = mean_with_interval(values)
    return {"mean": mean, "low": low, "high": high}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
