"""`rollout.workers` of a run: what is refused before it, and real processes that are killed and stopped while it goes on."""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentrl.cli.main import main
from agentrl.cluster.placement import ClusterNode
from agentrl.config import TrainConfig, load_config
from agentrl.config.identity import check_resumed
from agentrl.config.schema import ClusterConfig
from agentrl.contrib.doctor import machine_checks as doctor
from agentrl.engines.vllm.vllm_maker import VllmMaker
from agentrl.run import role_placement
from agentrl.run.assembly import Inputs, RunStart
from agentrl.run.checks import size_checks
from agentrl.run.checks.size_checks import check_workers
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.role_placement import RunRoles
from agentrl.run.rollout_workers import recipe_of
from agentrl.utils.errors import ConfigError, ResourceError
from tests.conftest import proof
from tests.e2e.inside import config_of, execute, updates
from tests.rollout.loopback import Loopback, solve
from tests.run.broken_off import told
from tests.run.timelines import check_update, read

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def of(*overrides: str) -> TrainConfig:
    return load_config(QUICKSTART, list(overrides))


def worker_lines(config: TrainConfig) -> list[str]:
    return RunRoles(EngineChoice(config)).worker_lines()


def test_workers_need_processes_calls_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    check_workers(RunStart(of("cluster.backend=inline", "rollout.workers=0")))
    with pytest.raises(ConfigError, match=r'rollout.workers = 2: with cluster.backend = "inline" all of the run is in this'):
        check_workers(RunStart(of("cluster.backend=inline", "rollout.workers=2")))
    summaries = ("rollout.context.name=compact", "rollout.summary_model=openai/x", "rollout.workers=3")
    with pytest.raises(ConfigError, match=r"api.concurrency = 2 concurrent calls are shared by rollout.workers = 3"):
        check_workers(RunStart(of(*summaries, "api.concurrency=2"), purpose="eval"))
    nodes = [ClusterNode("a", 2.0, 0.0), ClusterNode("b", 1.0, 0.0)]
    for module in (role_placement, size_checks):
        monkeypatch.setattr(module, "nodes_of", lambda cluster, role: nodes)
    # 3 slots, of which an actor takes one: four halves are left, and six for an evaluation.
    check_workers(RunStart(of("rollout.workers=4")))
    with pytest.raises(ResourceError, match=r"each takes 0.5 CPU slots, and of 3 the run's other processes take 1; .* to 4,"):
        check_workers(RunStart(of("rollout.workers=5")))
    check_workers(RunStart(of("rollout.workers=6"), purpose="eval"))
    assert worker_lines(of("rollout.workers=4")) == [
        "rollout.workers: 4 processes of 0.5 CPU slots (of 3 on 2 nodes) and about 700 MiB each, spread over the nodes"
    ]
    assert worker_lines(of("rollout.workers=0")) == []
    # vLLM's replicas host as many workers as they are, which take no slots; any other number have processes of their own. That is
    # counted from the config alone, also on a machine without vLLM.
    monkeypatch.setattr(VllmMaker, "check_installed", lambda: None)
    inside = ("engine=vllm", "vllm.replicas=6", "rollout.workers=6")
    assert worker_lines(of(*inside)) == ["rollout.workers: 6, in the processes of the vllm engine"]
    check_workers(RunStart(of(*inside)))
    assert [EngineChoice(of(*inside, f"rollout.workers={n}")).worker_processes() for n in (5, 6, 7)] == [5, 0, 7]
    with pytest.raises(ResourceError, match=r"rollout.workers = 7: each takes 0.5 CPU slots"):
        check_workers(RunStart(of(*inside, "rollout.workers=7")))
    found = {workers: doctor._room_for(workers, ClusterConfig(), 3.0).level for workers in (4, 5)}
    assert found == {4: "ok", 5: "fail"}


def test_a_resume_with_another_number_of_workers_is_not_refused(tmp_path: Path) -> None:
    config = of("rollout.workers=2", f"out={tmp_path}")
    check_resumed(config, of("rollout.workers=7", f"out={tmp_path}"), tmp_path)
    with pytest.raises(ConfigError, match=r"rollout.groups was"):
        check_resumed(config, of("rollout.workers=2", "rollout.groups=9", f"out={tmp_path}"), tmp_path)


def test_what_a_worker_may_call_at_once() -> None:
    config = of("rollout.workers=3", "api.concurrency=8")
    recipe = recipe_of(Inputs(config, (), None, 0), None)
    assert recipe.inputs.config.api.concurrency == 2 and config.api.concurrency == 8


# -- real processes ----------------------------------------------------------------------------------

COMPACT = 'rollout.context={name="compact", args={tokens=230, summary_tokens=8, keep=1, prompt="note"}}'
# Each turn is computed by itself: its last digits do not depend on which others are at the engine in the same moment.
BRANCH = ["cluster.backend=ray", "rollout.temperature=0.8", "steps=2", COMPACT, "engine_args={cache=false}"]


UNLUCKY = '''
"""An environment that fails on one turn in five, by what the turn says: a retry says something else."""

import zlib

from agentrl.env.wrappers import WRAPPERS, ToolWrapper
from agentrl.utils.errors import EnvError


@WRAPPERS.register("unlucky")
class Unlucky(ToolWrapper):
    def __init__(self, env: ToolWrapper) -> None:
        super().__init__(env)

    async def astep(self, action):
        sampled = "".join(call.raw for call in action.tool_calls)  # a scripted turn has none
        if sampled and zlib.crc32(sampled.encode()) % 5 == 0:
            raise EnvError("out of luck")
        return await self.env.astep(action)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a plug-in, which workers must find."""
    home = tmp_path_factory.mktemp("home")
    (home / "plugins").mkdir()
    (home / "plugins" / "unlucky.py").write_text(UNLUCKY)
    return home


@pytest.fixture(scope="module")
def warm(home: Path) -> str:
    """A model that has seen enough transcripts to make calls."""
    sft = ("sft.max_steps=80", "sft.min_steps=80", "sft.gate_every=80", "sft.gate=0.0", "sft.gate_tasks=2")
    return f"model.path={execute(config_of(home, 'warm', *sft), only_warm_start=True) / 'warm_start'}"


def run_with(
    monkeypatch: pytest.MonkeyPatch, home: Path, warm: str, name: str, *more: str, resumed: bool = False
) -> tuple[Path, list[Any]]:
    """A run of two updates in this process; its folder, and the columns of its batches."""
    from agentrl.run import loop

    batches: list[Any] = []
    make = loop.make_batch

    def noted(*args: Any, **kwargs: Any) -> Any:
        batch = make(*args, **kwargs)
        batches.append({key: value.values().clone() if value.is_nested else value for key, value in tensors(batch)})
        return batch

    monkeypatch.chdir(home)
    monkeypatch.setattr(loop, "make_batch", noted)
    monkeypatch.setattr("agentrl.run.rollout_workers.SILENCE_S", 4.0)
    path = execute(config_of(home, name, warm, *BRANCH, *more), resumed=resumed)
    monkeypatch.undo()
    return path, batches


def tensors(batch: Any) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in batch.items() if isinstance(value, torch.Tensor)]


def both(folder: Path) -> list[Any]:
    """Every episode of both updates, without times."""
    return [row for step in (1, 2) for row in told(folder / f"trajectories/step_{step:06d}.jsonl")]


def same(one: tuple[Path, list[Any]], other: tuple[Path, list[Any]]) -> None:
    """Bit for bit: episodes, batches, and the weights after two updates."""
    assert both(one[0]) == both(other[0])
    assert len(one[1]) == len(other[1]) == 2
    for left, right in zip(one[1], other[1], strict=True):
        assert left.keys() == right.keys() and len(left) > 5
        assert [key for key in left if not torch.equal(left[key], right[key])] == []
    for step in (1, 2):  # what training made of the tokens, of several ledgers an episode and beside unscored members
        files = [(run[0] / "tokens" / f"step_{step:06d}.jsonl").read_text() for run in (one, other)]
        assert files[0] == files[1] and files[0].count("\n") == len(told(one[0] / f"trajectories/step_{step:06d}.jsonl"))
    weights = [load_file(run[0] / "final" / "model.safetensors") for run in (one, other)]
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []


def actors(home: Path) -> dict[int, str]:
    """The processes that run rollout workers of runs that were started in that folder, and their states."""
    found = {}
    for process in psutil.process_iter(["cmdline", "status", "cwd"]):
        if " ".join(process.info["cmdline"] or []).startswith("ray::RolloutWorker") and process.info["cwd"] == str(home):
            found[process.pid] = process.info["status"]
    return found


def meddle(folder: Path, after: str, number: int, sent: list[int]) -> None:
    """Send a signal to a worker as soon as that file of trajectories is there."""
    while not (folder / "trajectories" / after).exists():
        time.sleep(0.01)
    victim = min(set(actors(folder.parent)) - set(sent))
    sent.append(victim)
    os.kill(victim, number)


@proof
@pytest.mark.timeout(900)
def test_equal_seeds_give_equal_runs_for_any_number_of_workers_also_if_they_die_and_hang(
    home: Path, warm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several ledgers an episode, unscored members, retries and a temperature."""
    wrapped = ('env.wrappers=[{name="unlucky"}]', "rollout.min_survivors=2")
    alone = run_with(monkeypatch, home, warm, "none", *wrapped)
    rows = both(alone[0])
    assert any(len(row["ledgers"]) > 1 for row in rows), "no episode was rewritten"
    assert any(row["reward"] is None for row in rows), "no member was unscored"
    log = (alone[0] / "log.txt").read_text()
    assert "attempt 0: env_error: out of luck" in log and "attempt 1" in log
    begun = run_with(monkeypatch, home, warm, "one", *wrapped, "rollout.workers=2", "steps=1")
    one = run_with(monkeypatch, home, warm, "one", *wrapped, "rollout.workers=1", resumed=True)
    same(alone, (one[0], begun[1] + one[1]))
    assert [row["rollout/workers"] for row in updates(one[0])] == [2.0, 1.0]
    sent: list[int] = []
    signals = [("before_000000.jsonl", signal.SIGKILL), ("step_000001.jsonl", signal.SIGSTOP)]
    threads = [threading.Thread(target=meddle, args=(home / "two", *wait, sent), daemon=True) for wait in signals]
    for thread in threads:
        thread.start()
    more = ("rollout.workers=2", "profile.steps=[2]")
    two = run_with(monkeypatch, home, warm, "two", *wrapped, *more)
    same(alone, two)
    shown = read(two[0] / "profile" / "step_000002.json.gz")
    check_update(two[0] / "profile" / "step_000002.json.gz")
    members = [row for row in told(two[0] / "trajectories" / "step_000002.jsonl") if row["reward"] is not None]
    played = [e for (at, _), each in shown.tracks.items() if at.startswith("episodes in worker") for e in each]
    # By key: an episode whose worker was stopped in the middle was played twice.
    finished = {e["args"]["key"]: e["args"] for e in played if e["cat"] == "episode" and e["args"]["stop"] != "env_error"}
    turns = Counter((e["task"], e["turns"]) for e in finished.values())
    # Those of groups that were dropped were played too.
    assert Counter((row["task"]["id"], len(row["turns"])) for row in members) <= turns
    log = (two[0] / "log.txt").read_text()
    assert f"(pid {sent[0]}) is gone: its process ended" in log
    assert f"(pid {sent[1]}) is gone: nothing was heard of it for 4 s" in log
    assert updates(two[0])[-1]["rollout/respawns"] == 2.0
    assert actors(home) == {}, "a worker outlived its run"


@proof
@pytest.mark.timeout(400)
def test_evaluations_with_workers_are_those_without(home: Path, warm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model in the driver, and of an API model, of which each worker is a client."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    found: dict[str, list[Any]] = {"own": [], "api": []}
    with Loopback(solve) as server:
        models = {
            "own": [warm.partition("=")[2], "engine=embedded", "engine_args={cache=false}", "eval.temperature=0.7"],
            "api": ["api:openai/test", f"api.base={server.url}", "api.concurrency=4"],
        }
        for workers in (0, 2):
            for name, (model, *more) in models.items():
                out = home / f"eval-{name}-{workers}"
                asked = ["eval", "key_value", "--model", model, "-n", "4", "-k", "2", "--out", str(out), "env.params.calls=[2,3]"]
                assert main([*asked, *more, f"rollout.workers={workers}", "rollout.max_turns=6"]) == 0
                found[name].append(told(out / "trajectories.jsonl"))
    for row in (*found["api"][0], *found["api"][1]):
        del row["ledgers"]  # numbers of messages, which each client counts by itself
    assert found["own"][0] == found["own"][1] and found["api"][0] == found["api"][1]
    assert len(found["own"][0]) == len(found["api"][0]) == 8
    assert sum(row["success"] for row in found["api"][0]) > 4 and actors(home) == {}
