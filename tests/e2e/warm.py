"""What the server that killable runs are forked from imports once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
import transformers
from torch.utils.tensorboard.writer import SummaryWriter

import agentrl.run.main

__all__ = ["SummaryWriter", "agentrl", "transformers"]
