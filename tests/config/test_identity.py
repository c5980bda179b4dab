"""Every key of the config is part of every identity, or is named with a reason why it cannot matter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from agentrl.config import TrainConfig, schema
from agentrl.config.identity import (
    CANNOT_MATTER,
    LATER,
    MEASURES,
    Purpose,
    cannot_matter,
    changes_below,
    check_overrides,
    check_resumed,
    differences,
    identity_of,
)
from agentrl.config.load import check_idle_keys, config_from, parse_overrides
from agentrl.utils.errors import ConfigError

VLLM = {"args": {"a": 1}, "kv_cache_mib": 1}
TOOLS = {
    "sets": ["dates"],
    "args": {"dates": {"a": 1}},
    "mcp": {"shop": {"command": ["serve"], "env": {"KEY": "k"}, "tools": ["t"], "url": "http://a", "max_output": 9}},
}
AGENT = {"command": ["a"], "python": "m:f", "url": "http://a", "pass_env": ["P"], "env": {"KEY": "k"}}
EVERY: dict[str, Any] = {
    # every section is there, and every table holds something
    "env": {"id": "key_value", "name": "kv", "weight": 1.0, "params": {"calls": 2}, "reward": "r",
        "wrappers": [{"name": "w", "args": {"a": 1}}], "sandbox": {"args": {"a": 1}, "warm": 1}, "system": "s",
        "url": "http://a", "token_env": "T", "max_output": 9, "tools": TOOLS, "agent": AGENT,
        "limits": {"max_turns": 2, "max_turn_tokens": 2, "max_episode_tokens": 2, "episode_timeout": 2.0},
        "sampler": {"name": "s", "args": {"a": 1}}, "advantage": {"name": "a", "args": {"a": 1}},
        "eval": {"tasks": 2, "split": "s", "temperature": 0.5, "weight": 2.0},
        "sft": {"teacher": {"a": 1}, "params": {"a": 1}, "gate": 0.25, "gate_params": {"a": 1}}},
    "tools": TOOLS,
    "agent": AGENT,
    "model": {"path": "m", "init": {}, "lora": {"modules": ["q_proj"]}, "chat_template": "hermes", "date": "2026-01-02",
        "dtype": "float32", "activation_checkpointing": True, "shard_gradients": True},
    "sft": {"envs": ["kv"], "teacher": {"stop": 0.1}, "params": {"calls": 2}, "gate_params": {"calls": 3}, "optimizer": "muon",
        "lr": 0.1, "matrix_lr": 0.1},
    "optim": {"lr": 0.1, "matrix_lr": 0.1},
    "data": {"path": ["d"], "min_reward": 0.5, "per_task": 2},
    "rollout": {"sampler": {"name": "s", "args": {"a": 1}}, "mixture": {"name": "m", "args": {"a": 1}},
        "context": {"name": "c", "args": {"a": 1}}, "accept": {"name": "f", "args": {"a": 1}}, "summary_model": "w",
        "start": {"left": 3}, "branch": {"roots": 2, "turns": [3]}},
    "algorithm": {"advantage": {"name": "a", "args": {"a": 1}}, "loss": {"name": "l", "args": {"a": 1}},
        "correction": {"name": "c", "args": {"a": 1}}, "kl": {"kind": "k1", "target": 0.1, "horizon": 9}, "length_norm": 9,
        "experience": {}, "distillation": {"path": "t"}, "demonstrations": {}},
    "critic": {"path": "c", "lr": 0.1},
    "reward_model": {"path": "r"},
    "cluster": {"address": "a", "pools": {"p": {}}, "roles": {"actor": "p"}},
    "weights": {"folder": "f", "bucket_mib": 1.0},
    "traces": {},
    "prometheus": {},
    "profile": {"steps": [2]},
    "api": {"base": "b", "args": {"a": 1}, "usd_per_million": [1.0, 2.0]},
    "reward": {"python": {"f": "m:f"}, "judge": {"api_base": "b", "args": {"a": 1}, "cache": "c", "usd": 1.0,
        "usd_per_million": [1.0, 2.0], "engines": {"e": {"path": "j", "engine_args": {"a": 1}, "vllm": VLLM}}}},
    "stop_at_success": 0.5,
    "engine_args": {"a": 1},
    "callbacks": [{"name": "c", "args": {"a": 1}}],
    "sglang": {"servers": ["http://a:1"], "api_key_env": "E"},
    "vllm": VLLM,
}  # fmt: skip


def literals(annotation: Any) -> Iterator[Any]:
    """The values that a type names."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for inner in get_args(annotation):
            yield from literals(inner)


SECTIONS = [value for value in vars(schema).values() if isinstance(value, type) and issubclass(value, BaseModel)]
NAMES = {name for section in SECTIONS for field in section.model_fields.values() for name in literals(field.annotation)}
OTHERS = [True, False, 0, 1, 2, 3, 5, 0.25, 0.5, 1.5, 2.5, "x", *sorted(NAMES), ["x"], [0.1, 0.2], [{"name": "v", "args": {}}]]
OTHERS += [[7], 2000, "2026-05-05"]


def keys(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from keys(value, (*path, key))
        else:
            yield (*path, key)


def flipped(path: tuple[str, ...]) -> TrainConfig:
    """The config with another valid value of one key."""
    for other in OTHERS:
        table = TrainConfig.model_validate(EVERY).model_dump(mode="json")
        inner: Any = reduce(getitem, path[:-1], table)
        if inner[path[-1]] == other:
            continue
        inner[path[-1]] = other
        try:
            return TrainConfig.model_validate(table)
        except ValidationError:
            continue
    raise AssertionError(f"{'.'.join(path)}: no other value is valid; add one to OTHERS")


KEYS = list(keys(TrainConfig.model_validate(EVERY).model_dump(mode="json")))


@pytest.mark.parametrize("path", KEYS, ids=[".".join(path) for path in KEYS])
def test_a_key_changes_the_identity_or_is_named(path: tuple[str, ...]) -> None:
    base, key = TrainConfig.model_validate(EVERY), ".".join(path)
    other = flipped(path)
    for purpose in get_args(Purpose):
        found = differences(identity_of(base, purpose), identity_of(other, purpose))
        assert bool(found) != cannot_matter(key, purpose), f"{purpose}: {found or 'nothing differs'}"
        assert not found or (found.startswith(key) and "; " not in found), f"{purpose}: it names {found!r}"


def test_no_section_or_key_is_missing_above() -> None:
    """Of the schema, walked by its types: what the table leaves at an empty value could not be flipped inside."""
    dumped = TrainConfig.model_validate(EVERY).model_dump(mode="json")
    unset = [".".join(path) for path in KEYS if reduce(getitem, path, dumped) in (None, {}, [])]
    assert unset == [], "give these a value in EVERY, so that they can be flipped"


@pytest.mark.parametrize("purpose", get_args(Purpose))
def test_every_name_is_of_a_key_and_none_is_said_twice(purpose: Purpose) -> None:
    known = {".".join(path[:end]) for path in KEYS for end in range(1, len(path) + 1)}
    known |= {name.replace("engines.e.", "engines.*.") for name in known}
    # Arguments of the embedded engine and of vLLM's.
    known |= {"engine_args.kv_cache_mib", "vllm.args.max_num_seqs", "vllm.args.max_num_batched_tokens"}
    for name in CANNOT_MATTER[purpose]:
        assert name in known, f"{name} is not a key of the config"
        assert not any(name.startswith(f"{other}.") for other in CANNOT_MATTER[purpose]), f"{name}: its section is named"


@pytest.mark.parametrize(("purpose", "word", "why"), [
    ("eval", "rollout.temperature=0", "it gives way to eval.temperature. Leave it out"),
    ("eval", "optim={lr=1.0}", "optim.lr: agentrl eval does not read it: it is read by training alone"),
    ("eval", "env.sql.weight=2", "env.sql.weight: agentrl eval does not read it: it forms the groups of an update"),
    ("rollout", "rollout.group_size=4", "rollout.group_size: agentrl rollout does not read it"),
    ("rollout", "eval.temperature=0", "it gives way to rollout.temperature"),
    ("rollout", "eval.tasks=4", "it is asked for by -n and --split"), ("rollout", "out=x", "--out names a folder"),
    *(("eval", word, "") for word in ("eval.temperature=0", "eval.tasks=4", "rollout.max_turns=2", "sft=false", "seed=3")),
    ("rollout", "rollout.temperature=0", ""), ("rollout", "env.sql.params.weight=2", ""),
])  # fmt: skip
def test_an_override_that_is_not_read_is_refused(purpose: Purpose, word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) if why else nullcontext():
        check_overrides([(one.keys, one.value) for one in parse_overrides([word])], purpose)


def test_whole_sections_are_named_only_if_nothing_in_them_is_read() -> None:
    """A new key is part of the identity by default; the sections where it is not are these."""
    kept = {"cluster", "keep", "health", "traces", "prometheus", "profile"}
    update = {"sft", "data", "algorithm", "optim", "critic", "reward_model", "model.init", "model.lora", "env.sft"}
    update |= {"env.advantage", "env.sampler"} | {f"rollout.{key}" for key in ("sampler", "mixture", "accept", "start", "branch")}
    for purpose in get_args(Purpose):
        sections = {name for name in CANNOT_MATTER[purpose] if any(".".join(path).startswith(f"{name}.") for path in KEYS)}
        later = {"vllm.args", "algorithm.loss.args", "algorithm.correction", "algorithm.advantage.args", "env.advantage.args"}
        assert sections == kept | (later if purpose == "train" else update)


def test_what_checkpoints_are_compared_by_stays_and_a_change_of_an_environment_is_named() -> None:
    """A success of 0.9 was better than any reward below it; what changed in [[env]] was not said."""
    table = {"env": [{"id": "a", "eval": {"tasks": 2}}, {"id": "b"}]}
    with pytest.raises(ConfigError, match=r'checkpoint\.best was "success", is "reward"'):
        check_resumed(config_from(table), config_from(table, ["checkpoint.best=reward"]), Path())
    other = config_from(table, ["env.a.eval.tasks=3", "env.b.limits.max_turns=4", "callbacks=[{name='echo'}]"])
    assert changes_below(MEASURES, config_from(table), other) == ["env.a.eval.tasks was 2, is 3"]
    assert changes_below(LATER, config_from(table), other) == ['callbacks was [], is [{"name": "echo", "args": {}}]']


def test_values_are_compared_and_secrets_are_digests() -> None:
    base = TrainConfig.model_validate(EVERY)
    identity = identity_of(base, "eval")
    assert identity["rollout.max_turns"] == 16 and identity["env.params.calls"] == 2 and "optim.lr" not in identity
    assert identity["rollout.summary_model"] == "w" and identity["model.tool_parser"] == "auto"
    for key in ("command", "url", "env.KEY"):
        assert identity[f"tools.mcp.shop.{key}"].startswith("sha256:")
    assert differences(identity, identity) == ""
    assert differences({"a": 1}, {"a": True}) == "a was 1, is true"  # equal in Python, and another parameter
    assert differences({"a": 1, "b": "x"}, {"a": 2.5, "c": [1]}) == 'a was 1, is 2.5; b was "x", is unset; c was unset, is [1]'


@pytest.mark.parametrize("word", ["name=z", "out=elsewhere", "data.max_bad=0.5"])
def test_a_resume_refuses_what_it_would_not_read(word: str) -> None:
    table = {"name": "a", "out": "runs", "data": {"path": ["x.jsonl"], "max_bad": 0.25}}
    key = word.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key} was .*, is .*: a resume goes on there.* Leave it out"):
        check_resumed(config_from(table), config_from(table, [word]), Path())
    check_resumed(config_from(table), config_from(table, ["name=a", "out=runs", "data.max_bad=0.25"]), Path())


def test_what_one_environment_does_not_read_is_refused_by_its_key() -> None:
    table = {"env": {"id": "a", "weight": 2.0}, "rollout": {"mixture": {"name": "by_success"}}}
    for key, other in (("env.weight", "rollout.mixture"), ("rollout.mixture", "env.weight")):
        with pytest.raises(ConfigError, match=rf"{key} = .* is read with several environments"):
            check_idle_keys(config_from(table, [f"~{other}"]))
    of_two = {**table, "env": [table["env"], {"id": "b"}]}
    check_idle_keys(config_from(of_two, ["~env.b"]))  # one is left of a list
