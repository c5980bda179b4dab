"""One file brings any registered part by name; its needs and traits are honoured before a run and in it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster.ray_cluster import stop_ray
from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.data.trajectory import Trajectory
from agentrl.engines.weights.base import WeightTarget
from agentrl.rollout.collector import FILTERS
from agentrl.rollout.engine import ENGINES, Engine
from agentrl.run.assembly import RunStart
from agentrl.run.checks import check_config
from agentrl.run.checks.size_checks import check_capacity
from agentrl.run.driver import execute
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.folder import RunFolder
from agentrl.run.role_placement import RunRoles
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from agentrl.utils.errors import CatalogError, ConfigError, ResourceError
from agentrl.utils.registry import Registry, _entry_points
from tests.conftest import proof
from tests.run.timelines import check_update

FILES = {
    "less_greedy": """
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.data.rows import on_mask
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput, row_advantages

@ADVANTAGES.register("less_greedy", needs={"baseline"})
def less_greedy(batch: AdvantageInput, *, plus: float = 0.0) -> AdvantageOutput:
    rows = row_advantages(batch, lambda e: e.reward - batch.baseline[e.first].double() + plus)
    return AdvantageOutput(on_mask(rows, batch.mask, batch.offsets))

@ADVANTAGES.register("valued", needs={"values"})
def valued(batch: AdvantageInput) -> AdvantageOutput:
    return AdvantageOutput(batch.values * batch.mask)
""",
    "half": """
import torch
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from agentrl.trainer.algorithms.base import LossInput, LossOutput

@POLICY_LOSSES.register("half", needs={"proximal"})
def half(batch: LossInput, *, share: float = 0.5) -> LossOutput:
    ratio = torch.exp(batch.logprobs - batch.old_logprobs)
    seen = {"advantage_seen": batch.advantages, "share": 0 * ratio.detach() + share}
    return LossOutput(-share * batch.advantages * ratio, seen)
""",
    "hundreds": """
from dataclasses import dataclass
from agentrl.rollout.samplers import SAMPLERS, TaskChoice, TaskSampler

@SAMPLERS.register("hundreds")
@dataclass(kw_only=True)
class Hundreds(TaskSampler):
    first: int = 100

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        return TaskChoice(self.first + index)
""",
    "noted": """
from dataclasses import dataclass
from pathlib import Path
from agentrl.rollout.context import CONTEXTS, ContextPolicy

@CONTEXTS.register("noted", traits={"summarizes"})
@dataclass(frozen=True, kw_only=True)
class Noted(ContextPolicy):
    into: str

    def __post_init__(self):
        Path(self.into).write_text("made")

    async def rewrite(self, moment):
        return None
""",
    "slow": """
from agentrl.env.base import ToolEnv
from agentrl.env.wrappers import WRAPPERS, TurnLimit

@WRAPPERS.register("one_turn", traits={"chance_faults"})  # so the gold solution is played without it
class OneTurn(TurnLimit):
    def __init__(self, env: ToolEnv, *, note: str) -> None:
        super().__init__(env, 1)
        open(note, "w").write("wrapped")

@WRAPPERS.register("by_the_clock", traits={"wall_clock"})
class ByTheClock(TurnLimit):
    def __init__(self, env: ToolEnv) -> None:
        super().__init__(env, 99)
""",
    "told": """
from dataclasses import replace
from pathlib import Path
from agentrl.engines.weights.base import ROUTES
from agentrl.engines.weights.host_routes import SharedSender

@ROUTES.register("told")
class Told(SharedSender):
    def open(self):
        Path(self.folder, "told.txt").write_text(str(self.receivers))
        return replace(super().open(), route="told")
""",
    "lines": """
from agentrl.run.trackers import TRACKERS, TrackedRun, Tracker

@TRACKERS.register("lines")
class Lines(Tracker):
    def __init__(self, run: TrackedRun, *, file: str) -> None:
        self._file = (run.folder.path / file).open("a")

    def row(self, phase, step, values):
        print(phase, step, sorted(values)[0], file=self._file)

    def close(self, status, summary):
        self._file.close()

    def look(self):
        return "cat the lines"
""",
    "trainers": """
from agentrl.trainer.train_engine import TRAIN_ENGINES
from agentrl.trainer.fsdp import FsdpEngine

@TRAIN_ENGINES.register("lifted", traits={"alone", "compile"})
class Lifted(FsdpEngine):
    def step(self, sound=True):
        return 1000.0 + super().step(sound)

    @classmethod
    def check(cls, cfg, ranks):
        if cfg.compile:
            from agentrl.utils.errors import ConfigError
            raise ConfigError(f"{ranks} rank cannot compile")
""",
    "engines": """
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.rollout.engine import ENGINES, Engine, EngineMaker, Processes

class FarEngine(Engine):
    untrainable = "it is too far"

@ENGINES.register("mine")
class Mine(EngineMaker):
    @classmethod
    def engine(cls):
        return EmbeddedEngine

    def __init__(self, config, *, note: str = "", slots: int = 4) -> None:
        super().__init__(config)
        self.note, self.slots = note, slots

    def context(self, positions):
        return min(positions, 300)

    def make(self, model, positions, ray_options=()):
        if self.note:
            open(self.note, "w").write(f"{self.slots} slots")
        return EmbeddedEngine(model, max_slots=self.slots, max_context=positions)

@ENGINES.register("far", needs={"ray"})
class Far(EngineMaker):
    @classmethod
    def engine(cls):
        return FarEngine

    def processes(self):
        return Processes(99, 1, 7, "far.count", "far.gpus", ("far.count",), "a far one")

    def make(self, model, positions, ray_options=()):
        raise NotImplementedError
""",
}
SMALL = {"layers": 1, "hidden": 16, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 512}


@pytest.fixture
def shelf(here: Path) -> Path:
    (here / "plugins").mkdir()
    for name, source in FILES.items():
        (here / "plugins" / f"{name}.py").write_text(source)
    return here


def run_of(*overrides: str, **sections: Any) -> TrainConfig:
    base = {"env": {"id": "key_value"}, "cluster": {"backend": "inline"}, "engine": "embedded", "model": {"init": SMALL}}
    return config_from({**base, "rollout": {"group_size": 2, "groups": 2}, **sections}, overrides)


@proof
@pytest.mark.timeout(240)
def test_a_run_of_plugins_alone(shelf: Path) -> None:
    """Its actor is a Ray worker, which loads the loss and the route's sender from the shelf too. (engine_args, trackers)"""
    config = run_of(
        f"out={shelf}", "engine=mine", f"engine_args={{note='{shelf}/engine.txt',slots=3}}", "steps=1", "eval.tasks=2",
        "algorithm.advantage={name='less_greedy',args={plus=2.0}}", "algorithm.loss={name='half',args={share=0.25}}",
        "algorithm.proximal=recompute", "rollout.sampler={name='hundreds',args={first=500}}",
        f"rollout.context={{name='noted',args={{into='{shelf}/context.txt'}}}}", 
        f"env.wrappers=[{{name='one_turn',args={{note='{shelf}/wrapper.txt'}}}}]",
        f"weights={{route='told',folder='{shelf}'}}", "trackers=[{name='lines',args={file='lines.txt'}}]",
        "rollout.max_turn_tokens=12", "rollout.max_turns=9", "cluster.backend=ray", "model.engine=lifted", "profile.steps=[1]",
    )  # fmt: skip
    check_capacity(RunStart(config))
    check_config(config)
    folder = RunFolder.create(config)
    stop_ray()  # one that an earlier test left knows the shelf of its own folder only
    assert execute(config, folder, resumed=False) == 0
    assert json.loads((folder.path / "summary.json").read_text())["engine"] == "mine"
    assert (shelf / "engine.txt").read_text() == "3 slots" and (shelf / "told.txt").read_text() == "1"
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    tracked = [line.split()[:2] for line in (folder.path / "lines.txt").read_text().splitlines()]
    assert tracked == [[row["phase"], str(row["step"])] for row in rows]
    assert not folder.tensorboard.exists()
    lines = (folder.path / "trajectories/step_000001.jsonl").read_text().splitlines()
    episodes = [Trajectory.from_json(json.loads(line)) for line in lines]
    assert sorted(episode.task.seed for episode in episodes) == [500, 500, 501, 501]
    assert ((shelf / "context.txt").read_text(), (shelf / "wrapper.txt").read_text()) == ("made", "wrapped")
    # The tiny model's greedy episode and its samples all score alike, so an advantage is what the argument adds.
    [update] = [row for row in rows if row["phase"] == "train"]
    assert {episode.reward for episode in episodes} == {0.0}
    assert update["share"] == pytest.approx(0.25) and update["advantage_seen"] == pytest.approx(2.0)
    assert 1000 < update["grad_norm"] < 1100  # by the training engine's own step
    check_update(folder.path / "profile" / "step_000001.json.gz")


@pytest.mark.parametrize(("overrides", "message"), [
    (["algorithm.advantage.name=valued"], 'algorithm.advantage "valued" needs a critic'),
    (["algorithm.advantage.name=less_greedy", "reward_model.path=x"], '"less_greedy" reads scores of the reward spec'),
    (["algorithm.advantage={name='multi_reward',args={terms=['a']}}", "reward_model.path=x"], '"multi_reward" reads scores of'),
    (["algorithm.loss.name=half"], 'algorithm.loss "half" needs algorithm.proximal = "recompute"'),
    (["algorithm.loss.name=haf"], "did you mean 'half'"),
    (["rollout.sampler={name='hundreds',args={fist=1}}"], "did you mean 'first'"),
    (["rollout.sampler={name='hundreds',args={first='x'}}"], "argument first = 'x': .*valid integer"),
    (["rollout.context={name='noted'}"], "argument 'into' is required"),
    (["rollout.context={name='truncate'}", "rollout.summary_model=x"], 'rollout.context.name = "compact" uses summaries'),
    (["env.wrappers=[{name='by_the_clock'}]"], "by_the_clock counts wall-clock time"),
    (["rollout.group_size=1"], 'use one of "gae", "gae_turns", "reinforce_pp", "remax"'),
    (["weights.route=tolt"], "did you mean 'told'"),
    (["trackers=[{name='line'}]"], "did you mean 'lines'"),
    (["trackers=[{name='lines'}]"], "argument 'file' is required"),
    (["engine=far"], "engine = far cannot be trained: it is too far"),
    (["engine=mine", "rollout.colocate=true"], 'only engine = "embedded", "vllm" can free'),
    (["engine=mine", "engine_args={slot=1}"], "did you mean 'slots'"),
    (["engine=mine", "optim.micro_tokens=299"], "optim.micro_tokens = 299: an episode may have 300 tokens"),
    (["model.engine=lift"], "model.engine: unknown name 'lift'; did you mean 'lifted'"),
    (["model.engine=lifted", "model.lora={}"], r'\[model.lora\]: model.engine = "lifted" does not .*do: "fsdp2"'),
    (["model.engine=lifted", "model.sequence_parallel=2"], 'sequence_parallel > 1: model.engine = "lifted" does not'),
    (["model.engine=lifted", "optim.prefix_sharing=on"], 'optim.prefix_sharing = "on": model.engine = "lifted" does not'),
    (["model.engine=lifted", "model.compile=true"], "1 rank cannot compile"),
    (["engine=embeded"], "did you mean 'embedded'"),
    (["engine=embedded", "engine_args={x=1}"], "unknown argument 'x'; known: cache"),
    (["model={path='api:openai/x'}"], "api:openai/x cannot be trained: .*can be evaluated"),
])  # fmt: skip
def test_what_a_plugin_needs_is_asked_for_before_the_run(shelf: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(run_of(*overrides))


def test_a_context_policy_that_has_summaries_written_may_have_a_model_for_it(shelf: Path) -> None:
    writer = ("rollout.summary_model=openai/x", "health.preflight=false")
    assert check_config(run_of(f"rollout.context={{name='noted',args={{into='{shelf}/made'}}}}", *writer)) == []


def test_an_engine_says_which_processes_it_has(shelf: Path) -> None:
    config = run_of("engine=far", "cluster.backend=ray")
    assert [RunRoles(EngineChoice(config, name)).names for name in ("far", "mine")] == [["actor", "rollout"], ["actor"]]
    with pytest.raises(ResourceError, match=r"cannot run 100 worker processes \(cluster.actors=1, far.count=99\)"):
        check_capacity(RunStart(config))


def test_agentrls_own_engines_are_what_they_say() -> None:
    """ "sleeps" is a promise of the maker; the class that it makes must keep it, and only an API is not a target of weights."""
    found = {entry.name: entry.make.engine() for entry in ENGINES.own()}
    targets = {name for name in ("api", "embedded", "vllm") if issubclass(found[name], WeightTarget)}
    assert targets == {"embedded", "vllm"}
    assert all(issubclass(cls, WeightTarget) or cls.untrainable != Engine.untrainable for cls in found.values())
    own = {name: vars(cls).get("sleep", WeightTarget.sleep) is not WeightTarget.sleep for name, cls in found.items()}
    assert own == {name: "sleeps" in ENGINES.entry(name).traits for name in found}


def test_a_name_is_registered_once_and_with_words_that_are_known(shelf: Path) -> None:
    own = {entry.name for entry in POLICY_LOSSES.own()}
    assert "half" in POLICY_LOSSES and "half" not in own and len(POLICY_LOSSES) == len(own) + 1
    assert set(POLICY_LOSSES) == own | {"half"}
    (shelf / "plugins/other.py").write_text(FILES["half"].replace("register(", "register(  "))
    with pytest.raises(ConfigError, match=r"two files register 'half': .*half.py and .*other.py"):
        POLICY_LOSSES.entry("half")
    with pytest.raises(ValueError, match="needs='baselin'; did you mean 'baseline'"):
        ADVANTAGES.register("x", needs={"baselin"})
    registry: Registry[Any] = Registry("kind", "NONE", "agentrl.utils.event_loop", traits={"fast": "is fast"})
    with pytest.raises(ValueError, match="traits='slow'; known: fast"):
        registry.register("x", traits={"slow"})
    (shelf / "plugins/other.py").write_text("POLICY_LOSSES.register(")
    with pytest.raises(ConfigError, match=r"other.py: not a Python file"):
        POLICY_LOSSES.entry("half")


@pytest.mark.parametrize("more", ["*, ", "*, own: Own = None, "])
def test_a_type_imported_for_checkers_alone_is_no_fault(here: Path, more: str) -> None:
    """It was a bare NameError, as of every `TYPE_CHECKING` that linters ask for; a class of one's own was pydantic's error."""
    (here / "plugins").mkdir()
    (here / "plugins" / "typed.py").write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        "from agentrl.rollout.collector import FILTERS\n"
        "if TYPE_CHECKING:\n    from agentrl import Group\n"
        "class Own:\n    pass\n"
        '@FILTERS.register("typed")\n'
        f"def typed(group: Group, {more}most: int = 1, where: Group = None): return most, where\n"
    )
    assert FILTERS.bind("typed", {"most": 2, "where": 3})(None) == (2, 3)
    with pytest.raises(ConfigError, match="argument most = 'a': Input should be a valid integer"):
        FILTERS.bind("typed", {"most": "a"})
    assert "own" not in more or FILTERS.bind("typed", {"own": 1})(None) == (1, None)


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])  # of a script without a guard, whose arguments are wrong
def test_only_the_file_that_is_asked_for_is_loaded(shelf: Path, error: str) -> None:
    (shelf / "plugins/broken.py").write_text(f'raise {error}("loaded")\nPOLICY_LOSSES.register("broken")')
    assert POLICY_LOSSES.entry("half").needs == {"proximal"} and "broken" in POLICY_LOSSES
    with pytest.raises(CatalogError, match=rf"broken.py does not load: {error}: loaded"):
        POLICY_LOSSES.entry("broken")


def test_a_plugin_of_another_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shelf: Path) -> None:
    assert POLICY_LOSSES.entry("half").name == "half"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "half" not in POLICY_LOSSES
    with pytest.raises(ConfigError, match="unknown name 'half'"):
        POLICY_LOSSES.entry("half")
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))
    assert POLICY_LOSSES.entry("half").name == "half"


def test_what_is_no_file_of_python_in_plugins_stops_no_run_or_is_named(here: Path) -> None:
    """An editor's lock is a link to nowhere, `.#mine.py`; another leaves a byte order mark; a file may be no text at all."""
    (folder := here / "plugins").mkdir()
    (folder / ".#mine.py").symlink_to("user@host.1")
    (folder / "folder.py").mkdir()
    source = "from agentrl.trainer.algorithms import ADVANTAGES\n@ADVANTAGES.register(name='marked')\ndef marked(batch): ...\n"
    (folder / "mine.py").write_bytes(b"\xef\xbb\xbf" + source.encode())
    assert ADVANTAGES.entry("marked").make.__name__ == "marked"
    assert "grpo" in ADVANTAGES
    (folder / "bytes.py").write_bytes(b"# ADVANTAGES.register(\xff\x00")
    with pytest.raises(ConfigError, match=r"bytes\.py: not a Python file"):
        ADVANTAGES.entry("marked2")
    (folder / "bytes.py").unlink()
    (folder / "twice.py").write_text(source + source.replace("def marked", "def other"))
    with pytest.raises(ConfigError, match=r"twice\.py: it registers 'marked' twice"):
        ADVANTAGES.entry("unheard")


# -- by an installed package -----------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with an installed package, which announces an advantage of its own and one that is not there."""
    site = tmp_path / "site"
    (site / "shop_pack").mkdir(parents=True)
    (site / "shop_pack/__init__.py").write_text("")
    (site / "shop_pack/credit.py").write_text(FILES["less_greedy"].replace("less_greedy", "packed"))
    info = site / "shop_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-pack\nVersion: 1.0\n")
    (site / "shop_pack/script.py").write_text("raise SystemExit(2)")
    points = {"packed": ".credit", "lost": ".gone", "grpo": ".credit", "other": "", "script": ".script"}
    lines = (f"algorithm.advantage/{name} = shop_pack{module}\n" for name, module in points.items())
    (info / "entry_points.txt").write_text("[agentrl.plugins]\n" + "".join(lines))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.syspath_prepend(str(site))
    _entry_points.cache_clear()
    yield site
    _entry_points.cache_clear()
    for name in ("shop_pack", "shop_pack.credit"):
        sys.modules.pop(name, None)
    for key in [key for key in ADVANTAGES._entries if key[1] == "shop_pack.credit"]:
        del ADVANTAGES._entries[key]


def test_an_installed_package_brings_an_advantage_that_a_config_names(installed: Path) -> None:
    """Its needs and its arguments are as those of a file; it is imported when the name is asked for."""
    assert "packed" in ADVANTAGES and "shop_pack" not in sys.modules
    check_config(run_of("algorithm.advantage={name='packed',args={plus=2.0}}"))
    assert ADVANTAGES.entry("packed").needs == {"baseline"}
    assert ADVANTAGES.entry("packed").make.__module__ == "shop_pack.credit"
    with pytest.raises(ConfigError, match=r"'packed': unknown argument 'pus'.*did you mean 'plus'"):
        check_config(run_of("algorithm.advantage={name='packed',args={pus=2.0}}"))
    assert "packed" not in POLICY_LOSSES


def test_a_file_of_the_working_folder_goes_before_an_installed_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "cwd/plugins").mkdir()
    file = tmp_path / "cwd/plugins/mine.py"
    file.write_text("from agentrl.trainer.algorithms import ADVANTAGES\n@ADVANTAGES.register('packed')\ndef mine(batch): ...\n")
    assert ADVANTAGES.entry("packed").make.__name__ == "mine"


@pytest.mark.parametrize(("name", "message"), [
    ("lost", "the entry point algorithm.advantage/lost names 'shop_pack.gone', which does not import: ModuleNotFoundError"),
    ("other", "shop_pack does not register 'other' when it is loaded"),
    ("script", "'shop_pack.script', which does not import: SystemExit"), ("packd", "did you mean 'packed'"),
])  # fmt: skip
def test_an_installed_package_that_does_not_hold_its_word_is_named(installed: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ADVANTAGES.entry(name)


def test_an_installed_package_takes_no_name_of_agentrl(installed: Path) -> None:
    assert ADVANTAGES.entry("grpo").make.__module__ == "agentrl.trainer.algorithms.advantages"
