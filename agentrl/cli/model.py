"""`agentrl init-model`, `agentrl export` and `agentrl doctor`: model folders, and checks of this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.arguments import COMMANDS, check_read, whole_number
from agentrl.config.schema import InitModelConfig
from agentrl.run.config_file import add_config, find_config_file, load_whole
from agentrl.utils.terminal import say

if TYPE_CHECKING:
    from agentrl.cluster.doctor import MachineFinding


# agentrl doctor

DOCTOR_EPILOG = """examples:
  agentrl doctor                                     this machine, and a local Ray
  agentrl doctor configs/quickstart.toml             also whether the config's pools and rollout workers fit
  agentrl doctor configs/quickstart.toml cluster.address=10.0.0.1:6379
  agentrl doctor --no-ray --json                     the quick checks, for a script

Exit code 2 if a check failed; a warning alone does not fail.
"""
MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@COMMANDS.register("doctor")
def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Check this machine and cluster without starting a run."""
    parser.epilog = DOCTOR_EPILOG
    add_config(parser, "a config whose cluster section is checked")
    parser.add_argument("--no-ray", action="store_true", help="do not start or join Ray")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Check this machine and cluster; returns 0, or 2 if a check failed."""
    from agentrl.cluster.doctor import all_checks
    from agentrl.config.schema import ClusterConfig
    from agentrl.run.engine_choice import EngineChoice

    config = None if args.config is None else load_whole(find_config_file(args.config), args.overrides)
    cluster = ClusterConfig() if config is None else config.cluster
    workers = 0 if config is None else EngineChoice(config).worker_processes()
    findings: list[MachineFinding] = []
    for finding in all_checks(cluster, not args.no_ray and cluster.backend == "ray", workers):
        findings.append(finding)
        if not args.json:
            advice = f"\n       -> {finding.advice}" if finding.advice else ""
            say(f"{MARKS[finding.level]} {finding.check:<20} {finding.found}{advice}", flush=True)
    failed = [finding.check for finding in findings if finding.level == "fail"]
    if args.json:
        say(json.dumps({"findings": [asdict(finding) for finding in findings], "failed": failed}))
    else:
        say(f"{len(findings)} checks, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return 2 if failed else 0


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
