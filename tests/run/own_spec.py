"""A config with a spec of the test's own."""

import json
from pathlib import Path
from typing import Any

from agentrl.config import TrainConfig

RIGHT = {"use": "number.close", "args": {"expect": {"$": "/task/gold/answer"}}}


def with_spec(folder: Path, root: dict[str, Any] = RIGHT, success: dict[str, Any] | None = RIGHT, **sections: Any) -> TrainConfig:
    """key_value, scored by a spec of this root, and of this node for success unless it is None."""
    spec = {"agentrl_reward": 1, "name": "mine", "root": root, **({} if success is None else {"success": success})}
    (folder / "mine.json").write_text(json.dumps(spec))
    return TrainConfig.model_validate({
        "name": "x", "env": {"id": "key_value", "reward": str(folder / "mine.json")}, "model": {"init": {}},
        "cluster": {"backend": "inline"}, "engine": "embedded", **sections,
    })  # fmt: skip
