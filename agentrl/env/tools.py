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
from functools import cache, cached_property, partial, update_wrapper
from itertools import pairwise
from types import CellType, FunctionType
from typing import Annotated, Any, ClassVar, Optional, Protocol, get_args, get_origin, get_type_hints, overload
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import SchemaError, SchemaValidator, core_schema

from agentrl.data.trajectory import Json
from agentrl.env.call_options import DEFAULT, Options, Problem, call_check, compile_validator, safe_schema
from agentrl.utils.child_process import Child, call_whole, child_for, function_ref
from agentrl.utils.errors import ToolSchemaError
from agentrl.utils.parsing import parts_of
from agentrl.utils.registry import Registry
from agentrl.utils.schemas import DATA
from agentrl.utils.threads import TOOLS

# From typed Python signatures to JSON Schema, and from JSON arguments to Python values.
#
# pydantic handles the types; this file decides which parameters are arguments, where their
# descriptions come from, and how the schema is simplified for the model.


class Hidden:
    """Marks a parameter that the environment fills in and the model never sees.

    `user: Annotated[str, Hidden()]` takes its value from `ToolEnv.hidden(task)["user"]`.
    """


@dataclass(frozen=True, slots=True)
class Signature:
    """A tool's parameters: JSON Schema for the model, `hidden` names, and Python types by name (`hints`). `reader` converts all
    arguments at once (None if JSON values are passed on unchanged), `readers` single ones. `declared`: the whole declaration
    that the model is shown, if it was given and not made from the signature."""

    description: str
    parameters: dict[str, Json]
    hidden: tuple[str, ...]
    hints: Mapping[str, Any] = field(default_factory=dict)
    reader: SchemaValidator | None = None
    declared: dict[str, Json] | None = None
    readers: dict[str, SchemaValidator] = field(default_factory=dict)


_PREFIX = "p_"
# Without int and float: JSON Schema accepts 1.0 for an integer and 1 for a number, which pydantic converts to 1 and 1.0.
_UNCONVERTED = frozenset({str, bool, Any, dict, list})


def read_signature(function: Callable[..., Any], *, method: bool) -> Signature:
    """Read the types, defaults and docstring of `function` (`method`: its first parameter is `self`).

    Raises TypeError if a parameter has no annotation, is `*args`, `**kwargs` or positional-only, has a `Field` as its default,
    or has a type without a JSON form.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as problem:  # TypeError: of a partial, or an object that can be called
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
        if isinstance(parameter.default, FieldInfo):  # Python would pass the Field itself as the value
            raise ToolSchemaError(f"{place} has a Field as its default. Write Annotated[TYPE, Field(...)] = DEFAULT")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        if default is None:  # `x: int = None`: the default would not fit the schema
            base, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            optional = Optional[base]  # type: ignore[valid-type]  # noqa: UP045 - it may be a string, which `|` does not take
            hint = Annotated[(optional, *more)] if more else optional
        # The alias is the argument's name; the prefixed field name (see below) is never visible.
        info = Field(default=default, alias=parameter.name, description=described.get(parameter.name))
        fields[parameter.name] = (hint, info)
    # The prefix avoids clashes with names that pydantic uses or forbids, such as `schema`, `copy` or `_x`.
    renamed: dict[str, Any] = {f"{_PREFIX}{name}": field for name, field in fields.items()}
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        model = create_model(f"{function.__name__}_arguments", __config__=config, **renamed)
        schema = plain_schema(model.model_json_schema(by_alias=True))
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as problem:
        raise ToolSchemaError(f"tool {function.__name__}: no JSON form for its parameters: {problem}") from problem
    except SchemaError as problem:  # an invalid pattern or bound
        said, of = str(problem), re.search(rf'Field "{_PREFIX}(\w+)"', str(problem))
        place = f"parameter {of[1]!r}" if of else "its parameters"
        why = re.sub(r"^\s*(\w*Error|error): ", "", said.splitlines()[-1])
        raise ToolSchemaError(f"tool {function.__name__}: {place}: {why}. Change its pattern or bound") from problem
    for part in parts_of(model.__pydantic_core_schema__):
        for value in part.get("expected", ()) if isinstance(part, dict) and part.get("type") == "literal" else ():
            if isinstance(value, Enum) and not isinstance(value, str | int):  # pydantic accepts it only as a Python object
                raise ToolSchemaError(f"tool {function.__name__}: Literal[{value}] is no JSON. Write Literal[{value.value!r}]")
    hints = {name: hint for name, (hint, _) in fields.items()}
    plain = all((hint is Any or isinstance(hint, type)) and hint in _UNCONVERTED for hint in hints.values())
    return Signature(summary, schema, tuple(hidden), hints, None if plain else _reader(model.__pydantic_core_schema__))


_PLAIN = (str, int, float, bool, Any, dict, list)
_NUMBER = re.compile(r"\s*[-+]?[0-9.]+\s*")
_SECONDS = "agentrl_seconds"
_TAGGED_UNION = re.compile(r"tagged-union\[(\w+)\]")


def _reader(schema: Any) -> SchemaValidator:
    return SchemaValidator(_refuse_seconds(schema), _use_prebuilt=False)


def _refuse_seconds(schema: Any) -> Any:
    """Make the dates of a pydantic core schema refuse "2024", which would be seconds since 1970."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_refuse_seconds, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")  # a dict if the keys are field names
    kept = ("default", "expected", "metadata", "serialization") if isinstance(kind, str) else ()
    changed = {key: value if key in kept else _refuse_seconds(value) for key, value in schema.items()}
    if kind not in ("date", "datetime"):
        return changed
    # A tagged union with one member: its discriminator sees the text and leaves the conversion to the member.
    named = {"ref": changed.pop("ref", None), "custom_error_type": _SECONDS, "custom_error_message": _SECONDS}
    tag = lambda given: None if isinstance(given, str) and _NUMBER.fullmatch(given) else _SECONDS  # noqa: E731
    return core_schema.tagged_union_schema({_SECONDS: changed}, tag, **named)


def _is_json(value: Any) -> bool:
    if type(value) in (list, dict):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return value is None or type(value) in (str, int, float, bool)


def plain_schema(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Shorten a schema: no titles, and references inlined unless they are recursive."""
    definitions = dict(schema.get("$defs", {}))
    found = {name: [part.get("$ref") for part in parts_of(body) if isinstance(part, dict)] for name, body in definitions.items()}
    reached = {name: {one.rpartition("/")[2] for one in said if isinstance(one, str)} for name, said in found.items()}
    for _ in reached:  # transitive closure
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
    """Inline references and drop titles. `named`: the keys of `node` are property names, so a property "title" is kept."""
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


_SECTION = re.compile(
    r"^(?:((?:keyword |other )?(?:args|arguments|parameters|params))|returns?|raises|yields?|examples?|notes?):{0,2}\s*$", re.I
)
_GOOGLE = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)$")
_NUMPY = re.compile(r"^(\w+(?:\s*,\s*\w+)*)\s*(?::\s*.*)?$")
_SPHINX = re.compile(r"^\s*:param\s+(?:[\w\[\], |]+\s+)?(\w+)\s*:\s*(.*)$")
_DEEP = 10**6


@cache
def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the summary and each parameter's description of a Google, NumPy or Sphinx docstring."""
    summary: list[str] = []
    described: dict[str, list[str]] = {}
    section, into, base = "", summary, _DEEP  # the indentation of the section's entries
    for line, below in pairwise([*text.splitlines(), ""]):
        indent, underlined = len(line) - len(line.lstrip()), set(below.strip()) == {"-"}
        if not line.strip() or set(line.strip()) == {"-"}:
            continue
        match = _SECTION.match(line)
        if param := _SPHINX.match(line):
            section, into, base = "sphinx", described.setdefault(param[1], []), _DEEP
            into.append(param[2].strip())
        elif match or (section == "numpy" and underlined):
            section, into, base = "numpy" if underlined else "google", [], _DEEP
            if match is None or not match[1]:
                section = "other"
        elif section and line.startswith(":"):
            section, into, base = "other", [], _DEEP
        elif section and not indent and 0 < base < _DEEP:  # text after an indented section
            section, into = "", summary
            into.append(line)
        else:
            base = min(base, indent)
            if section == "google" and indent == base and (entry := _GOOGLE.match(line)):
                into = described[entry[1]] = [entry[2].strip()]
            elif section == "numpy" and not indent and (entry := _NUMPY.match(line)):
                into = []
                described |= dict.fromkeys(re.findall(r"\w+", entry[1]), into)
            else:
                into.append(line.strip())
    return " ".join(" ".join(summary).split()), {name: " ".join(filter(None, parts)) for name, parts in described.items()}


# Tools


def _holds_env(cell: CellType) -> bool:
    with suppress(ValueError):  # an empty cell
        return hasattr(cell.cell_contents, "user_toolbox")
    return False


_NO_SLOT: nullcontext[None] = nullcontext()  # stateless, so calls may share it


@dataclass(frozen=True, eq=False)
class Tool:
    """A function with its name, schema and call options; stateless and shared by all episodes.

    A tool defined in a class is a method: accessed through an instance it is the bound function, so `env.get("a")`
    works in plain Python, without validation. A `Toolbox` makes validated calls.
    """

    function: Callable[..., Any]
    name: str
    options: Options = DEFAULT
    method: bool = False
    explicit: Signature | None = field(default=None, repr=False)
    in_set: str = ""
    """Name of the tool set that it is a method of; calls look the set up in the environment, since a fork has its own copy."""

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return self.function.__get__(instance, owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tool:
        """Return the tool itself, which is stateless; a bound one is rebound to the copy of its object."""
        if not self.bound:
            return self
        other, made = copy.copy(self), copy.deepcopy(self.function, memo)
        if isinstance(made, FunctionType):  # `deepcopy` returns the function itself
            env = partial(copy.deepcopy, memo=memo)
            cells = tuple(CellType(env(cell.cell_contents)) if _holds_env(cell) else cell for cell in made.__closure__ or ())
            made = FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, cells)
            update_wrapper(made, self.function)
            made.__dict__, made.__kwdefaults__ = dict(vars(self.function)), self.function.__kwdefaults__
        object.__setattr__(other, "function", made)
        return other

    @property
    def bound(self) -> bool:
        """True if its function is bound to an object: a bound method, a partial, or a function that encloses an environment."""
        if isinstance(self.function, FunctionType):
            return any(map(_holds_env, self.function.__closure__ or ()))
        return not isinstance(getattr(self.function, "__self__", None), type)

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
        """Make a tool with an existing schema (from an MCP server or a dataset), shown to the policy unchanged; `function` takes
        keyword arguments, including those in `hidden`, which the environment fills in (`ToolEnv.hidden`).

        Raises ValueError if the schema shows a hidden argument, and TypeError, naming the place, if the schema could fetch
        something, not terminate or exhaust memory (`agentrl.utils.schemas`). `Options.check` selects the argument check; with
        "strict" the schema must be valid JSON Schema, which adding the tool to a toolbox verifies.
        """
        safe_schema(name, parameters)
        if shown := [name for name in hidden if name in parameters.get("properties", {})]:
            raise ValueError(f"tool {name}: its schema shows the policy {shown[0]!r}, which is to be hidden")
        return cls(function, name, options, explicit=Signature(description, dict(parameters), tuple(hidden)))

    @classmethod
    def from_declaration(
        cls, declaration: Mapping[str, Any], function: Callable[..., Any], options: Options = DEFAULT, hidden: Sequence[str] = ()
    ) -> Tool:
        """Make a tool from a declaration in OpenAI's format, shown to the policy unchanged; see `from_schema`."""
        body = declaration["function"]
        made = cls.from_schema(body["name"], body.get("description", ""), body["parameters"], function, options, hidden)
        return replace(made, explicit=replace(made.signature, declared=dict(declaration)))

    def with_options(self, **changes: Any) -> Tool:
        """Return the tool with some options replaced."""
        made = replace(self, options=replace(self.options, **changes))
        if "signature" in self.__dict__:  # already read; it does not depend on the options
            made.__dict__["signature"] = self.signature
        return made

    @cached_property
    def signature(self) -> Signature:
        """The parameters, read once. Raises TypeError if they have no JSON form or an unsafe schema."""
        if self.explicit is not None:
            return self.explicit
        signature = read_signature(self.function, method=self.method)
        safe_schema(self.name, signature.parameters)
        return signature

    @cached_property
    def schema(self) -> dict[str, Json]:
        """The schema in OpenAI's function format. It is shared: do not change it."""
        signature = self.signature
        if signature.declared is not None:
            return signature.declared
        said = {"description": signature.description} if signature.description else {}
        return {"type": "function", "function": {"name": self.name, **said, "parameters": signature.parameters}}

    @cached_property
    def check(self) -> Callable[[Json], Problem | None]:
        """The compiled argument check of `Options.check`."""
        taken = call_check(self.function, self.signature.hidden, method=self.method, by_python=self.options.check != "off")
        if self.options.check != "strict":
            return taken
        fits = compile_validator(self.name, self.signature.parameters)
        # A given schema may allow names that the function does not take.
        return fits if self.explicit is None else lambda arguments: fits(arguments) or taken(arguments)

    @cached_property
    def changeable(self) -> dict[str, Any]:
        """Default values that a call could change for all later ones, by parameter: each call gets a copy."""
        with suppress(ValueError):  # a builtin without a signature
            own = inspect.signature(self.function, follow_wrapped=False).parameters
            rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
            known = inspect.signature(self.function).parameters if rest else own
            return {name: parameter.default for name, parameter in known.items() if type(parameter.default).__hash__ is None}
        return {}

    @cached_property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @cached_property
    def _slots(self) -> WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]:
        # A semaphore belongs to one event loop, but tools are shared between loops (one per thread).
        return WeakKeyDictionary()

    def place(self) -> AbstractAsyncContextManager[Child | None]:
        """Wait for a slot under the concurrency limit, and for a thread or child process if needed."""
        options = self.options
        at_once = options.concurrency is None and not options.process and (options.inline or self.is_async)
        return _NO_SLOT if at_once else self._place()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[Child | None]:
        async with AsyncExitStack() as stack:
            # The tool's limit first: calls that wait for it must not hold threads that other tools could use.
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
        """Convert checked arguments to Python values; a Problem if a type refuses a value that its schema allows."""
        signature, values = self.signature, dict(arguments)
        reader, hints = signature.reader, signature.hints
        if reader is None or self.options.check == "off":
            return values
        if self.options.check == "lenient":  # unchanged, unless the parameter's type is no JSON type and accepts the value
            for name, value in arguments.items():
                if name in hints and hints[name] not in _PLAIN:
                    if name not in signature.readers:
                        signature.readers[name] = _reader(TypeAdapter(hints[name]).core_schema)
                    with suppress(ValidationError):
                        made = signature.readers[name].validate_json(json.dumps(value), strict=True)
                        # [5] for a list of floats stays unchanged: Python would not convert it either.
                        values[name] = value if _is_json(made) else made
            return values
        # Arguments of the declared types skip pydantic. `type`, not isinstance: a bool must not pass for an int.
        if all(type(arguments[name]) is hints[name] for name in arguments):
            return values
        try:
            # From JSON text, so that pydantic accepts enums, dates and tuples only in their JSON form.
            read = reader.validate_json(json.dumps(arguments))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(_TAGGED_UNION.sub(r"\1", str(part)) for part in first["loc"] if part != _SECONDS)
            said = f"{first['input']!r} is no date or time. Write it in ISO 8601" if first["type"] == _SECONDS else first["msg"]
            return Problem("invalid_argument", f"{place}: {said}" if place else said)
        # Only the given arguments: the function has its own defaults for the others.
        return {name.removeprefix(_PREFIX): getattr(read, name) for name in read.model_fields_set}

    async def invoke(self, owner: Any, values: Mapping[str, Any], child: Child | None = None) -> Any:
        """Call the function with Python values: awaited, inline, in a thread or in `child`, the process from `place`."""
        if child is not None:
            return await child.call(self.name, function_ref(self.function, self.name), values)
        target: Callable[..., Any] = self.function
        if self.method:
            target = target.__get__(owner.tool_set(self.in_set) if self.in_set else owner)
        if self.is_async:
            return await target(**values)
        made = call_whole(target, values) if self.options.inline else await TOOLS.call(self.name, call_whole, target, values)
        return await made if inspect.iscoroutine(made) else made  # a decorator may wrap an async function in a plain one


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool from a typed function or a method of a ToolEnv. Options are the fields of `Options`.

        @tool
        async def get(self, key: str) -> int: ...

        @tool(timeout=5, on_timeout="answer")
        def run(code: str) -> str: ...

    An async function is awaited on the event loop; a plain one runs in a thread (so it may block) unless `inline=True`. A thread
    cannot be killed, so use `process=True` for functions that may hang.
    The docstring becomes the description; `Annotated[..., Hidden()]` parameters are filled in by the environment.
    Raises TypeError for an unknown option, and for `process=True` on a function that a child process cannot import;
    annotations are resolved at first use, so types may be defined further down.
    """

    def decorate(target: Callable[..., Any]) -> Tool:
        if not callable(target) or not hasattr(target, "__name__"):
            raise ToolSchemaError(f"tool {name or ''}: {target!r:.80} is no function. Write one around it, with @tool above")
        # A function written inside a class body is a method; its first parameter is the environment.
        first = next(iter(inspect.signature(target).parameters), None)
        made = Tool(target, name or target.__name__, Options(**options), method=first == "self")
        if made.options.process:
            # To raise its error at the definition, not at the first call in an episode.
            function_ref(target, made.name)
        return made

    return decorate if function is None else decorate(function)


# Tools from outside


class ToolSession(Protocol):
    """One episode's connection to a source of tools."""

    async def open(self) -> list[Tool]:
        """Connect and list the tools. Raises EnvError if the source does not answer."""

    async def close(self) -> None:
        """Disconnect; idempotent, also after a failed `open`."""


class ToolSource(Protocol):
    """A source of tools that opens a separate session for each episode."""

    def session(self) -> ToolSession:
        """Make a new session, not yet open."""


TOOL_SOURCES: Registry[Callable[..., ToolSource]] = Registry("tools", "TOOL_SOURCES", "agentrl.env", given=2)
"""Factories of tool sources by their key in the `tools` section; arguments: a name and its config section."""

# Tool sets


class ToolSet:
    """Base class of stateful tool sets on a shelf (`tools/NAME.py`): a `name`, and methods marked with `@tool`.

    The keyword arguments of the class come from `tools.args.NAME`; raise ConfigError for invalid ones, and ResourceError if
    this machine lacks a requirement. Set state in `__init__` and `open`, as ordinary attributes: snapshots and forks of the
    environment copy them with `copy.deepcopy`, so make a large constant part immutable, or share it by `__deepcopy__`.
    """

    name: ClassVar[str] = ""
    _tools: ClassVar[tuple[Tool, ...]]

    async def open(self) -> None:
        """Start an episode. Raises EnvError if that fails."""

    async def close(self) -> None:
        """End the episode; called once, also if `open` raised."""

    @property
    def queued(self) -> str:
        """The resource that it queues for; see `ToolEnv.queued`."""
        return ""

    def state(self) -> Json:
        """The set's state as JSON, for an environment that includes it in its `state`."""
        return None

    @classmethod
    def tools(cls) -> tuple[Tool, ...]:
        """Return its tools, read once per class; a call runs on the environment's set of this name. Raises TypeError for an
        invalid signature."""
        if "_tools" not in cls.__dict__:
            cls._tools = tuple(replace(item, explicit=item.signature, in_set=cls.name) for item in tool_methods(cls))
        return cls._tools


def tool_methods(owner: type) -> Iterator[Tool]:
    """Yield a class's tools in order of definition, inherited ones first. Raises TypeError for an invalid one."""
    found: dict[str, Tool] = {}
    taken = {name for base in owner.__mro__ if base.__module__.startswith(("agentrl.env.", "gymnasium.")) for name in vars(base)}
    for base in reversed(owner.__mro__):
        # A name that a subclass redefines as something else is no longer a tool.
        for name, value in vars(base).items():
            if found.pop(name, None) is not None and inspect.isfunction(value):
                fix = f"Put @tool above it, or write `{name} = None` to offer no such tool"
                raise ToolSchemaError(f"{base.__qualname__}.{name}: it overrides a tool, and is not marked as one. {fix}")
            if isinstance(getattr(value, "__wrapped__", None), Tool):
                raise ToolSchemaError(f"{base.__qualname__}.{name}: a decorator hides its @tool. Put @tool above all others")
            if isinstance(value, Tool):
                if name in taken:
                    fix = f"Rename the method, and keep the tool's name with @tool(name={value.name!r})"
                    raise ToolSchemaError(f"{base.__qualname__}.{name}: the name is reserved. {fix}")
                found[name] = value
    return iter(found.values())
