"""The config blocks of docs/observability.md are configs of runs, and the families that it names are those of a scrape."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from agentrl.config.load import config_from
from agentrl.contrib.trackers.prometheus import COUNTERS
from agentrl.run.trackers import TRACKERS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "observability.md").read_text()
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0])
def test_a_block_is_a_config(block: str) -> None:
    config = config_from({"env": {"id": "key_value"}, "model": {"init": {}}, **tomllib.loads(block)}, [])
    for choice in config.trackers:
        TRACKERS.bind(choice.name, choice.args)
    assert len(BLOCKS) == 4


def test_every_tracker_with_its_arguments_and_every_counter_is_named() -> None:
    for entry in TRACKERS.own():
        [row] = [line for line in PAGE.splitlines() if line.startswith(f"| `{entry.name}` |")]
        for argument in TRACKERS.arguments(entry.name, {}):
            assert f"`{argument}`" in row, (entry.name, argument)
    for name in COUNTERS:
        assert f"`agentrl_{name}_total`" in PAGE, name
