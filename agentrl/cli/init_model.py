"""`agentrl init-model FOLDER`: write a tiny random model and its tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.parser import seed
from agentrl.config.schema import InitModelConfig
from agentrl.shown import say

HELP = "write a tiny randomly initialized model and its tokenizer"
EPILOG = """examples:
  agentrl init-model models/tiny
  agentrl init-model models/wider --hidden 128 --mlp 256 --seed 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", help="where to write it; must not exist, or be empty")
    parser.add_argument("--seed", type=seed, default=0, help="of the random weights (default 0)")
    defaults = InitModelConfig()
    for name, field in InitModelConfig.model_fields.items():
        value = getattr(defaults, name)
        words = " ".join((field.description or "").replace("`", "").rstrip(".").split())
        help = f"{words[:1].lower()}{words[1:]} (default {value})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=help)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the model; returns 0. Raises ConfigError for an invalid size, or if something else is in the folder."""
    from pydantic import ValidationError

    from agentrl.errors import ConfigError
    from agentrl.quiet import quiet_libraries
    from agentrl.train.init_model import init_model

    sizes = {name: getattr(args, name) for name in InitModelConfig.model_fields}
    try:
        cfg = InitModelConfig(**sizes)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from error
    target = Path(args.folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target}: already exists; random weights would replace what is there: give a path that does not exist"
        )
    quiet_libraries()
    folder = init_model(cfg, args.folder, args.seed)
    say(f"wrote a random model of {cfg.layers} layers, hidden size {cfg.hidden}, to {folder}")
    return 0
