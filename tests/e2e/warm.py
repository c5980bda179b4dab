"""What the server that killable runs are forked from imports once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
import transformers  # noqa: E402
from torch.utils.tensorboard.writer import SummaryWriter  # noqa: E402

import agentrl.run.main  # noqa: E402

__all__ = ["SummaryWriter", "agentrl", "transformers"]
