"""The batch and the tiny models whose losses TRL computed (benchmarks/parts/trl_losses.py)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agentrl.config.schema import ModelConfig
from agentrl.contrib.offline.objectives import classifier_of
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Task, Trajectory
from agentrl.trainer.pretrained import init_model
from tests.tiny import SMALL

PAIRS = 3


def batch_rows() -> list[dict[str, Any]]:
    """Token ids and which of them are sampled: rows 2 i and 2 i + 1 are a pair with one prompt."""
    rng, rows = np.random.default_rng(7), []
    for pair in range(PAIRS):
        prompt = rng.integers(10, 400, size=4 + pair).tolist()
        for _ in range(2):
            ids, sampled = list(prompt), [0] * len(prompt)
            for turn in range(2):
                for size, mark in ((int(rng.integers(2, 9)), 1), (int(rng.integers(1, 5)), 0))[: 2 - turn]:
                    ids += rng.integers(10, 400, size=size).tolist()
                    sampled += [mark] * size
            rows.append({"ids": ids, "sampled": sampled})
    return rows


def models(folder: Path) -> None:
    """policy/, reference/ and classifier/, whose head is not zero, in the folder."""
    for seed, name in enumerate(("policy", "reference")):
        init_model(SMALL, folder / name, seed=seed)
    classifier_of(str(folder / "policy"), folder / "classifier", ModelConfig())
    weights = load_file(folder / "classifier" / "model.safetensors")
    weights["score.weight"] = torch.linspace(-1, 1, SMALL.hidden)[None].contiguous()
    save_file(weights, folder / "classifier" / "model.safetensors", metadata={"format": "pt"})


def episodes() -> list[Trajectory]:
    """The rows as episodes."""
    return [Trajectory("", Task("", 0), ledgers=[ledger_of(row["ids"], row["sampled"])]) for row in batch_rows()]


def ledger_of(ids: list[int], sampled: list[int]) -> TokenLedger:
    ledger = TokenLedger()
    for token, mark in zip(ids, sampled, strict=True):
        if mark:
            ledger.append_sampled([token], [0.0], [0], 0)
        else:
            ledger.append_context([token], 0)
    return ledger
