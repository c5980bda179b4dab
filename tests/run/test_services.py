"""A leaf and a service of the user's own: made once for a run, checked before it, started, asked and ended with it."""

import json
from pathlib import Path

import pytest

from agentrl.config.schema import RewardConfig, TrainConfig
from agentrl.data.trajectory import Task, Trajectory
from agentrl.reward import compile_spec, make_context
from agentrl.run.assembly import RunStart
from agentrl.run.checks import RUN_CHECKS, check_config
from agentrl.run.services import RunServices, Service
from agentrl.utils.errors import ConfigError, RewardSpecError
from tests import tiny
from tests.e2e.inside import config_of
from tests.run.broken_off import TINY
from tests.run.own_spec import RIGHT

PLUGIN = """
from agentrl.reward.leaf import LEAVES, SERVICES, Leaf, PendingError, Reading
from agentrl.run.checks import RUN_CHECKS
from agentrl.run.services import Service
from agentrl.utils.errors import ConfigError

@RUN_CHECKS.register("planted")
def check(start):
    if start.config.steps > 9:
        raise ConfigError(f"steps = {start.config.steps}: too many. Set at most 9")
    return [f"{len(start.scorers)} specs, purpose: {start.purpose}"]

class Question:
    def assumption(self, best):
        return float(best)

@LEAVES.register("planted.mark")
class Mark(Leaf):
    kind, formula, example, asks = "planted.mark", "the mark", {}, "planted"

    def read(self, view, args):
        if "mark" not in view.answers:
            raise PendingError("mark", Question())
        return Reading(view.answers["mark"], None)

@SERVICES.register("planted")
class Planted(Service):
    def __init__(self, config):
        self.name, self.course = "", []

    def ask(self, key, request):
        self.course.append("asked")
        return 0.25

    async def aask(self, key, request):
        self.course.append(self.name)
        return 0.75

    async def start(self, run, scorers):
        self.course.append([scorer.name for scorer in scorers])

    async def forget(self):
        self.course.append("forget")

    async def close(self):
        self.course.append("close")

    def metrics(self):
        return {"planted/marks": 1.0}
"""
MARKED = {"agentrl_reward": 1, "name": "marked", "root": {"use": "planted.mark"}}


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the plug-in onto the shelf of a working directory."""
    (folder / "plugins").mkdir()
    (folder / "plugins/planted.py").write_text(PLUGIN)
    monkeypatch.chdir(folder)


async def test_a_run_has_one_service_for_all_its_leaves_and_a_check_warns_of_it_or_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "planted" not in RUN_CHECKS
    plant(tmp_path, monkeypatch)
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**MARKED, "name": name, "success": RIGHT}))
    envs = "env=[{name='a', id='key_value', reward='a.json'}, {name='b', id='key_value', reward='b.json'}]"
    config = config_of(tmp_path, "r", *TINY, "steps=9", "rollout.max_turns=8", envs)
    assert "2 specs, purpose: train" in check_config(config)
    with pytest.raises(ConfigError, match=r"^steps = 10: too many\. Set at most 9$"):
        check_config(config.model_copy(update={"steps": 10}))
    made = RunStart(config).inputs(tiny.build(tmp_path / "model")).assemble()
    assert [env.scorer.score(Trajectory("kv", Task("t", 0))).value for env in made.envs] == [0.25, 0.25]
    await made.start()
    await made.services["planted"].forget()
    assert made.services["planted"].metrics() == {"planted/marks": 1.0}
    await made.close()
    assert list(made.services) == ["planted"]
    assert made.services["planted"].course == ["asked", "asked", ["a", "b"], "forget", "close"]


def test_whatever_a_service_would_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, monkeypatch)
    scorer = compile_spec(MARKED, context=make_context(RewardConfig()))
    assert scorer.judged == ["/root"] and scorer.asks == {"planted"}
    episode = Trajectory("kv", Task("t", 0))
    assert [scorer.assuming(lambda _, best=best: best).score(episode).value for best in (True, False)] == [1.0, 0.0]  # type: ignore[misc]
    with pytest.raises(RewardSpecError, match=r"at /root: planted\.mark asks 'planted', which this run does not provide"):
        compile_spec(MARKED)
    (tmp_path / "plugins/planted.py").write_text(PLUGIN.replace('SERVICES.register("planted")', 'SERVICES.register("plantd")'))
    with pytest.raises(ConfigError, match=r"unknown name 'planted'; did you mean 'plantd'"):
        compile_spec(MARKED, context=make_context(RewardConfig()))


async def test_a_service_that_fails_to_close_leaves_no_other_open() -> None:
    ended: list[str] = []

    class Named(Service):
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            ended.append(self.name)
            raise OSError(self.name)

    services = RunServices(TrainConfig())
    services.update({name: Named(name) for name in ("a", "b")})  # type: ignore[abstract]
    with pytest.raises(OSError, match=r"^[ab]$"):
        await services.close()
    assert sorted(ended) == ["a", "b"]
