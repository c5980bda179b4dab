"""The cards of a worker process: those that Ray gave it, and the device that it computes on."""

import pytest
import ray
import torch

from agentrl.cluster import host as cards
from agentrl.utils.errors import ResourceError
from tests.conftest import CARDS, cards_shown


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


GPU_TEST = "tests/gpu/test_engine.py::test_sleep_frees_the_memory"


@pytest.mark.parametrize("args", [(), ("tests",), ("tests/trainer", "-x"), ("tests/run/test_gpu_placement.py",)])
def test_the_suite_sees_no_card_and_a_session_of_the_cards_tests_sees_them(args: tuple[str, ...]) -> None:
    assert cards_shown(args, driver=True, given="2") == CARDS
    assert cards_shown(args, driver=False, given="") is None
    for own in (("tests/gpu",), ("-x", GPU_TEST)):
        assert [cards_shown(own, driver=True, given=given) for given in ("2", None)] == ["2", None]


def test_torch_finds_none_of_the_cards_that_no_machine_has_and_ray_lets_a_test_make_up_as_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private.accelerators import NvidiaGPUAcceleratorManager as Manager

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", CARDS)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 8)
    assert torch.cuda._device_count_nvml() == 0
    assert len(Manager.get_current_process_visible_accelerator_ids()) == 64
