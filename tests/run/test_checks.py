"""What is refused before a run: a plug-in's check too."""

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.env.catalog import find_config
from agentrl.run import checks
from agentrl.utils.errors import ConfigError

PLUGIN = """
from agentrl.run.checks import RUN_CHECKS
from agentrl.utils.errors import ConfigError

@RUN_CHECKS.register("few_steps")
def few_steps(start):
    if start.config.steps > 9:
        raise ConfigError(f"steps = {start.config.steps}: too many. Set at most 9")
    return [f"{start.purpose}: {start.config.steps} steps, scored by {', '.join(start.scorers)}"]
"""


def test_a_plug_in_refuses_a_start_or_warns_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "few.py").write_text(PLUGIN)
    file, keys = Path(find_config("quickstart")), ["engine=embedded", "cluster.backend=inline"]
    few, many = (load_config(file, [*keys, f"steps={steps}"]) for steps in (3, 10))
    assert "few_steps" not in checks.RUN_CHECKS
    monkeypatch.chdir(tmp_path)
    assert "train: 3 steps, scored by key_value" in checks.check_config(few)
    with pytest.raises(ConfigError, match=r"^steps = 10: too many\. Set at most 9$"):
        checks.check_config(many)
