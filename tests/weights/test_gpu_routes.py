"""Routes from GPU to GPU on a CPU: refusals, forms and vLLM's own engines; tests/gpu proves the rest."""

import contextlib
import pickle
from base64 import b64encode
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config.schema import ClusterConfig, WeightsConfig
from agentrl.engines.vllm.transfer import TRANSFERS, IpcTransfer, open_receiving_end
from agentrl.engines.weights import base as routes
from agentrl.engines.weights import distributed_routes
from agentrl.engines.weights import host_routes as shared
from agentrl.engines.weights.base import ROUTES, SLOTS, Named, Sender
from agentrl.trainer import actor as source
from agentrl.trainer import publish
from agentrl.utils.errors import ConfigError
from tests.publishing import Held, holder

WEIGHTS: list[Named] = [
    (f"layers.{i}.weight", torch.randn(rows, 3, generator=torch.Generator().manual_seed(i)).bfloat16())
    for i, rows in enumerate((4, 7, 2, 9, 5, 1))
]
ROOM = 64  # bytes: 24 + 42 do not fit


class Cards:
    """The memory of GPUs by the handles that CUDA would give, and how often each was mapped."""

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.mapped: list[str] = []
        self.current = 0

    def reduce(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        name = f"handle {len(self.memory)}"
        self.memory[name] = tensor
        return None, (Tensor, tensor.shape, (1,), 0, None, torch.uint8, self.current, name)

    def rebuild(self, *values: Any) -> Tensor:
        assert values[distributed_routes.DEVICE_AT] == 5, "the engine's number of the GPU, not the trainer's"
        self.mapped.append(values[7])
        return self.memory[values[7]]


@pytest.fixture
def engines() -> None:
    """vLLM's modules, which look at the GPUs when they are imported: before there seem to be some."""
    pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """This process as one that has a GPU: UUID "GPU-a", which is number 5 on the engine's side."""
    found = Cards()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a"))
    for name in ("synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 5)
    monkeypatch.setattr(distributed_routes, "gpu_bytes", lambda count, device: torch.zeros(count, dtype=torch.uint8))
    monkeypatch.setattr(distributed_routes, "reduce_tensor", found.reduce)
    monkeypatch.setattr(distributed_routes, "rebuild_cuda_tensor", found.rebuild)
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", found.rebuild)
    return found


def test_auto_tries_gpus_first_and_host_memory_after_them() -> None:
    assert routes.auto_routes() == ("memory", "ipc", "nccl", "shared", "disk")


@pytest.mark.parametrize("route", ["ipc", "nccl"])
def test_without_gpus_the_route_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    check = partial(publish.check_weights, WeightsConfig(route=route), ClusterConfig(), lora=False, sft=False)
    on: dict[str, bool] = {}
    monkeypatch.setattr(publish, "has_gpus", lambda cluster, role: on[role])
    for actor, engine in ((False, False), (True, False), (False, True)):
        on |= {"actor": actor, "rollout": engine}
        with pytest.raises(ConfigError, match=f'weights.route = "{route}" goes from GPU to GPU.* "disk", "memory", "shared"'):
            check(colocated=False)
    on |= {"actor": True, "rollout": True}
    check(colocated=route == "ipc")
    with pytest.raises(ConfigError, match=f'weights.route = "{route}" .* rollout.colocate: .*; use "auto"'):
        check(colocated=route != "ipc")
    with pytest.raises(ConfigError, match=f"weights.route = {route}: the trainer has no GPU"):
        routes.make_sender(route, WeightsConfig(), 1, 1, "127.0.0.1").open()


def test_buckets_are_larger_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, mib in ((True, 256), (False, 64)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert routes.make_sender("memory", WeightsConfig(), 1, 1, "").slot_bytes == mib << 20
        assert routes.make_sender("memory", WeightsConfig(bucket_mib=2.0), 1, 1, "").slot_bytes == 2 << 20


def test_an_engine_on_the_same_gpu_maps_the_trainers_buckets_and_proves_it(cards: Cards) -> None:
    sender = distributed_routes.IpcSender(ROOM, 1)
    offer = sender.open()
    receiver = distributed_routes.IpcReceiver(offer, 0)
    receiver.open()
    assert len(cards.mapped) == SLOTS
    found = [named for bucket in stream_of(sender) for named in copied(receiver.receive(bucket))]
    same(found, WEIGHTS)
    gpu, _, handles = offer.where[0].split(" ")
    for where, said in (
        (f"GPU-b {'00' * 16} {handles}", "the engine's GPU is not one of the trainer's"),
        (f"{gpu} {'00' * 16} {handles}", "the engine does not read the memory that the trainer writes"),
    ):
        with pytest.raises(ConfigError, match=f"weights.route = ipc: {said}"):
            distributed_routes.IpcReceiver(replace(offer, where=(where,)), 0).open()


def test_every_rank_offers_its_own_gpu_and_one_that_cannot_fails_all(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    other = f"GPU-b {'11' * 16} {b64encode(pickle.dumps([('other',)])).decode()}"
    monkeypatch.setattr(distributed_routes, "gather_objects", lambda mine: [mine, (other, "")])
    offer = distributed_routes.IpcSender(ROOM, 2).open()
    assert [where.split(" ")[0] for where in offer.where] == ["GPU-a", "GPU-b"]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-b"))
        assert distributed_routes.own_handles(offer)[1:] == ("GPU-b", "11" * 16, [("other",)])
    monkeypatch.setattr(distributed_routes, "gather_objects", lambda mine: [mine, (None, "no memory")])
    with pytest.raises(ConfigError, match=r"weights.route = ipc: no memory"):
        distributed_routes.IpcSender(ROOM, 2).open()

    def full(tensor: Tensor) -> None:
        raise RuntimeError("full")

    told: list[Any] = []
    monkeypatch.setattr(distributed_routes, "reduce_tensor", full)
    monkeypatch.setattr(distributed_routes, "gather_objects", lambda mine: [told.append(mine) or mine])
    with pytest.raises(ConfigError, match="can be shared: full"):
        distributed_routes.IpcSender(ROOM, 1).open()
    assert told == [(None, "no memory of the trainer's GPU can be shared: full")]  # the other ranks wait for it


@pytest.mark.parametrize("route", ["ipc", "shared"])
def test_ranks_other_than_0_fill_their_own_buckets_for_ipc_alone(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    made = distributed_routes.IpcSender(ROOM, 1) if route == "ipc" else shared.SharedSender(ROOM, 1)
    monkeypatch.setattr(source, "make_sender", lambda *args: made)
    rank = holder(Held(dict(WEIGHTS)), 1)
    rank.open_route(route, WeightsConfig(), 1)
    assert len(made.slots) == (SLOTS if route == "ipc" else 0)
    rank.route_attached()
    rank.close_route()


def test_vllms_engine_loads_what_comes_by_handle(engines: None, cards: Cards) -> None:
    """vLLM's own, one for each slot, so that each handle is mapped once however often the slots take turns."""
    sender = distributed_routes.IpcSender(ROOM, 2)
    end, loaded = transfer_of(sender.open(), index=0)
    end.open()
    for round_ in range(2):
        for bucket in stream_of(sender):
            end.load(bucket.with_aliases({"lm_head.weight": "layers.0.weight"}))
        same(loaded[len(WEIGHTS) * round_ :], WEIGHTS)
    assert sorted(cards.mapped) == ["handle 0", "handle 1"]
    end.close()
    wrong = replace(sender.open(), where=(f"GPU-b {'00' * 16} {b64encode(pickle.dumps([])).decode()}",))
    with pytest.raises(ConfigError, match="not one of the trainer's"):
        transfer_of(wrong, 0)[0].open()


def test_vllms_engine_loads_what_is_broadcast(engines: None, cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    wire: list[Tensor] = []
    asked: list[Any] = []

    class Group:
        """Both ends' communicator: what rank 0 broadcasts, the worker gets next, and as many bytes."""

        def __init__(self, rank: int) -> None:
            self.rank, self.destroyed = rank, False

        def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
            assert src == 0 and tensor.dtype == torch.uint8
            if self.rank == 0:
                wire.append(tensor.clone())
            else:
                assert len(tensor) == len(wire[0])
                tensor.copy_(wire.pop(0))

        def destroy(self) -> None:
            self.destroyed = True

    def joined(info: Any, parallel: Any) -> Group:
        asked.append(info)
        return Group(parallel.rank + info.rank_offset)

    real = torch.empty
    monkeypatch.setattr(distributed_routes, "_join_nccl", lambda *args: asked.append(args) or Group(0))
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", joined)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: [torch.cuda.current_stream()] * count)
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **options: real(*args, **options))
    sender = distributed_routes.NcclSender(ROOM, 6, host="127.0.0.1")
    offer = sender.open()
    end, loaded = transfer_of(offer, index=4, rank=1)  # the second replica of three with two ranks each
    end.open()
    sender.attached()
    join, info = sorted(asked, key=lambda each: not isinstance(each, tuple))
    assert join[0] == info.master_address == "127.0.0.1" and join[1] == info.master_port and join[2] == info.world_size == 7
    assert end._engines[0].model_update_group.rank == 5  # index 4 of the receivers, after the sender
    for bucket in stream_of(sender):
        end.load(bucket)
    same(loaded, WEIGHTS)
    assert not wire
    group = end._engines[0].model_update_group
    end.close()
    assert group.destroyed
    sender.close()


def test_vllms_processes_end_a_route_between_gpus_in_its_own_engine_and_join_the_broadcast_alone(
    engines: None, cards: Cards
) -> None:
    worker = SimpleNamespace(parallel_config=None, model_config=None)
    offer, device = distributed_routes.IpcSender(ROOM, 1).open(), SimpleNamespace(index=5)
    assert isinstance(open_receiving_end(offer, 0, worker, device, None), IpcTransfer)  # type: ignore[arg-type]
    offer = routes.Offer("nccl", ROOM, 1, ("127.0.0.1", "1"))
    with pytest.raises(ConfigError, match=r"weights.route = nccl: only the processes of a vLLM engine"):
        routes.open_receiver(offer, 0)


def test_shared_buckets_are_pinned_at_both_ends(cards: Cards, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    pinned: dict[int, int] = {}
    refuse = 0

    def register(pointer: int, size: int, flags: int) -> int:
        pinned[pointer] = size
        return refuse

    calls = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    sender = shared.SharedSender(1 << 12, 1)
    receiver = routes.open_receiver(sender.open(), 0)
    assert list(pinned.values()) == [1 << 12] * SLOTS * 2
    receiver.close()
    assert list(pinned) == [slot.data_ptr() for slot in sender.slots]
    sender.close()
    assert not pinned
    refuse = 2
    sender.open()
    assert "could not be pinned (CUDA error 2)" in caplog.text
    sender.close()


def stream_of(sender: Sender) -> Any:
    """The buckets of one publish, as the driver asks for them: the next one only after the last was loaded."""
    count = 0
    for bucket in sender.buckets(iter(WEIGHTS)):
        count += 1
        yield pickle.loads(pickle.dumps(bucket))
    assert count == 4  # 24 | 42 + 12 | 54 | 30 + 6


def transfer_of(offer: Any, index: int, rank: int = 0) -> tuple[Any, list[Named]]:
    """vLLM's end in a worker process whose model keeps what it is given."""
    loaded: list[Named] = []
    model = SimpleNamespace(load_weights=lambda weights: loaded.extend(copied(weights)))
    parallel = SimpleNamespace(rank=rank, data_parallel_index=0, world_size=2)
    vllm_config = SimpleNamespace(parallel_config=parallel, model_config=None)
    end = TRANSFERS[ROUTES.entry(offer.route).make.receiver]
    return end(offer, index, vllm_config, SimpleNamespace(index=5), model), loaded  # type: ignore[arg-type]


def copied(named: Any) -> list[Named]:
    return [(name, tensor.clone()) for name, tensor in named]


def same(found: list[Named], wanted: list[Named]) -> None:
    assert [name for name, _ in found] == [name for name, _ in wanted]
    assert all(torch.equal(one, other) and one.dtype == other.dtype for (_, one), (_, other) in zip(found, wanted, strict=True))
