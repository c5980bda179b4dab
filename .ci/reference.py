"""Write the reference pages under docs/ from the code. `make docs` runs it; git ignores the pages.

python .ci/reference.py
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from pydantic import BaseModel  # noqa: E402

from agentrl.config.keys import NAME, REQUIRED, UNSET, Key, all_keys  # noqa: E402
from agentrl.utils.registry import Entry, Registry  # noqa: E402

MADE = "<!-- written by `make docs` from the code -->\n"


def pages() -> dict[str, Callable[[], str]]:
    """Map each file name under docs/ to the function that returns its text."""
    from measured_pages import benchmark_book, families_page, floors_page, gpu_page, templates_page

    from agentrl.run.metrics import as_markdown

    return {
        "cli.md": cli_page,
        "config_keys.md": keys_page,
        "registered_names.md": names_page,
        "api.md": api_page,
        "metrics.md": as_markdown,
        "measured_families.md": families_page,
        "measured_templates.md": templates_page,
        "measured_floors.md": floors_page,
        "gpu.md": gpu_page,
        "benchmark_book.md": benchmark_book,
    }


# -- the command line ------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its arguments and examples, from the parser."""
    from agentrl.cli.main import build_parser

    os.environ["COLUMNS"] = "110"
    head = "# Commands\n\n" + MADE + "\n`agentrl COMMAND --help` prints the same. "
    exits = "Exit codes: 0 done, 1 the run failed, 2 a mistake of the user, 130 interrupted.\n"
    return head + exits + "".join(_command(parser, 2) for parser in _children(build_parser()))


def _children(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the subcommands' parsers, in order."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return list(dict.fromkeys(found[0].choices.values())) if found else []


def _command(parser: argparse.ArgumentParser, level: int) -> str:
    usage = re.sub(r"^usage: ", "", parser.format_usage()).rstrip()
    text = f"\n{'#' * level} {parser.prog}\n\n"
    if told := _said_of(parser):
        text += f"{told}\n\n"
    text += f"```text\n{usage}\n```\n"
    inner = _children(parser)
    rows = [row for action in parser._actions for row in _argument(action)]
    if rows:
        text += "\n| argument | meaning |\n|---|---|\n" + "".join(f"| {_code(name)} | {_cell(told)} |\n" for name, told in rows)
    if parser.epilog:
        text += f"\n```text\n{parser.epilog.strip()}\n```\n"
    return text + "".join(_command(one, level + 1) for one in inner)


def _said_of(parser: argparse.ArgumentParser) -> str:
    """Return the one-line description of a command in its parent's help."""
    from agentrl.cli.main import build_parser

    def look(above: argparse.ArgumentParser) -> str | None:
        for action in above._actions:
            if isinstance(action, argparse._SubParsersAction):
                said = {choice.dest: choice.help for choice in action._choices_actions}
                for name, below in action.choices.items():
                    if below.prog == parser.prog:
                        return _sentence(said.get(name) or "")
                    if (found := look(below)) is not None:
                        return found
        return None

    return look(build_parser()) or ""


def _argument(action: argparse.Action) -> Iterator[tuple[str, str]]:
    if isinstance(action, argparse._SubParsersAction | argparse._HelpAction) or action.help == argparse.SUPPRESS:
        return
    metavar = action.metavar if isinstance(action.metavar, str) else None
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else metavar or action.dest.upper()
    name = f"{', '.join(action.option_strings)}{'' if action.nargs == 0 else f' {value}'}" if action.option_strings else value
    told = (action.help or "").replace("%%", "%")
    if "%(" in told:
        told = told % {**vars(action), "prog": "agentrl"}
    yield name, told


# -- keys of the config ----------------------------------------------------------------------------


def keys_page() -> str:
    """Every key with its type, default, unit and meaning, a table for each section."""
    keys = all_keys()
    text = "# Keys of the config\n\n" + MADE
    text += "\n`agentrl config docs KEY` prints the same. [configuration.md](configuration.md) says how configs are found, "
    text += "joined,\noverridden and shown, [registered_names.md](registered_names.md) what a key with a `name` takes. "
    text += (
        f"{NAME} is a name of\nyour choice. A section that is *off* is there only if the config has it. A unit of 1 is a ratio.\n"
    )
    text += "\n## The top level\n"
    text += _keys_table([key for key in keys if not key.section and "." not in key.name])
    for section in (key for key in keys if key.section):
        title = f"{section.name}.{NAME}" if section.type == "table of sections" else section.name
        text += f"\n## [{title}]\n\n{section.meaning}{' *Off.*' if section.default == 'unset' else ''}\n"
        below = [key for key in keys if key.name.startswith(f"{title}.")]
        deeper = tuple(f"{key.name}." for key in below if key.section)
        text += _keys_table([key for key in below if not key.section and not key.name.startswith(deeper)])
    return text


def _keys_table(keys: Sequence[Key]) -> str:
    text = "\n| key | type | default | unit | meaning |\n|---|---|---|---|---|\n" if keys else ""
    for key in keys:
        default = key.default if key.default in (UNSET, REQUIRED) else f"`{key.default}`"
        text += f"| `{key.name}` | {_cell(key.type)} | {_cell(default)} | {key.unit or ''} | {_cell(key.meaning)} |\n"
    return text


# -- registered names ------------------------------------------------------------------------------

HOMES = (
    "agentrl.trainer.algorithms.advantages", "agentrl.trainer.algorithms.losses", "agentrl.rollout.samplers",
    "agentrl.rollout.mixtures", "agentrl.rollout.context", "agentrl.env.wrappers", "agentrl.rollout.engine",
    "agentrl.trainer.train_engine", "agentrl.engines.weights.base", "agentrl.contrib.sandboxes", "agentrl.run.trackers",
)  # fmt: skip


def registries() -> list[Registry[Any]]:
    """Every registry of agentrl, in the order of HOMES."""
    found = [value for home in HOMES for value in vars(importlib.import_module(home)).values() if isinstance(value, Registry)]
    return list({id(registry): registry for registry in found}.values())


def names_page() -> str:
    """Every name for configs: components with their arguments, environments, reward specs, leaves, tool sets, parsers."""
    text = (
        "# Registered names\n\n" + MADE + "\nWhat a config names. An own one is a file in `plugins/` of your working directory "
    )
    text += "([CONTRIBUTING.md](../CONTRIBUTING.md#to-add-x-touch-y)).\nArguments are given as "
    text += '`{ name = "NAME", args = { key = value } }`; those without a default are required.\n'
    for registry in registries():
        text += f"\n## `{registry.kind}`\n\n| name | arguments | what it is |\n|---|---|---|\n"
        for entry in registry.own():
            told = _first(inspect.getdoc(entry.make) or inspect.getdoc(sys.modules[entry.make.__module__]) or "")
            text += f"| `{entry.name}` | {_arguments(registry, entry)} | {_cell(told)} |\n"
    return text + _content()


def _arguments(registry: Registry[Any], entry: Entry[Any]) -> str:
    return "<br>".join(_code(_parameter(p)) for p in registry.parameters(entry.name).values())


def _parameter(parameter: inspect.Parameter) -> str:
    kind = "" if parameter.annotation is inspect.Parameter.empty else f": {_annotation(parameter.annotation)}"
    default = "" if parameter.default is inspect.Parameter.empty else f" = {_value(parameter.default)}"
    return f"{parameter.name}{kind}{default}"


def _value(value: Any) -> str:
    return value.__name__ if inspect.isroutine(value) or inspect.isclass(value) else re.sub(r"<.*>", "...", repr(value))


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _content() -> str:
    """Environments and packaged files that are found by id."""
    from agentrl.env.catalog import list_envs
    from agentrl.reward.leaf import LEAVES
    from agentrl.reward.nodes import GROUP_LEAVES
    from agentrl.reward.spec import kinds

    schemas = kinds()
    text = "\n## Environments (`env.id`)\n\n| id | short name | what it is |\n|---|---|---|\n"
    for env in sorted(
        (env for env in list_envs() if env.path is not None and ROOT / "envs" in env.path.parents), key=lambda env: env.id
    ):
        text += f"| `{env.id}` | `{env.name}` | {_cell(env.summary)} |\n"
    text += "\n## Reward specs (`env.reward`)\n\n| name | what it is |\n|---|---|\n"
    for file in sorted((ROOT / "rewards").glob("*.json")):
        spec = json.loads(file.read_text())
        if "agentrl_reward" in spec:
            text += f"| `{file.stem}` | {_cell(_first(spec.get('description', '')))} |\n"
    text += "\n## Reward leaves (`use` in a spec)\n"
    every: dict[str, Any] = {**LEAVES, **GROUP_LEAVES}
    for kind, leaf in sorted(every.items()):
        example = json.dumps({"use": kind, "args": leaf.example}, ensure_ascii=False)
        arguments = ", ".join(_leaf_argument(*one) for one in schemas[kind].get("properties", {}).items())
        text += f"\n### `{kind}`\n\n{_first(inspect.getdoc(leaf) or '')}\n\n- value: {leaf.formula}\n"
        text += (f"- arguments: {arguments}\n" if arguments else "") + f"- example: `{example}`\n"
    text += "\n## Tool sets (`tools.sets`)\n\n| name | what it is |\n|---|---|\n"
    for file in sorted((ROOT / "tools").glob("*.py")):
        import ast

        text += f"| `{file.stem}` | {_cell(_first(ast.get_docstring(ast.parse(file.read_text())) or ''))} |\n"
    return text


def _leaf_argument(name: str, schema: Mapping[str, Any]) -> str:
    """Format an argument with its choices."""
    choices = " / ".join(str(choice) for choice in schema.get("enum", ()) if choice is not None)
    return f"`{name}`" + (f" ({choices})" if choices else "")


# -- Python ----------------------------------------------------------------------------------------

ROOMS = (
    "agentrl", "agentrl.env", "agentrl.contrib.toolkit.branches", "agentrl.env.tools", "agentrl.reward",
    "agentrl.trainer.algorithms",
    "agentrl.trainer.algorithms.base", "agentrl.render", "agentrl.contrib.sandboxes", "agentrl.data.rows", "agentrl.env.catalog",
    "agentrl.config",
    "agentrl.data.trajectory", "agentrl.utils.errors",
)  # fmt: skip


def api_page() -> str:
    """The public names of the rooms that users import from, with signatures and docstrings."""
    text = "# Python API\n\n" + MADE + "\nWhat each room offers to import. How they are used together: the guides.\n"
    for room in ROOMS:
        module = importlib.import_module(room)
        told = _first(inspect.getdoc(module) or "")
        names = public(module)
        if names:
            text += f"\n## {room}\n\n{told}\n" + "".join(_object(room, name, getattr(module, name)) for name in names)
    return text


def public(module: Any) -> list[str]:
    """List a module's public names: its `__all__`, else the definitions without a leading underscore."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("__")]
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__ and not n.startswith("_")]
    return [name for name in own if inspect.isclass(getattr(module, name)) or inspect.isfunction(getattr(module, name))]


def _object(room: str, name: str, found: Any) -> str:
    text = f"\n### {room}.{name}\n\n"
    if inspect.isclass(found) and issubclass(found, BaseModel):
        return text + f"A section of the config: its fields are its keys.\n\n{_first(inspect.getdoc(found) or '')}\n"
    if inspect.isclass(found) or inspect.isfunction(found):
        text += f"```text\n{_signature(name, found)}\n```\n\n" + _docstring(found)
        if inspect.isclass(found):
            text += "".join(_method(member, inside) for member, inside in _members(found).items())
        return text
    if inspect.ismodule(found):
        return text + _docstring(found)
    return text + f"A `{type(found).__name__}`.\n"


def _members(found: type) -> dict[str, Any]:
    """Return the members of a class, including those of bases that its package does not export."""
    room = sys.modules[found.__module__.rpartition(".")[0] or found.__module__]
    bases = [base for base in found.__mro__[:0:-1] if base.__module__.startswith(f"{room.__name__}.")]
    own = [base for base in bases if not hasattr(room, base.__name__)]
    return {name: inside for home in (*own, found) for name, inside in vars(home).items()}


def _method(name: str, found: Any) -> str:
    inside = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    inside = inside.fget if isinstance(inside, property) else inside
    if name.startswith("_") or not inspect.isfunction(inside) or not inspect.getdoc(inside):
        return ""
    mark = "property " if isinstance(found, property) else "async " if inspect.iscoroutinefunction(inside) else ""
    call = name if isinstance(found, property) else _signature(name, inside)
    return f"\n`{mark}{' '.join(call.split())}`\n\n" + _docstring(inside)


def _signature(name: str, found: Any) -> str:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return name
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = [stars.get(p.kind, "") + _parameter(p) for p in parameters]
    back = signature.return_annotation
    arrow = "" if back is inspect.Signature.empty or inspect.isclass(found) else f" -> {_annotation(back)}"
    flat = f"{name}({', '.join(_starred(parameters, shown))}){arrow}"
    if len(flat) <= 100:
        return flat
    return f"{name}(\n" + "".join(f"    {one},\n" for one in _starred(parameters, shown)) + f"){arrow}"


def _starred(parameters: list[inspect.Parameter], shown: list[str]) -> list[str]:
    found: list[str] = []
    for parameter, text in zip(parameters, shown, strict=True):
        if (
            parameter.kind is inspect.Parameter.KEYWORD_ONLY
            and "*" not in found
            and not any(one.startswith("*") for one in found)
        ):
            found.append("*")
        found.append(text)
    return found


def _docstring(found: Any) -> str:
    """Convert a docstring to Markdown: indented code stays code, and no line becomes a heading."""
    text = inspect.getdoc(found) or ""
    text = "" if inspect.isclass(found) and found.__doc__ is None else text
    return re.sub(r"^#", r"\\#", text, flags=re.MULTILINE).replace("<", "&lt;") + "\n" if text else ""


# -- words -----------------------------------------------------------------------------------------


def _first(text: str) -> str:
    """Return the first sentence or paragraph."""
    return re.split(r"(?<=[.:])\s|\n\n", text.strip(), maxsplit=1)[0].rstrip(":").replace("\n", " ")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") or not text else ".")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def write(folder: Path = ROOT / "docs") -> None:
    """Write every page whose text has changed."""
    for name, text in ((name, make()) for name, make in pages().items()):
        file = folder / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
