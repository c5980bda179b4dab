"""What the server that killable runs are forked from imports once."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
import matplotlib.backends.backend_agg
import matplotlib.figure
import transformers
from torch.utils.tensorboard.writer import SummaryWriter
from transformers.models.qwen3 import modeling_qwen3

import agentrl.cli.train
import agentrl.engines.embedded.embedded_engine
import agentrl.run.driver
import agentrl.trainer.actor

# Else each run looks through all that was imported, half a second a time, and its pages become its own by that.
gc.freeze()

__all__ = ["SummaryWriter", "agentrl", "matplotlib", "modeling_qwen3", "transformers"]
