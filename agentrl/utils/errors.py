"""One error class per cause. `UserError` and its subclasses are a user's mistake or a machine's limit: the
command line prints their message without a stack trace and exits with code 2."""

from __future__ import annotations

import difflib
import dis
import errno
import inspect
import signal
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, SupportsFloat, SupportsIndex, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Values of `OSError.errno` for a full disk, an exhausted quota, or a file at its size limit."""


def did_you_mean(
    word: object,
    known: Iterable[object],
    otherwise: str = "",
    *,
    most: int = 1,
    show: Callable[[str], str] = repr,
    like: float = 0.5,
) -> str:
    """Format a hint for a misspelled `word`: "did you mean 'x'?" with up to `most` similar names of `known`, formatted by `show`;
    `otherwise` if none has a difflib ratio of at least `like`."""
    # `difflib.get_close_matches`, several times as fast: an upper bound from letter counts rules out most words.
    text = str(word)
    matcher, letters, found = difflib.SequenceMatcher(b=text), Counter(text), list[tuple[float, str]]()
    sized = [(len(item) + len(text), item) for item in {str(item) for item in known}]
    sized = [(both, item) for both, item in sized if 2 * min(len(item), len(text)) >= like * both > 0]
    bounds = [(2 * sum(min(item.count(one), many) for one, many in letters.items()) / both, item) for both, item in sized]
    for bound, item in sorted(bounds, reverse=True):
        if bound < like:
            break
        matcher.set_seq1(item)
        if (ratio := matcher.ratio()) >= like:
            found = sorted([*found, (ratio, item)], reverse=True)[:most]
            like = found[-1][0] if len(found) == most else like
    return f"did you mean {' or '.join(show(item) for _, item in found)}?" if found else otherwise


def hint_text(word: object, known: Iterable[object], *, show: Callable[[str], str] = repr) -> str:
    """Return the hint as the end of a sentence, "; did you mean 'x'?", or ""."""
    hint = did_you_mean(word, known, show=show)
    return f"; {hint}" if hint else ""


_RAISE = dis.opmap["RAISE_VARARGS"]


def fault_text(problem: BaseException) -> str:
    """Format an exception as "Type: text", even if its `__str__` raises."""
    try:
        return f"{type(problem).__name__}: {problem}"
    except BaseException as second:
        if is_from_outside(second):
            raise
        return f"{type(problem).__name__} (its __str__ raises {type(second).__name__})"


def is_from_outside(fault: BaseException) -> bool:
    """Return True for the user's Ctrl-C and the closing of a coroutine, which must propagate; False for a KeyboardInterrupt or
    GeneratorExit that code raises itself: that is a fault, and must not end a run."""
    if not isinstance(fault, KeyboardInterrupt | GeneratorExit):
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    own, place, raises = getattr(getattr(handler, "func", handler), "__code__", None), fault.__traceback__, False
    while place is not None:
        code, at, place = place.tb_frame.f_code, place.tb_lasti, place.tb_next
        if code is own:
            return True
        raises = code.co_code[at] == _RAISE
    return not raises  # Python's own handler has no frame: it raises between two instructions


def exception_for(fault: BaseException, name: str, kind: type[Exception] = RuntimeError) -> Exception:
    """Return the exception, or a `kind` instead of one that would end an event loop or process."""
    if isinstance(fault, Exception):
        return fault
    raised = f"called sys.exit({fault.code!r})" if isinstance(fault, SystemExit) else f"raised {fault_text(fault)}"
    return kind(f"{name} {raised}")


def is_alien(fault: BaseException) -> bool:
    """Return True for a fault in code that agentrl calls: neither from outside nor an AgentrlError that such code lets pass.
    ToolError and ImageError are its own: only a tool's call reads them."""
    return isinstance(fault, ToolError | ImageError) or not (isinstance(fault, AgentrlError) or is_from_outside(fault))


def raised_text(problem: BaseException, made: Any) -> str:
    """Describe an exception of a user's function or class: type, text, and FILE:LINE."""
    return f"raised {fault_text(problem)} ({place_of(made, problem)})"


def place_of(made: Any, problem: BaseException | None = None) -> str:
    """Return FILE:LINE where a user's function or class raised `problem`, else of its definition."""
    made = inspect.unwrap(getattr(made, "func", made))
    made = made if isinstance(made, type) or inspect.isroutine(made) else type(made)
    code = getattr(made, "__code__", None)
    try:
        file = inspect.getfile(made)
        line = inspect.getsourcelines(made)[1] if code is None else code.co_firstlineno
    except (OSError, TypeError, SystemError):  # typed at a prompt, not written in Python, or parsed elsewhere (`parse_alone`)
        return str(getattr(made, "__qualname__", made))
    frames = traceback.extract_tb(None if problem is None else problem.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{file}:{lines[-1] if lines else line}"


def need_package(module: str, text: str) -> None:
    """Raise DependencyError with `text` if a Python package is not installed."""
    if find_spec(module) is None:
        raise DependencyError(text)


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that users call: a wrong argument type raises ConfigError, which names the argument."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_arguments(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def check_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument (or an item of a container) of a type other than annotated. A missing or unknown argument
    raises Python's TypeError."""
    signature, hints = _signature_of(function)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        several = signature.parameters[name].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        hint = Any if several else hints.get(name, Any)
        # True is a number to Python, but as an argument a mistake (inside of a list, as of rewards, it is allowed).
        kinds = (hint, *get_args(hint))
        switch = isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds)
        if switch or not _type_test(hint)(value):
            expected = " or ".join(dict.fromkeys(_describe_type(hint)))
            call = function.__name__.lstrip("_")
            raise ConfigError(f"{call}: {name} = {value!r:.80} is a {type(value).__name__}; expected {expected}")


@cache
def _signature_of(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    return inspect.signature(function), get_type_hints(function)


def answer_problem(answer: Any, method: Callable[..., Any], made: Any) -> str:
    """Describe an answer that violates the return annotation of `method`, with the FILE:LINE of the override `made`; else ""."""
    hint = _signature_of(method)[1].get("return", Any)
    if type(answer) is hint or _type_test(hint)(answer):
        return ""
    if inspect.iscoroutine(answer):
        answer.close()
    shown, expected = "a coroutine" if inspect.iscoroutine(answer) else f"{answer!r:.80}", dict.fromkeys(_describe_type(hint))
    return f"returned {shown}, expected {' or '.join(expected)}. Correct it at {place_of(made)}"


@contextmanager
def user_code(what: str, function: Any, made: Any = None) -> Iterator[None]:
    """Convert an exception of a user's function (or a method of `made`) into CallbackError, with `what` raised and FILE:LINE.
    AgentrlErrors, and exceptions of agentrl's own functions, pass unchanged."""
    try:
        yield
    except (Exception, SystemExit) as problem:
        if isinstance(problem, AgentrlError) or not is_users(function if made is None else type(made)):
            raise
        raise CallbackError(f"{what} {raised_text(problem, function)}") from problem


def is_users(function: Any) -> bool:
    """Return True for a function or class defined outside of agentrl."""
    made = inspect.unwrap(getattr(function, "func", function))
    return not (getattr(made, "__module__", None) or "").startswith("agentrl.")


def call_method(label: str, method: Callable[..., R], made: Any, *args: Any) -> R:
    """Call an object's override of a base class's method. Raises CallbackError as `user_code`, and ConfigError with FILE:LINE if
    the answer's type differs from the annotation."""
    own: Callable[..., R] = getattr(made, method.__name__)
    with user_code(f"{label}: {method.__name__}", own, made):
        answer = own(*args)
    if text := answer_problem(answer, method, own):
        raise ConfigError(f"{label}: {method.__name__} {text}")
    return answer


@cache
def _type_test(hint: Any) -> Callable[[Any], bool]:
    """Build the type test of an annotation; cached, because every call of a hook is checked."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return lambda value: value in parts
    if kind in (Union, UnionType):
        tests = [_type_test(part) for part in parts]
        return lambda value: any(test(value) for test in tests)
    if kind is Any or not isinstance(kind, type):
        return lambda value: True
    if not issubclass(kind, Collection) or issubclass(kind, str):
        # Exact type first: isinstance of a protocol is slow. numpy's bool is no Python bool.
        kinds, names = _LIKE.get(kind, kind), ("bool", "bool_") if kind is bool else ()
        return lambda value: type(value) is kind or isinstance(value, kinds) or type(value).__name__ in names
    if kind is tuple and parts and Ellipsis not in parts:
        each = [_type_test(part) for part in parts]
        return lambda value: (
            isinstance(value, list | tuple)
            and len(value) == len(each)
            and all(test(one) for test, one in zip(each, value, strict=True))
        )
    mapped = issubclass(kind, Mapping)
    inside = parts[1:] if mapped else parts[:1]
    item = _type_test(inside[0]) if inside and inside[0] is not Any else None
    if mapped:
        return lambda value: (
            isinstance(value, Mapping) and isinstance(value, kind) and (item is None or all(map(item, value.values())))
        )
    # An array counts as a list.
    return lambda value: (
        isinstance(value, Collection) and not isinstance(value, Mapping | str) and (item is None or all(map(item, value)))
    )


def _describe_type(hint: Any) -> list[str]:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return [word for part in parts for word in _describe_type(part)]
    if kind is Literal:
        return [repr(word) for word in parts]
    if kind is tuple and parts and Ellipsis not in parts:
        return [f"({', '.join(' or '.join(_describe_type(part)) for part in parts)})"]
    if isinstance(kind, type) and issubclass(kind, Collection) and not issubclass(kind, Mapping | str):
        return ["a list" + (f" (each {' or '.join(_describe_type(parts[0]))})" if parts else "")]
    if isinstance(kind, type) and issubclass(kind, Mapping) and parts[1:] not in ((), (Any,)):
        return [f"a dict (each {' or '.join(_describe_type(parts[1]))})"]
    return [_WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")]


_LIKE: dict[Any, Any] = {bool: SupportsIndex, int: SupportsIndex, float: SupportsFloat}
_WORDS: dict[Any, str] = {
    NoneType: "None", bool: "True or False", int: "a whole number", float: "a number", str: "a text", Path: "a path",
    Mapping: "a dict", dict: "a dict", Callable: "a function", Awaitable: "a coroutine",
}  # fmt: skip


class AgentrlError(Exception):
    """Base of all errors that agentrl raises on purpose."""


class UserError(AgentrlError):
    """A mistake that the user can fix; the message names the place, the expected form and similar names."""


class ConfigError(UserError):
    """A config file, key or value is wrong."""


class ToolSchemaError(UserError, TypeError):
    """A tool's parameters have no schema: an annotation is missing, or has no JSON form."""


class CatalogError(UserError):
    """No environment, tool, reward or config has that id."""


class TaskDataError(UserError):
    """A row of a task file is wrong: names file, line and field."""


class BadRowError(ValueError):
    """A data row cannot be used; the message says why. Readers count such rows instead of failing."""


class RewardSpecError(UserError):
    """A reward spec is wrong: gives the JSON Pointer to the place."""


class ModelError(UserError):
    """A model folder or tokenizer is missing, unreadable or unsuitable for the request."""


class ResourceError(UserError):
    """The machine or cluster lacks what the run needs (memory, cores, disk, port, GPUs)."""


class DiskFullError(ResourceError):
    """No space is left for a file: names it, the free space, and the fix."""


class OutputError(UserError):
    """Standard output or standard error cannot be written."""


class DependencyError(UserError):
    """An optional dependency is missing: names the extra that installs it."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or does not fit the run."""


class RunFolderError(UserError):
    """A folder is not a run folder, or its content is damaged or of another version."""


class RepositoryError(UserError):
    """An object to push or pull has another form, is damaged, or must not be published."""


class NonFiniteError(UserError):
    """Training produced non-finite numbers, in the weights or more often than may be skipped: names the rows."""


class BrokenWeightsError(NonFiniteError):
    """Weights became NaN or infinite; only a checkpoint can restore them."""


class JudgeBudgetError(UserError):
    """The run's judge budget is used up: its episodes can no longer be scored."""


class StepOrderError(UserError):
    """The calls of a step-wise loop are in an impossible order: names the missing one."""


class CallbackError(UserError):
    """A user's function (a callback, a filter, a policy) raised: names it and the exception."""


class ToolError(AgentrlError):
    """A tool refuses its arguments or its task; the message is the tool's answer to the model."""


class ImageError(AgentrlError, ValueError):
    """Bytes that are not an accepted image: too large, of another format, or broken."""


class EnvError(AgentrlError):
    """An environment failed (its own fault, not the policy's): the episode is unscored, never 0."""


class HookError(EnvError):
    """A hook of an environment returned a wrong type: names file, line and hook."""


class SandboxError(EnvError):
    """A sandbox itself failed (its provider is down, its image is missing): the episode is unscored, never 0."""


class HungError(EnvError):
    """A tool or reward spec hangs in too many threads, so no more calls of it start: names it."""


class RemoteEnvError(EnvError):
    """An environment server is unreachable or lost the episode: names its url and the cause; unscored, never 0."""


class ToolTimeoutError(EnvError):
    """A tool did not answer in time, and the tool (not the policy) is to blame: unscored, never 0."""


class PolicyTimeoutError(AgentrlError):
    """The policy used up a tool's time (for example by an endless loop in its code): the episode ends and is scored."""


class UserLimitError(AgentrlError):
    """The simulated user exceeded its tool calls per answer: a budget, so the episode is truncated, as at its most turns, and
    scored."""


class EngineError(AgentrlError):
    """An inference engine failed to answer: the episode is unscored, never 0."""


class PromptTooLongError(EngineError):
    """A prompt leaves no room for a token in the engine's context length."""


class AgentFaultError(AgentrlError):
    """An agent's program failed or hung, not by fault of the policy or environment: the episode is unscored, never 0."""


class RenderError(UserError):
    """Messages cannot be turned into tokens as asked (for example, a template rewrote history)."""


class DispatchError(AgentrlError):
    """A worker class, its dispatch table and a call do not match."""


class WorkerError(AgentrlError):
    """A worker's method raised: names worker, rank and method, with the remote traceback."""


class WorkerDiedError(WorkerError):
    """A worker process died."""


class NoRoomLeftError(WorkerError):
    """A run that lost a worker cannot restart: the remaining machine or cluster lacks resources."""


class NothingScoredError(AgentrlError):
    """No episode of a run could be scored, so there is nothing to train on: gives the first error."""


class StalledError(AgentrlError):
    """No progress within the allowed time: names the awaited event."""
