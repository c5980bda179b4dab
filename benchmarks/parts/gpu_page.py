"""Page of GPU measurements, from the result files of benchmarks/gpu.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD = """# On a card

Results of benchmarks/gpu.py on GPUs by card and day, newest first. Written by `python benchmarks/gpu.py --page` from the
files `gpu-CARD-DATE.json` in `benchmarks/results`.

For a card on a machine without a network, `benchmarks/gpu_proof.sh loads` writes the files to copy there, each below 50 MB.
`benchmarks/gpu_proof.sh` then runs these parts in order, each independently and in less than 9 minutes:

| part | what it shows |
|---|---|
| `learn` | SmolLM2-135M in bfloat16, embedded engine, one process: success on BFCL untouched, after an epoch of gold calls, \
and after 30 updates of GRPO; tokens/s, MFU, memory, mismatch |
| `trainer` | a step over 16,384 packed tokens of Qwen3-0.6B and of 8 layers of the 4B: MFU and memory, compiled or not, \
with varlen or blocks, checkpointed, float32 |
| `kernels` | attention by row length, save and load, offload |
| `publish` | weights into a second process, by shared memory and by CUDA IPC |
| `vllm` | tokens/s of the embedded engine and of a vLLM replica, and five updates with trainer and replica in turn \
on the card; needs Hopper |

The entry of a part that could not run is its reason.
"""


def page(results: Path) -> str:
    """Return the page in Markdown."""
    files = sorted(results.glob("gpu-*.json"), key=lambda path: path.stem[-10:], reverse=True)
    if not files:
        return f"{HEAD}\n**Nothing has run on a card yet**, so there are no figures.\n"
    return HEAD + "".join(_section(path) for path in files)


def _section(path: Path) -> str:
    found = json.loads(path.read_text())
    rows = [f"| `{part}` | {key} | {value} |" for part, figures in found["parts"].items() for key, value in _flat("", figures)]
    table = "\n".join(["| part | figure | value |", "|---|---|---|", *rows])
    return f"\n## {found['card']}, {path.stem[-10:]}\n\ntorch {found['torch']}\n\n{table}\n"


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix} {key}".strip(), inner)
    else:
        yield (
            prefix,
            f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value).split("\n")[0],
        )
