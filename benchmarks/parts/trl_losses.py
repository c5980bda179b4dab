"""Compute TRL's losses of one batch for tests/contrib/offline/trl_losses.json, with which tests compare agentrl's.

    python benchmarks/parts/trl_losses.py build FOLDER          with agentrl's Python: writes tiny models and the batch
    python benchmarks/parts/trl_losses.py measure FOLDER > tests/contrib/offline/trl_losses.json      with one that has trl 1.16.0

The batch has pairs of two-turn episodes with a shared prompt; tool results are not trained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
BETA = 0.3


def build(folder: Path) -> None:
    from tests.trainer.pair_batches import batch_rows, models

    models(folder)
    (folder / "rows.json").write_text(json.dumps(batch_rows()))


def measure(folder: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    rows = json.loads((folder / "rows.json").read_text())
    order = [*rows[0::2], *rows[1::2]]  # TRL's order: all chosen, then all rejected
    width = max(len(row["ids"]) for row in order)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")

    def padded(values: list[list[int]], fill: int = 0) -> torch.Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in values])

    inputs = {
        "input_ids": padded([row["ids"] for row in order], tokenizer.pad_token_id),
        "attention_mask": padded([[1] * len(row["ids"]) for row in order]),
        "completion_mask": padded([row["sampled"] for row in order]),
    }
    options: dict[str, Any] = {"output_dir": str(folder / "out"), "use_cpu": True, "report_to": [], "bf16": False}
    options |= {"gradient_checkpointing": False, "disable_dropout": True}
    data = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("policy", "reference")
    )
    dpo = DPOTrainer(policy, reference, DPOConfig(beta=BETA, **options), train_dataset=data, processing_class=tokenizer)
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "classifier", dtype=torch.float32)
    reward = RewardTrainer(judge, RewardConfig(**options), train_dataset=data, processing_class=tokenizer)

    def norm(model: Any, loss: torch.Tensor) -> float:
        model.zero_grad()
        torch.autograd.backward(loss)
        found = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        return float(torch.stack(found).norm())

    def out(loss: torch.Tensor, model: Any) -> dict[str, float]:
        return {"loss": float(loss.detach()), "grad_norm": norm(model, loss)}

    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    half = len(order) // 2
    supervised = policy(inputs["input_ids"][:half], attention_mask=inputs["attention_mask"][:half], labels=labels[:half]).loss
    found = {"beta": BETA, "trl": __import__("trl").__version__, "sft": out(supervised, policy)}
    found["dpo"] = out(dpo.compute_loss(dpo.model, dict(inputs)), policy)
    found["reward"] = out(reward.compute_loss(reward.model, {k: inputs[k] for k in ("input_ids", "attention_mask")}), judge)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        print(json.dumps(measure(Path(sys.argv[2])), indent=1))
