"""What is refused before a run: the list in agentrl/run/checks says each check, and each check says what it reads."""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from agentrl.config import TrainConfig, load_config
from agentrl.config.schema import Frozen
from agentrl.run import checks
from agentrl.utils.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.toml"))
CHECKS: dict[str, Callable[..., Any]] = {
    name: found
    for name, found in vars(checks).items()
    if name.startswith("check_") and name not in ("check_train", "check_config", "check_eval")
}
ENTERED = {name: entry for name in checks.RUN_CHECKS if "plan" not in (entry := checks.RUN_CHECKS.entry(name)).traits}
CHECKS |= {name: entry.make for name, entry in ENTERED.items()}
# What an environment sets itself is read before any check, to give it the config of a single environment (`TrainConfig.alone`).
OWN = {"agent", *(f"env.{n}" for n in ("name", "weight", "tools", "agent", "limits", "sampler", "advantage", "eval", "sft"))}


def declared(check: Callable[..., Any]) -> set[str]:
    """The keys behind "Reads:" in a check's docstring, and those of the checks that it calls."""
    found = re.search(r"Reads: (.*?)\.\Z", inspect.cleandoc(check.__doc__ or ""), re.DOTALL)
    assert found, f"{check.__name__} does not say what it reads"
    keys, _, others = found.group(1).partition("; and as ")
    called = [vars(inspect.getmodule(check))[name] for name in re.findall(r"`(\w+)`", others)]
    return set(re.split(r",\s+", keys)).union(*map(declared, called))


def sections(section: Frozen, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Which object is which section of a config."""
    yield id(section), prefix
    for name in type(section).model_fields:
        value = getattr(section, name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Frozen):
                yield from sections(inner, f"{prefix}{name}.")


def keys_of(model: type[Frozen], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in kinds(field.annotation):
            yield from keys_of(kind, f"{prefix}{name}.")


def kinds(annotation: Any) -> Iterator[type[Frozen]]:
    """The sections in a type."""
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        yield annotation
    for inner in get_args(annotation):
        yield from kinds(inner)


def test_each_check_names_keys_that_there_are() -> None:
    known = set(keys_of(TrainConfig))
    assert {name: declared(check) - known for name, check in CHECKS.items() if declared(check) - known} == {}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_check_reads_what_it_says_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(path)
    names, running, read = dict(sections(config)), [], defaultdict[str, set[str]](set)
    read_plainly = object.__getattribute__

    def reading(section: Frozen, name: str) -> Any:
        value = read_plainly(section, name)
        if running and id(section) in names and name in type(section).model_fields and not isinstance(value, Frozen):
            read[running[-1]].add(names[id(section)] + name)
        return value

    def watched(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            try:
                return check(*args, **kwargs)
            finally:
                running.pop()

        return run

    for name, check in CHECKS.items():
        if name in ENTERED:
            monkeypatch.setitem(checks.RUN_CHECKS._own, name, replace(ENTERED[name], make=watched(name, check)))
        else:
            monkeypatch.setattr(checks, name, watched(name, check))
    monkeypatch.setattr(Frozen, "__getattribute__", reading)
    checks.check_config(config)
    checks.check_eval(config)
    monkeypatch.undo()
    silent = {
        name: sorted(
            key
            for key in keys - {"env"}  # the list of all, from which each is taken
            if not any(key == one or key.startswith(one + ".") for one in declared(CHECKS[name]) | OWN)
        )
        for name, keys in read.items()
    }
    assert {name: keys for name, keys in silent.items() if keys} == {}
    assert len(read) >= 9


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
    file, keys = CONFIGS[0].with_name("quickstart.toml"), ["engine=embedded", "cluster.backend=inline"]
    few, many = (load_config(file, [*keys, f"steps={steps}"]) for steps in (3, 10))
    assert "few_steps" not in checks.RUN_CHECKS
    monkeypatch.chdir(tmp_path)
    assert "train: 3 steps, scored by key_value" in checks.check_config(few)
    with pytest.raises(ConfigError, match=r"^steps = 10: too many\. Set at most 9$"):
        checks.check_config(many)
