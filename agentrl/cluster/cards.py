"""The GPUs ("cards") of a worker process: which ones Ray gave it, and the device that it computes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agentrl.errors import ResourceError

if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
_given: list[str] = []


def take_cards() -> list[str]:
    """Make exactly the cards that Ray gave this process visible to it, and return them; before anything asks CUDA.

    Ray leaves every card visible to a process that asked for none, and hides none at all on clusters that set
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES; such a process would compute on a card of another one.
    """
    import ray

    _given[:] = [str(card) for card in ray.get_gpu_ids()]
    # Also if Ray gave none: an empty value hides every card, an absent one hides none.
    os.environ[VISIBLE] = ",".join(_given)
    return list(_given)


def own_device() -> torch.device:
    """The device that this process computes on, made CUDA's current one: its first visible card, else the CPU.

    Raises ResourceError if Ray gave it a card, but torch finds none: it would train on the CPU without a word.
    """
    import torch

    if torch.cuda.is_available():
        # Numbers count visible cards only, so 0 is this process's own. NCCL uses the current device, which must be the same one.
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    if _given:
        raise ResourceError(
            f"Ray gave this process GPU {', '.join(_given)}, but torch {torch.__version__} finds no CUDA device on its node: "
            "install a build of torch with CUDA there, or set the pool's gpus to 0 to train on CPUs"
        )
    return torch.device("cpu")
