"""Part `learn`: train a real model on the GPU in one process, without Ray. Part `one_card`: a few updates with vLLM and trainer
on the same GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_common import rounded

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
name = "learn"
steps = 30
engine = "embedded"
trajectories_every = 30
trackers = []

[[env]]
name = "live"
id = "bfcl"
params = { category = ["live_simple", "live_multiple"] }
eval = { tasks = 16 }

[[env]]                  # only evaluated: other tasks, of other functions
name = "simple"
id = "bfcl"
weight = 0.0
params = { category = ["simple_python", "multiple"] }

[model]
dtype = "bfloat16"

[sft]                    # about one epoch of gold calls
optimizer = "adamw"
lr = 1e-4
batch = 16
min_steps = 40
max_steps = 40
gate = 0.0
gate_every = 40
gate_tasks = 8

[rollout]
groups = 16
group_size = 8
max_turns = 2
max_turn_tokens = 192
max_episode_tokens = 4096

[optim]
lr = 1e-5                # ten times the usual rate: thirty updates are few
micro_tokens = 16384

[eval]
tasks = 120
split = "train"          # the benchmark's own held-out families are of other kinds
every = 0
temperature = 0.0

[checkpoint]
every = 1000

[cluster]
backend = "inline"
"""
QUICK = [
    *["env={id='key_value',params={calls=[3,4]}}", "model.dtype=float32", "steps=2", "eval.tasks=2", "rollout.max_turns=6"],
    *["sft.max_steps=4", "sft.min_steps=4", "sft.batch=2", "sft.gate_every=4", "sft.gate_tasks=2"],
    *["rollout.groups=2", "rollout.group_size=2", "rollout.max_turn_tokens=24"],
]
PATIENCE = float(os.environ.get("LIMIT", "530")) - 10
"""Timeout of a command in seconds, which leaves time to print its output."""
COLUMNS = (
    "throughput/sampled_tokens_per_s",
    "throughput/trained_tokens_per_s",
    "gpu/tokens_per_s",
    "gpu/mfu",
    "gpu/memory_gib",
    "mismatch_kl",
    "mismatch_max",
)


def learn(device: torch.device, folder: Path, model: str | None, quick: bool) -> dict[str, Any]:
    """Measure held-out success untouched, after one epoch of gold calls, and after GRPO; and medians of the updates' figures."""
    if quick:
        from agentrl.config.schema import InitModelConfig
        from agentrl.trainer.pretrained import init_model

        model = str(init_model(InitModelConfig(layers=1, hidden=32, mlp=32), folder / "tiny", seed=0))
    if model is None or not Path(model).is_dir():
        return {"error": f"there is no model at {model}: benchmarks/gpu_proof.sh loads, and make smollm2, write one"}
    keys = [f"model.path={model}", *(QUICK if quick else []), f"out={folder / 'runs'}"]
    which = ["-n", "2"] if quick else ["simple", "--split", "train", "-n", "120"]
    _run_agentrl(folder, "eval", keys, "--model", model, "--out", str(folder / "untouched"), *which)
    seconds = _run_agentrl(folder, "train", keys)
    [report] = (folder / "untouched").rglob("report.json")  # below the environment's name, if the config has several
    untouched = json.loads(report.read_text())["pass@1"]
    return {"model": Path(model).name, "success_untouched": untouched["mean"], **_run_figures(folder / "runs" / "learn", seconds)}


def one_card(device: torch.device, folder: Path, model: str | None, quick: bool) -> dict[str, Any]:
    """Run five updates through vLLM and Ray on one card, used by trainer and replica in turn. KEYS: additional config keys."""
    missing = [name for name in ("vllm", "ray") if importlib.util.find_spec(name) is None]
    if device.type != "cuda" or missing or model is None:
        return {"error": f"needs a card, a model, vLLM and Ray; missing here: {', '.join(missing) or 'the card or the model'}"}
    turns = ["engine=vllm", "cluster.backend=ray", "cluster.actors=1", "rollout.colocate=true", "model.offload=idle"]
    sizes = [
        "steps=5",
        "eval.tasks=32",
        "vllm.kv_cache_mib=16384",
        "vllm.max_model_len=4096",
        *os.environ.get("KEYS", "").split(),
    ]
    keys = [f"model.path={model}", "name=one_card", *turns, *sizes, f"out={folder / 'runs'}"]
    seconds = _run_agentrl(folder, "train", keys)
    return {"model": Path(model).name, **_run_figures(folder / "runs" / "one_card", seconds)}


def _run_agentrl(folder: Path, command: str, keys: list[str], *options: str) -> float:
    """Run a command on CONFIG and return its seconds. Raises RuntimeError with its last lines if it fails."""
    config = folder / "learn.toml"
    config.write_text(CONFIG)
    place = ["--config", str(config)] if command == "eval" else [str(config)]
    began = time.monotonic()
    words = [sys.executable, "-m", "agentrl", command, *place, *options, *keys]
    with (folder / "log").open("w+") as log:
        try:
            code: int | str = subprocess.run(words, cwd=ROOT, stdout=log, stderr=log, check=False, timeout=PATIENCE).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {PATIENCE} s"
        log.seek(0)
        if code:
            raise RuntimeError(f"agentrl {command}: exit code {code}\n{log.read()[-4000:]}")
    return time.monotonic() - began


def _run_figures(run: Path, seconds: float) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["phase"] == "train"]
    judged = summary.get("envs", {}).get("simple", summary)
    found: dict[str, Any] = {key: judged[key] for key in ("success_before", "success_after")}
    for key in COLUMNS:
        values = [row[key] for row in updates if row.get(key) is not None]
        found |= {key: rounded(statistics.median(values))} if values else {}
    return {**found, "updates": len(updates), "seconds": rounded(seconds)}
