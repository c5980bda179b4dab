"""`Toolbox`: an ordered set of tools that validates calls and limits output."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.data.images import MOST_IMAGES, Image
from agentrl.data.trajectory import Json, ToolCall, ToolResult
from agentrl.env.call_options import FIELD, MAX_OUTPUT, Problem, nearest
from agentrl.env.tools import Tool
from agentrl.env.tools import tool as make_tool
from agentrl.utils.child_process import Child
from agentrl.utils.errors import (
    AgentrlError,
    EnvError,
    ImageError,
    PolicyTimeoutError,
    ToolError,
    ToolSchemaError,
    ToolTimeoutError,
    fault_text,
)
from agentrl.utils.event_loop import LateError, cancel_all, run_contained, within
from agentrl.utils.parsing import TwiceError, as_value_error, deep_copy_json, in_json, json_text, own_name
from agentrl.utils.redaction import redact, redact_json, redact_said
from agentrl.utils.schemas import own_names
from agentrl.utils.spans import span
from agentrl.utils.threads import by_size, size_of

# Images in a tool's result


def _put_lines(name: str, item: Any, found: list[Image | None]) -> Any:
    """Replace the images of a result by text lines, and append them to `found` (None: not shown)."""
    if isinstance(item, dict):
        return {key: _put_lines(name, value, found) for key, value in item.items()}
    if isinstance(item, set | frozenset):  # its order differs between processes
        item = sorted(item, key=lambda one: (0, one, "") if isinstance(one, int | float) else (1, 0, str(one)))
    if isinstance(item, list | tuple):
        return [_put_lines(name, value, found) for value in item]
    if not isinstance(item, Image) and not type(item).__module__.startswith("PIL."):
        return item
    try:
        image = item if isinstance(item, Image) else Image.of(item)
    except ImageError as problem:
        raise EnvError(f"tool {name} returned an image that cannot be used: {problem}") from None
    why, data = "", image.bytes().decode("latin-1")
    if sum(one is not None for one in found) >= MOST_IMAGES:
        why = f"an answer may hold {MOST_IMAGES}"
    elif redact(data) != data:  # for example in a comment; unlike text, an image file cannot be redacted
        why = "a secret of this run stands in its file"
    found.append(None if why else image)
    return f"[image, {image.size} bytes, not shown: {why}]" if why else image.line


# Output within a budget

CountTokens = Callable[[str], int]
MARK = "... [cut: {cut} of {total} characters]"


def estimate_tokens(text: str) -> int:
    """Estimate four UTF-8 bytes per token, rounded up: usual for English and a large vocabulary.

    Pass a tokenizer's count to `Toolbox` if the budget must be exact.
    """
    return -(-len(text.encode("utf-8", "replace")) // 4)


def shape_result(name: str, answer: Any, budget: int, count: CountTokens) -> tuple[Json, str, tuple[Image, ...]]:
    """Return a result as JSON, as text within `budget` tokens for the model, and its images (as lines in both)."""
    value, images = to_json(name, answer)
    text = fit(to_text(value), budget, count)
    # Image lines that were cut off are appended, so that no image is lost silently.
    lost = dict.fromkeys(image.line for image in images if image.line not in text)
    return value, "\n".join([text, *lost]), images


def to_json(name: str, answer: Any) -> tuple[Json, tuple[Image, ...]]:
    """Convert a result to JSON (`parsing.in_json`) with a line per image, and return the images too. A list of only strings and
    images becomes text, one line each.

    Raises EnvError, as for any fault of a tool, if the result has no JSON form, its methods raise, or an image is too large."""
    if answer is None or type(answer) in (str, bool):  # the common case
        return answer, ()
    found: list[Image | None] = []
    try:
        with as_value_error():
            value = _put_lines(name, answer, found)
        if found and isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = "\n".join(value)
        images = tuple(image for image in found if image is not None)
        # Floats are converted too: JSON has no NaN and no infinity.
        return (value if value is None or type(value) in (str, bool) else in_json(value)), images
    except ValueError as problem:
        raise EnvError(f"tool {name} returned {type(answer).__name__}, which has no JSON form: {problem}") from problem


def to_text(value: Json) -> str:
    """Return strings unchanged, other values as JSON text, and "ok" for None."""
    if value is None:
        return "ok"
    text = value if isinstance(value, str) else json_text(value, ensure_ascii=False)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_text(name: str, answer: Any) -> str:
    """Return a tool's result as the uncut text for the model. Raises EnvError as `to_json`."""
    return to_text(to_json(name, answer)[0])


def error_text(kind: str, message: str) -> str:
    """Return the structured tool message of a failed call."""
    return json.dumps({"error": kind, "message": message}, ensure_ascii=False)


def fit(text: str, budget: int, count: CountTokens) -> str:
    """Cut the end of `text` to fit `budget` tokens, with a mark at the cut.

    The mark is never cut: if it alone exceeds the budget, it is the whole result.
    """
    # A character is at most 4 tokens (its UTF-8 bytes), so short texts need no counting.
    if len(text) * 4 <= budget:
        return text
    # Counting may be slow: if the beginning alone exceeds the budget, the rest is not counted.
    begins = len(text) <= 16 * budget or count(text[: 16 * budget]) <= budget
    if begins and count(text) <= budget:
        return text
    low, high = 0, min(len(text), max(4 * budget, 1))
    while high < len(text) and count(_cut(text, high)) <= budget:
        low, high = high, min(len(text), 2 * high)
    while low < high:
        middle = (low + high + 1) // 2
        if count(_cut(text, middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return _cut(text, low)


def _cut(text: str, keep: int) -> str:
    return text[:keep] + MARK.format(cut=len(text) - keep, total=len(text))


# The toolbox

_NOTHING: Mapping[str, Any] = {}


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call in progress: its start (`since`, time.monotonic()), and whether it is running or waiting for a slot."""

    tool: Tool
    call_id: str
    since: float = field(default_factory=time.monotonic)
    running: bool = False

    def __str__(self) -> str:
        doing = "has been running" if self.running else "has been waiting for a slot"
        return f"tool {self.tool.name} ({self.call_id}), which {doing} for {time.monotonic() - self.since:.0f} s"


class Toolbox:
    """An ordered set of tools, bound to the object whose methods they are.

    Tools are shared between toolboxes; adding or removing one takes effect at once and in this toolbox only, so an environment
    may change its tools during an episode. `max_output`: tokens per result, for tools without a limit of their own. `table`: the
    tools by name; each change makes a new table, so a reference to an old one is a snapshot. `waiting`: the calls in progress.
    `unlisted`: tools by name that are not offered but answer calls (functions that a benchmark offers later).
    """

    __slots__ = ("_count", "_owner", "hidden", "max_output", "table", "unlisted", "waiting")

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] | Mapping[str, Tool] = (),
        *,
        owner: object | None = None,
        hidden: Mapping[str, Any] = _NOTHING,
        count_tokens: CountTokens = estimate_tokens,
        max_output: int = MAX_OUTPUT,
    ) -> None:
        """`tools`: an ordered list, or a table shared by many episodes, which is never changed. `hidden`: values of Hidden
        parameters by name. `owner` may have a method `error_text` (see `ToolEnv`). Raises TypeError for an invalid or duplicate
        tool."""
        self.table: Mapping[str, Tool] = tools if isinstance(tools, Mapping) else {}
        self._owner = owner
        self._count = count_tokens
        self.waiting: list[PendingCall] = []
        self.hidden = hidden
        self.max_output = max_output
        self.unlisted: Mapping[str, Tool] = {}
        for item in () if isinstance(tools, Mapping) else tools:
            self.add(item)

    def __deepcopy__(self, memo: dict[int, Any]) -> Toolbox:
        """Return a toolbox with the same tools, bound to the copy of the owner."""
        tools = copy.deepcopy(self.table, memo)
        hidden = copy.deepcopy(dict(self.hidden), memo)  # values may be episode state
        owner, count = memo.get(id(self._owner), self._owner), self._count
        box = Toolbox(tools, owner=owner, hidden=hidden, count_tokens=count, max_output=self.max_output)
        box.unlisted = copy.deepcopy(self.unlisted, memo)
        return box

    def __iter__(self) -> Iterator[Tool]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, name: object) -> bool:
        return name in self.table

    def __getitem__(self, name: str) -> Tool:
        return self.table[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.table)

    def release(self, owner: object) -> None:
        """Drop the reference to an owner that is no longer used. The reference cycle would otherwise wait for the garbage
        collector, whose passes took a fifth of the time of scores that replay calls."""
        self._owner = None if self._owner is owner else self._owner

    def find(self, name: str) -> Tool | None:
        """Return the tool with this name in any Unicode normalization, listed or unlisted; None if unknown."""
        return self.table.get(own_name(name, self.table)) or self.unlisted.get(own_name(name, self.unlisted))

    def schemas(self) -> list[dict[str, Json]]:
        """All tools in OpenAI's function format, in order."""
        return [item.schema for item in self.table.values()]

    def add(self, item: Tool | Callable[..., Any]) -> None:
        """Add a tool at the end. Raises TypeError if the name is taken or the signature does not fit."""
        added = item if isinstance(item, Tool) else make_tool(item)
        if own_name(added.name, self.table) in self.table:
            raise ToolSchemaError(f"two tools are called {added.name!r}")
        _ = added.schema, added.check  # both are lazy: an invalid signature should fail here, not in an episode
        self.table = {**self.table, added.name: added}

    def offer(self, tools: Mapping[str, Tool]) -> None:
        """Add a table of tools shared by many episodes, before the present tools. Raises TypeError if a name is taken."""
        if taken := sorted(tools.keys() & self.table.keys()):
            raise ToolSchemaError(f"two tools are called {taken[0]!r}")
        self.table = {**tools, **self.table} if self.table else tools

    def replace(self, item: Tool) -> None:
        """Replace the tool with the same name. Raises KeyError for a new name."""
        if item.name not in self.table:
            raise KeyError(item.name)
        self.table = {**self.table, item.name: item}

    def remove(self, name: str) -> None:
        """Remove a tool. Raises KeyError for an unknown name."""
        if name not in self.table:
            raise KeyError(name)
        self.table = {key: value for key, value in self.table.items() if key != name}

    async def call(self, call: ToolCall) -> ToolResult:
        """Answer one call; an invalid call gets a structured error as its result.

        Raises EnvError if the tool fails. On a timeout with `on_timeout` "stop" it raises PolicyTimeoutError if the policy is
        responsible (`Options.late`), else ToolTimeoutError.
        """
        with span("tool", call.name) as opened:
            began = time.monotonic()
            prepared = await by_size(len(call.raw) or size_of(call.arguments), self._prepare, call)
            if isinstance(prepared, Problem):
                answer: Any = prepared
            else:
                item, values = prepared
                waiting = PendingCall(item, call.id)
                self.waiting.append(waiting)
                try:
                    answer = await self._run(waiting, values)
                finally:
                    self.waiting.remove(waiting)
                began, most = waiting.since, item.options.max_output or self.max_output
            if type(answer) is Problem:  # not isinstance, which reads `__class__` of a tool's object
                text = redact(to_text(self.refusal(call, answer)))
                result = ToolResult(call.id, call.name, text, None, answer.kind, time.monotonic() - began)
            else:
                value, content, images = await by_size(size_of(answer), shape_result, item.name, answer, most, self._count)
                if (clean := redact(content)) != content:
                    content, value = clean, redact_json(value)
                result = ToolResult(call.id, call.name, content, value, None, time.monotonic() - began, images)
            if opened is not None:
                opened.set(call=call.id, refused=None if result.error is None else str(result.error))
            return result

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answer the calls of a turn, in order. Adjacent calls run in parallel if their tools allow it."""
        results: list[ToolResult] = []
        while left := calls[len(results) :]:
            # All calls before the next non-parallel tool, or that tool's call alone.
            alone = (n for n, call in enumerate(left) if (item := self.find(call.name)) is not None and not item.options.parallel)
            together = left[: next(alone, len(left)) or 1]
            if len(together) == 1:
                results.append(await self.call(together[0]))
                continue
            tasks = list(map(asyncio.ensure_future, map(self.call, together)))
            try:
                results += await asyncio.gather(*tasks)
            finally:
                # If one call failed or the turn was cancelled, the others must not keep running in the background.
                await cancel_all(tasks)
        return results

    def _prepare(self, call: ToolCall) -> tuple[Tool, dict[str, Any]] | Problem:
        if call.arguments is None:
            return Problem("malformed_call", call.error or "the call is not valid JSON")
        item = self.find(call.name)
        if item is None:
            return Problem("unknown_tool", f"no tool {call.name!r}; {nearest(call.name, list(self.table))}")
        try:
            given = own_names(call.arguments, item.signature.parameters, integers=item.options.check == "strict")
            # A copy: a tool may keep and change its arguments, and the call is part of the record.
            values = item.check(given) or item.convert(deep_copy_json(given))
        except TwiceError as twice:
            return Problem("malformed_call", str(twice))
        except TimeoutError as late:
            return Problem("invalid_argument", str(late))
        if isinstance(values, Problem):
            return values
        # After the check, which refuses unknown arguments, so that a policy cannot set these.
        for name in item.signature.hidden:
            if name not in self.hidden:
                raise EnvError(f"tool {item.name}: no value for its hidden parameter {name!r} (ToolEnv.hidden)")
            values[name] = self.hidden[name]
        for name in item.changeable.keys() - values.keys():
            values[name] = copy.deepcopy(item.changeable[name])
        return item, values

    async def _run(self, waiting: PendingCall, values: dict[str, Any]) -> Any:
        item, child = waiting.tool, None
        try:
            async with item.place() as child:
                # The clock starts here: time in a queue is not the tool's time.
                waiting.since, waiting.running = time.monotonic(), True
                answer = _invoke_tool(item, self._owner, values, child)
                if item.options.inline and not item.is_async:
                    return await run_contained(answer, item.name)  # it blocks the loop, so no timeout could fire
                return await within(item.options.timeout, answer, f"tool {item.name}")
        except ToolError as refusal:
            return Problem("tool_error", str(refusal))
        # Unchanged: the last clause would lose who is to blame.
        except (EnvError, PolicyTimeoutError):
            raise
        except LateError:
            message = f"no answer within {item.options.timeout:g} s"
            if item.options.on_timeout == "answer":
                return Problem("timeout", message)
            if child is not None:
                message += f"; its process used {child.used:.2f} s of CPU time"
            kind = PolicyTimeoutError if item.options.policy_late else ToolTimeoutError
            raise kind(f"tool {item.name}: {message}") from None
        except Exception as fault:
            raise EnvError(redact_said(f"tool {item.name} failed: {fault_text(fault)}")) from fault

    def refusal(self, call: ToolCall, problem: Problem) -> str:
        """Return the text that the policy reads instead of a result: in the tool's format, the environment's, or as JSON with the
        keys "error" and "message". The message is cut to the tool's budget."""
        item = self.find(call.name)
        most = item.options.max_output if item is not None else None
        cut = replace(problem, message=fit(problem.message, most or self.max_output, self._count))
        if item is not None and item.options.error is not None:
            message = json.dumps(cut.message, ensure_ascii=False)
            values = {"message": cut.message, "json": message, "error": cut.kind, "tool": item.name}
            return FIELD.sub(lambda field: values[field[1]], item.options.error)
        own: Callable[[ToolCall, Problem], str] | None = getattr(self._owner, "error_text", None)
        return error_text(cut.kind, cut.message) if own is None else own(call, cut)


async def _invoke_tool(item: Tool, owner: object | None, values: Mapping[str, Any], child: Child | None) -> Any:
    """Call the tool and return its result. Raises its exceptions, as ToolError those that the policy should read."""
    try:
        return await item.invoke(owner, values, child)
    except AgentrlError as fault:
        str(fault)  # may raise; then here, where it counts as the tool's fault
        raise
    except Exception as fault:
        options = item.options
        if options.on_error == "stop" or (options.on_error is None and options.check == "strict"):
            raise
        raise ToolError(str(fault)) from fault
