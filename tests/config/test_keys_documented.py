"""Every key says what it is: a meaning of its own, and the unit of what it counts or measures."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from agentrl.config import keys
from agentrl.config.keys import all_keys, find_keys

UNITS = {"timeout": "seconds", "tokens": "tokens", "mib": "MiB", "usd": "USD", "lr": "1"}
"""What the end of a name says about the unit."""


@pytest.mark.parametrize("key", all_keys(), ids=lambda key: key.name)
def test_the_key_has_a_meaning_and_a_unit(key: keys.Key) -> None:
    assert len(key.meaning.split()) >= 3 and key.meaning[-1] in ".)", f"its meaning is {key.meaning!r}: write a sentence below it"
    if key.section:
        return
    counted = re.search(r"\b(integer|number)s?\b", key.type)
    assert not counted or key.unit, f'it is a {key.type} without a unit: Annotated[..., Unit("tokens")], or "1" for a ratio'
    expected = next((unit for end, unit in UNITS.items() if re.search(rf"(^|_){end}$", key.name.split(".")[-1])), key.unit)
    assert key.unit == expected, "its name says another unit"


def test_the_list_is_of_every_key_of_the_schema() -> None:
    """Against a count of its own: the fields of all sections, once each; one that stands in two places is a key in the second."""

    def count(section: type[BaseModel], top: bool = True) -> int:
        total = 0
        for name, field in section.model_fields.items():
            inner = keys.named_sections_of(field.annotation) or keys.section_of(field.annotation)
            closed = inner is None or inner.__name__ == "Choice" or (not top and name in ("tools", "agent", "vllm"))
            total += 1 if closed else 1 + count(inner, top=False)
        return total

    from agentrl.config import TrainConfig

    assert len(all_keys()) == count(TrainConfig) == len({key.name for key in all_keys()})


@pytest.mark.parametrize(("name", "found"), [
    ("rollout.groups", ["rollout.groups"]),
    (
        "[checkpoint]",
        ["checkpoint", *(f"checkpoint.{key}" for key in ("every", "keep", "keep_best", "best", "asynchronous"))],
    ),
    ("algorithm.advantage.name", ["algorithm.advantage"]),
    ("env.params.calls", ["env.params"]),
    ("tools.mcp.shop.command", ["tools.mcp.NAME.command"]),
    ("env.agent.command", ["env.agent.command"]),
    ("env.tools.mcp.shop.url", ["env.tools.mcp.NAME.url"]),
    ("reward.judge.engines.big.vllm.replicas", ["reward.judge.engines.big.vllm.replicas"]),
])  # fmt: skip
def test_a_name_finds_its_key(name: str, found: list[str]) -> None:
    assert [key.name for key in find_keys(name)] == found


@pytest.mark.parametrize(("name", "type", "default", "unit"), [
    ("rollout.oversample", "number >= 1 <= 8", "1.0", "1"),
    ("optim.betas", "pair of numbers >= 0 < 1", "[0.9, 0.999]", "1"),
    ("model.dtype", '"auto" or "float32" or "bfloat16"', '"auto"', None),
    ("model.threads", 'integer >= 1 or "auto"', '"auto"', "threads"),
    ("env.id", "string", "required", None),
    ("env.weight", "number >= 0 or list of pairs of integer >= 0 and number >= 0", "unset", "1"),
    ("algorithm.loss", "table of name and args", '{ name = "ppo_clip" }', None),
    ("trackers", "list of tables of name and args", '[{ name = "tensorboard" }]', None),
    ("reward.judge.usd_per_million", "pair of numbers >= 0", "unset", "USD per million tokens"),
    ("cluster.roles", "table of strings", "{}", None),
])  # fmt: skip
def test_type_default_and_unit(name: str, type: str, default: str, unit: str | None) -> None:
    [key] = find_keys(name)
    assert (key.type, key.default, key.unit) == (type, default, unit)
