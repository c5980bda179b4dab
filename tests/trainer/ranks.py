"""Ranks as forked processes over gloo: one import for all of them, while a Ray actor each costs seconds.

Run as a script it does everything that this room's tests want of several ranks, and leaves it in a folder:

    python ranks.py OUT MODEL       OUT/<layout>.pt: metrics and gradients;  OUT/killed_<world>/: checkpoints
"""

import contextlib
import importlib.util
import math
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist

import agentrl.trainer.train_engine
from agentrl.cluster.worker import Mesh, WorkerContext
from agentrl.config.schema import AlgorithmConfig, Choice, LoraSection, ModelConfig, OptimConfig
from agentrl.contrib.titan.engine import require_torchtitan
from agentrl.data.expert_routing import FREE
from agentrl.data.rows import collate, nested_tensor, offsets_of, select, wide
from agentrl.data.schedule import FRESH, ORIGIN
from agentrl.trainer.actor import Actor
from agentrl.trainer.attention import PACKED, register_packed_attention
from agentrl.trainer.checkpoint import Checkpoints
from agentrl.trainer.language_model import Micro, PolicyModule, share_tokens
from agentrl.trainer.minibatch import TERMS, Term, cut_update
from agentrl.trainer.parallel import Ulysses
from agentrl.trainer.roles import Critic, ModelRole, Reference
from agentrl.trainer.train_engine import TRAIN_ENGINES
from tests import moe
from tests.trainer.family_models import build
from tests.trainer.tiny_families import VOCAB, micro_of, tiny_model
from tests.trainer.train_batches import make_batch, sharing, toy_critic, toy_optim, trajectories

Body = Callable[[WorkerContext], None]

LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {},
    "gspo": {"loss": Choice(name="gspo"), "aggregate": "seq_mean_token_mean"},
    "clip_cov": {"loss": Choice(name="clip_cov", args={"share": 0.2, "low": 0.0, "high": 99.0})},
    "kl_cov": {"loss": Choice(name="kl_cov", args={"share": 0.2, "coefficient": 5.0})},
    "ledgers": {"aggregate": "seq_mean_token_mean", "minibatch": 3},
    "idle": {"aggregate": "seq_mean_token_sum", "loss": Choice(name="kl_cov", args={"share": 0.1, "coefficient": 5.0})},
    "rejection": {
        "proximal": "recompute",
        "correction": Choice(name="masked", args={"cap": 2.0}),
        "aggregate": "seq_mean_token_sum",
    },
    "added": {"aggregate": "seq_mean_token_mean"},
}
ULYSSES = ModelConfig(sequence_parallel=2)
BOTH = ModelConfig(sequence_parallel=2, replicas=2)
LAYOUTS: dict[str, tuple[dict[str, int], ModelConfig, int]] = {  # mesh, model, micro_tokens
    "one": ({"dp": 1}, ModelConfig(), 150),
    "one, small micro-batches": ({"dp": 1}, ModelConfig(), 64),
    "one, all rows packed": ({"dp": 1}, ModelConfig(), 100_000),
    "two": ({"dp": 2}, ModelConfig(), 150),
    "two, shared tokens": ({"dp": 1, "sp": 2}, ULYSSES, 150),
    "four, shared tokens in two replicas": ({"dp": 2, "sp": 2}, BOTH, 150),
}
TITAN = importlib.util.find_spec("torchtitan") is not None  # without it test_titan.py says why its layouts are left out
ENGINES = ["fsdp2", "titan"] if TITAN else ["fsdp2"]
LONG = bool(os.environ.get("AGENTRL_PROOFS"))
if TITAN:
    LAYOUTS["two, torchtitan"] = ({"dp": 2}, ModelConfig(engine="titan"), 150)
if TITAN and LONG:
    replicated = ModelConfig(engine="titan", replicas=2, sequence_parallel=2, activation_checkpointing=True)
    LAYOUTS["four, torchtitan, shared tokens in two replicas"] = ({"dp": 2, "sp": 2}, replicated, 150)
if LONG:
    LAYOUTS["four"] = ({"dp": 4}, ModelConfig(), 150)
    LAYOUTS["four, split matrices"] = ({"dp": 2, "sp": 1, "tp": 2}, ModelConfig(tensor_parallel=2), 150)
LOADS = [*LAYOUTS] if LONG else ["one", "two", "two, shared tokens"]
ONE_ROW = ModelConfig(packing="one_row")
FAMILIES: dict[str, tuple[str, dict[str, int], ModelConfig]] = {  # the model, the mesh, how it is computed
    "lfm2": ("lfm2", {"dp": 1}, ModelConfig()),
    "lfm2, two": ("lfm2", {"dp": 2}, ModelConfig(activation_checkpointing=True)),
    "lfm2, shared tokens": ("lfm2", {"dp": 1, "sp": 2}, ULYSSES),
    "lfm2, one row a pass on two": ("lfm2", {"dp": 2}, ONE_ROW),
    "qwen3_next": ("qwen3_next", {"dp": 1}, ModelConfig()),
    "qwen3_next, shared tokens": (
        "qwen3_next",
        {"dp": 1, "sp": 2},
        ULYSSES.model_copy(update={"activation_checkpointing": True}),
    ),
    "qwen3_next, one row a pass on two": ("qwen3_next", {"dp": 2}, ONE_ROW),
}
KILLED = [(2, 1), *([(1, 0), (2, 2), (4, 3)] if LONG else [])]  # ranks, seed of the moment


class UpdateLog:
    """In an optimizer's place: notes the whole gradient of each step, and steps not."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]]) -> None:
        self.named, self.seen = named, []

    def set_rate(self, factor: float) -> None: ...
    def drop(self) -> None: ...

    def step(self) -> None:
        found = {}
        for name, parameter in self.named:
            grad = parameter.grad
            assert grad is not None, name
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            parameter.grad = None
        self.seen.append(found)


def logged(role: Any) -> UpdateLog:
    """The log of a role's steps from now on."""
    role._engine.optimizers = log = UpdateLog(role._engine.named_weights())
    return log


def forked(mesh: dict[str, int], folder: Path, body: Body) -> list[int]:
    """Start `body` on every rank of a mesh; the processes' ids."""
    grid = Mesh.of(mesh, math.prod(mesh.values()))
    store = folder / f"store_{time.monotonic_ns()}"
    found = []
    for rank in range(grid.world_size):
        child = os.fork()
        if child:
            found.append(child)
            continue
        try:
            if grid.world_size > 1:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=grid.world_size)
            body(WorkerContext("ranks", rank, grid))
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return found


def join(children: list[int]) -> None:
    """Wait for all; ends the program if one failed (the others would wait for it for ever)."""
    for _ in children:
        child, status = os.wait()
        if status:
            for other in children:
                if other != child:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with status {status}")


def mine(worker: type[Actor | Critic], batch: Any, algorithm: AlgorithmConfig, context: WorkerContext) -> Any:
    """This rank's rows of an update, as the learner cuts it and the dispatch table shards it."""
    cut = cut_update(batch, algorithm, context.mesh.size("dp"), step=1, policy=worker is Actor)
    shipment = worker.dispatch_table["update"].scatter("ranks", (cut,), {}, context.mesh)
    return select(shipment.batch, shipment.rows[context.rank])


def measured(tiny: str, out: Path, layout: str) -> Body:
    """Metrics and gradients of one update for each loss, and of the critic."""
    _, model, cap = LAYOUTS[layout]

    def body(context: WorkerContext) -> None:
        optim = toy_optim(micro_tokens=cap, max_grad_norm=1e9)
        found: dict[str, Any] = {}
        actor = Actor(context)
        actor.init_model(tiny, model, optim)
        for name, change in LOSSES.items():
            algorithm = AlgorithmConfig(minibatch=7).model_copy(update=change)
            update_log = logged(actor)
            batch = mine(Actor, BATCHES.get(name, noisy)(), algorithm, context)
            metrics = actor.update(batch, algorithm, step=1)
            found[name] = metrics, update_log.seen
        found["broken"] = after_broken(tiny, model, optim, out / f"{layout}, trained", context)
        if "critic" in TRAIN_ENGINES.entry(model.engine).traits:
            found["critic"] = of_critic(tiny, model, optim, context)
        if "router_replay" in TRAIN_ENGINES.entry(model.engine).traits:
            # no part of an expert
            whole = model if model.tensor_parallel == 1 else model.model_copy(update={"expert_parallel": 2})
            found["routed"] = of_routers(str(out / "moe"), whole, optim, context)
            if layout in LOADS:
                found["loads"] = loads(str(out / "moe"), whole, optim.model_copy(update={"micro_tokens": 400}), context)
        if context.rank == 0:
            torch.save(found, out / f"{layout}.pt")

    return body


def of_families(out: Path, mesh: dict[str, int]) -> Body:
    """Metrics and gradients of an update, and the critic's values, of every entry of FAMILIES on that mesh."""

    def body(context: WorkerContext) -> None:
        for name, (family, wanted, model) in FAMILIES.items():
            if wanted != mesh:
                continue
            actor, critic, algorithm = Actor(context), Critic(context), AlgorithmConfig(minibatch=7)
            actor.init_model(str(out / family), model, toy_optim(micro_tokens=400, max_grad_norm=1e9))
            update_log = logged(actor)
            batch = mine(Actor, sharing(noisy(120), "on"), algorithm, context)
            metrics = actor.update(batch, algorithm, step=1, temperature=0.7)
            critic.init_model(str(out / family), model, toy_optim(micro_tokens=400), toy_critic())
            torch.nn.init.constant_(critic._engine.module.head.weight, 0.05)
            values = critic.compute_values(batch)["values"].values()
            if context.rank == 0:
                torch.save((metrics, update_log.seen, batch["token_ids"].values(), values), out / f"{name}.pt")

    return body


def of_routers(path: str, model: ModelConfig, optim: OptimConfig, context: WorkerContext) -> Any:
    """Metrics and gradients of an update with dictated experts, also in layers that are computed again."""
    actor, algorithm = Actor(context), AlgorithmConfig(minibatch=7)
    actor.init_model(path, model.model_copy(update={"activation_checkpointing": True}), optim)
    update_log = logged(actor)
    return actor.update(mine(Actor, routed(), algorithm, context), algorithm, step=1), update_log.seen


def loads(path: str, model: ModelConfig, optim: OptimConfig, context: WorkerContext) -> list[dict[str, float]]:
    """Metrics of such an update of rows that begin alike, without shared prefixes and with them."""
    actor, algorithm, found = Actor(context), AlgorithmConfig(minibatch=13), []
    actor.init_model(path, model, optim)
    logged(actor)
    for mode in ("off", "on"):
        batch, _ = by_token(sharing(noisy(120), mode), 2)
        found.append(actor.update(mine(Actor, batch, algorithm, context), algorithm, step=1))
    return found


def of_critic(tiny: str, model: ModelConfig, optim: OptimConfig, context: WorkerContext) -> Any:
    """Metrics and gradients of an update of a critic."""
    critic, algorithm = Critic(context), AlgorithmConfig(minibatch=7)
    critic.init_model(tiny, model, optim, toy_critic(clip=None))
    torch.nn.init.constant_(critic._engine.module.head.weight, 0.05)
    update_log = logged(critic)
    batch = mine(Critic, noisy(), algorithm, context)
    batch["values"] = critic.compute_values(batch)["values"]
    return critic.update(batch, algorithm, step=1), update_log.seen


SHARDED = {"plain": ModelConfig(), "replicas": ModelConfig(replicas=2), "adapters": ModelConfig(lora=LoraSection(rank=2))}
if TITAN and LONG:
    SHARDED["torchtitan"] = ModelConfig(engine="titan")


def reduced(tiny: str, out: Path) -> Body:
    """Gradients, and the most numbers of them kept between micro-batches, with `shard_gradients` and without."""

    def body(context: WorkerContext) -> None:
        found: dict[str, Any] = {}
        for name, model in SHARDED.items():
            for often in (None, False, True):
                actor, algorithm = Actor(context), AlgorithmConfig(minibatch=13)
                actor.init_model(tiny, model.model_copy(update={"shard_gradients": often}), toy_optim(micro_tokens=64))
                engine, update_log = actor._engine, logged(actor)
                kept, backward = [], engine.backward

                def counted(loss: Any, last: bool, engine=engine, kept=kept, backward=backward) -> None:
                    backward(loss, last)
                    if not last:
                        kept.append(gradients_kept(engine))

                engine.backward = counted
                actor.update(mine(Actor, noisy(), algorithm, context), algorithm, step=1)
                size = sum(p.numel() for _, p in engine.named_weights())
                found[f"{name} {often}"] = update_log.seen, max(kept), len(kept), size
        found["base"] = of_base(tiny, context)
        found["moved"] = moved(tiny, context)
        found["waited"] = {engine: [waiting(tiny, context, engine, away) for away in (False, True)] for engine in ENGINES}
        if context.rank == 0:
            torch.save(found, out / "reduced.pt")

    return body


def waiting(tiny: str, context: WorkerContext, engine: str, away: bool) -> tuple[Any, dict[str, torch.Tensor], list[int]]:
    """Two updates of a rank that gives its memory back after each, or keeps it: metrics, weights, bytes that were left."""
    agentrl.trainer.train_engine.check_on_host, left, rows = lambda cfg: None, [], []
    actor, algorithm = Actor(context), AlgorithmConfig(minibatch=7)
    actor.init_model(tiny, ModelConfig(engine=engine, offload="idle"), toy_optim())
    for _ in range(2):
        batch = mine(Actor, noisy(), algorithm, context)
        actor.compute_logprob(batch)  # leaves the outermost part unsharded
        if away:
            actor.offload()
        rows.append(actor.update(batch, algorithm, step=1))
        if away:
            actor.offload()
            held = [*actor._ready(onload=False).module.parameters(), *actor._ready(onload=False).optimizers.tensors()]
            left.append(sum(tensor.to_local().untyped_storage().nbytes() for tensor in held))
    return rows, weights_on(actor), left


def of_base(tiny: str, context: WorkerContext) -> list[torch.Tensor]:
    """Logprobs of this rank's rows after an update of adapters: the actor's own, its frozen base's, a separate reference's."""
    actor, reference, algorithm = Actor(context), Reference(context), AlgorithmConfig(minibatch=7)
    actor.init_model(tiny, SHARDED["adapters"], toy_optim(lr=0.02))
    reference.init_model(tiny, ModelConfig(), toy_optim())
    batch = mine(Actor, noisy(), algorithm, context)
    for _ in range(2):  # the second matrix of an adapter starts at zero, and the first has no gradient until it is not
        actor.update(batch, algorithm, step=1)
    asked = (actor.compute_logprob, actor.compute_reference, reference.compute_logprob)
    return [method(batch)["logprobs"].values() for method in asked]


def moved(tiny: str, context: WorkerContext) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """Weights of the policy and of a reference that follows it, before an update and after it, then without memory; and the
    logprobs of this rank's rows by both at the end. A forward pass before each step leaves the outermost part unsharded."""
    actor, reference, algorithm = Actor(context), Reference(context), AlgorithmConfig(minibatch=7)
    actor.init_model(tiny, ModelConfig(), toy_optim())
    reference.init_model(tiny, ModelConfig(), toy_optim())
    actor.show("policy")
    batch, weights = mine(Actor, noisy(), algorithm, context), [weights_on(reference)]
    actor.update(batch, algorithm, step=1)
    for decay in (0.75, 0.0):
        actor.compute_logprob(batch)
        reference.compute_logprob(batch)
        reference.follow("policy", decay)
        logprobs = [role.compute_logprob(batch)["logprobs"].values() for role in (actor, reference)]
        weights += [weights_on(actor), weights_on(reference)]
    return weights, logprobs


SPREAD = ["gpt-oss", "gemma2", "deepseek-v3", "llama4"]  # sinks, caps and windows, narrow values, chunks


def spread(out: Path) -> Body:
    """logprobs and gradients of families whose heads these ranks split, of rows and of a prefix with three suffixes, and those of
    one rank: for each, the largest difference of a logprob, and of a gradient as a share of its size or of the largest one's."""

    def body(context: WorkerContext) -> None:
        register_packed_attention()
        found = {}
        for family in SPREAD:
            model = tiny_model(family)
            model.set_attn_implementation(PACKED)
            policy = PolicyModule(model)
            for prefix in (0, 9):
                ids = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
                rows = [torch.cat([ids[:prefix], ids[9 : 9 + n]]) for n in (10, 2, 18)]
                micro = micro_of(rows, prefix)
                alone, expected = of_policy(policy, micro)
                logprobs, grads = of_policy(policy, share_tokens(micro, Ulysses(dist.group.WORLD)))
                for grad in grads.values():
                    dist.all_reduce(grad)
                top = max(grad.norm().item() for grad in expected.values())
                off = {n: (g - expected[n]).norm().item() / max(expected[n].norm().item(), 1e-2 * top) for n, g in grads.items()}
                found[family, prefix] = (logprobs - alone).abs().max().item(), off
        if context.rank == 0:
            torch.save(found, out / "spread.pt")

    return body


def of_policy(policy: PolicyModule, micro: Micro) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs, _ = policy(micro, 0.8, False)
    weights = torch.linspace(-1.0, 1.0, len(logprobs))
    names, parameters = zip(*policy.named_parameters(), strict=True)
    # A parameter that only the other rank's tokens or heads use has no gradient on this one.
    grads = torch.autograd.grad((logprobs * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
    return logprobs.detach(), dict(zip(names, grads, strict=True))


def gradients_kept(engine: Any) -> int:
    """Numbers of the gradients that a rank holds, whole or sharded, by FSDP2's own account."""
    total = 0
    states = {id(state): state for part in engine._parts() if (state := part._get_fsdp_state())}  # modules may share one
    for state in states.values():
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one
        for group in filter(None, groups):  # none if submodules have all parameters
            total += 0 if group._partial_reduce_output is None else group._partial_reduce_output.numel()
            for held in group.fsdp_params:
                shard = held.sharded_param.grad
                grads = [held.unsharded_accumulated_grad, held.unsharded_param.grad, None if shard is None else shard.to_local()]
                total += sum(grad.numel() for grad in grads if grad is not None)
    return total


def after_broken(tiny: str, model: ModelConfig, optim: OptimConfig, saved: Path, context: WorkerContext) -> tuple[Any, Any]:
    """Metrics and weights after an update of two minibatches, one with an infinite advantage; also saved to a folder."""
    actor, algorithm = Actor(context), AlgorithmConfig(minibatch=7)
    actor.init_model(tiny, model, optim)
    batch = noisy()
    batch["advantages"].values()[int(batch["sampled"].values().nonzero()[-1])] = math.inf
    metrics = actor.update(mine(Actor, batch, algorithm, context), algorithm, step=1)
    actor.save(str(saved))
    return metrics, [weights_on(actor)]


def weights_on(actor: ModelRole) -> dict[str, torch.Tensor]:
    """Copies of all weights, on every rank; a collective."""
    return {name: tensor.cpu().clone() for name, tensor in actor._ready().tensors()}


def noisy(longest: int = 40) -> Any:
    """13 rows (ragged for every rank count) whose old logprobs lie around those of an untrained model."""
    batch = make_batch(13, seed=3, longest=longest)
    sampled = batch["sampled"].values()
    generator = torch.Generator().manual_seed(5)
    noise = -6.0 + 0.3 * torch.randn(len(sampled), generator=generator)
    batch["logprobs"].values().copy_(noise * sampled)
    returns = torch.randn(len(sampled), generator=generator) * sampled
    near = (noise + 0.5 * torch.randn(len(sampled), generator=generator)) * sampled
    columns = {"returns": returns, "old_logprobs": near}
    return batch.update({name: nested_tensor(column, offsets_of(batch["sampled"])) for name, column in columns.items()})


def of_ledgers() -> Any:
    """The rows of `noisy` as five episodes of one to five ledgers."""
    batch = noisy()
    batch["group"], batch["member"] = torch.zeros(13, dtype=torch.int64), torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4])
    return batch


def idle() -> Any:
    """The rows of `noisy`, of which two in three have no advantage."""
    batch = noisy()
    batch["advantages"].values()[: int(offsets_of(batch["advantages"])[9])] = 0.0
    return batch


def routed(experts: int = moe.EXPERTS) -> Any:
    """The rows of `noisy` whose tokens went to two random experts in each of two layers, the last of each row to none."""
    batch = noisy()
    offsets = offsets_of(batch["sampled"])
    scores = torch.rand(int(offsets[-1]), 2, experts, generator=torch.Generator().manual_seed(7))
    chosen = scores.topk(moe.CHOSEN).indices.to(torch.uint8)
    chosen[offsets[1:] - 1] = FREE[torch.uint8]
    return batch.update({"experts": nested_tensor(chosen, offsets)})


def by_token(batch: Any, routers: int) -> tuple[Any, torch.Tensor]:
    """Rows whose tokens went to two experts that hang on the token alone; and these: [ids, routers, 2]."""
    scores = torch.rand(moe.VOCAB, routers, moe.EXPERTS, generator=torch.Generator().manual_seed(9))
    table = scores.topk(moe.CHOSEN).indices.to(torch.uint8)
    ids = batch["token_ids"]
    return batch.clone().update({"experts": nested_tensor(table[ids.values().long()], offsets_of(ids))}), table


def added() -> Any:
    """The rows of `noisy`, of which the last four were added: two in the policy loss, one in each other term."""
    batch = noisy()
    batch[ORIGIN] = torch.tensor([FRESH] * 9 + [1, 1, 2, 3])
    terms = Term("experience", False, 0.7), Term("imitated", True, 0.7), Term("demonstrations", True, 0.3)
    return batch.update({TERMS: wide(terms, len(batch))})


BATCHES: dict[str, Callable[[], Any]] = {"ledgers": of_ledgers, "idle": idle, "added": added}


def saving_for_ever(tiny: str, root: Path) -> Body:
    """Train and save in the background, over and over; rank 0 says what it began and what is whole."""

    def body(context: WorkerContext) -> None:
        actor = Actor(context)
        actor.init_model(tiny, ModelConfig(), toy_optim())
        critic = Critic(context)  # in the same processes, as in a run: two saves at once
        critic.init_model(tiny, ModelConfig(), toy_optim(), toy_critic())
        checkpoints = Checkpoints(root, keep=2)
        batch, algorithm = collate(trajectories(8)), AlgorithmConfig(minibatch=8)
        batch["advantages"] = batch["logprobs"].clone()
        for step in range(1, 1000):
            actor.update(mine(Actor, batch, algorithm, context), algorithm, step=step)
            if context.rank == 0:
                checkpoints.begin(step)
            weights = weights_on(actor)
            if context.rank == 0:
                torch.save(weights, root.parent / f"weights_{step}.pt.new")
                (root.parent / f"weights_{step}.pt.new").rename(root.parent / f"weights_{step}.pt")
            if context.mesh.world_size > 1:
                dist.barrier()
            aside = root / f".writing_step_{step:06d}"
            actor.begin_save(str(aside / "actor"))
            critic.begin_save(str(aside / "critic"))
            tell(root, context, f"began {step}")
            while not together(actor.is_saved() and critic.is_saved()):  # training goes on meanwhile
                actor.compute_logprob(batch)
            if context.rank == 0:
                checkpoints.commit(step)
            tell(root, context, f"whole {step}")

    return body


def together(done: bool) -> bool:
    """Whether it is done on all ranks: they must leave a loop with collectives in it at the same moment."""
    if not dist.is_initialized():
        return done
    flag = torch.tensor(int(done))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def tell(root: Path, context: WorkerContext, text: str) -> None:
    if context.rank == 0:
        with (root.parent / "said").open("a") as file:
            file.write(text + "\n")


def together_on(bodies: list[Body]) -> Body:
    """All of them, one after the other: bodies on one mesh share its processes, and what a rank's first collectives cost."""

    def body(context: WorkerContext) -> None:
        for each in bodies:
            each(context)

    return body


def main(out: Path, tiny: str) -> None:
    moe.build("qwen3_moe", out / "moe")
    for family in ("lfm2", "qwen3_next"):
        build(family, out / family)
    import torch._dynamo  # noqa: F401  # FSDP2 imports it when it first shards

    # What the ranks would each import; a forward pass alone, as autograd must not be in use when a process forks.
    actor = Actor(WorkerContext("ranks", 0, Mesh.of({"dp": 1}, 1)))
    actor.init_model(tiny, ModelConfig(), toy_optim())
    actor.compute_logprob(noisy())
    if TITAN:
        require_torchtitan()
    work: dict[tuple[tuple[str, int], ...], list[Body]] = {}
    for layout, (mesh, _, _) in LAYOUTS.items():
        work.setdefault(tuple(mesh.items()), []).append(measured(tiny, out, layout))
    for mesh in ({"dp": 1}, {"dp": 2}, {"dp": 1, "sp": 2}):
        work[tuple(mesh.items())].append(of_families(out, mesh))
    work[("dp", 1), ("sp", 2)].append(spread(out))
    work[(("dp", 2),)].append(reduced(tiny, out))  # the last: it has this process think that it is no host
    for axes, bodies in work.items():
        join(forked(dict(axes), out, together_on(bodies)))
    for world, seed in KILLED:
        folder = out / f"killed_{world}_{seed}"
        folder.mkdir()
        children = forked({"dp": world}, folder, saving_for_ever(tiny, folder / "checkpoints"))
        said, deadline = folder / "said", time.monotonic() + 120  # all ranks are killed some time after the third save began
        while not (said.exists() and "began 3\n" in said.read_text()):
            if time.monotonic() > deadline or os.waitpid(children[0], os.WNOHANG)[0]:
                sys.exit("the third save did not begin")
            time.sleep(0.001)
        time.sleep(random.Random(seed).uniform(0.0, 0.03))
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
