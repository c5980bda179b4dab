"""The tiny model that most tests train; the fixture `tiny` is the folder of one."""

from pathlib import Path

from agentrl.config.schema import InitModelConfig
from agentrl.trainer.pretrained import init_model

SMALL = InitModelConfig(layers=2, hidden=32, mlp=64, heads=4, kv_heads=2, head_dim=8, context=512)


def build(folder: Path) -> str:
    """A two-layer model with random weights in the folder; its path."""
    return str(init_model(SMALL, folder, seed=0))
