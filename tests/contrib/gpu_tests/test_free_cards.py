"""Which cards there are and what is in use: `nvidia-smi` by a stand-in that prints what the real one does, and made-up cards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.contrib.gpu_tests import cards as simulated
from agentrl.contrib.gpu_tests.cards import (
    FOLDER,
    CardLocks,
    CardMemory,
    CardPool,
    NvidiaSmi,
    SimulatedCards,
    choose_cards,
)
from agentrl.utils.errors import ResourceError

TWO = "0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 4, 81559\n1, GPU-bbbb-2, NVIDIA H100 80GB HBM3, 20480, 81559\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that prints the file `cards`, or `apps` if it is asked for processes."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase $1 in --query-gpu=index,uuid,name,memory.used,memory.total) cat '{tmp_path}/cards';;"
        f" --query-compute-apps=*) cat '{tmp_path}/apps';; *) exit 9;; esac\n[ ! -e '{tmp_path}/fails' ]\n"
    )
    program.chmod(0o755)
    (tmp_path / "cards").write_text(TWO)
    (tmp_path / "apps").write_text("GPU-bbbb-2, 4711, /usr/bin/python3, 20470\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def test_nvidia_smi_says_what_is_in_use_and_by_whom(smi: Path) -> None:
    reader = NvidiaSmi()
    first, second = reader.read()
    assert first == CardMemory(0, "GPU-aaaa-1", "NVIDIA H100 80GB HBM3", 4, 81559) and second.used == 20480
    assert reader.holders(0) == [] and reader.holders(1) == ["pid 4711 (python3)"]
    assert reader.env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    said: list[str] = []
    pool = CardPool(reader, [0, 1], CardLocks(smi, {0: "a", 1: "b"}), said.append)
    pool.refresh(0.0)
    told = {1: "20480 MiB in use (free: at most 256), held by pid 4711 (python3)"}
    assert (pool.free(), pool.foreign(), said) == ([0], told, [])
    (smi / "fails").touch()
    pool.refresh(0.5)  # a reading is good for a second
    assert pool.free() == [0]
    pool.refresh(1.5)
    assert pool.free() == [] and "nvidia-smi failed with code 1" in pool.foreign()[0]
    assert len(said) == 1 and said[0].startswith("no card can be given at present: nvidia-smi failed with code 1: 0, GPU-aaaa")


def test_what_nvidia_smi_does_not_say_is_an_error(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (smi / "cards").write_text("0, GPU-aaaa-1, NVIDIA GB10, [N/A], [N/A]\n")
    with pytest.raises(ResourceError, match="does not say how much of a card's memory is in use: '0, GPU-aaaa-1, NVIDIA GB10"):
        NvidiaSmi().read()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ResourceError, match="there is no nvidia-smi on the PATH"):
        NvidiaSmi().read()


CARDS = [CardMemory(number, uuid, "x", 0, 1) for number, uuid in enumerate(("GPU-aaaa-1", "GPU-bbbb-2", "GPU-bbcc-3"))]


@pytest.mark.parametrize(
    ("asked", "visible", "found"),
    [
        (None, None, [0, 1, 2]), ([2, 0, 2], None, [2, 0]), (None, "2,0", [2, 0]), (None, "", []), (None, "-1", []),
        (None, "1,7,0", [1]), (None, "GPU-bbcc-3, GPU-aa", [2, 0]), (None, "GPU-bb", []), ([0], "0,1", [0]),
    ],
)  # fmt: skip
def test_the_cards_to_use_are_those_asked_for_among_those_shown(
    asked: list[int] | None, visible: str | None, found: list[int]
) -> None:
    assert choose_cards(CARDS, asked, visible) == found


@pytest.mark.parametrize(
    ("asked", "visible", "told"),
    [
        ([3], None, "there is no card 3; there are 0, 1, 2"),
        ([2], "0,1", "card 2 is hidden by CUDA_VISIBLE_DEVICES=0,1"),
        (None, "MIG-1", "a part of a card"),
    ],
)
def test_cards_that_are_not_there_are_an_error(asked: list[int] | None, visible: str | None, told: str) -> None:
    with pytest.raises(ResourceError, match=told):
        choose_cards(CARDS, asked, visible)


def test_a_card_is_locked_once_and_also_by_who_may_only_read_the_file(tmp_path: Path) -> None:
    ours, theirs = (CardLocks(tmp_path, {0: "GPU-a/b", 1: "c"}) for _ in range(2))
    assert ours.take(0) and not theirs.take(0) and theirs.take(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agentrl-card-GPU-a_b.lock", "agentrl-card-c.lock"]
    assert {path.stat().st_mode & 0o222 for path in tmp_path.iterdir()} == {0}
    ours.drop(0)
    assert theirs.take(0)


def test_memory_of_a_made_up_card_is_its_processes_and_its_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = SimulatedCards(tmp_path, 3)
    with pytest.raises(RuntimeError, match="there is no simulated card 0 here"), simulated.hold(1):
        pass
    monkeypatch.setenv(FOLDER, cards.env[FOLDER])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with simulated.hold(700), simulated.hold(50, card=1), simulated.hold(1):
        assert [card.used for card in cards.read()] == [50, 0, 701]
        assert cards.holders(2) == [f"pid {os.getpid()}"] * 2
    if (pid := os.fork()) == 0:
        simulated.hold(900).__enter__()
        simulated.leak(30, card=1)
        os._exit(0)
    os.waitpid(pid, 0)  # not `wait`: other tests of this process have children too
    assert [card.used for card in cards.read()] == [30, 0, 0]
    assert cards.holders(0) == [f"pid {pid}, which has ended"]
    assert [card.used for card in SimulatedCards(tmp_path, 3).read()] == [0, 0, 0]  # a new run has new cards
