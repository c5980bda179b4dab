"""A typed Python signature as JSON Schema, and JSON arguments as Python values.

pydantic handles the types; this file only decides which parameters are arguments, where their
descriptions come from, and in what simplified form a model sees the schema.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import SchemaError

from agentrl.schemas import DATA
from agentrl.trajectory import Json


class Hidden:
    """Marks a parameter that the environment fills in and the model never sees.

    `user: Annotated[str, Hidden()]` takes its value from `ToolEnv.hidden(task)["user"]`.
    """


@dataclass(frozen=True, slots=True)
class Signature:
    """A tool's parameters: JSON Schema for the model, and how to turn its arguments into Python values: those that fit the
    schema (`convert`), or any (`loosely`). `declared`: what the model is shown, where others wrote it; else None."""

    description: str
    parameters: dict[str, Json]
    hidden: tuple[str, ...]
    convert: Callable[[Mapping[str, Json]], dict[str, Any]]
    loosely: Callable[[Mapping[str, Json]], dict[str, Any]] = dict
    declared: dict[str, Json] | None = None


_PREFIX = "p_"
# int and float are not among them: JSON Schema takes 1.0 for an integer and 1 for a number, and pydantic
# turns these into 1 and 1.0.
_AS_JSON = frozenset({str, bool, Any, dict, list})


def read_signature(function: Callable[..., Any], *, method: bool) -> Signature:
    """Read the name, types, defaults and docstring of `function` (`method`: its first parameter is `self`).

    Raises TypeError if a parameter has no annotation, is `*args` or `**kwargs`, or has a type that
    has no JSON form.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as problem:
        raise TypeError(f"tool {function.__name__}: an annotation cannot be resolved: {problem}") from problem
    summary, described = read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    hidden: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[1 if method else 0 :]:
        hint = _hint(function, parameter, hints)
        if _is_hidden(hint):
            hidden.append(parameter.name)
            continue
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        # The alias is the argument's name; the field's own name (see _model) is never visible.
        info = Field(default=default, alias=parameter.name, description=described.get(parameter.name))
        fields[parameter.name] = (hint, info)
    model = _model(function, fields)
    schema = plain_schema(_schema(function, model))
    return Signature(summary, schema, tuple(hidden), _converter(model, fields), _loose_converter(fields))


def _hint(function: Callable[..., Any], parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    place = f"tool {function.__name__}: parameter {parameter.name!r}"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise TypeError(f"{place} must be an ordinary named parameter, not {parameter.kind.description}")
    if parameter.name not in hints:
        raise TypeError(f"{place} has no type annotation; a tool's schema is made from its annotations")
    return hints[parameter.name]


def _is_hidden(hint: Any) -> bool:
    return get_origin(hint) is Annotated and any(item is Hidden or isinstance(item, Hidden) for item in get_args(hint)[1:])


def _model(function: Callable[..., Any], fields: Mapping[str, Any]) -> type[BaseModel]:
    # The prefix keeps names such as `schema`, `copy` or `_x` out of pydantic's way.
    renamed: dict[str, Any] = {f"{_PREFIX}{name}": field for name, field in fields.items()}
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        return create_model(f"{function.__name__}_arguments", __config__=config, **renamed)
    except (PydanticSchemaGenerationError, PydanticUserError) as problem:
        raise TypeError(f"tool {function.__name__}: no JSON form for its parameters: {problem}") from problem
    except SchemaError as problem:  # a pattern or a bound
        said, of = str(problem), re.search(rf'Field "{_PREFIX}(\w+)"', str(problem))
        place = f"parameter {of[1]!r}" if of else "its parameters"
        why = re.sub(r"^\s*(\w*Error|error): ", "", said.splitlines()[-1])
        raise TypeError(f"tool {function.__name__}: {place}: {why}. Change its pattern or bound") from problem


def _schema(function: Callable[..., Any], model: type[BaseModel]) -> dict[str, Json]:
    try:
        return model.model_json_schema(by_alias=True)
    except (PydanticUserError, TypeError) as problem:
        raise TypeError(f"tool {function.__name__}: no JSON Schema for its parameters: {problem}") from problem


def _converter(model: type[BaseModel], fields: Mapping[str, Any]) -> Callable[[Mapping[str, Json]], dict[str, Any]]:
    """A converter that skips pydantic for arguments that already have their declared Python types."""
    hints = {name: hint for name, (hint, _) in fields.items()}
    if all(hint in _AS_JSON for hint in hints.values() if _hashable(hint)) and all(map(_hashable, hints.values())):
        return dict

    def convert(arguments: Mapping[str, Json]) -> dict[str, Any]:
        # `type` and not isinstance: a bool must not pass for an int.
        if all(type(arguments[name]) is hints[name] for name in arguments):
            return dict(arguments)
        # JSON text on purpose: pydantic then accepts enums, dates and tuples in their JSON form only.
        value = model.model_validate_json(json.dumps(arguments))
        # Only those that were given: for the others the function has its own defaults.
        return {name.removeprefix(_PREFIX): getattr(value, name) for name in value.model_fields_set}

    return convert


def _loose_converter(fields: Mapping[str, Any]) -> Callable[[Mapping[str, Json]], dict[str, Any]]:
    """A converter that leaves values as they are, unless the parameter's type is no JSON type and takes them."""

    @cache
    def adapter(name: str) -> TypeAdapter[Any]:
        return TypeAdapter(fields[name][0])

    def convert(arguments: Mapping[str, Json]) -> dict[str, Any]:
        values = dict(arguments)
        for name, value in arguments.items():
            if name in fields and fields[name][0] not in _PLAIN:
                with suppress(ValidationError):
                    made = adapter(name).validate_json(json.dumps(value), strict=True)
                    # 5 for a list of floats, say, stays what it is: Python would not change it either.
                    values[name] = value if _is_json(made) else made
        return values

    return convert


_PLAIN = (str, int, float, bool, Any, dict, list)


def _is_json(value: Any) -> bool:
    if type(value) in (list, dict):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return value is None or type(value) in (str, int, float, bool)


def _hashable(hint: Any) -> bool:
    return hint is Any or isinstance(hint, type)


def conversion_problem(error: ValidationError) -> str:
    """One line for the first value that pydantic refuses."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def plain_schema(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The same schema as short as possible: no titles, references inlined unless they are recursive."""
    definitions = dict(schema.get("$defs", {}))
    recursive = {name for name in definitions if _reaches(definitions, name, name)}
    body = {key: value for key, value in schema.items() if key not in ("$defs", "title", "description")}
    result: dict[str, Json] = _inline(body, definitions, recursive, named=False)
    if recursive:
        result["$defs"] = {name: _inline(definitions[name], definitions, recursive, named=False) for name in sorted(recursive)}
    result.setdefault("properties", {})
    return result


def _references(node: Json) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_references, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    found = {node["$ref"].rpartition("/")[2]} if isinstance(node.get("$ref"), str) else set()
    return found.union(*(_references(value) for value in node.values())) if node else found


def _reaches(definitions: Mapping[str, Json], start: str, target: str) -> bool:
    seen: set[str] = set()
    open_names = _references(definitions[start])
    while open_names:
        name = open_names.pop()
        if name == target:
            return True
        if name not in seen and name in definitions:
            seen.add(name)
            open_names |= _references(definitions[name])
    return False


def _inline(node: Json, definitions: Mapping[str, Json], recursive: set[str], *, named: bool) -> Json:
    """`named`: the keys of `node` are property names, so that a property called "title" stays."""
    if isinstance(node, list):
        return [_inline(item, definitions, recursive, named=False) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str) and not named and reference.rpartition("/")[2] in definitions.keys() - recursive:
        merged = {
            **definitions[reference.rpartition("/")[2]],
            **{k: v for k, v in node.items() if k != "$ref"},
        }
        return _inline(merged, definitions, recursive, named=False)
    return {
        key: value if not named and key in DATA else _inline(value, definitions, recursive, named=not named and key in _NAMED)
        for key, value in node.items()
        if named or key != "title"
    }


_NAMED = ("properties", "patternProperties")


_SECTION = re.compile(r"^(args|arguments|parameters|params|returns?|raises|yields?|examples?|notes?):?\s*$", re.I)
_GOOGLE = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY = re.compile(r"^(\w+)\s*(?::\s*.*)?$")
_SPHINX = re.compile(r"^\s*:param\s+(?:[\w\[\], |]+\s+)?(\w+)\s*:\s*(.*)$")


@cache
def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The summary and the description of each parameter of a Google, NumPy or Sphinx docstring."""
    summary: list[str] = []
    described: dict[str, list[str]] = {}
    section, current = "", ""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if set(line.strip()) == {"-"}:
            continue
        if match := _SPHINX.match(line):
            section, current = "sphinx", match[1]
            described[current] = [match[2]]
        elif match := _SECTION.match(line):
            underlined = number + 1 < len(lines) and set(lines[number + 1].strip()) == {"-"}
            section, current = ("numpy " if underlined else "") + match[1].lower(), ""
        elif not section:
            summary.append(line)
        elif line.lstrip().startswith(":"):
            section = "other"
        else:
            current = _describe(section, line, current, described)
    return _paragraph(summary), {name: " ".join(filter(None, parts)) for name, parts in described.items()}


def _describe(section: str, line: str, current: str, described: dict[str, list[str]]) -> str:
    """Read one line of a parameter section; returns the parameter that the next line may continue."""
    numpy = section.startswith("numpy ")
    if section == "sphinx":
        described[current].append(line.strip())
    elif section.removeprefix("numpy ") not in ("args", "arguments", "parameters", "params"):
        return ""
    elif numpy and line[:1].strip() and (match := _NUMPY.match(line)):
        described[match[1]] = []
        return match[1]
    elif not numpy and (match := _GOOGLE.match(line)) and (not current or _indent(line) <= 4):
        described[match[1]] = [match[2].strip()]
        return match[1]
    elif current:
        described[current].append(line.strip())
    return current


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _paragraph(lines: list[str]) -> str:
    """The text before the first section, its paragraphs joined by single spaces."""
    return " ".join(" ".join(lines).split())
