"""Which cards there are, which to use, and which are free."""

from pathlib import Path

import pytest

from agentrl.contrib.gpu_tests.scheduler import CardMemory, CardPool, choose_cards, read_cards
from agentrl.utils.errors import ResourceError
from tests.contrib.gpu_tests.conftest import Smi

CARDS = [CardMemory(number, uuid, "x", 0, 1) for number, uuid in enumerate(("GPU-aaaa-1", "GPU-bbbb-2", "GPU-bbcc-3"))]


def test_a_card_is_free_by_a_reading_after_its_file_ended_and_the_rest_is_described(smi: Smi, tmp_path: Path) -> None:
    smi.use(1, 20480)
    (smi.folder / "apps").write_text("GPU-1, 4711, /usr/bin/python3, 20470\n")
    cards = read_cards()
    assert cards[1] == CardMemory(1, "GPU-1", "NVIDIA H100 80GB HBM3", 20480, 81559)
    pool, other = CardPool(cards, locks=tmp_path), CardPool(cards, locks=tmp_path)
    pool.refresh()
    assert pool.free() == [0, 2]
    assert pool.not_free() == "card 1: 20480 MiB in use (free: at most 256), held by pid 4711 (python3)"
    assert pool.take([0], "a.py") and pool.free() == [2]
    smi.use(0, 3000)
    pool.give_back([0])
    assert pool.free() == [2], "the last reading is from before the file had it"
    pool.refresh()
    assert pool.free() == [2] and "card 0: 3000 MiB in use (free: at most 256), last given to a.py" in pool.not_free()
    smi.use(0, 256)
    pool.refresh()
    other.refresh()
    # Of cards that cannot all be taken none is kept.
    assert pool.take([0], "b.py") and other.free() == [0, 2] and not other.take([2, 0], "c.py")
    assert other.free() == [2] and other.not_free().startswith("card 0: taken by another `agentrl test`; card 1: ")
    assert other.take([2], "c.py")
    pool.give_back([0])
    other.refresh()
    assert other.free() == [0]
    assert {path.stat().st_mode & 0o222 for path in tmp_path.glob("agentrl-card-*.lock")} == {0}
    (smi.folder / "fails").touch()
    pool.refresh()
    assert pool.free() == [] and "card 0: nvidia-smi failed with code 1" in pool.not_free()


def test_cards_that_cannot_be_read_are_an_error(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.use(0, "[N/A]")
    with pytest.raises(ResourceError, match="does not say how much of a card's memory is in use: '0, GPU-0, NVIDIA"):
        read_cards()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ResourceError, match="there is no nvidia-smi on the PATH"):
        read_cards()


@pytest.mark.parametrize(
    ("asked", "visible", "found"),
    [
        (None, None, [0, 1, 2]), ([2, 0, 2], None, [0, 2]), (None, "2,0", [2, 0]), (None, "", []), (None, "-1", []),
        (None, "1,7,0", [1]), (None, "GPU-bbcc-3, GPU-aa", [2, 0]), (None, "GPU-bb", []), ([0], "0,1", [0]),
        ([3], None, "there is no card 3; there are 0, 1, 2"), ([2], "0,1", "card 2 is hidden by CUDA_VISIBLE_DEVICES=0,1"),
        (None, "MIG-1", "a part of a card"),
    ],
)  # fmt: skip
def test_the_cards_to_use_are_those_asked_for_among_those_shown(
    asked: list[int] | None, visible: str | None, found: list[int] | str
) -> None:
    if isinstance(found, str):
        with pytest.raises(ResourceError, match=found):
            choose_cards(CARDS, asked, visible)
    else:
        assert [card.number for card in choose_cards(CARDS, asked, visible)] == found
