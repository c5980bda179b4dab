"""`agentrl train --dry-run` calls each plug-in that a config names on made-up data, and names the one that fails."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli.main import main

HEAD = """
import torch
SEEN = []
from agentrl.trainer.algorithms import ADVANTAGES, POLICY_LOSSES, AdvantageOutput, LossOutput
from agentrl.trainer.algorithms.losses import CORRECTIONS
from agentrl.rollout.context import CONTEXTS, ContextPolicy
from agentrl.rollout.mixtures import MIXTURES, FixedMixture
from agentrl.run.callbacks import CALLBACKS, Callback
from agentrl.rollout.samplers import SAMPLERS, UniformSampler
from agentrl.rollout.collector import FILTERS
from agentrl.rollout.engine import ENGINES, EngineMaker
from agentrl.trainer.train_engine import TRAIN_ENGINES, BaseEngine
from agentrl.engines.weights.base import ROUTES, Sender
from agentrl.run.trackers import TRACKERS, Tracker
"""
ADVANTAGE = "@ADVANTAGES.register('mine')\ndef mine(batch):\n    SEEN.append(1)\n    return "
LOSS = "@POLICY_LOSSES.register('mine')\ndef mine(batch):\n    return "
CORRECTION = "@CORRECTIONS.register('mine')\ndef mine(prox, behave, mask, offsets):\n    return "
MIXTURE = "@MIXTURES.register('mine')\nclass Mine(FixedMixture):\n    def shares(self, weights):\n        return "
CONTEXT = "@CONTEXTS.register('mine')\nclass Mine(ContextPolicy):\n    async def rewrite(self, moment):\n        return "
CALLBACK = "@CALLBACKS.register('mine')\nclass Mine(Callback):\n    def __init__(self):\n        "
SAMPLER = "@SAMPLERS.register('mine')\nclass Mine(UniformSampler):\n    def __init__(self):\n        "
CHOICE = "@SAMPLERS.register('mine')\nclass Mine(UniformSampler):\n    def choose(self, run_seed, index):\n        "
FILTER = "@FILTERS.register('mine')\ndef mine(group):\n    return "
TRACKER = "@TRACKERS.register('mine')\nclass Mine(Tracker):\n    def __init__(self, run): ...\n"


PROVIDER = """
from agentrl.contrib.sandboxes.local import LocalProvider, LocalSandbox
from agentrl.contrib.sandboxes.contract import SANDBOXES, SandboxProvider
@SANDBOXES.register('mine')
class Mine(%s):
    name = 'mine'
"""
BOX = PROVIDER % "LocalProvider" + "    async def start(self, spec, snapshot=None):\n        "
MADE = BOX + "made = await super().start(spec, snapshot)\n        "


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `agentrl train --dry-run` with a plug-in; returns what it printed, or the one line with which it was refused."""

    def run(key: str, body: str, value: str = "", code: int = 2) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / "plugins").mkdir(parents=True)
        (folder / "plugins/mine.py").write_text(HEAD + body + "\n")
        small = {"layers": 1, "hidden": 16, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 512}
        init = ", ".join(f"{name}={size}" for name, size in small.items())
        env = "python" if key == "env.sandbox" else "key_value"
        (folder / "run.toml").write_text(f"engine='embedded'\nenv={{id='{env}'}}\ncluster={{backend='inline'}}\n"
                                         f"model={{init={{{init}}}}}\nrollout={{groups=2, group_size=2}}\n")  # fmt: skip
        monkeypatch.chdir(folder)
        own = {"callbacks": "[{name='mine'}]", "trackers": "[{name='mine'}]", "env.sandbox": "{provider='mine'}"}
        own |= dict.fromkeys(("engine", "model.engine", "weights.route"), "mine")
        value = value or own.get(key, "{name='mine'}")
        assert main(["train", "run.toml", "--dry-run", "--json", f"{key}={value}"]) == code
        said, error = capsys.readouterr()
        assert code == 0 or (error.startswith("agentrl: ") and "Traceback" not in error), error
        return error if code else said

    return run


@pytest.mark.parametrize(("key", "body", "said"), [
    ("algorithm.advantage", ADVANTAGE + "batch.rewards", "plugins/mine.py:18: 'mine' raised AttributeError: "),
    ("algorithm.advantage", ADVANTAGE + "batch.reward", "returned tensor("),
    ("algorithm.advantage", ADVANTAGE + "AdvantageOutput(batch.reward)", "advantages float32 [4], expected"),
    ("algorithm.advantage", ADVANTAGE + "AdvantageOutput(batch.mask * float('nan'))", "not finite"),
    ("algorithm.advantage", ADVANTAGE.replace("batch", "") + "1", "plugins/mine.py:15: 'mine' raised TypeError"),
    ("algorithm.loss", LOSS + "LossOutput(-batch.advantages)", "without a gradient"),
    ("algorithm.loss", LOSS + "LossOutput((batch.logprobs * 0).sqrt())", "gradients that are not finite"),
    ("algorithm.loss", LOSS + "LossOutput(batch.logprobs, {'m': batch.offsets})", "the metric m int64"),
    ("algorithm.correction", CORRECTION + "prox[mask]", "returned weights float32 [12], expected"),
    ("rollout.mixture", MIXTURE + "{}", "expected one >= 0 for each of"),
    ("rollout.context", CONTEXT + "['x']", "returned 'x', expected Message"),
    ("rollout.sampler", SAMPLER + "raise KeyError('token')", "'mine' raised KeyError"),
    ("rollout.sampler", CHOICE + "return 3", "returned 3, expected TaskChoice"),
    ("env.sampler", CHOICE + "return 3", "returned 3, expected TaskChoice"),
    ("env.sampler", SAMPLER + "raise KeyError('token')", "'mine' raised KeyError"),
    ("rollout.accept", FILTER + "sum(m.reward for m in group.scored())", "returned 1.0, expected True or False"),
    ("rollout.accept", FILTER.replace("def", "async def") + "3", "returned 3, expected True or False"),
    ("trackers", TRACKER, "'mine' lacks close, row, which Tracker demands"),
    ("engine", "@ENGINES.register('mine')\nclass Mine(EngineMaker): ...", "lacks engine, make, which EngineMaker demands"),
    ("model.engine", "@TRAIN_ENGINES.register('mine')\nclass Mine: ...", "expected a subclass of BaseEngine"),
    ("weights.route", "@ROUTES.register('mine')\nclass Mine(Sender): ...", "lacks open, which Sender demands"),
    ("callbacks", CALLBACK + "raise KeyError('token')", "plugins/mine.py:18: 'mine' raised KeyError"),
    (
        "callbacks",
        CALLBACK + "pass\n    def on_step(self, row): ...",
        "'mine' has on_step(row), expected on_step(row, session)",
    ),
    (
        "trackers",
        TRACKER + "    def row(self, row): ...\n    def close(self, status, summary): ...",
        "'mine' has row(self, row), expected row(self, phase, step, values)",
    ),
    ("env.sandbox", PROVIDER % "SandboxProvider", "raised TypeError: Can't instantiate abstract class Mine"),
    ("env.sandbox", PROVIDER % "", "expected SandboxProvider"),
    ("env.sandbox", BOX + "return 3", "returned 3, expected Sandbox"),
    ("env.sandbox", BOX + "raise KeyError('token')", "'mine' raised KeyError: 'token'"),
    (
        "env.sandbox",
        PROVIDER % "LocalProvider" + "    def unavailable(self):\n        return True",
        "returned True, expected str",
    ),
    ("env.sandbox", MADE + "made.exec = lambda *a, **k: 3\n        return made", "'mine' raised TypeError"),
    ("env.sandbox", MADE + "async def none(*a): ...\n        made.write = none\n        return made", "FileNotFoundError"),
])  # fmt: skip
def test_a_plug_in_that_cannot_work_is_named_with_key_file_and_line(
    dry: Callable[..., str], key: str, body: str, said: str
) -> None:
    error = dry(key, body)
    named = "env.sandbox.provider" if key == "env.sandbox" else key
    assert error.startswith(f"agentrl: {named}: plugins/mine.py:") and said in error


WRAPPER = "from agentrl.env.wrappers import WRAPPERS, ToolWrapper\n@WRAPPERS.register('mine')\nclass Mine(ToolWrapper):\n    "


@pytest.mark.parametrize(("key", "body", "said"), [
    ("algorithm.advantage", "import no_such_package\n" + ADVANTAGE + "1", "no_such_package"),
    ("algorithm.advantage", ADVANTAGE + "1 +", "not a Python file"),
    ("algorithm.advantage", "", "unknown name 'mine'"),
    (
        "trackers",
        TRACKER
        + "    @classmethod\n    def check(cls, args):\n        raise KeyError('token')\n    row = close = lambda *_: None",
        "trackers 'mine': check raised KeyError: 'token' (",
    ),
    (
        "rollout.sampler",
        SAMPLER + "super().__init__()\n    def wants(self):\n        return 'many'",
        "wants returned 'many', expected",
    ),
    (
        "algorithm.loss",
        LOSS + "LossOutput(batch.logprobs * batch.advantages.zero_())",
        "algorithm.loss 'mine' changes its input advantages in place",
    ),
    (
        "env.wrappers",
        WRAPPER + "def __init__(self, env):\n        raise KeyError('token')",
        "env.wrappers 'mine': it raised KeyError: 'token'",
    ),
    (
        "env.wrappers",
        WRAPPER + "async def astep(self, action):\n        raise KeyError('token')",
        "cannot be played: plugins/mine.py:19: KeyError: 'token'",
    ),
])  # fmt: skip
def test_one_that_does_not_load_writes_into_its_input_or_wraps_is_one_line(
    dry: Callable[..., str], key: str, body: str, said: str
) -> None:
    assert said in dry(key, body, "[{name='mine'}]" if key == "env.wrappers" else "")


def test_a_correct_one_passes_and_keeps_nothing_of_its_trial(dry: Callable[..., str]) -> None:
    from agentrl.trainer.algorithms import ADVANTAGES

    body = ADVANTAGE + "AdvantageOutput(batch.values * batch.mask if batch.values is not None else batch.mask * 0.5)"
    assert json.loads(dry("algorithm.advantage", body, code=0))["algorithm"].startswith("mine, ")
    assert ADVANTAGES.entry("mine").make.__globals__["SEEN"] == []  # type: ignore[attr-defined]
    for key, right in (
        ("env.sandbox", MADE + "return made"),
        ("algorithm.loss", LOSS + "LossOutput(-batch.advantages * batch.logprobs, {'half': 0.5})"),
        ("rollout.accept", FILTER + "group.trajectories[0].task.data['n'] > 2"),
    ):
        dry(key, right, code=0)
    dry("env.wrappers", WRAPPER + "pass", "[{name='mine'}]", code=0)  # without an __init__ of its own
