"""Run three updates of a tiny model of each family with each engine, for docs/families.md.

    python .ci/family_runs.py                                   all families, both engines (about an hour on two cores)
    python .ci/family_runs.py --engine vllm --only qwen3 lfm2   only these; the others keep their record
    python .ci/family_runs.py --engine vllm --ray               vLLM in Ray actors, as in `agentrl train`; slower

Each run starts from a config, as with `agentrl train`, in float32, at temperature 0.8, with shared prefixes. The record
(docs/family_runs.json) has the run's metric `mismatch_max` of each step: the largest difference between the engine's and the
trainer's logprob of a sampled token. Two more numbers come from transformers alone, row by row, with the initial weights:
`alone`, the largest difference to the engine's logprobs in the first step, which should be 0; and `stale`, the same in the last
step, the mismatch to expect if no weights were published.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # for Ray's workers
sys.path[:0] = [str(ROOT)]

import families  # noqa: E402
import inside  # noqa: E402
import torch  # noqa: E402
from family_sizes import MODELS, build  # noqa: E402

from agentrl.utils.errors import AgentrlError  # noqa: E402

RECORD = ROOT / "docs" / "family_runs.json"
ENGINES = ("embedded", "vllm")
STEPS, TEMPERATURE = 3, 0.8
BOUND = {"embedded": 1e-4, "vllm": 1e-3}
"""Largest accepted mismatch. Both sides compute in float32, but sum in different orders."""
TEMPLATES = {
    "qwen2": "Qwen2.5", "qwen3": "Qwen3", "qwen3_moe": "Qwen3", "qwen3_5": "Qwen3.5 (think)", "qwen3_5_text": "Qwen3.5 (think)",
    "qwen3_5_moe": "Qwen3.5 (think)", "qwen3_5_moe_text": "Qwen3.5 (think)", "llama": "Llama 3.1", "llama4": "Llama 4",
    "llama4_text": "Llama 4", "mistral": "Mistral 7B v0.3", "ministral3": "Ministral 3 (reasoning)", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3", "gemma3_text": "Gemma 3", "gemma4": "Gemma 4", "gemma4_text": "Gemma 4", "glm4_moe": "GLM-4.5",
    "glm4_moe_lite": "GLM-4.7 Flash", "deepseek_v3": "DeepSeek-V3.1", "deepseek_v32": "DeepSeek-V3.2", "gpt_oss": "gpt-oss",
    "phi3": "Phi-4", "lfm2": "LFM2", "lfm2_moe": "LFM2 8B", "granite": "Granite 3.3", "granitemoehybrid": "Granite 4.0",
    "nemotron_h": "Nemotron 3 Nano",
}  # fmt: skip
"""Template in docs/templates.json of a released model of the family; other models may have others."""
LIMIT = {"embedded": 120, "vllm": 400}
"""Timeout of a run in seconds; then it counts as failed."""
Entry = dict[str, Any]


def table(family: str, engine: str, path: str, out: str, cache: bool = True) -> dict[str, Any]:
    """Return the config of a run."""
    return {
        "name": f"{family}-{engine}",
        "out": out,
        "model": {"path": path},
        "env": {"id": "key_value", "reward": str(ROOT / "tests" / "e2e" / "short.json")},
        "cluster": {"backend": "inline"},
        "engine": engine,
        "engine_args": {} if cache else {"cache": False},
        "vllm": {"kv_cache_mib": 64, "max_model_len": 512, "max_respawns": 0, "startup_timeout": LIMIT["vllm"]},
        "rollout": {
            "groups": 2,
            "group_size": 4,
            "max_turns": 4,
            "max_turn_tokens": 16,
            "max_episode_tokens": 500,
            "temperature": TEMPERATURE,
        },
        "algorithm": {"proximal": "recompute", "entropy_bonus": 0.01},
        "optim": {"lr": 1e-3, "micro_tokens": 2000, "prefix_sharing": "on"},
        "steps": STEPS,
        "eval": {"tasks": 1},
        "trackers": [],
    }


def measured(family: str, engine: str, cache: bool = True) -> Entry:
    """Return the figures of a run of the family. Raises any error of the run."""
    from agentrl.config.load import config_from
    from agentrl.run.checks import check_config
    from agentrl.run.driver import execute
    from agentrl.run.folder import RunFolder

    with tempfile.TemporaryDirectory() as place:
        path = build(family, Path(place) / "model")
        config = config_from(table(family, engine, path, place, cache), [])
        check_config(config)
        folder = RunFolder.create(config)
        if execute(config, folder, resumed=False):
            raise AgentrlError("the run was stopped")
        rows = [row for row in folder.read_metrics() if row["phase"] == "train"]
        return {
            "packing": folder.log.read_text().split("packing: ")[1].split(":")[0],
            "cache": cache,
            "mismatch_max": [_short(row["mismatch_max"]) for row in rows],
            "mismatch_kl": [_short(row["mismatch_kl"]) for row in rows],
            "grad_norm": [_short(row["grad_norm"]) for row in rows],
            "prefix_ratio": _short(rows[0].get("prefix_ratio", 1.0)),
            "alone": _short(off(path, folder, 1)),
            "stale": _short(off(path, folder, STEPS)),
        }


@torch.inference_mode()
def off(path: str, folder: Any, step: int) -> float:
    """Return the largest difference of a step's sampled logprobs to transformers' with the initial weights."""
    from transformers import AutoModelForCausalLM

    from agentrl.data.trajectory import Trajectory

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    worst = 0.0
    for line in (folder.trajectories / f"step_{step:06d}.jsonl").read_text().splitlines():
        for ledger in Trajectory.from_json(json.loads(line)).ledgers:
            ids = torch.tensor(ledger.ids())
            found = (model(ids[None], use_cache=False).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
            found = found.gather(1, ids[1:, None])[:, 0]
            sampled = torch.as_tensor(ledger.sampled)[1:].bool()
            told = torch.as_tensor(ledger.logprobs)[1:]
            worst = max(worst, float((found - told)[sampled].abs().max()))
    return worst


def tried(family: str, engine: str) -> Entry:
    """Call `measured`, without the embedded engine's cache if its error asks for that; else return why it failed."""
    for cache in (True, False):
        try:
            return measured(family, engine, cache)
        except Exception as error:
            if engine == "embedded" and cache and "cache = false" in str(error):
                continue
            return {"why": first_line(error)}
    raise AssertionError("not reached")


def first_line(error: Exception) -> str:
    """Return an error's first line, with its class unless it is agentrl's."""
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return text if isinstance(error, AgentrlError) else f"{type(error).__name__}: {text}"


def in_child(family: str, engine: str, ray: bool) -> Entry:
    """Call `tried` in a forked process, for at most LIMIT seconds."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if not child:
            os.setsid()
            signal.alarm(LIMIT[engine])
            with nullcontext() if ray or engine != "vllm" else inside.in_process():
                answer.write_text(json.dumps(tried(family, engine)))
            os.killpg(0, signal.SIGKILL)  # processes that the run left behind
        os.waitpid(child, 0)
        return json.loads(answer.read_text()) if answer.exists() else {"why": f"not done in {LIMIT[engine]} s"}


def run(names: Sequence[str], engines: Sequence[str], ray: bool) -> None:
    """Run all one after the other, and record each."""
    for engine in engines:
        for family in names:
            began = time.monotonic()
            entry = in_child(family, engine, ray)
            with RECORD.with_suffix(".lock").open("w") as lock:  # several of these commands may run at the same time
                fcntl.flock(lock, fcntl.LOCK_EX)
                record = read()
                record.setdefault(family, {})[engine] = entry
                write(record)
            said = entry.get("why") or f"mismatch {entry['mismatch_max']} alone {entry['alone']} stale {entry['stale']}"
            print(f"{engine} {family}: {said} ({time.monotonic() - began:.0f} s)", flush=True)


def read() -> dict[str, Entry]:
    """Read the record."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(record: dict[str, Entry]) -> None:
    """Write the record to its file, in the order of `MODELS`."""
    ordered = {name: {e: record[name][e] for e in ENGINES if e in record[name]} for name in MODELS if name in record}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n")


def fill(record: dict[str, Entry], found: dict[str, Entry]) -> None:
    """Fill the columns of docs/families.json that the probe does not measure: template, parser, vLLM's mismatch."""
    templates = {entry["family"]: entry for entry in json.loads((ROOT / "docs" / "templates.json").read_text())}
    for family, entry in found.items():
        template = templates.get(TEMPLATES.get(family, ""))
        vllm = record.get(family, {}).get("vllm", {})
        new = {
            "template": template["family"] if template else "",
            "parser": (template["parser"] or "no tools") if template else "",
            "vllm": "no" if "why" in vllm else f"{max(vllm['mismatch_max']):.0e}" if vllm else "",
        }
        for key, value in new.items():
            entry.pop(key, None)
            if value:
                entry[key] = value


def _short(value: float) -> float:
    return float(f"{value:.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="three updates of each family with each engine")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--ray", action="store_true", help="vLLM in a Ray actor, as in any run; else in the run's own process")
    args = parser.parse_args()
    import transformers

    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    engines = args.engine or ENGINES
    if "vllm" in engines and not args.ray:
        inside.prepare()
    run(args.only, engines, args.ray)
    found = json.loads(families.RECORD.read_text())
    fill(read(), found)
    families.write(found)


if __name__ == "__main__":
    main()
