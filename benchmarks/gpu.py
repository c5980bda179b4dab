"""Measure the GPU paths on one card: learning, a training step, attention, checkpoints, offload, weight routes, engines.

    python benchmarks/gpu.py [--only PART] [--model 0.6B|4B] [--real models/smollm2-135m] [--results]
    python benchmarks/gpu.py --device cpu --quick      # a rehearsal in tiny shapes, without meaningful speeds
    python benchmarks/gpu.py --page > docs/gpu.md      # the page, from the files of results

The most important parts are first; benchmarks/gpu_proof.sh runs them on a card without a network, and lists the files to carry
there. Needs no network; `agentrl train` imports Ray. Each part takes less than 9 minutes. Speeds come with a limit measured in
the same run: one large product (`limit_tflops`, for MFU), a copy on the card, a plain write to the disk. `--results` writes the
figures to benchmarks/results/gpu-CARD-DATE.json (other parts of the same day are kept). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1" if "cpu" in sys.argv else "8")

# agentrl too: a GPU machine may have it only as a checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "parts"))

import torch
from gpu_common import copy_gb_s, peak_flops, rounded
from gpu_engine import checkpoint, engine, vllm
from gpu_learn import learn, one_card
from gpu_page import page
from gpu_publish import publish
from gpu_step import attention_ways, step

PARTS = ("learn", "limits", "step", "attention", "checkpoint", "publish", "engine", "vllm", "one_card")
RESULTS = Path(__file__).parent / "results"


def run(part: str, args: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Any]:
    """Measure one part."""
    if part == "limits":
        found = {"product_tflops": peak_flops(device, args.quick) / 1e12, "copy_gb_s": copy_gb_s(device, args.quick)}
        return {name: rounded(value) for name, value in found.items()}
    if part in ("learn", "one_card"):
        return (learn if part == "learn" else one_card)(device, folder, args.real, args.quick)
    if part == "step":
        return step(device, folder, args.model, args.quick)
    if part == "attention":
        return attention_ways(device, args.quick)
    if part == "engine":
        return engine(device, folder, args.quick)
    if part == "vllm":
        return vllm(device, folder, args.quick)
    if part == "publish":
        return publish(device, args.quick)
    return checkpoint(device, folder, args.quick)


def write(found: dict[str, Any]) -> Path:
    """Add the parts to the file of this card and day."""
    card = re.sub(r"[^a-z0-9]+", "-", found["card"].lower()).strip("-")
    path = RESULTS / f"gpu-{card}-{datetime.date.today().isoformat()}.json"
    RESULTS.mkdir(exist_ok=True)
    if path.is_file():
        found = {**found, "parts": {**json.loads(path.read_text())["parts"], **found["parts"]}}
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part (may be repeated); by default all")
    parser.add_argument("--model", choices=("0.6B", "4B"), default="0.6B", help="the shape of part `step`")
    parser.add_argument("--real", metavar="FOLDER", help="the model of parts `learn` and `one_card`")
    parser.add_argument("--page", action="store_true", help="print the page of all files of results, and run nothing")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: a rehearsal")
    parser.add_argument("--results", action="store_true", help="write benchmarks/results/gpu-CARD-DATE.json")
    args = parser.parse_args()
    if args.page:
        print(page(RESULTS), end="")
        return
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "benchmarks/gpu.py: no CUDA device here; --device cpu --quick rehearses it without one\n")
    if args.results and (args.quick or device.type != "cuda"):
        parser.exit(2, "benchmarks/gpu.py: --results is for real shapes on a card\n")
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    found: dict[str, Any] = {"benchmark": "gpu", "card": card, "torch": torch.__version__, "quick": args.quick, "parts": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for part in args.only or PARTS:
            name = f"{part} {args.model}" if part == "step" else part
            found["parts"][name] = run(part, args, device, Path(scratch))
            print(f"{name}: {json.dumps(found['parts'][name])}", flush=True)
            if args.results:  # after each part, so that a failed or interrupted one loses no other
                print(f"written: {write(found)}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
