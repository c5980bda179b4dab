"""The routes that weights take: each is proved by the logprobs of the same tokens, with wrong weights as the control."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from agentrl.cluster.launch import launch
from agentrl.config.schema import ClusterConfig, LoraSection, ModelConfig, WeightsConfig
from agentrl.engines.api_models import LiteLlmEngine, ScriptedEngine
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.weights import base as routes
from agentrl.engines.weights import host_routes
from agentrl.engines.weights.base import ALIGN, PACKED, Adapter, Bucket, Lent, MembersChangedError, Named, Offer
from agentrl.engines.weights.parameters import Saving, expected_parameters
from agentrl.rollout.engine import Engine, Sampling
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.publish import Publisher, check_takes_weights, check_weights
from agentrl.utils.errors import ConfigError, EngineError
from tests import moe
from tests.publishing import Held, Holder, buckets_of, holder, publish, weights_of
from tests.weights.publish_parts import gap, ledger_of, trained

SMALL = 0.01
SMALL_BUCKETS = WeightsConfig(bucket_mib=SMALL)
LORA = ModelConfig(lora=LoraSection(rank=4, alpha=8.0))


@pytest.fixture
async def engine(tiny: str) -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(tiny)
    await made.start()
    yield made
    await made.close()


@pytest.mark.parametrize("route", ["auto", "memory", "shared", "disk"])
async def test_each_route_brings_the_weights_and_only_it_does(
    tiny: str, engine: EmbeddedEngine, tmp_path: Path, route: str
) -> None:
    """Into the embedded engine, twice: the second publish goes over slots that were used before."""
    actors = trained(tiny)
    cfg = WeightsConfig(route=route, bucket_mib=SMALL, folder=str(tmp_path))  # type: ignore[arg-type]
    publisher = Publisher(actors, engine, cfg)
    for temperature in (1.0, 0.7):
        # control: the engine's first weights do not explain the trainer
        assert gap(actors, await ledger_of(engine, 0, temperature), temperature) > 1e-2
    for version in (1, 2):
        await publisher.send(version)
        assert gap(actors, await ledger_of(engine, version)) < 1e-5
        cool = await ledger_of(engine, version, 0.7)
        assert gap(actors, cool, 0.7) < 1e-5 and gap(actors, cool, 1.0) > 1e-2  # control: another temperature
        if version == 1:
            trained(tiny, actors, steps=1)
            assert gap(actors, await ledger_of(engine, version)) > 1e-3  # control: one update behind
    assert publisher.route == (route if route != "auto" else "memory")
    await publisher.close()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("agentrl-weights")]


@pytest.mark.parametrize("route", ["shared", "disk"])
def test_a_bucket_is_a_copy(tiny: str, route: str) -> None:
    """An engine that loads late does not see weights of a later update, on routes that do not read them in place."""
    actors = trained(tiny)
    before = weights_of(actors)
    receiver = routes.open_receiver(actors.run(Actor.open_route, route, WeightsConfig(), 1), 0)
    bucket = actors.run(Actor.next_bucket, True)
    trained(tiny, actors, steps=1)
    assert bucket is not None
    found = dict(receiver.receive(bucket))
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in found)
    later = weights_of(actors)  # control: the update changed them
    assert not any(torch.equal(found[name], later[name]) for name in found if name.endswith("proj.weight"))


def test_nothing_is_left_in_shared_memory(tiny: str) -> None:
    sender = host_routes.SharedSender(1 << 20, 1)
    offer = sender.open()
    names = [Path(name) for name in offer.where[1:]]
    assert all(name.is_file() for name in names)
    receiver = routes.open_receiver(offer, 0)
    sender.attached()
    assert not any(name.exists() for name in names)  # a kill from here on leaves nothing
    bucket = next(sender.buckets(iter([("a", torch.arange(8.0))])))
    assert bucket is not None
    [(name, found)] = receiver.receive(bucket)
    assert name == "a" and torch.equal(found, torch.arange(8.0))


async def test_a_route_that_cannot_serve_says_why(
    tiny: str, engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(cfg: WeightsConfig) -> str | None:
        publisher = Publisher(actors, engine, cfg)
        await publisher.send(1)
        return publisher.route

    actors = trained(tiny, steps=0)
    with pytest.raises(ConfigError, match=r"weights\.folder .*nowhere"):
        await send(WeightsConfig(route="disk", folder=str(tmp_path / "nowhere")))
    monkeypatch.setattr(host_routes, "FOLDER", tmp_path / "none")
    with pytest.raises(ConfigError, match="this machine has no"):
        await send(WeightsConfig(route="shared"))
    # what another process would find: no sender of that key, and so no route
    monkeypatch.setattr(host_routes, "_open", {})
    real = host_routes.MemorySender.open
    monkeypatch.setattr(host_routes.MemorySender, "open", lambda self: replace(real(self), where=("other-1-0",)))
    with pytest.raises(ConfigError, match="in another process"):
        await send(WeightsConfig(route="memory"))
    assert await send(WeightsConfig(folder=str(tmp_path))) == "disk"  # auto goes on to the next


def test_another_machines_file_of_the_same_name_is_not_taken() -> None:
    sender = host_routes.SharedSender(1 << 12, 1)
    offer = sender.open()
    wrong = replace(offer, where=("00" * 16, *offer.where[1:]))
    with pytest.raises(ConfigError, match="does not read the memory"):
        routes.open_receiver(wrong, 0)
    sender.close()
    with pytest.raises(ConfigError, match="do not share memory"):
        routes.open_receiver(offer, 0)


def test_full_shared_memory_is_an_error_and_no_crash() -> None:
    before = set(host_routes.FOLDER.glob("agentrl-weights-*"))
    sender = host_routes.SharedSender(1 << 50, 1)
    with pytest.raises(ConfigError, match=r"no room .* lower weights\.bucket_mib"):
        sender.open()
    assert not set(host_routes.FOLDER.glob("agentrl-weights-*")) - before


async def test_a_broken_publish_is_refused_and_the_next_one_heals(tiny: str, engine: EmbeddedEngine) -> None:
    actors = trained(tiny)
    publisher = Publisher(actors, engine, SMALL_BUCKETS)
    await publisher.send(1)

    async def part() -> AsyncIterator[Bucket]:
        bucket = await actors.arun(Actor.next_bucket, True)
        assert bucket is not None
        yield replace(bucket, entries=bucket.entries[:-1])

    with pytest.raises(EngineError, match="were not published"):
        await engine.receive(2, part())
    with pytest.raises(EngineError, match="until a publish succeeds"):
        await ledger_of(engine, 2)
    await publisher.send(3)
    assert gap(actors, await ledger_of(engine, 3)) < 1e-5


class Gathers(Held):
    """Every start of the stream is a collective that all ranks must enter."""

    started = 0

    def tensors(self) -> Iterator[Named]:
        self.started += 1
        return super().tensors()


def test_ranks_start_a_stream_together_and_once() -> None:
    started = []
    for rank in (0, 1):
        engine = Gathers({f"w{i}": torch.zeros(8) for i in range(5)})
        source = holder(engine, rank)
        source.open_route("memory", WeightsConfig(bucket_mib=0.00001), 1)
        sent = [source.next_bucket(call == 0) for call in range(6)]  # the driver asks until rank 0 has no more
        assert [bucket is not None for bucket in sent] == ([True] * 5 + [False] if rank == 0 else [False] * 6)
        started.append(engine.started)
    assert started == [1, 1]


class Replaceable(EmbeddedEngine):
    """An engine one of whose processes was replaced: the route it had does not reach the new one."""

    name, attached = "a", ""

    def members(self) -> tuple[str, ...]:
        return (self.name,)

    async def attach(self, offer: Offer) -> None:
        await super().attach(offer)
        self.attached = self.name

    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        if self.name == "a" and version == 1:
            self.name = "b"  # just between attaching and the first bucket
        if self.attached != self.name:
            raise MembersChangedError("replaced")
        await super().receive(version, buckets)


async def test_a_replaced_process_is_attached_again(tiny: str) -> None:
    actors = trained(tiny)
    engine = Replaceable(tiny)
    await engine.start()
    publisher = Publisher(actors, engine, SMALL_BUCKETS)
    for version, name in ((1, "b"), (2, "b"), (3, "c")):
        if name == "c":
            engine.name = "c"
        await publisher.send(version)
        assert engine.attached == name
        assert gap(actors, await ledger_of(engine, version)) < 1e-5
    await engine.close()


class Losing(Replaceable):
    """One of its processes dies in the middle of the first publish, and the broadcast with it."""

    fails = True

    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        if self.fails:
            self.fails, self.name = False, "c" if version == 1 else self.name
            await anext(aiter(buckets))
            raise EngineError("the broadcast failed")
        await super().receive(version, buckets)


async def test_a_publish_that_a_dying_process_took_with_it_is_sent_again_to_the_others(tiny: str) -> None:
    actors, engine = trained(tiny), Losing(tiny)
    await engine.start()
    publisher = Publisher(actors, engine, SMALL_BUCKETS)
    await publisher.send(1)
    assert gap(actors, await ledger_of(engine, 1)) < 1e-5 and engine.attached == "c"
    engine.fails = True
    with pytest.raises(EngineError, match="the broadcast failed"):  # and nobody died
        await publisher.send(2)
    await engine.close()


@pytest.mark.parametrize(("engine", "why"), [(LiteLlmEngine, "an API model"), (ScriptedEngine, "a scripted policy")])
def test_an_engine_that_takes_no_weights_says_why_it_cannot_be_trained(engine: type[Engine], why: str) -> None:
    with pytest.raises(ConfigError, match=f"^this one cannot be trained: {why} "):
        check_takes_weights(engine, "this one")
    check_takes_weights(EmbeddedEngine, "this one")  # control: one that does


def test_what_weights_lora_cannot_be(tiny: str) -> None:
    adapter, cluster = WeightsConfig(lora="adapter"), ClusterConfig()
    with pytest.raises(ConfigError, match=r"needs \[model\.lora\]"):
        check_weights(adapter, cluster, colocated=False, lora=False, sft=False)
    check_weights(adapter, cluster, colocated=False, lora=True, sft=False)
    with pytest.raises(ConfigError, match=r"does not work with \[sft\]"):
        check_weights(adapter, cluster, colocated=False, lora=True, sft=True)
    with pytest.raises(ConfigError, match="has no adapter"):
        trained(tiny, steps=0).run(Actor.export_adapter)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    room=st.integers(256, 1024),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), min_size=30, max_size=30),
    align=st.sampled_from([ALIGN, PACKED]),
)
def test_buckets_hold_every_tensor_once_and_in_bounds(sizes: list[int], room: int, dtypes: list[torch.dtype], align: int) -> None:
    """Packed without gaps or not: a tensor that would begin where its type cannot be read begins the next bucket."""
    made = [(f"w{i}", torch.arange(n).to(kind)) for i, (n, kind) in enumerate(zip(sizes, dtypes, strict=False))]
    room = max(room, *(tensor.nbytes for _, tensor in made))
    sender, silent, found = host_routes.MemorySender(room, 1), host_routes.MemorySender(room, 1), list[Named]()
    sender.align = silent.align = align
    sender.open()  # the other is not
    quiet = silent.buckets(iter(made))
    for bucket in sender.buckets(iter(made)):
        assert bucket is not None and next(quiet, 0) is None, "ranks without a buffer stay in step"
        ends = [entry.offset + entry.nbytes for entry in bucket.entries]
        assert align != PACKED or [*[entry.offset for entry in bucket.entries][1:], bucket.nbytes] == ends
        assert ends[-1] <= bucket.nbytes <= room
        found += [(name, tensor.clone()) for name, tensor in bucket.cut(sender.slots[bucket.slot])]
    assert next(quiet, 0) == 0 and [name for name, _ in found] == [name for name, _ in made]
    with pytest.raises(ValueError, match=rf"weight 'large' has {room + 1} bytes, a bucket {room}"):
        list(sender.buckets(iter([*made, ("large", torch.zeros(room + 1, dtype=torch.uint8))])))
    sender.close()
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, made, strict=True))


@pytest.mark.parametrize("mib", [0.0625, 0.125, 64.0])
def test_bucket_mib_bounds_each_bucket_folder_is_where_it_lies_and_all_of_them_are_the_export(
    tiny: str, tmp_path: Path, mib: float
) -> None:
    """The tiny model's largest tensor, its embeddings, is 51 KB; every bucket but the last is filled to within it."""
    actors = trained(tiny)
    actors.run(Actor.export_hf, str(tmp_path / "export"))
    want = load_file(tmp_path / "export" / "model.safetensors")
    total, largest = sum(t.nbytes for t in want.values()), max(t.nbytes for t in want.values())
    folder = tmp_path / "buckets"
    folder.mkdir()
    offer = actors.run(Actor.open_route, "disk", WeightsConfig(bucket_mib=mib, folder=str(folder)), 1)
    receiver = routes.open_receiver(offer, 0)
    actors.run(Actor.next_bucket, True)  # of a publish that is broken off
    buckets, found = list[Bucket](), list[Named]()
    for bucket in buckets_of(actors):
        buckets.append(bucket)
        found += [(name, tensor.clone()) for name, tensor in receiver.receive(bucket)]
        file, _, number = bucket.file.rpartition(":")
        assert Path(file).is_relative_to(folder) and Path(file).is_file() and number == str(len(buckets) + 1)
        assert bucket.nbytes <= mib * 2**20
    assert largest <= mib * 2**20 and sum(bucket.nbytes for bucket in buckets) >= total
    assert all(bucket.nbytes > mib * 2**20 - largest for bucket in buckets[:-1]) and len(buckets) >= total / (mib * 2**20)
    assert sorted(name for name, _ in found) == sorted(want) and all(torch.equal(tensor, want[name]) for name, tensor in found)
    actors.run(Actor.close_route)
    assert not list(folder.iterdir())


async def test_an_adapter_alone_is_published_in_place_of_the_one_before(tiny: str, engine: EmbeddedEngine) -> None:
    actors = trained(tiny, model=LORA)
    publisher = Publisher(actors, engine, WeightsConfig(lora="adapter"))
    assert gap(actors, await ledger_of(engine, 0)) > 1e-3  # control: no adapter
    for version in (1, 2):
        await publisher.send(version)
        assert gap(actors, await ledger_of(engine, version)) < 1e-5
        trained(tiny, actors, steps=1)
        assert gap(actors, await ledger_of(engine, version)) > 1e-3  # control: the adapter of before
    wrong = actors.run(Actor.export_adapter)
    with pytest.raises(EngineError, match="is not a linear layer"):
        await engine.adapt(3, Adapter(4, 8.0, {f"z{n}": t for n, t in wrong.tensors.items()}))


def test_lent_weights_are_read_where_the_trainer_has_them() -> None:
    """Two parameters of one storage and one of its own, written again; a made tensor goes through the bucket."""
    both = torch.arange(64.0)
    held = {"a": both[:16], "b": both[16:].view(6, 8), "c": torch.full((3, 5), 7.0)}
    made = torch.full((4,), 9.0)
    sender = host_routes.MemorySender(1 << 12, 1)
    sender.lend(list(held.values()))
    receiver = routes.open_receiver(sender.open(), 0)
    sender.attached()
    bucket = next(sender.buckets(iter([*held.items(), ("made", made)])))
    assert bucket is not None
    assert [entry.lent is None for entry in bucket.entries] == [False, False, False, True]
    found = dict(receiver.receive(bucket))
    assert all(torch.equal(found[name], tensor) for name, tensor in [*held.items(), ("made", made)])
    both += 100.0
    held["c"][2, 4] = -1.0
    made.zero_()
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())
    assert found["made"].tolist() == [9.0] * 4
    receiver.close()
    sender.close()


def test_a_lent_tensor_is_found_in_the_region_that_holds_all_of_it() -> None:
    one, two = torch.zeros(10), torch.zeros(4, 6)
    lent = Lent([two, one])
    at = {region.data_ptr(): number for number, region in enumerate(lent.regions)}
    assert lent.find(one[3:5]) == (at[one.data_ptr()], 12)
    assert lent.find(two[1]) == (at[two.data_ptr()], 24)
    assert lent.find(two.t()) is None and lent.find(torch.zeros(1)) is None
    whole = torch.zeros(8)
    assert Lent([whole[:4]]).find(whole[2:6]) is None


def test_the_trainers_weights_are_lent_and_its_update_reaches_the_engine(tiny: str) -> None:
    """Publishing in a process after another optimizer step: every weight is the trainer's, and none was copied to a bucket."""
    actors = trained(tiny)
    for _ in range(2):
        offer = actors.run(Actor.open_route, "memory", SMALL_BUCKETS, 1)
        receiver = routes.open_receiver(offer, 0)
        actors.run(Actor.route_attached)
        found = {}
        for bucket in buckets_of(actors):
            assert all(entry.lent is not None for entry in bucket.entries)
            found |= {name: tensor.clone() for name, tensor in receiver.receive(bucket)}
        receiver.close()
        want = weights_of(actors)
        assert set(found) == set(want) and all(torch.equal(found[name], want[name]) for name in want)
        trained(tiny, actors, steps=1)


def test_an_older_bucket_of_a_network_file_system_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_routes, "STALE_S", 0.1)
    sender = host_routes.DiskSender(1 << 12, 1, str(tmp_path))
    lent = torch.arange(5.0)
    sender.lend([lent])
    receiver = routes.open_receiver(sender.open(), 0)
    named = [("made", torch.ones(3)), ("lent", lent), ("more", torch.ones(2, dtype=torch.int64))]
    bucket = next(sender.buckets(iter(named)))
    assert bucket is not None
    found = {name: tensor.tolist() for name, tensor in receiver.receive(bucket)}
    assert found == {"made": [1.0] * 3, "lent": [0.0, 1.0, 2.0, 3.0, 4.0], "more": [1, 1]}
    with pytest.raises(EngineError, match="bucket0 does not hold bucket 2"):
        receiver.receive(replace(bucket, file=bucket.file[:-1] + "2"))
    sender.close()


# -- mixtures of experts ---------------------------------------------------------------------------


NAMES = {  # one expert's weight, as the family's checkpoints name it; None: they have all of a layer in one tensor
    "qwen3_moe": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.7.w3.weight",
    "glm4_moe": "model.layers.1.mlp.experts.7.down_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.7.up_proj.weight",
    "granitemoe": None,
    "gpt_oss": None,
}


@pytest.mark.parametrize("family", NAMES)
def test_saved_tensors_are_those_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    model = moe.model(family)
    model.save_pretrained(tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    # each as it comes: a module's tensors in the same memory, one after the other
    found = {name: tensor.clone() for name, tensor in Saving(model).tensors(iter(model.state_dict().items()))}
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)
    expected = expected_parameters(str(tmp_path), saved=True)
    assert expected.shapes == {name: tuple(tensor.shape) for name, tensor in want.items()}
    if (name := NAMES[family]) is not None:
        fused = model.model.layers[1].mlp.experts
        part = {"gate_proj": fused.gate_up_proj[7, :64], "up_proj": fused.gate_up_proj[7, 64:], "down_proj": fused.down_proj[7]}
        kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(name.split(".")[-2], name.split(".")[-2])
        assert torch.equal(found[name], part[kind])


def test_tied_weights_have_the_names_of_checkpoints_too(tmp_path: Path) -> None:
    path = moe.build("mixtral", tmp_path, tie_word_embeddings=True)
    assert expected_parameters(path, saved=True).tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in expected_parameters(path, saved=True).shapes


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
async def test_the_embedded_engine_has_all_of_a_publish(family: str, tmp_path: Path) -> None:
    """A router's bias is a buffer: it decides which experts a token goes to, and is published like a parameter."""
    engine = EmbeddedEngine(moe.build(family, tmp_path), kv_cache_mib=64)
    await engine.start()
    model = moe.model(family)
    await publish(engine, 1, moe.shaken(model.state_dict(), seed=1))
    prompt = [(7 * at + 3) % moe.VOCAB for at in range(20)]
    answer = await engine.generate(prompt, Sampling(8, seed=1), "a")
    await engine.close()

    def gap() -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0, 19:-1]
        found = logits.float().log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None]).squeeze(1)
        return float((found - torch.tensor(answer.logprobs)).abs().max())

    assert gap() > 0.1  # control: the model before
    model.load_state_dict(moe.shaken(model.state_dict(), seed=1))
    assert gap() < 1e-4


def test_a_routers_bias_is_published_as_it_is_computed_with(tmp_path: Path) -> None:
    """In float32: rounded to bfloat16 it would choose other experts than the trainer's."""
    engine = FsdpEngine(moe.build("glm4_moe", tmp_path), ModelConfig(), 1.0)
    engine.compute_dtype = torch.bfloat16
    types = {name: tensor.dtype for name, tensor in engine.tensors()}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert types.pop(bias) == torch.float32 and set(types.values()) == {torch.bfloat16}
    held = dict(engine.tensors())
    assert torch.equal(held[bias], load_file(tmp_path / "model.safetensors")[bias].float())
    assert {name: tensor.dtype for name, tensor in engine.saving().expected.items() if "bias" in name} == {bias: torch.float32}


def test_every_family_can_be_exported(tmp_path: Path) -> None:
    """gpt-oss has no attention of torch's, which a skeleton was made with."""
    engine = FsdpEngine(moe.build("gpt_oss", tmp_path), ModelConfig(), 1.0)
    assert engine.saving().expected.keys() == load_file(tmp_path / "model.safetensors").keys()


async def test_a_target_says_which_names_it_loads(tmp_path: Path) -> None:
    from agentrl.engines.vllm.vllm_engine import VllmEngine

    path = moe.build("qwen3_moe", tmp_path)
    actors = launch(Holder, backend="inline")
    actors.run(Holder.hold, FsdpEngine(path, ModelConfig(), 1.0))
    names = {}
    for saved in (EmbeddedEngine.loads_saved, VllmEngine.loads_saved):
        offer = actors.run(Actor.open_route, "memory", WeightsConfig(bucket_mib=0.25), 1, saved)
        names[saved] = {entry.name for bucket in buckets_of(actors) for entry in bucket.entries}
        # the bucket is as large as asked for, as no expert is larger; all experts of a layer together are
        assert offer.slot_bytes == 256 << 10
    actors.run(Actor.close_route)
    assert names[False] == set(expected_parameters(path).shapes)
    assert names[True] == set(expected_parameters(path, saved=True).shapes)
    assert len(names[True]) - len(names[False]) == 2 * (3 * moe.EXPERTS - 2)
