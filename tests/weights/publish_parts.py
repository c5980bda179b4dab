"""A trained actor, and how far an engine's logprobs are from its own."""

from typing import ClassVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Strategy
from agentrl.config.schema import AlgorithmConfig, ModelConfig
from agentrl.data.rows import collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.rollout.engine import Engine, Sampling
from agentrl.trainer.actor import Actor
from tests.trainer.train_batches import make_batch, toy_optim, train_batch, trajectories

PROMPT = list(range(20, 40))


def is_whole(part: nn.Module) -> bool:
    """Whether a part's own parameters, not those of parts further in, are gathered."""
    inner = {id(p) for m in part.modules() if isinstance(m, FSDPModule) and m is not part for p in m.parameters()}
    return any(not isinstance(p, DTensor) for p in part.parameters() if id(p) not in inner)


class Counting(Actor):
    """An actor that tells how much of a model a publish holds at once."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"most_whole": Broadcast()}

    def most_whole(self) -> tuple[int, int]:
        """The largest number of FSDP parts that were whole at the same time while the weights went by; all parts."""
        parts = [part for part in self._ready().module.modules() if isinstance(part, FSDPModule)]
        most = 0
        for _ in self._ready().tensors():
            most = max(most, sum(is_whole(part) for part in parts))
        return most, len(parts)


def trained(
    tiny: str,
    group: WorkerGroup[Actor] | None = None,
    steps: int = 3,
    model: ModelConfig | None = None,
    backend: str = "inline",
    ranks: int = 1,
    cls: type[Actor] = Actor,
) -> WorkerGroup[Actor]:
    """Actors (new ones, or those of `group`) after some large updates."""
    seed = 0
    if group is None:
        group = launch(cls, backend=backend, world_size=ranks, num_cpus=0.25)  # type: ignore[arg-type]
        group.run(Actor.init_model, tiny, model or ModelConfig(), toy_optim(lr=1e-2))
    else:
        seed = 50
    for step in range(steps):
        train_batch(group, Actor.update, make_batch(8, seed=seed + step), AlgorithmConfig(), step=step)
    return group


async def ledger_of(engine: Engine, version: int, temperature: float = 1.0) -> TokenLedger:
    """What the engine samples after a prompt, as an episode's ledger. Its tokens must carry `version`."""
    out = await engine.generate(PROMPT, Sampling(max_tokens=40, temperature=temperature, seed=5), "one")
    assert set(out.versions) == {version}
    ledger = TokenLedger()
    ledger.append_context(PROMPT, 0)
    ledger.append_sampled(out.token_ids, out.logprobs, out.versions, 0)
    return ledger


def gap(actors: WorkerGroup[Actor], ledger: TokenLedger, temperature: float = 1.0) -> float:
    """Largest difference of the engine's and the trainer's logprobs of the same tokens."""
    episodes = trajectories(2)  # one for each of two ranks
    for episode in episodes:
        episode.ledgers = [ledger]
    batch = collate(episodes)
    found = actors.run(Actor.compute_logprob, batch, temperature=temperature)["logprobs"].values()
    return float((found - batch["logprobs"].values()).abs().max())
