"""The cards of a worker process: those that Ray gave it, and the device that it computes on."""

from __future__ import annotations

import pytest
import ray
import torch

from agentrl.cluster import host as cards
from agentrl.utils.errors import ResourceError


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_given", [])
    monkeypatch.setenv(cards.VISIBLE, "0,1,2,3")  # what a node's processes inherit: all its cards


@pytest.mark.parametrize(("given", "visible"), [([3], "3"), ([2, 0], "2,0"), ([], "")])
def test_a_process_sees_the_cards_that_it_was_given_and_no_other(
    monkeypatch: pytest.MonkeyPatch, given: list[int], visible: str
) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: given)
    assert cards.take_cards() == [str(card) for card in given]
    assert cards.os.environ[cards.VISIBLE] == visible


def test_the_first_visible_card_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert cards.own_device() == torch.device("cuda", 0) and chosen == [0]


def test_a_card_that_torch_does_not_find_is_an_error_and_none_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cards.own_device() == torch.device("cpu")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [5])
    cards.take_cards()
    with pytest.raises(ResourceError, match=r"Ray gave this process GPU 5, but torch .* finds no CUDA device"):
        cards.own_device()
