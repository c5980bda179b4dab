"""Probe every causal language model of transformers, into docs/families.json (`make docs` prints it).

    python .ci/families.py                    all families (some minutes)
    python .ci/families.py --only lfm2 llama  only these; the others keep their record

The record has an entry per family. Columns that other commands measure (template, parser, vllm) stay unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from specimens import specimen  # noqa: E402
from torch import Tensor  # noqa: E402

from agentrl.contrib.families import TEMPERATURE, Sample, brief, micro_of  # noqa: E402
from agentrl.trainer.attention import PACKED  # noqa: E402
from agentrl.trainer.families import Measured, Probed, probe_family  # noqa: E402
from agentrl.trainer.language_model import share_tokens  # noqa: E402
from agentrl.trainer.parallel import Ulysses  # noqa: E402
from agentrl.utils.errors import ModelError  # noqa: E402

RECORD = ROOT / "docs" / "families.json"
OTHERS = ("template", "parser", "vllm")
LIMIT = 120
"""Timeout per family in seconds."""
Entry = dict[str, Any]


def families() -> dict[str, str]:
    """Map the model_type of every causal language model of transformers to its class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return dict(sorted(names.items()))


def measured(family: str) -> Entry:
    """Probe a family: the error of each way to compute its rows, and the mode of a run."""
    try:
        config = specimen(family)
    except Exception as error:
        return {"mode": "refused", "why": f"its default config cannot be made: {brief(error)}"}
    try:
        found = probe_family(config, "policy", "", one_row=True)
    except ModelError as error:
        return {"mode": "refused", "why": _plain(str(error), family)}
    entry: Entry = {"packed": _short(found.packed), "shared": _short(found.shared), "one_row": _short(found.one_row)}
    mode = mode_of(found)
    entry["mode"] = mode
    if mode != "packed":
        worst = found.packed if not found.packed.right else found.shared
        entry["why"] = worst.why or f"packed rows are off by {worst.error:.1e}"
    return entry


def mode_of(found: Probed) -> str:
    """Return the mode of a run with `model.packing = "auto"` on such a model."""
    if found.packed.right:
        return "packed" if found.shared.right else "packed, no sharing"
    if found.one_row is not None and found.one_row.right:
        return "one row"
    return "one row, eager" if found.eager is not None and found.eager.right else "refused"


def embedded(family: str) -> str:
    """Describe whether the embedded engine serves the family, or why not."""
    from agentrl.engines.embedded.embedded_model import EmbeddedModel

    with tempfile.TemporaryDirectory() as folder:
        try:
            Sample(specimen(family)).model.save_pretrained(folder)
            EmbeddedModel(folder, "float32", torch.device("cpu"))
        except Exception as error:
            return str(error).replace(folder, "it").splitlines()[0][:160] if isinstance(error, ModelError) else brief(error)[:160]
    return "yes"


def on_two_ranks(names: list[str], answers: Path) -> None:
    """Measure the errors of logprobs and gradients if two ranks share the tokens; write a line per family to `answers`."""
    store = answers.with_suffix(".store")
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            try:
                torch.set_num_threads(1)
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT)
                )
                with answers.open("a") if rank == 0 else Path(os.devnull).open("w") as file:
                    for name in names:
                        print(json.dumps([name, _shared_tokens(name)]), file=file, flush=True)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _shared_tokens(name: str) -> str:
    """Return, on each rank, the larger of the largest errors of logprobs and gradients (relative to the largest gradient)."""
    try:
        sample = Sample(specimen(name))
        module = sample.module(PACKED)
        module.requires_grad_(True)
        micro = micro_of(sample.view, (0, 1, 2, 3), ())
        alone, slopes = _slopes(module, module(micro, TEMPERATURE, False)[0])
        both, parts = _slopes(module, module(share_tokens(micro, Ulysses(dist.group.WORLD)), TEMPERATURE, False)[0])  # type: ignore[arg-type]
        top = max(float(slope.abs().max()) for slope in slopes.values())
        for part in parts.values():
            dist.all_reduce(part)
        worst = max(float((parts[key] - slope).abs().max()) for key, slope in slopes.items()) / top
        return _short(Measured(max(worst, float((both - alone).abs().max()))))
    except Exception as error:
        return brief(error)[:160]


def _slopes(module: torch.nn.Module, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    torch.autograd.backward((logprobs * torch.linspace(-1, 1, len(logprobs))).sum())
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return logprobs.detach(), found


def _short(found: Measured | None) -> str:
    if found is None:
        return ""
    return found.why[:160] if found.why else f"{found.error:.1e}"


def _plain(message: str, family: str) -> str:
    """Return an error message without the parts that all of them share."""
    for part in (f": the family {family} ", ": the family ", "; take another model"):
        message = message.split(part)[-1] if part.startswith(":") else message.split(part)[0]
    return message[:240]


def in_time(call: Callable[[], Any]) -> Any:
    """Return the call's result. Raises TimeoutError after LIMIT seconds."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {LIMIT} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        return call()
    finally:
        signal.alarm(0)


def measure(names: list[str], record: dict[str, Entry]) -> None:
    """Update the entries of these families."""
    classes = families()
    for name in names:
        began = time.monotonic()
        kept = {key: value for key, value in record.get(name, {}).items() if key in OTHERS}
        try:
            entry = in_time(partial(measured, name))
            if entry["mode"] != "refused":
                entry["embedded"] = in_time(partial(embedded, name))
        except TimeoutError as error:
            entry = {"mode": "refused", "why": str(error)}
        record[name] = {"architecture": classes[name], **entry, **kept}
        write(record)
        print(
            f"{name}: {entry['mode']} {entry.get('packed', '')} {entry.get('why', '')} ({time.monotonic() - began:.1f} s)",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "ulysses"
        on_two_ranks([name for name in names if record[name]["mode"].startswith("packed")], answers)
        for line in answers.read_text().splitlines() if answers.exists() else []:
            name, text = json.loads(line)
            record[name]["ulysses"] = text
    write(record)


def write(record: dict[str, Entry]) -> None:
    """Write the record to its file, sorted by family."""
    RECORD.write_text(json.dumps({name: record[name] for name in families() if name in record}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="the probe over every family of transformers")
    parser.add_argument("--only", nargs="+", metavar="FAMILY")
    args = parser.parse_args()
    import transformers

    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    record: dict[str, Entry] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    measure(args.only or list(families()), record)


if __name__ == "__main__":
    main()
