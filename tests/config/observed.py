"""What the functions that read the config make of it, in numbers that a test can say beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig

from agentrl.cluster.worker import Mesh
from agentrl.config import TrainConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Message, Task, ToolCall, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Generation
from agentrl.rollout.group_ledger import GroupLedger
from agentrl.rollout.samplers import TaskChoice
from agentrl.run import engine_choice as engines
from agentrl.run import loop
from agentrl.run.assembly import Inputs
from agentrl.run.display import Display
from agentrl.trainer.pretrained import init_model, packaged_tokenizer
from agentrl.utils.errors import EngineError
from tests.players import Still, collector_of
from tests.run.starts import scorer_of

# -- models ----------------------------------------------------------------------------------------


def built_model(config: TrainConfig, out: Path) -> Any:
    """Parameters, shapes, positions and the spread of the weights of the model that `model.init` makes."""
    assert config.model.init is not None
    folder = init_model(config.model.init, out / "model", seed=config.seed)
    weights = load_file(folder / "model.safetensors")
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "o": "self_attn.o_proj", "up": "mlp.up_proj"}
    return {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "positions": AutoConfig.from_pretrained(folder).max_position_embeddings,
        **{key: tuple(weights[f"model.layers.0.{name}.weight"].shape) for key, name in names.items()},
        "std": weights["model.embed_tokens.weight"].std().item(),
    }


def sizes(
    layers: int = 1,
    hidden: int = 16,
    mlp: int = 16,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 8,
    context: int = 4096,
    std: float = 0.05,
) -> dict[str, Any]:
    """The same of a Qwen3 with tied embeddings, by hand: its parts are q, k, v, o, the norms of q and k, the three
    matrices of the MLP, two norms a layer and one at the end."""
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads) + 2 * head_dim
    parameters = len(packaged_tokenizer(64)) * hidden + layers * (attention + 3 * hidden * mlp + 2 * hidden) + hidden
    return {
        "parameters": parameters,
        "positions": context,
        "q": (heads * head_dim, hidden),
        "k": (kv_heads * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "up": (mlp, hidden),
        "std": pytest.approx(std, rel=0.02),
    }


def longest_answer(config: TrainConfig, out: Path) -> int:
    """Characters that a tool's answer may have."""
    return EnvRef.of(config.the_env, config.tools).build().toolbox.max_output


# -- episodes --------------------------------------------------------------------------------------


class Scribe(Still):
    """In an engine's place: makes the same call in every turn, and writes down how it was asked."""

    def __init__(self, renderer: Any, fail: bool) -> None:
        self.ids = renderer.assistant(Message("assistant", tool_calls=(ToolCall("list", {}),)))
        self.fail, self.asked, self.running, self.most = fail, [], 0, 0  # type: ignore[var-annotated]

    async def generate(self, token_ids: Sequence[int], sampling: Any, request_key: str) -> Any:
        self.asked.append((request_key, sampling))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        if self.fail:
            raise EngineError("away")
        ids = self.ids[: sampling.max_tokens]
        return Generation(list(ids), [-1.0] * len(ids), [0] * len(ids), "stop" if ids == self.ids else "length")


@cache
def renderer() -> Any:
    return make_renderer(packaged_tokenizer(4096))


def rollouts(config: TrainConfig, fail: bool = False) -> tuple[Any, Scribe, list[Any]]:
    """The collector of a session, its engine, and the episodes of its first group, as far as one comes together."""
    ref, engine = EnvRef.of(config.the_env, config.tools), Scribe(renderer(), fail)
    policy = Inputs(config, (), None, 0).policy(engine, renderer())  # type: ignore[arg-type]

    async def body() -> tuple[Any, Scribe, list[Any]]:
        collector = collector_of(ref, policy, scorer_of(config), config.rollout, context=4096, seed=config.seed)
        found = await collector._group(0, TaskChoice(0, env=ref.id))
        return collector, engine, found.trajectories

    return asyncio.run(body())


def admitted(config: TrainConfig, out: Path) -> int:
    """Groups that run before any update is done."""
    collector, _, _ = rollouts(config)
    count = 0
    while collector.ledger.admit() is not None:
        count += 1
    return count


def most_at_once(config: TrainConfig, out: Path) -> int:
    return rollouts(config)[1].most


def ends(config: TrainConfig, out: Path) -> Any:
    """Turns of each episode, and how it ended."""
    return [(len(episode.turns), episode.stop.value) for episode in rollouts(config)[2]]


def members(config: TrainConfig, out: Path) -> Any:
    """Members that were started, that came back, and that were cancelled."""
    collector, engine, found = rollouts(config)
    return len({key for key, _ in engine.asked}), len(found), collector.stats.cancelled


def asked(config: TrainConfig, out: Path) -> Any:
    """How the first request of each member says to sample."""
    _, engine, _ = rollouts(config)
    first = engine.asked[: config.rollout.group_size]
    return {(s.max_tokens, s.temperature, s.top_p, s.top_k) for _, s in first}


def told(config: TrainConfig, out: Path) -> Any:
    """From which token on the first request of each member asks where its tokens went."""
    _, engine, _ = rollouts(config)
    return {s.experts_from for _, s in engine.asked[: config.rollout.group_size]}


def tokens(config: TrainConfig, out: Path) -> Any:
    """Whether every episode ended for want of tokens, and by how many its ledgers are short of the bound."""
    found = rollouts(config)[2]
    short = {config.rollout.max_episode_tokens - sum(len(ledger) for ledger in episode.ledgers) for episode in found}
    return {episode.stop.value for episode in found}, min(short) >= 0 and max(short) < 40


def attempts(config: TrainConfig, out: Path) -> Any:
    """Requests of a group of two whose engine is away, and how many different seeds they have."""
    _, engine, _ = rollouts(config, fail=True)
    return len(engine.asked), len({sampling.seed for _, sampling in engine.asked})


# -- engines ---------------------------------------------------------------------------------------


def vllm_arguments(config: TrainConfig) -> Any:
    """The options with which a replica makes vLLM's AsyncEngineArgs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "model_context", lambda model, trust: 4096)
        engine: Any = engines.EngineChoice(config, "vllm").make("model")
    return engine._replicas._options


# -- the phases of a run ---------------------------------------------------------------------------


class Course:
    """A session without models: what a phase of a run calls, in order. Every evaluation finds 0.5."""

    def __init__(self, config: TrainConfig, out: Path) -> None:
        self.calls: list[tuple[str, Any]] = []
        ledger = GroupLedger(1, 0)
        tokens = TokenLedger()
        tokens.append_context([5], 0)
        tokens.append_sampled([6], [-1.0], [0], 0)
        member = Trajectory("made-up", Task("t", 0), ledgers=[tokens], turns=[], reward=0.5)

        async def collect() -> list[Group]:
            return [Group(ledger.version, 0, [member])]

        def trained(groups: list[Group]) -> None:
            ledger.version += 1

        self.member = member
        self.session: Any = SimpleNamespace(
            config=config,
            sft_threads=None,
            envs=[SimpleNamespace(name="key_value", scorer=SimpleNamespace(terms=[], measures=[]))],
            player=SimpleNamespace(metrics=dict),
            services={},
            engine=SimpleNamespace(forget=self.waited("forget", None)),
            display=Display(Console(quiet=True)),
            collector=SimpleNamespace(
                ledger=ledger, collect=collect, trained=trained, metrics=lambda: {"tokens_sampled": 0}, ahead=str, watch=Watch()
            ),
            watchdog=SimpleNamespace(read=dict),
            callbacks=SimpleNamespace(call=self.waited("on_step", None)),
            tracing=None,
            rest=self.waited("rest", None),
            learner=SimpleNamespace(step=self.waited("update", {}), tokens=None, sharing="off", hooks={}),
            publish=self.waited("publish", None),
            publisher=SimpleNamespace(prove=self.waited("prove", None)),
            saver=SimpleNamespace(
                check=self.waited("check", None),
                wait=self.waited("wait", None),
                is_new_best=lambda found: False,
                save=self.waited("save", None),
            ),
            folder=SimpleNamespace(warm_start=out / "warm"),
            actors=SimpleNamespace(arun=self.worker, in_processes=self.waited("in_processes", []), mesh=Mesh.of(None, 1)),
        )
        self.run_log: Any = SimpleNamespace(
            row=lambda *args: None,
            evaluation=self.waited("evaluation", True),
            trajectories=self.waited("write", None),
            writes=SimpleNamespace(check=self.waited("written", None), wait=self.waited("written", None)),
        )
        self.interrupt: Any = SimpleNamespace(requested=False, in_step=False)

    def waited(self, name: str, value: Any) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, self.session.collector.ledger.version))
            return dict(value) if isinstance(value, dict) else value

        return call

    async def worker(self, method: Any, *args: Any) -> Any:
        return [{"loss": 1.0}] * len(args[0]["counts"]) if method.__name__ == "sft_steps" else {"loss": 1.0}

    async def evaluated(self, player: Any, env: str, pairs: list[Any], *, seed: int, temperature: float, **more: Any) -> Any:
        """Episodes of which every second one is solved."""

        of = {"tasks": len(pairs), "seed": seed, "split": more["split"], "params": more.get("params", {})}
        self.calls.append(("evaluate", {"temperature": temperature, **of}))
        return [Trajectory("x", Task("t", 0), reward=float(right), success=right) for right in (True, False)]

    def all(self, name: str) -> list[Any]:
        """What was noted of each call of this name."""
        return [value for called, value in self.calls if called == name]


def course_of(config: TrainConfig, out: Path) -> Course:
    course = Course(config, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.run.session.run_tasks", course.evaluated)
        patch.setattr(loop, "EngineMeter", lambda engine: SimpleNamespace(read=course.waited("read", {})))
        asyncio.run(loop.train_loop(course.session, course.run_log, course.interrupt))
    return course


def at(name: str) -> Callable[[TrainConfig, Path], Any]:
    """After how many updates the loop called `name`."""
    return lambda config, out: course_of(config, out).all(name)


def first_evaluation(config: TrainConfig, out: Path) -> Any:
    return course_of(config, out).all("evaluate")[0]
