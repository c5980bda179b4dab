"""`Tool`, `@tool`, `ToolSet`: typed Python functions that a policy may call, with their JSON Schemas."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from types import FunctionType
from typing import Annotated, Any, ClassVar, Optional, Protocol, get_args, get_origin, get_type_hints, overload
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import SchemaError, SchemaValidator, core_schema

from agentrl.data.trajectory import Json
from agentrl.env.call_options import DEFAULT, Options, Problem, as_called, compile_validator, safe_schema
from agentrl.utils.child_process import Child, child_for, function_ref
from agentrl.utils.errors import ToolSchemaError
from agentrl.utils.parsing import parts_of
from agentrl.utils.registry import Registry
from agentrl.utils.schemas import DATA
from agentrl.utils.threads import TOOLS

# A typed Python signature as JSON Schema, and JSON arguments as Python values.
#
# pydantic handles the types; this file only decides which parameters are arguments, where their
# descriptions come from, and in what simplified form a model sees the schema.


class Hidden:
    """Marks a parameter that the environment fills in and the model never sees.

    `user: Annotated[str, Hidden()]` takes its value from `ToolEnv.hidden(task)["user"]`.
    """


@dataclass(frozen=True, slots=True)
class Signature:
    """A tool's parameters: JSON Schema for the model, the names that it never sees, and, unless JSON values are passed as they
    are, the Python types of arguments by name (`hints`), with the `reader` of them all. `declared`: what the model is shown,
    where others wrote it; else None."""

    description: str
    parameters: dict[str, Json]
    hidden: tuple[str, ...]
    hints: Mapping[str, Any] = field(default_factory=dict)
    reader: SchemaValidator | None = None
    declared: dict[str, Json] | None = None
    readers: dict[str, SchemaValidator] = field(default_factory=dict)


_PREFIX = "p_"
# int and float are not among them: JSON Schema takes 1.0 for an integer and 1 for a number, and pydantic
# turns these into 1 and 1.0.
_AS_JSON = frozenset({str, bool, Any, dict, list})


def read_signature(function: Callable[..., Any], *, method: bool) -> Signature:
    """Read the name, types, defaults and docstring of `function` (`method`: its first parameter is `self`).

    Raises TypeError if a parameter has no annotation, is `*args` or `**kwargs`, has a `Field` as its default, or has a type
    that has no JSON form.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as problem:
        raise ToolSchemaError(f"tool {function.__name__}: an annotation cannot be resolved: {problem}") from problem
    summary, described = read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    hidden: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[1 if method else 0 :]:
        place = f"tool {function.__name__}: parameter {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolSchemaError(f"{place} must be an ordinary named parameter, not {parameter.kind.description}")
        if parameter.name not in hints:
            raise ToolSchemaError(f"{place} has no type annotation; a tool's schema is made from its annotations")
        hint = hints[parameter.name]
        if get_origin(hint) is Annotated and any(item is Hidden or isinstance(item, Hidden) for item in get_args(hint)[1:]):
            hidden.append(parameter.name)
            continue
        if isinstance(parameter.default, FieldInfo):  # which Python would pass on as the value
            raise ToolSchemaError(f"{place} has a Field as its default. Write Annotated[TYPE, Field(...)] = DEFAULT")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        if default is None:  # `x: int = None`, whose default would not fit its own schema
            base, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            optional = Optional[base]  # type: ignore[valid-type]  # noqa: UP045 - it may be a text, which `|` does not take
            hint = Annotated[(optional, *more)] if more else optional
        # The alias is the argument's name; the field's own name (see below) is never visible.
        info = Field(default=default, alias=parameter.name, description=described.get(parameter.name))
        fields[parameter.name] = (hint, info)
    # The prefix keeps names such as `schema`, `copy` or `_x` out of pydantic's way.
    renamed: dict[str, Any] = {f"{_PREFIX}{name}": field for name, field in fields.items()}
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        model = create_model(f"{function.__name__}_arguments", __config__=config, **renamed)
        schema = plain_schema(model.model_json_schema(by_alias=True))
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as problem:
        raise ToolSchemaError(f"tool {function.__name__}: no JSON form for its parameters: {problem}") from problem
    except SchemaError as problem:  # a pattern or a bound
        said, of = str(problem), re.search(rf'Field "{_PREFIX}(\w+)"', str(problem))
        place = f"parameter {of[1]!r}" if of else "its parameters"
        why = re.sub(r"^\s*(\w*Error|error): ", "", said.splitlines()[-1])
        raise ToolSchemaError(f"tool {function.__name__}: {place}: {why}. Change its pattern or bound") from problem
    for part in parts_of(model.__pydantic_core_schema__):
        for value in part.get("expected", ()) if isinstance(part, dict) and part.get("type") == "literal" else ():
            if isinstance(value, Enum) and not isinstance(value, str | int):  # pydantic takes it only as a Python object
                raise ToolSchemaError(f"tool {function.__name__}: Literal[{value}] is no JSON. Write Literal[{value.value!r}]")
    hints = {name: hint for name, (hint, _) in fields.items()}
    plain = all((hint is Any or isinstance(hint, type)) and hint in _AS_JSON for hint in hints.values())
    return Signature(summary, schema, tuple(hidden), hints, None if plain else _reader(model.__pydantic_core_schema__))


_PLAIN = (str, int, float, bool, Any, dict, list)
_NUMBER = re.compile(r"\s*[-+]?[0-9.]+\s*")
_SECONDS = "agentrl_seconds"
_OF_ONE = re.compile(r"tagged-union\[(\w+)\]")


def _reader(schema: Any) -> SchemaValidator:
    return SchemaValidator(_without_seconds(schema), _use_prebuilt=False)


def _without_seconds(schema: Any) -> Any:
    """A schema of pydantic's core in which no date, however deep, is read from "2024", which would be seconds since 1970."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_without_seconds, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")  # a dict, where the keys are names of fields
    kept = ("default", "expected", "metadata", "serialization") if isinstance(kind, str) else ()
    changed = {key: value if key in kept else _without_seconds(value) for key, value in schema.items()}
    if kind not in ("date", "datetime"):
        return changed
    # A union of one, since only the choice among its members sees the text and leaves to them how they read it.
    named = {"ref": changed.pop("ref", None), "custom_error_type": _SECONDS, "custom_error_message": _SECONDS}
    tag = lambda given: None if isinstance(given, str) and _NUMBER.fullmatch(given) else _SECONDS  # noqa: E731
    return core_schema.tagged_union_schema({_SECONDS: changed}, tag, **named)


def _is_json(value: Any) -> bool:
    if type(value) in (list, dict):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return value is None or type(value) in (str, int, float, bool)


def plain_schema(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The same schema as short as possible: no titles, references inlined unless they are recursive."""
    definitions = dict(schema.get("$defs", {}))
    found = {name: [part.get("$ref") for part in parts_of(body) if isinstance(part, dict)] for name, body in definitions.items()}
    reached = {name: {one.rpartition("/")[2] for one in said if isinstance(one, str)} for name, said in found.items()}
    for _ in reached:  # until each has all that it leads to
        for names in reached.values():
            names.update(*(reached[name] for name in names & reached.keys()))
    recursive = {name for name, names in reached.items() if name in names}
    body = {key: value for key, value in schema.items() if key not in ("$defs", "title", "description")}
    result: dict[str, Json] = _inline(body, definitions, recursive, named=False)
    if recursive:
        result["$defs"] = {name: _inline(definitions[name], definitions, recursive, named=False) for name in sorted(recursive)}
    result.setdefault("properties", {})
    return result


def _inline(node: Json, definitions: Mapping[str, Json], recursive: set[str], *, named: bool) -> Json:
    """`named`: the keys of `node` are property names, so that a property called "title" stays."""
    if isinstance(node, list):
        return [_inline(item, definitions, recursive, named=False) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str) and not named and reference.rpartition("/")[2] in definitions.keys() - recursive:
        merged = {**definitions[reference.rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
        return _inline(merged, definitions, recursive, named=False)
    names = ("properties", "patternProperties")
    return {
        key: value if not named and key in DATA else _inline(value, definitions, recursive, named=not named and key in names)
        for key, value in node.items()
        if named or key != "title"
    }


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
    return " ".join(" ".join(summary).split()), {name: " ".join(filter(None, parts)) for name, parts in described.items()}


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
    elif not numpy and (match := _GOOGLE.match(line)) and (not current or len(line) - len(line.lstrip()) <= 4):
        described[match[1]] = [match[2].strip()]
        return match[1]
    elif current:
        described[current].append(line.strip())
    return current


# Tools

_AT_ONCE: nullcontext[None] = nullcontext()  # keeps nothing, so calls may share it


@dataclass(frozen=True, eq=False)
class Tool:
    """One function with its name, schema and call options; stateless and shared by all episodes.

    Defined in a class it is a method: accessed through an instance it is the bound function, so that `env.get("a")`
    works in plain Python, without validation. A `Toolbox` makes the validated calls.
    """

    function: Callable[..., Any]
    name: str
    options: Options = DEFAULT
    method: bool = False
    explicit: Signature | None = field(default=None, repr=False)
    in_set: str = ""
    """The tool set that it is a method of, which its calls find through the environment: that of a fork is the fork's own."""

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return self.function.__get__(instance, owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tool:
        """A tool has no state, so copies of its owner share it. One that is a method of an object calls that object's copy."""
        if not self.bound:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "function", copy.deepcopy(self.function, memo))
        return other

    @property
    def bound(self) -> bool:
        """True if its function is bound to an object: a method of it, or a partial call."""
        return not isinstance(self.function, FunctionType) and not isinstance(getattr(self.function, "__self__", None), type)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @classmethod
    def from_schema(
        cls,
        name: str,
        description: str,
        parameters: Mapping[str, Json],
        function: Callable[..., Any],
        options: Options = DEFAULT,
        hidden: Sequence[str] = (),
    ) -> Tool:
        """A tool with an existing schema (from an MCP server or a dataset), which the policy is shown as it is; `function` takes
        keyword arguments, among them those named in `hidden`, which the environment fills in (`ToolEnv.hidden`).

        Raises ValueError if the schema shows one of those, and TypeError, which names the place, if it could fetch something,
        never end or fill the memory (`agentrl.utils.schemas`). What arguments are checked against is `Options.check`; with
        "strict" the schema must be valid JSON Schema, which is found out when the tool is added to a toolbox.
        """
        safe_schema(name, parameters)
        if shown := [name for name in hidden if name in parameters.get("properties", {})]:
            raise ValueError(f"tool {name}: its schema shows the policy {shown[0]!r}, which is to be hidden")
        return cls(function, name, options, explicit=Signature(description, dict(parameters), tuple(hidden)))

    @classmethod
    def from_declaration(
        cls, declaration: Mapping[str, Any], function: Callable[..., Any], options: Options = DEFAULT, hidden: Sequence[str] = ()
    ) -> Tool:
        """`from_schema` of a whole declaration in OpenAI's form, which the policy is shown key for key."""
        body = declaration["function"]
        made = cls.from_schema(body["name"], body.get("description", ""), body["parameters"], function, options, hidden)
        return replace(made, explicit=replace(made.signature, declared=dict(declaration)))

    def with_options(self, **changes: Any) -> Tool:
        """The same tool with some options replaced."""
        made = replace(self, options=replace(self.options, **changes))
        if "signature" in self.__dict__:  # read already; it does not depend on the options
            made.__dict__["signature"] = self.signature
        return made

    @cached_property
    def signature(self) -> Signature:
        """Read once. Raises TypeError if the function's parameters have no JSON form, or one that should not be used."""
        if self.explicit is not None:
            return self.explicit
        signature = read_signature(self.function, method=self.method)
        safe_schema(self.name, signature.parameters)
        return signature

    @cached_property
    def schema(self) -> dict[str, Json]:
        """The schema in OpenAI's function format. Shared: do not change it."""
        signature = self.signature
        if signature.declared is not None:
            return signature.declared
        said = {"description": signature.description} if signature.description else {}
        return {"type": "function", "function": {"name": self.name, **said, "parameters": signature.parameters}}

    @cached_property
    def check(self) -> Callable[[Json], Problem | None]:
        """The compiled argument check, as `Options.check` says."""
        if self.options.check == "strict":
            return compile_validator(self.name, self.signature.parameters)
        return as_called(self.function, self.signature.hidden, method=self.method, by_python=self.options.check == "lenient")

    @cached_property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @cached_property
    def _slots(self) -> WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]:
        # A semaphore belongs to one event loop, and tools are shared between loops (one per thread).
        return WeakKeyDictionary()

    def place(self) -> AbstractAsyncContextManager[Child | None]:
        """Wait for a slot under the tool's own concurrency limit, and for a thread or a child process if it needs
        one."""
        options = self.options
        at_once = options.concurrency is None and not options.process and (options.inline or self.is_async)
        return _AT_ONCE if at_once else self._place()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[Child | None]:
        async with AsyncExitStack() as stack:
            # The tool's own limit first: calls that wait for it must not hold threads that other tools could use.
            if self.options.concurrency is not None:
                slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.options.concurrency))
                await stack.enter_async_context(slots)
            if not self.is_async and not self.options.inline:
                await stack.enter_async_context(TOOLS.slot())
            child = None
            if self.options.process:
                child = await stack.enter_async_context(child_for(self.name, function_ref(self.function, self.name)))
            yield child

    def convert(self, arguments: Mapping[str, Json]) -> dict[str, Any] | Problem:
        """Checked arguments as Python values; a Problem if a type refuses what its schema allows."""
        signature, values = self.signature, dict(arguments)
        reader, hints = signature.reader, signature.hints
        if reader is None or self.options.check == "off":
            return values
        if self.options.check == "lenient":  # as they are, unless the parameter's type is no JSON type and takes them
            for name, value in arguments.items():
                if name in hints and hints[name] not in _PLAIN:
                    if name not in signature.readers:
                        signature.readers[name] = _reader(TypeAdapter(hints[name]).core_schema)
                    with suppress(ValidationError):
                        made = signature.readers[name].validate_json(json.dumps(value), strict=True)
                        # 5 for a list of floats, say, stays what it is: Python would not change it either.
                        values[name] = value if _is_json(made) else made
            return values
        # Arguments of their declared types skip pydantic. `type` and not isinstance: a bool must not pass for an int.
        if all(type(arguments[name]) is hints[name] for name in arguments):
            return values
        try:
            # JSON text on purpose: pydantic then accepts enums, dates and tuples in their JSON form only.
            read = reader.validate_json(json.dumps(arguments))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(_OF_ONE.sub(r"\1", str(part)) for part in first["loc"] if part != _SECONDS)
            said = f"{first['input']!r} is no date or time. Write it in ISO 8601" if first["type"] == _SECONDS else first["msg"]
            return Problem("invalid_argument", f"{place}: {said}" if place else said)
        # Only those that were given: for the others the function has its own defaults.
        return {name.removeprefix(_PREFIX): getattr(read, name) for name in read.model_fields_set}

    async def invoke(self, owner: Any, values: Mapping[str, Any], child: Child | None = None) -> Any:
        """Call the function with Python values: awaited, inline, in a thread or in a child. `child`: what `place` gave."""
        if child is not None:
            return await child.call(self.name, function_ref(self.function, self.name), values)
        target: Callable[..., Any] = self.function
        if self.method:
            target = target.__get__(owner.tool_set(self.in_set) if self.in_set else owner)
        if self.is_async:
            return await target(**values)
        made = target(**values) if self.options.inline else await TOOLS.call(self.name, target, **values)
        return await made if inspect.iscoroutine(made) else made  # of a plain function around an async one, as decorators make


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a typed function or of a method of a ToolEnv. Options are the fields of `Options`.

        @tool
        async def get(self, key: str) -> int: ...

        @tool(timeout=5, on_timeout="answer")
        def run(code: str) -> str: ...

    An async function is awaited on the event loop; a plain one runs in a thread (so it may block) unless
    `inline=True`. A thread cannot be killed: after a timeout it keeps running with its result ignored, and once 256
    calls of one tool do so, no further ones are started (HungError); use `process=True` for functions that may hang.
    The docstring becomes the description; `Annotated[..., Hidden()]` parameters are filled in by the environment.
    Raises TypeError for an unknown option, and for `process=True` on a function that a child process cannot import;
    types are resolved at first use, so that they may be declared further down.
    """

    def decorate(target: Callable[..., Any]) -> Tool:
        if not callable(target) or not hasattr(target, "__name__"):
            raise ToolSchemaError(f"tool {name or ''}: {target!r:.80} is no function. Write one around it, with @tool above")
        # A function written inside a class body is a method; its first parameter is the environment.
        first = next(iter(inspect.signature(target).parameters), None)
        made = Tool(target, name or target.__name__, Options(**options), method=first == "self")
        if made.options.process:
            # For its error: where the tool is written, not at the first call in an episode.
            function_ref(target, made.name)
        return made

    return decorate if function is None else decorate(function)


# Tools from outside


class ToolSession(Protocol):
    """One episode's connection to a source of tools."""

    async def open(self) -> list[Tool]:
        """Connect and list the tools. Raises EnvError if the other side does not answer."""

    async def close(self) -> None:
        """Disconnect; idempotent, also after a failed `open`."""


class ToolSource(Protocol):
    """Makes a separate session for every episode."""

    def session(self) -> ToolSession:
        """A new, unopened session."""


TOOL_SOURCES: Registry[Callable[..., ToolSource]] = Registry("tools", "TOOL_SOURCES", "agentrl.env", given=2)
"""Makers of sources by the key of `tools` that names them, from a name and its section of the config."""

# Tool sets


class ToolSet:
    """Base class of the stateful sets of a shelf (`tools/NAME.py`): `name`, and methods marked with `@tool`.

    Keyword arguments of the class are those of `tools.args.NAME`; it raises ConfigError for unfit ones, and ResourceError if
    this machine lacks what it needs. State is set in `__init__` and `open` as ordinary attributes: a snapshot or fork of the
    environment copies them with `copy.deepcopy`, so a large and constant part is immutable, or shared by `__deepcopy__`.
    """

    name: ClassVar[str] = ""
    _tools: ClassVar[tuple[Tool, ...]]

    async def open(self) -> None:
        """An episode begins. Raises EnvError if the set fails at it."""

    async def close(self) -> None:
        """The episode is over; called once, also if `open` raised."""

    @property
    def queued(self) -> str:
        """As `ToolEnv.queued`."""
        return ""

    def state(self) -> Json:
        """State of the set, as JSON, for an environment that shows it in its own `state`."""
        return None

    @classmethod
    def tools(cls) -> tuple[Tool, ...]:
        """Its tools as methods of an environment, whose set of this name they are called on: read once a class. Raises TypeError
        for a signature that does not fit."""
        if "_tools" not in cls.__dict__:
            cls._tools = tuple(replace(item, explicit=item.signature, in_set=cls.name) for item in tool_methods(cls))
        return cls._tools


def tool_methods(owner: type) -> Iterator[Tool]:
    """The tools of a class in order of definition, those of its bases first. Raises TypeError for one that could not work."""
    found: dict[str, Tool] = {}
    taken = {name for base in owner.__mro__ if base.__module__.startswith(("agentrl.env.", "gymnasium.")) for name in vars(base)}
    for base in reversed(owner.__mro__):
        # A name that a subclass redefines as something else is not a tool any longer.
        for name, value in vars(base).items():
            found.pop(name, None)
            if isinstance(getattr(value, "__wrapped__", None), Tool):
                raise ToolSchemaError(f"{base.__qualname__}.{name}: a decorator hides its @tool. Put @tool above all others")
            if isinstance(value, Tool):
                if name in taken:
                    raise ToolSchemaError(f"{base.__qualname__}.{name}: runs call it. Rename it, with @tool(name={value.name!r})")
                found[name] = value
    return iter(found.values())
