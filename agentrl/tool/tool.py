"""`Tool`: a typed Python function that a policy may call, and the `@tool` decorator that makes one."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType
from typing import Any, overload
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from agentrl.executors import TOOLS
from agentrl.tool.options import DEFAULT, Blame, OnTimeout, Options
from agentrl.tool.process import Child, child_for, function_ref
from agentrl.tool.schema import Hidden, Signature, conversion_problem, read_signature
from agentrl.tool.validate import Problem, as_called, as_object, compile_validator, safe_schema
from agentrl.trajectory import Json

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
        """Whether its function is bound to an object: a method of it, or a partial call."""
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
        never end or fill the memory (`agentrl.schemas`). What arguments are checked against is `Options.check`; with "strict" the
        schema must be valid JSON Schema, which is found out when the tool is added to a toolbox.
        """
        safe_schema(name, parameters)
        if shown := [name for name in hidden if name in parameters.get("properties", {})]:
            raise ValueError(f"tool {name}: its schema shows the policy {shown[0]!r}, which is to be hidden")
        return cls(function, name, options, explicit=Signature(description, dict(parameters), tuple(hidden), dict))

    @classmethod
    def declared(
        cls,
        declaration: Mapping[str, Any],
        function: Callable[..., Any],
        options: Options = DEFAULT,
        hidden: Sequence[str] = (),
    ) -> Tool:
        """`from_schema` of a whole declaration in OpenAI's form, which the policy is shown key for key."""
        body = declaration["function"]
        made = cls.from_schema(body["name"], body.get("description", ""), body["parameters"], function, options, hidden)
        return replace(made, explicit=replace(made.signature, declared=dict(declaration)))

    @classmethod
    def published(cls, declared: Mapping[str, Any], run: Callable[..., Any], **options: Any) -> Tool:
        """A benchmark's tool as it publishes it: `declared` is {"name", "description", "parameters"}, which the policy is shown.
        `run(env, **arguments)` answers. Its own code says what arguments are worth, so nothing checks them before, and the calls
        of a turn are made one after the other. `options`: others, as in `Options`."""
        made = Options(**{"check": "off", "parallel": False, **options})
        name, parameters = declared["name"], declared.get("parameters", {})
        return replace(cls.from_schema(name, declared.get("description", ""), parameters, run, made), method=True)

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
        body: dict[str, Json] = {"name": self.name, "parameters": signature.parameters}
        if signature.description:
            body = {
                "name": self.name,
                "description": signature.description,
                "parameters": signature.parameters,
            }
        return {"type": "function", "function": body}

    @cached_property
    def check(self) -> Callable[[Json], Problem | None]:
        """The compiled argument check, as `Options.check` says."""
        if self.options.check == "strict":
            return compile_validator(self.name, self.signature.parameters)
        if self.options.check == "lenient":
            return as_called(self.function, self.signature.hidden, method=self.method)
        return as_object(self.function, self.signature.hidden)

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
                await stack.enter_async_context(self._slot())
            if not self.is_async and not self.options.inline:
                await stack.enter_async_context(TOOLS.slot())
            child = None
            if self.options.process:
                child = await stack.enter_async_context(child_for(self.name, function_ref(self.function, self.name)))
            yield child

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self.options.concurrency or 1)
        return self._slots[loop]

    def convert(self, arguments: Mapping[str, Json]) -> dict[str, Any] | Problem:
        """Checked arguments as Python values; a Problem if a type refuses what its schema allows."""
        try:
            if self.options.check == "strict":
                return self.signature.convert(arguments)
            return dict(arguments) if self.options.check == "off" else self.signature.loosely(arguments)
        except ValidationError as error:
            return Problem("invalid_argument", conversion_problem(error))

    async def invoke(self, owner: object | None, values: Mapping[str, Any], child: Child | None = None) -> Any:
        """Call the function with Python values: awaited, inline, in a thread or in a child. `child`: what `place` gave."""
        if child is not None:
            return await child.call(self.name, function_ref(self.function, self.name), values)
        target = self.function.__get__(owner) if self.method else self.function
        if self.is_async:
            return await target(**values)
        if self.options.inline:
            return target(**values)
        return await TOOLS.call(self.name, target, **values)


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
        # A function written inside a class body is a method; its first parameter is the environment.
        first = next(iter(inspect.signature(target).parameters), None)
        made = Tool(target, name or target.__name__, Options(**options), method=first == "self")
        if made.options.process:
            # For its error: where the tool is written, not at the first call in an episode.
            function_ref(target, made.name)
        return made

    return decorate if function is None else decorate(function)


__all__ = ["Blame", "Hidden", "OnTimeout", "Options", "Tool", "tool"]
