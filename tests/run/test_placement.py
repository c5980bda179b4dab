"""Keys that say in which processes the roles run, and with what they are started."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.engines.vllm import replicas
from agentrl.run import engine_choice as engines
from agentrl.run import role_placement as placement
from agentrl.run.checks.size_checks import check_placement
from agentrl.trainer import learner
from agentrl.utils.errors import ConfigError
from tests.run.starts import start_of
from tests.trainer.train_batches import toy_critic


def config_of(*overrides: str) -> TrainConfig:
    return config_from({"env": {"id": "key_value"}}, list(overrides))


def test_what_starts_a_role_gets_the_keys_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, dict[str, Any]] = {}

    def launch(cls: Any, *, name: str, **given: Any) -> Any:
        seen[name] = given

        async def arun(*args: Any) -> None:
            pass

        return SimpleNamespace(arun=arun, world_size=given["world_size"])

    monkeypatch.setattr(placement, "launch", launch)
    monkeypatch.setattr(learner, "launch", launch)
    monkeypatch.setattr("agentrl.cluster.placement.Pools", lambda *args: args)
    keys = ["cluster.backend=ray", "cluster.actors=3", "cluster.startup_timeout=7.0", "cluster.call_timeout=9.0"]
    config = config_of(*keys, "algorithm.advantage.name=gae", "algorithm.kl.coef=0.1")
    config = config.model_copy(update={"critic": toy_critic()})
    actors = placement.start_actors(config.model, config.cluster, None)
    asyncio.run(learner.Learner(config, actors).open("model"))
    common = {"backend": "ray", "world_size": 3, "mesh": {"dp": 3, "sp": 1}, "call_timeout": 9.0}
    assert seen == {
        "actor": {**common, "startup_timeout": 7.0},
        "critic": {**common, "on": actors},
        "reference": {**common, "on": actors},
    }
    pooled = config_of(*keys, "cluster.pools={p={}}", "cluster.roles={critic='p'}").cluster
    changed = config.model_copy(update={"cluster": pooled})
    pools = placement.RunRoles(engines.EngineChoice(changed, "embedded")).open_pools()
    assert pools == (pooled, ["critic"], 9.0, {}, {})
    inline = config_of(*keys, "cluster.backend=inline")
    assert placement.start_actors(inline.model, inline.cluster, None).world_size == 3 and seen["actor"]["backend"] == "inline"


@pytest.mark.parametrize("placed", [True, False])
def test_vllm_replicas_run_where_the_role_rollout_is_placed(monkeypatch: pytest.MonkeyPatch, placed: bool) -> None:
    """Two replicas with a pool of two: each is started with Ray's options of its slot; without a pool, with those of its own."""
    slots = [{"num_cpus": 0.5, "scheduling_strategy": f"slot {number}"} for number in range(2)]

    class Pools:
        def __contains__(self, role: str) -> bool:
            return placed and role == "rollout"

        def ray_options(self, role: str, gpus: int) -> list[dict[str, Any]]:
            assert (role, gpus) == ("rollout", 1)
            return slots

    started: list[dict[str, Any]] = []

    class Remote:
        def options(self, **options: Any) -> Any:
            started.append(options)
            return SimpleNamespace(remote=lambda given: None)

    monkeypatch.setattr(engines, "model_context", lambda model, trust: 4096)
    monkeypatch.setattr(replicas.ray, "remote", lambda **_: lambda cls: Remote())
    engine: Any = engines.EngineChoice(config_of("vllm.replicas=2"), "vllm").make("model", Pools())  # type: ignore[arg-type]
    for number in range(2):
        engine._replicas._spawn(number)
    assert [options.get("scheduling_strategy") for options in started] == (["slot 0", "slot 1"] if placed else [None, None])


@pytest.mark.parametrize(("rank", "published", "room"), [(8, "adapter", 8), (20, "adapter", 32), (8, "merged", None)])
def test_vllm_gets_room_for_an_adapter_of_the_rank_and_only_where_one_is_published(
    monkeypatch: pytest.MonkeyPatch, rank: int, published: Any, room: int | None
) -> None:
    """vLLM has room for ranks of 8, 16, 32, ... : the least that holds the adapter's."""
    monkeypatch.setattr(engines, "model_context", lambda model, trust: 4096)
    config = config_of(f"model.lora.rank={rank}", f"weights.lora={published}")
    engine: Any = engines.EngineChoice(config, "vllm").make("model")
    options = engine._replicas._options
    assert (options.get("max_lora_rank"), options.get("enable_lora", False)) == (room, room is not None)


MEMORY = "weights.route=memory rollout.max_episode_tokens=4096 model.init={}"


@pytest.mark.parametrize(("engine", "overrides", "said"), [
    ("embedded", "cluster.backend=inline cluster.actors=1", None),
    ("embedded", "cluster.backend=inline cluster.actors=2",
     r'cluster\.actors = 2.*cluster\.actors = 1 or cluster\.backend = "ray"'),
    ("embedded", "cluster.backend=ray cluster.actors=2", None),
    ("embedded", f"cluster.backend=inline {MEMORY}", None),
    ("embedded", f"cluster.backend=ray {MEMORY}",
     'weights.route = "memory" stays within a process, and cluster.backend = "ray" trains in processes of its own.*"auto"'),
    ("vllm", f"cluster.backend=inline {MEMORY}",
     'weights.route = "memory" stays within a process, and engine = vllm samples in processes of its own.*"auto"'),
    ("embedded", "cluster.backend=inline cluster.address=10.0.0.1:6379 model.init={}",
     r'cluster.address = "10\.0\.0\.1:6379": .*cluster.backend = "inline".*joins no cluster.*"ray"'),
])  # fmt: skip
def test_processes_that_cannot_be_as_the_config_has_them_are_refused(engine: str, overrides: str, said: str | None) -> None:
    """Several actors in the driver's process, a route within one process between several, an address that nobody would use."""
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_placement(start_of(config_of(f"engine={engine}", *overrides.split()), engine))
