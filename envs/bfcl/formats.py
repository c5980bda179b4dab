"""Calls and declarations in the forms of BFCL's format sensitivity."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from agentrl.data.trajectory import Json

Calls = Sequence[tuple[str, Mapping[str, Json]]]
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array", dict: "dict", type(None): "null"}


def as_python(calls: Calls) -> str:
    """`[name(key=value), ...]`."""
    pairs = [(name, ", ".join(f"{key}={value!r}" for key, value in arguments.items())) for name, arguments in calls]
    return f"[{', '.join(f'{name}({inside})' for name, inside in pairs)}]"


def as_json(calls: Calls) -> str:
    """`[{"function": name, "parameters": {...}}, ...]`."""
    return json.dumps([{"function": name, "parameters": dict(arguments)} for name, arguments in calls])


def as_xml(calls: Calls) -> str:
    """`<functions><function name="..."><param name="..." type="...">value</param>...</function>...</functions>`."""
    return _xml(calls, "{}", "<param name={} type={}>{}</param>", escape)


def as_verbose_xml(calls: Calls) -> str:
    """The same with `<params>` around the parameters, and a value as an attribute."""
    return _xml(calls, "<params>{}</params>", "<param name={0} value={2} type={1}/>", quoteattr)


def _xml(calls: Calls, around: str, form: str, quoted: Callable[[str], str]) -> str:
    made = []
    for name, arguments in calls:
        items = [(quoteattr(key), quoteattr(_TYPES[type(value)]), quoted(str(value))) for key, value in arguments.items()]
        made.append(f"<function name={quoteattr(name)}>{around.format(''.join(form.format(*item) for item in items))}</function>")
    return f"<functions>{''.join(made)}</functions>"


def with_json_types(declared: Mapping[str, Json], types: Mapping[str, str]) -> dict[str, Json]:
    """A declaration of parameters in another language's names of types, with those of JSON Schema (`types`: one for each of
    theirs), at every depth; a type that is missing or unknown is a string."""
    made = {**declared, "type": types.get(declared.get("type", "string"), "string")}
    if isinstance(declared.get("properties"), Mapping):
        made["properties"] = {name: with_json_types(inner, types) for name, inner in declared["properties"].items()}
    if isinstance(declared.get("items"), Mapping):
        made["items"] = with_json_types(declared["items"], types)
    return made
