"""On a machine with cards the suite computes on the CPU, as everywhere, and tests/gpu on the cards."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import CARDS, cards_shown


@pytest.mark.parametrize("args", [(), ("tests",), ("tests/trainer", "-x"), ("tests/run/test_gpu_placement.py",)])
def test_the_suite_sees_no_card(args: tuple[str, ...]) -> None:
    assert cards_shown(args, driver=True, given="2") == CARDS
    assert cards_shown(args, driver=False, given="") is None


def test_a_session_of_the_cards_tests_sees_them() -> None:
    for args in (("tests/gpu",), ("-x", "tests/gpu/test_engine.py::test_sleep_frees_the_memory")):
        assert [cards_shown(args, driver=True, given=given) for given in ("2", None)] == ["2", None]


def test_torch_finds_none_of_the_cards_that_no_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", CARDS)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 8)
    assert torch.cuda._device_count_nvml() == 0


def test_ray_lets_a_test_make_up_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray._private.accelerators import NvidiaGPUAcceleratorManager as Manager

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", CARDS)
    assert len(Manager.get_current_process_visible_accelerator_ids()) == 64
