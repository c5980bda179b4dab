"""`agentrl export RUN OUT`: a checkpoint of a run as a Hugging Face model folder."""

from __future__ import annotations

import argparse

from agentrl.shown import say

HELP = "write a run's checkpoint as a Hugging Face model folder, or its adapter as peft's"
EPILOG = """examples:
  agentrl export runs/quickstart models/mine              the newest checkpoint
  agentrl export runs/quickstart models/step10 --step 10  the checkpoint of step 10
  agentrl export runs/quickstart models/best --best       the best one by held-out evaluation

  agentrl export runs/lora adapters/mine --adapter        of a run with model.lora, its adapter alone (peft)

The folder holds config, weights and tokenizer; plain transformers and vLLM load it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_folder", help="a run folder", metavar="RUN")
    parser.add_argument("out", help="where to write the model; must not exist, or be empty", metavar="OUT")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, default=None, help="which checkpoint (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best evaluation")
    parser.add_argument("--adapter", action="store_true", help="of a run with model.lora: its adapter alone, in peft's format")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export; returns 0. Raises UserError if the run or checkpoint is missing, or OUT is not an empty folder."""
    from agentrl.train.export import export_run

    step = export_run(args.run_folder, args.out, args.step, best=args.best, adapter=args.adapter)
    what = "adapter" if args.adapter else "model"
    say(f"wrote the {what} of step {step} to {args.out}, in float32, as it was trained (final/ has the type of model.dtype)")
    return 0
