"""`agentrl init-model FOLDER`: write a tiny random model and its tokenizer, or the model of a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.parser import seed
from agentrl.config.schema import InitModelConfig
from agentrl.shown import say

HELP = "write a tiny randomly initialized model and its tokenizer, or the model of a GGUF file"
EPILOG = """examples:
  agentrl init-model models/tiny
  agentrl init-model models/wider --hidden 128 --mlp 256 --seed 1
  agentrl init-model models/mine --from mine.Q8_0.gguf --chat-template hermes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", help="where to write it; must not exist, or be empty")
    parser.add_argument("--from", dest="file", metavar="FILE", help="a GGUF file, whose weights and tokenizer are written")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights of --from (default float32)"
    )
    parser.add_argument("--chat-template", metavar="NAME", help="as model.chat_template: hermes, chatml, ..., or a file")
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
    from agentrl.errors import ConfigError
    from agentrl.quiet import quiet_libraries

    target = Path(args.folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target}: already exists; the model's weights would replace what is there: give a path that does not exist"
        )
    quiet_libraries()
    return _random(args, target) if args.file is None else _from_file(args, target)


def _random(args: argparse.Namespace, target: Path) -> int:
    from pydantic import ValidationError

    from agentrl.errors import ConfigError
    from agentrl.train.init_model import init_model

    sizes = {name: getattr(args, name) for name in InitModelConfig.model_fields}
    try:
        cfg = InitModelConfig(**sizes)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from error
    folder = init_model(cfg, target, args.seed, args.chat_template)
    say(f"wrote a random model of {cfg.layers} layers, hidden size {cfg.hidden}, to {folder}")
    return 0


def _from_file(args: argparse.Namespace, target: Path) -> int:
    from agentrl.errors import ConfigError
    from agentrl.render import make_renderer
    from agentrl.render.template import TemplateRenderer
    from agentrl.train.gguf_file import convert_gguf

    defaults = InitModelConfig()
    if given := [name for name in InitModelConfig.model_fields if getattr(args, name) != getattr(defaults, name)]:
        raise ConfigError(f"--{given[0].replace('_', '-')}: the size of the model is that of {args.file}. Leave it out.")
    renderer = make_renderer(convert_gguf(args.file, target, args.dtype, args.chat_template))
    say(f"wrote the model of {args.file} in {args.dtype} to {target}")
    if isinstance(renderer, TemplateRenderer) and renderer.no_tools:
        say(f"note: {renderer.no_tools}")
    return 0
