"""`agentrl init-model` and `agentrl export`: model folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.arguments import COMMANDS, check_read, whole_number
from agentrl.config.schema import InitModelConfig
from agentrl.utils.terminal import say

# agentrl init-model

INIT_MODEL_EPILOG = """examples:
  agentrl init-model models/tiny
  agentrl init-model models/wider --hidden 128 --mlp 256 --seed 1
  agentrl init-model models/mine --from mine.Q8_0.gguf --chat-template hermes
"""


@COMMANDS.register("init-model")
def add_init_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a tiny randomly initialized model and its tokenizer, or the model of a GGUF file."""
    parser.epilog = INIT_MODEL_EPILOG
    parser.add_argument("folder", help="where to write it; must not exist, or be empty")
    parser.add_argument("--from", dest="file", metavar="FILE", help="a GGUF file, whose weights and tokenizer are written")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights of --from (default float32)"
    )
    parser.add_argument("--chat-template", metavar="NAME", help="as model.chat_template: hermes, chatml, ..., or a file")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the random weights (default 0)")
    defaults = InitModelConfig()
    for name, field in InitModelConfig.model_fields.items():
        value = getattr(defaults, name)
        words = " ".join((field.description or "").replace("`", "").rstrip(".").split())
        help = f"{words[:1].lower()}{words[1:]} (default {value})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=help)
    parser.set_defaults(run=run_init_model)


def run_init_model(args: argparse.Namespace) -> int:
    """Write the model; returns 0. Raises ConfigError for an invalid size, or if the folder is not empty."""
    from pydantic import ValidationError

    from agentrl.render import make_renderer
    from agentrl.render.template import TemplateRenderer
    from agentrl.trainer.model_folder import convert_gguf
    from agentrl.trainer.pretrained import init_model
    from agentrl.utils.errors import ConfigError
    from agentrl.utils.terminal import quiet_libraries

    target = Path(args.folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: already exists and would be overwritten. Give a path that does not exist")
    quiet_libraries()
    if args.file is None:
        check_read(args, ("dtype",), "it sets the type of the weights of --from; a random model has float32. Leave it out")
        try:
            cfg = InitModelConfig(**{name: getattr(args, name) for name in InitModelConfig.model_fields})
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from error
        folder = init_model(cfg, target, args.seed, args.chat_template)
        say(f"wrote a random model of {cfg.layers} layers, hidden size {cfg.hidden}, to {folder}")
        return 0
    check_read(args, (*InitModelConfig.model_fields, "seed"), f"{args.file} determines the model. Leave it out")
    renderer = make_renderer(convert_gguf(args.file, target, args.dtype, args.chat_template))
    say(f"wrote the model of {args.file} in {args.dtype} to {target}")
    if isinstance(renderer, TemplateRenderer) and renderer.no_tools:
        say(f"note: {renderer.no_tools}")
    return 0


# agentrl export

EXPORT_EPILOG = """examples:
  agentrl export runs/quickstart models/mine              the newest checkpoint
  agentrl export runs/quickstart models/step10 --step 10  the checkpoint of step 10
  agentrl export runs/quickstart models/best --best       the best one by held-out evaluation

  agentrl export runs/lora adapters/mine --adapter        of a run with model.lora, its adapter alone (peft)

The folder holds config, weights and tokenizer; plain transformers and vLLM load it.
"""


@COMMANDS.register("export")
def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a run's checkpoint as a Hugging Face model folder, or its adapter for peft."""
    parser.epilog = EXPORT_EPILOG
    parser.add_argument("run_folder", help="a run folder", metavar="RUN")
    parser.add_argument("out", help="where to write the model; must not exist, or be empty", metavar="OUT")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, default=None, help="which checkpoint (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best evaluation")
    parser.add_argument("--adapter", action="store_true", help="of a run with model.lora: its adapter alone, in peft's format")
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    """Export a checkpoint; returns 0. Raises UserError without the run or checkpoint, or if OUT is not an empty folder."""
    from agentrl.run.display import shown_working
    from agentrl.trainer.model_folder import export_run

    what = "adapter" if args.adapter else "model"
    with shown_working("export", f"writing the {what}"):
        step = export_run(args.run_folder, args.out, args.step, best=args.best, adapter=args.adapter)
    say(f"wrote the {what} of step {step} to {args.out}, in float32, as it was trained (final/ has the type of model.dtype)")
    return 0
