"""Convert tools, calls, results and reasoning from foreign formats to OpenAI's format.

All readers use this module: chats, preferences, the endpoint's three protocols, own_tools and function_calling.

A declaration in OpenAI's format is kept key for key, since chat templates print it: training data must have the same prompt as
an episode with the same tool. Other formats are translated: `inputSchema` (MCP), `input_schema` (Anthropic),
`function_declarations` (Google), `toolSpec` (Bedrock), `inputs` (Hugging Face), `arguments`, schemas as JSON text,
`{"city": {"type": "str"}}`, a list of parameters, and types such as "dict", "STRING", "List[int]". A key that could hold
parameters and is not known is an error.

A null means an absent key, except for `default` and `const`, and for arguments whose schema accepts null."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.data.chat_forms import FormError, arguments_of, parse_field
from agentrl.data.images import Image
from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.utils.schemas import ALTERNATIVES, DATA, resolve_reference, schema_parts

Declaration = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters", ...}}`."""
NO_PARAMETERS: Mapping[str, Json] = {"type": "object", "properties": {}}
TYPES: dict[str, str | None] = {
    "string": "string", "str": "string", "text": "string", "char": "string", "date": "string", "datetime": "string",
    "time": "string", "uuid": "string", "path": "string", "bytes": "string",
    "integer": "integer", "int": "integer", "long": "integer", "short": "integer", "byte": "integer", "bigint": "integer",
    "number": "number", "float": "number", "double": "number", "decimal": "number",
    "boolean": "boolean", "bool": "boolean",
    "array": "array", "list": "array", "tuple": "array", "set": "array", "sequence": "array", "iterable": "array",
    "arraylist": "array", "queue": "array", "stack": "array", "ndarray": "array",
    "object": "object", "dict": "object", "dictionary": "object", "mapping": "object", "map": "object", "hashmap": "object",
    "hashtable": "object",
    "null": "null", "none": "null", "nonetype": "null",
    "any": None, "callable": None, "complex": None, "type_unspecified": None,
}  # fmt: skip
"""Type name in data sets -> type in JSON Schema, None for no constraint."""
_SCHEMAS = ("parameters", "inputSchema", "input_schema", "parametersJsonSchema", "parameters_json_schema",
            "parameter_definitions", "arguments", "inputs", "args", "args_schema")  # fmt: skip
_OTHER_KEYS = frozenset({"annotations", "outputSchema", "output_schema", "response", "responses", "return", "returns", "_meta",
                     "meta", "icons", "execution", "examples", "input_examples", "cache_control", "tags",
                     "required"})  # fmt: skip
"""Keys of a tool that may hold objects or lists, but not its parameters."""
_ARGUMENTS = ("arguments", "parameters", "input", "args")
_CALL_ID_KEYS = ("tool_call_id", "tool_use_id", "call_id")
_LISTS = ("function_declarations", "functionDeclarations", "tools")
_KEPT_NULLS = frozenset({"default", "const"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SINGLE = frozenset({"items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
                   "propertyNames", "not", "if", "then", "else"})  # fmt: skip
_SIZES = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_WORDS = frozenset({*DATA, *_MAPS, *_SINGLE, *ALTERNATIVES, *_SIZES, "type", "description", "title", "required", "nullable",
                    "format", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
                    "uniqueItems", "prefixItems", "optional", "example", "deprecated", "dependentRequired"})  # fmt: skip
_GENERIC = re.compile(r"^\s*([\w.]+)\s*(?:\[(.*)\])?\s*$", re.S)


# -- declarations ------------------------------------------------------------------------------------


def declarations(given: Any, key: str = "tools", *, table: bool = False) -> tuple[Declaration, ...]:
    """Read tools from a list, a tool, an object that holds a list, or JSON text. `table`: the rows have every column, as in
    Parquet. Raises FormError if an item is not a tool."""
    if isinstance(given, str):
        given, table = (parse_field(given, key) if given.strip() else None), False
    if given is None:
        return ()
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, list):
        raise FormError(key, f"expected a list of tools, got {type(given).__name__}")
    found: list[Declaration] = []
    for number, item in enumerate(given):
        at = f"{key}[{number}]"
        held = next((word for word in _LISTS if isinstance(item, Mapping) and isinstance(item.get(word), list)), None)
        if held is None:
            found.append(declaration(item, at, table=table))
        else:
            found += declarations(item[held], f"{at}.{held}", table=table)
    return tuple(found)


def declaration(given: Any, key: str, *, table: bool = False) -> Declaration:
    """Convert one tool to OpenAI's format. Raises FormError, which names the unreadable key."""
    whole = _present(parse_field(given, key) if isinstance(given, str) else given, key)
    inner = next((word for word in ("function", "toolSpec") if word in whole), None)
    if inner is None:
        function = _function({k: v for k, v in whole.items() if k != "type"}, key, table)
        if whole.get("type", "function") != "function" and not any(word in whole for word in _SCHEMAS):  # bash_20250124
            raise FormError(f"{key}.type", f"a tool of type {whole['type']!r} declares no parameters here. Write them out")
        return {"type": "function", "function": function}
    at, body = f"{key}.{inner}", whole[inner]
    if word := next((word for word in _SCHEMAS if whole.get(word)), None):
        raise FormError(f"{key}.{word}", f"stands next to {inner}. Put it inside")
    function = _function(_present(parse_field(body, at) if isinstance(body, str) else body, at), at, table)
    if inner != "function":
        return {"type": "function", "function": function}
    return {**({} if "type" in whole else {"type": "function"}), **whole, "function": function}


def _present(given: Any, key: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise FormError(key, f"expected an object that declares a function, got {type(given).__name__}")
    return {name: value for name, value in given.items() if value is not None}


def _function(given: dict[str, Any], key: str, table: bool) -> dict[str, Any]:
    if not isinstance(given.get("name"), str) or not given["name"]:
        raise FormError(key, f"expected a declaration; a function needs a name, got {given.get('name')!r}")
    if not isinstance(given.get("description", ""), str):
        raise FormError(f"{key}.description", f"expected text, got {type(given['description']).__name__}")
    named = [word for word in _SCHEMAS if given.get(word)] or [word for word in _SCHEMAS if word in given][:1]
    if any(given[word] != given[named[0]] for word in named[1:]):
        raise FormError(key, f"{' and '.join(named)} both declare parameters. Leave one of them out")
    empty = not (named and given[named[0]])
    for word, value in given.items():
        holds = bool(value) and (
            isinstance(value, Mapping | list) or (isinstance(value, str) and value.lstrip()[:1] in ("{", "["))
        )
        if word in ("properties", "schema") or (empty and holds and word not in (*_OTHER_KEYS, "name", "description")):
            raise FormError(f"{key}.{word}", "no known key of a tool. Put the schema of its parameters under `parameters`")
    if not named:
        return {**given, "parameters": dict(NO_PARAMETERS)}
    word = named[0]
    schema = parameters(given[word], f"{key}.{word}", table=table)
    if word in ("inputSchema", "input_schema"):  # as agentrl presents the tools of an MCP server
        schema = {name: value for name, value in schema.items() if name not in ("$schema", "title")}
    own = ("parameters", "arguments")
    kept = {k: v for k, v in given.items() if k not in _SCHEMAS} if word in own else {k: given[k] for k in given if k in _SHARED}
    return {("parameters" if k == word else k): schema if k == word else v for k, v in given.items() if k == word or k in kept}


_SHARED = ("name", "description", "strict")
"""Keys that tools of other formats share with OpenAI's."""


def parameters(given: Any, key: str, *, table: bool = False) -> dict[str, Any]:
    """Convert the schema of a tool's parameters. Raises FormError if it is unreadable."""
    if isinstance(given, str):
        given, table = (parse_field(given, key) if given.strip() else None), False
    if isinstance(given, Mapping) and set(given) == {"json"} and _is_schema(given["json"]):  # Bedrock
        given, key = given["json"], f"{key}.json"
    if given is None or given == {} or given == []:
        return dict(NO_PARAMETERS)
    if isinstance(given, list):
        given = _by_name(given, key)
    if not isinstance(given, Mapping):
        raise FormError(key, f"parameters must be an object, not {type(given).__name__}")
    if table or _is_padded(given):
        given = _remove_padding(given, given)
    if not _is_schema(given):
        return _flat(given, key)
    schema: dict[str, Any] = _schema(given, key)
    if schema.get("type", "object") not in ("object", ["object"]):
        raise FormError(f"{key}.type", f"the parameters of a tool are of the type object, not {schema['type']!r}")
    for word, value in schema.items() if "properties" not in schema else ():
        if isinstance(value, Mapping | list) and word not in _WORDS and not word.startswith(("x-", "$")):
            raise FormError(f"{key}.{word}", "no keyword of JSON Schema. Put parameters under `properties`")
    return schema


def _is_schema(given: Any) -> bool:
    """Return True for a JSON Schema, False for an object of parameters by name."""
    if not isinstance(given, Mapping):
        return False
    held = given.get("properties")
    inner = isinstance(held, list) or (isinstance(held, Mapping) and not isinstance(held.get("type"), str))
    words = (
        "$schema" in given
        or isinstance(given.get("type"), str | list)
        or isinstance(given.get("$ref"), str)
        or isinstance(given.get("required"), list)
    )
    return inner or words or isinstance(given.get("additionalProperties"), bool) or any(
        isinstance(given.get(word), list) for word in ALTERNATIVES
    )  # fmt: skip


def _by_name(given: Sequence[Any], key: str) -> dict[str, Any]:
    """Convert a list of parameters to a dictionary by name."""
    found: dict[str, Any] = {}
    for number, item in enumerate(given):
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            raise FormError(f"{key}[{number}]", "expected an object with the name and the type of a parameter")
        if item["name"] in found:
            raise FormError(f"{key}[{number}]", f"two parameters are called {item['name']!r}")
        inner = item.get("schema")
        rest = {k: v for k, v in item.items() if k not in ("name", "in", "schema")}
        found[item["name"]] = {**rest, **(inner if isinstance(inner, Mapping) else {})}
    return found


def _flat(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Make a schema from parameters by name. With `required` flags, flagged ones are required; else all without a default."""
    nodes = {name: {"type": node} if isinstance(node, str) else node for name, node in given.items() if node is not None}
    flagged = any(isinstance(node, Mapping) and isinstance(node.get("required"), bool) for node in nodes.values())
    properties, required = dict[str, Any](), list[str]()
    for name, node in nodes.items():
        schema = properties[name] = _schema(node, f"{key}.{name}")
        if isinstance(node, bool):  # a JSON Schema of anything or nothing, or a flag of required parameters
            raise FormError(f"{key}.{name}", f"{str(node).lower()} is no type of a parameter. Name one, such as 'string'")
        optional = node.get("optional") is True or node.get("nullable") is True or _schema_of_type(node.get("type"), key)[1]
        if node.get("required", not flagged) is True and not optional and "default" not in node:
            required.append(name)
        if "default" in node:
            schema["default"] = _typed_default(node["default"], schema.get("type"))
    return {"type": "object", "properties": properties, "required": required}


def _typed_default(value: Json, kind: Any) -> Json:
    """Convert a default that is text ("10", "True") to its declared type."""
    if not isinstance(value, str) or kind not in ("integer", "number", "boolean"):
        return value
    if kind == "boolean":
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        return int(value) if kind == "integer" else float(value)
    except ValueError:
        return value


def _schema(node: Any, key: str) -> Any:
    """Rewrite a schema with JSON Schema's type names, in the order of its keys; data in it (`DATA`) stays unchanged."""
    if isinstance(node, bool):
        return node
    if not isinstance(node, Mapping):
        raise FormError(key, f"a parameter's schema must be an object, not {node!r}"[:200])
    if (
        node
        and not any(word in _WORDS or word.startswith(("$", "x-")) for word in node)
        and isinstance(next(iter(node.values())), Mapping)
    ):
        raise FormError(f"{key}.{next(iter(node))}", "no keyword of JSON Schema. Put parameters under `properties`")
    found: dict[str, Any] = {}
    for word, value in node.items():
        at = f"{key}.{word}"
        if value is None and word not in _KEPT_NULLS:
            continue
        if word == "type":
            found |= {name: part for name, part in _schema_of_type(value, at)[0].items() if name == "type" or name not in node}
        elif word == "enum" and not isinstance(value, list):
            raise FormError(at, f"expected a list of values, got {type(value).__name__}")
        elif word in DATA:
            found |= {} if word == "enum" and not value else {word: value}
        elif word in _MAPS:
            held = _by_name(value, at) if isinstance(value, list) and word == "properties" else value
            if not isinstance(held, Mapping):
                raise FormError(at, f"expected an object of schemas, got {type(value).__name__}")
            found[word] = {name: _schema(inner, f"{at}.{name}") for name, inner in held.items() if inner is not None}
        elif word in (*ALTERNATIVES, "prefixItems") or (word in _SINGLE and isinstance(value, list)):
            if not isinstance(value, list):
                raise FormError(at, f"expected a list of schemas, got {type(value).__name__}")
            found[word] = [_schema(inner, f"{at}[{number}]") for number, inner in enumerate(value)]
        elif word in _SINGLE:
            found[word] = _schema({"type": value} if isinstance(value, str) and word == "items" else value, at)
        elif word in _SIZES and isinstance(value, str) and value.isdecimal():  # as Google's JSON writes 64 bits
            found[word] = int(value)
        elif word == "required" and not isinstance(value, bool):
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise FormError(at, f"expected a list of names, got {value!r}"[:200])
            found[word] = value
        elif word not in ("required", "optional"):
            found[word] = value
    held = node.get("properties")
    inside = (held or {}).items() if isinstance(held, Mapping) else [(item["name"], item) for item in held or ()]
    if marked := [name for name, inner in inside if isinstance(inner, Mapping) and inner.get("required") is True]:
        listed = found.get("required")
        found["required"] = list(dict.fromkeys([*(listed if isinstance(listed, list) else []), *marked]))
    return found


def _schema_of_type(kind: Any, key: str) -> tuple[dict[str, Any], bool]:
    """Return (JSON Schema, is optional) of a type. Raises FormError if the type is unknown."""
    if kind is None or (isinstance(kind, str) and kind in _JSON_TYPES):
        return ({} if kind is None else {"type": kind}), False
    try:
        if isinstance(kind, list):
            parts = [from_annotation(str(item))[0].get("type") for item in kind]
            return ({"type": parts} if all(parts) else {}), False
        if isinstance(kind, str):
            return from_annotation(kind)
    except ValueError as problem:
        raise FormError(key, f"{problem}. Name one of JSON Schema, such as string, or leave it out") from None
    raise FormError(key, f"a type must be a string, not {kind!r}"[:200])


_JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})


def from_annotation(text: str) -> tuple[dict[str, Any], bool]:
    """Return (JSON Schema, is optional) of a Python annotation such as "List[int]" or "str, optional".

    A type without a JSON form, such as a callable, gives no constraint. Raises ValueError for an unknown type.
    """
    head, _, tail = text.rpartition(",")
    optional = tail.strip().lower() == "optional"
    text = (head if optional else text).strip()
    if not text:
        return {}, optional
    if len(parts := _split(text, "|")) > 1:
        return _union(parts), optional
    if text.endswith("[]"):
        return {"type": "array", "items": from_annotation(text[:-2])[0]}, optional
    match = _GENERIC.match(text)
    name, inner = (match[1].rpartition(".")[2].lower(), match[2]) if match else ("", None)
    if name == "optional" and inner:
        return from_annotation(inner)[0], True
    if name == "union" and inner:
        return _union(_split(inner)), optional
    if name == "annotated" and inner:
        return from_annotation(_split(inner)[0])[0], optional
    if name == "literal" and inner:
        try:
            values = [ast.literal_eval(part.strip()) for part in _split(inner)]
        except (SyntaxError, ValueError):
            raise ValueError(f"'Literal[{inner}]' is no known type"[:120]) from None
        kinds = {type(value): TYPES.get(type(value).__name__.lower()) for value in values}
        return {**({"type": next(iter(kinds.values()))} if len(kinds) == 1 else {}), "enum": values}, optional
    if name not in TYPES:
        raise ValueError(f"{text!r} is no known type"[:120])
    if (kind := TYPES[name]) is None:
        return {}, optional
    schema: dict[str, Any] = {"type": kind}
    if kind == "array" and inner and name != "tuple":
        schema["items"] = from_annotation(inner)[0]
    return schema, optional


def _union(texts: Sequence[str]) -> dict[str, Any]:
    parts = [from_annotation(text)[0] for text in texts]
    if not all(parts):
        return {}
    if any(set(part) != {"type"} or not isinstance(part["type"], str) for part in parts):
        return {"anyOf": parts}
    return {"type": list(dict.fromkeys(part["type"] for part in parts))}


def _split(text: str, between: str = ",") -> list[str]:
    """Split a text at separators (`between`) outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == between and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# -- calls, results and reasoning --------------------------------------------------------------------


def calls_of(given: Any, key: str, tools: Iterable[Declaration] = (), *, table: bool = False) -> tuple[ToolCall, ...]:
    """Read the calls of an assistant's message. `tools`: their schemas decide which nulls in arguments stay; `table`: the rows
    have every column, as in Parquet. Raises FormError if a call is unreadable."""
    given = (parse_field(given, key) if isinstance(given, str) and given else given) or []
    if not isinstance(given, list):
        raise FormError(key, "expected a list of calls in an assistant's message")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    return tuple(_call(item, f"{key}[{number}]", schemas, table) for number, item in enumerate(given))


def _call(item: Any, key: str, schemas: Mapping[str, Any], table: bool) -> ToolCall:
    inner = item.get("function") if isinstance(item, Mapping) else None
    fields = {**item, **inner} if isinstance(inner, Mapping) else item
    if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str) or not fields["name"]:
        raise FormError(key, "expected an object with function.name and function.arguments")
    if fields.get("type") not in (None, "function", "tool_use", "tool_call", "function_call"):
        raise FormError(f"{key}.type", f"only calls of functions are read, not {fields['type']!r}")
    named = [word for word in _ARGUMENTS if fields.get(word) is not None]
    if any(fields[word] != fields[named[0]] for word in named[1:]):
        raise FormError(key, f"{' and '.join(named)} both hold arguments. Leave one of them out")
    for word, value in fields.items() if not named else ():
        if isinstance(value, Mapping) and value and word != "function":
            raise FormError(f"{key}.{word}", "no known key of a call. Put its arguments under `arguments`")
    written = fields[named[0]] if named else None
    arguments = arguments_of(written, f"{key}.arguments")
    # JSON text in a table has no padding: its nulls were written on purpose.
    arguments = without_padding(arguments, schemas.get(fields["name"], {}), table=table and not isinstance(written, str))
    number = next((word for word in ("id", "call_id") if fields.get(word) is not None), "id")
    return ToolCall(fields["name"], arguments, identifier(fields.get(number), f"{key}.{number}"))


def identifier(given: Any, key: str) -> str:
    """Return a call's ID as text (some data sets use numbers), "" for None. Raises FormError for another type."""
    if given is not None and (not isinstance(given, str | int) or isinstance(given, bool)):
        raise FormError(key, f"expected text, got {type(given).__name__}")
    return "" if given is None else str(given)


def result_of(item: Mapping[str, Any], content: str, key: str) -> Message:
    """Make a tool's result message. Raises FormError if its ID or name is not text."""
    number = next((word for word in _CALL_ID_KEYS if item.get(word) is not None), _CALL_ID_KEYS[0])
    name = item.get("name") or item.get("tool_name")
    if not isinstance(name, str | None):
        raise FormError(f"{key}.name", f"expected text, got {type(name).__name__}")
    return Message("tool", content, tool_call_id=identifier(item.get(number), f"{key}.{number}") or None, name=name)


def is_thought(part: Any) -> bool:
    """Return True if a part of a message's content is reasoning."""
    return isinstance(part, Mapping) and part.get("type") in ("thinking", "redacted_thinking", "reasoning")


def _is_padded(node: Any) -> bool:
    """Return True if a schema has nulls that no author writes: it comes from a table whose rows have every column."""
    if isinstance(node, Mapping):
        return any(
            word not in _KEPT_NULLS if inner is None else word not in DATA and _is_padded(inner) for word, inner in node.items()
        )
    return isinstance(node, list) and any(map(_is_padded, node))


def _remove_padding(node: Any, root: Any) -> Any:
    """Remove a table's nulls from a schema; a null `default` or `const` stays only if the type accepts null."""
    if isinstance(node, list):
        return [_remove_padding(item, root) for item in node]
    if not isinstance(node, Mapping):
        return node
    rest = {word: inner for word, inner in node.items() if inner is not None}
    nulls = not (rest.keys() & {"default", "const"}) and takes_null(rest, root)
    return {
        word: inner if word in DATA else _remove_padding(inner, root)
        for word, inner in node.items()
        if inner is not None or (word in _KEPT_NULLS and nulls)
    }


# Forms of an MCP server


def tool_list(schemas: Iterable[Mapping[str, Json]]) -> list[Any]:
    """Convert tools in OpenAI's function format to the tool list of an MCP server."""
    import mcp_types as types

    functions = [schema["function"] for schema in schemas]
    return [
        types.Tool(name=one["name"], description=one.get("description", ""), input_schema=one["parameters"]) for one in functions
    ]


def call_result(text: str, images: Iterable[Image] = (), *, error: bool = False) -> Any:
    """Convert a text with images to an MCP call result: each image replaces its line."""
    import mcp_types as types

    left = {image.line: types.ImageContent(type="image", data=image.data, mime_type=image.media_type) for image in images}
    parts: list[Any] = []  # images, and lists of lines
    for line in text.split("\n"):
        if line in left:
            parts.append(left.pop(line))
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(line)
        else:
            parts.append([line])
    blocks = [types.TextContent(type="text", text="\n".join(part)) if isinstance(part, list) else part for part in parts]
    # An image inside a line, for example in JSON: the text stays whole.
    blocks += [picture for line, picture in left.items() if line in text]
    return types.CallToolResult(content=blocks, is_error=error)


# Nulls in arguments


def without_padding(arguments: dict[str, Any], schema: Any, *, table: bool = False) -> dict[str, Any]:
    """Remove the nulls from arguments that only pad a table's columns. A null stays where the schema accepts it; in a `table`,
    or if the schema rejects other nulls in the arguments, it must also be required."""
    left: list[str] = []
    found: dict[str, Any] = _settle_schema(arguments, schema, schema, table, left)
    if left and not table:
        found = _settle_schema(arguments, schema, schema, True, left)
    return found


def _settle_schema(value: Any, node: Any, root: Any, table: bool, left: list[str]) -> Any:
    if isinstance(value, list):
        items = [part["items"] for part in schema_parts(node, root) if isinstance(part.get("items"), Mapping)]
        return [_settle_schema(item, items[0] if items else {}, root, table, left) for item in value]
    if not isinstance(value, dict):
        return value
    parts = schema_parts(node, root)
    properties = {name: inner for part in parts for name, inner in (part.get("properties") or {}).items()}
    required = {name for part in parts for name in part.get("required") or ()}
    others = next((part["additionalProperties"] for part in parts if "additionalProperties" in part), not properties)
    found: dict[str, Any] = {}
    for name, item in value.items():
        inner = properties.get(name, others)
        if item is not None:
            found[name] = _settle_schema(item, inner, root, table, left)
        elif not takes_null(inner, root):
            left.append(name)
        elif not table or name in required:
            found[name] = None
    return found


def takes_null(node: Any, root: Any, depth: int = 0) -> bool:
    """Return True if null fits a schema, judged by its types. `root`: the schema that its references point into."""
    if isinstance(node, bool) or not isinstance(node, Mapping) or depth > 16 or node.get("nullable") is True:
        return bool(node)
    kinds = node.get("type", "null")
    if "null" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    if ("const" in node and node["const"] is not None) or None not in node.get("enum", [None]):
        return False
    if isinstance(node.get("$ref"), str) and not takes_null(resolve_reference(node["$ref"], root), root, depth + 1):
        return False
    if not all(takes_null(part, root, depth + 1) for part in node.get("allOf", ())):
        return False
    either = (node[word] for word in ("anyOf", "oneOf") if word in node)
    return all(any(takes_null(part, root, depth + 1) for part in parts) for parts in either)
