"""Calls of API models through litellm, for policies, judges and users: requests, answers and refusals."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from agentrl.config.identity import check_base
from agentrl.data.trajectory import Json, ToolCall
from agentrl.utils.errors import DependencyError
from agentrl.utils.network import exempt_own, through_proxy
from agentrl.utils.redaction import basic, learn, resolve_references
from agentrl.utils.threads import fork_safe

_IMPORTING = fork_safe(threading.Lock())
NO_RETRIES = {"num_retries": 0, "max_retries": 0}
"""Arguments that switch litellm's retries off, since these respect neither a time limit nor a queue."""
MAX_WAIT = 60.0
"""Longest wait between two attempts, in seconds; a call is given up if the server asks for a longer one."""
_BUSY = (408, 409, 425, 429)
_FAILED = {"error", "network_error", "insufficient_system_resource", "insufficient_quota", "abort", "cancelled", "timeout",
           "failed", "content_filter", "sensitive"}  # fmt: skip
"""Finish reasons of failures, as various providers name them; litellm replaces names that it does not know by "stop"."""
_UNPAID = re.compile(r"(?i)insufficient.(quota|credit|balance|fund)|exceeded_current_quota|credit balance|billing[_ ](hard|not)")
_KEYLESS = re.compile(r"(?i)missing\b.{0,30}\b(api.?key|credentials)|api_key\b.{0,30}\b(not|be) set|unable to locate credentials")
_CUT = {"model_length", "max_output_tokens", "incomplete"}
_REASONING = ("reasoning_content", "reasoning", "thinking")


def request_of(
    own: Mapping[str, Any], args: Mapping[str, Any], base: str | None, *, args_key: str, base_key: str
) -> dict[str, Any]:
    """Build the keyword arguments of a litellm call: the caller's `own`, overridden by `args` with references resolved, except
    model, messages, timeout and tools. Raises as `address_arguments`."""
    given, where = resolve_references(dict(args), args_key), address_arguments(base, base_key)
    headers = {**given.get("extra_headers", {}), **where.get("extra_headers", {})}
    asked = {name: own[name] for name in ("model", "messages", "timeout")}
    found = {**own, **given, **where, **({"extra_headers": headers} if headers else {}), **asked, "tools": own.get("tools")}
    return {name: value for name, value in found.items() if name != "tools" or value}


def choice_of(answer: Any) -> Any:
    """Return a response's choice, with finish_reason "length" if it was cut. Raises LookupError if the provider failed or
    withheld it, or for calls in another layout."""
    if not answer.choices:
        raise LookupError("the response has no choices")
    choice, row = answer.choices[0], answer.choices[0].model_dump()
    came = row.get("provider_specific_fields") or {}
    ends = [came.get("native_finish_reason") or choice.finish_reason, choice.finish_reason]  # of the provider, and of litellm
    if came.get("error"):
        raise LookupError(f"the provider failed: {str(came['error'])[:200]}")
    if _FAILED & {*ends}:
        raise LookupError(f"the provider ended it with finish_reason {ends[0]!r}, which means failure, not a normal end")
    choice.finish_reason = "length" if ends[0] in _CUT else ends[1]
    kinds = {item.get("type") or "function" for item in row["message"].get("tool_calls") or ()}
    if row["message"].get("function_call") or kinds - {"function"}:
        raise LookupError(
            "it calls in another layout (function_call, or a custom tool). Use a model that answers with tool_calls"
        )
    return choice


def read_answer(message: Any) -> tuple[str, str | None, tuple[ToolCall, ...]]:
    """Return an answer's text or refusal, its reasoning, and its calls, with ids `call_0`, `call_1` and so on."""
    # Imported late: only calls of an API need the parser.
    from agentrl.render.tool_calls import call_from_json, malformed_call, whole_json

    calls: list[ToolCall] = []
    for place, item in enumerate(message.tool_calls or ()):
        call_id, text, name = f"call_{place}", item.function.arguments or "{}", item.function.name
        try:
            calls.append(call_from_json({"name": name, "arguments": whole_json(text)}, call_id, text))
        except ValueError as problem:
            calls.append(malformed_call(call_id, text, f"not valid JSON: {problem}", name or ""))
    row = message.model_dump(exclude_none=True)
    row = {**(row.get("provider_specific_fields") or {}), **row}
    reasoning = next((row[name] for name in _REASONING if isinstance(row.get(name), str)), None)
    if reasoning is None:
        blocks = [str(block["thinking"]) for block in row.get("thinking_blocks") or () if block.get("thinking")]
        reasoning = "\n".join(blocks) or None
    return message.content or row.get("refusal") or "", reasoning, tuple(calls)


def answer_row(model: str, message: Any, calls: Sequence[ToolCall]) -> dict[str, Json]:
    """Convert an answer to a message of the next request. The provider's ids and fields (reasoning, signatures) are unchanged,
    and its `calls` in a form that strict servers accept."""
    from agentrl.render.tool_calls import sendable, write_call

    row: dict[str, Json] = {"role": "assistant", "content": message.content, **message.model_dump(exclude_none=True)}
    # Providers with OpenAI's request format, to which message fields are sent under their own names.
    alike = {"openai", "azure", "openrouter", "custom_openai", *load_litellm().openai_compatible_providers}
    if load_litellm().get_llm_provider(model)[1] in alike:
        # litellm keeps fields unknown to OpenAI separately, and converts them itself for other providers.
        more = row.pop("provider_specific_fields", None) or {}
        row = {**{name: value for name, value in more.items() if value is not None}, **row}
        if "reasoning" in more and more["reasoning"] == row.get("reasoning_content"):
            del row["reasoning_content"]  # litellm's own copy
    if calls:
        ids = [item.get("id") for item in row["tool_calls"]]
        own = len(set(filter(None, ids))) == len(ids)
        for item, call in zip(row["tool_calls"], calls, strict=True):
            written = write_call(sendable(call))
            function = written["function"] if call.arguments is None else {**written["function"], "arguments": call.raw}
            item |= {"function": {**item["function"], **function}} | ({} if own else {"id": call.id})
    return row


def retry_wait(problem: BaseException, least: float) -> float | None:
    """Return the seconds until a call is made again after an outage, a rate limit or a lost connection: `least`, or the server's
    Retry-After if longer; None if that is longer than MAX_WAIT, and for other errors, which would come again."""
    import openai  # a dependency of litellm, whose errors are subclasses of openai's

    status = getattr(problem, "status_code", None)  # some errors of litellm lack the openai class of their status
    busy = isinstance(status, int) and (status >= 500 or status in _BUSY)
    lost = isinstance(problem, openai.APIConnectionError) or (isinstance(problem, openai.APIError) and busy)
    if not lost or refusal(problem) is not None:
        return None
    # litellm replaces the response; the server's headers, if any, are in this attribute.
    headers = vars(problem).get("litellm_response_headers") or getattr(getattr(problem, "response", None), "headers", {})
    least = max(least, retry_after(headers) or 0.0)
    return least if least <= MAX_WAIT else None


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Return the seconds to wait by a Retry-After header (RFC 9110, section 10.2.3: seconds or a date); None without one."""
    text = headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(text))
    with suppress(ValueError):
        until = parsedate_to_datetime(text)
        until = until.replace(tzinfo=until.tzinfo or UTC)  # without a zone the date is in UTC
        return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())
    return None


def refusal(problem: BaseException, request: Mapping[str, Any] | None = None, base: str | None = None) -> str | None:
    """Describe a refusal of the key, account or model, with the key's variable and the fix; None for other errors. A missing key
    or used-up credit may come as a server error or rate limit. `base`: the config's address."""
    links, status = list(causes(problem)), getattr(problem, "status_code", None)
    said = " ".join(f"{link} {getattr(link, 'code', '')} {getattr(link, 'type', '')}" for link in links)
    if status == 402 or (status in (400, 403, 429) and _UNPAID.search(said)):
        what, fix = "has no quota or credit left for the key", "Add credit to its account, or set another key"
    elif status in (401, 403) or any(_KEYLESS.search(str(link)) for link in links):
        what, fix = "refuses the key", "Set one that may use this model"
    elif status == 404:
        what, fix = "has no such model", "Correct its name, or the address"
    else:
        return None
    if request is None:
        return what
    model, given = request["model"], request.get("api_key")
    named = ["api_key"] if given else load_litellm().validate_environment(model)["missing_keys"]
    variable = f"{model.partition('/')[0].upper().replace('-', '_')}_API_KEY"
    named = named or [variable] * (variable in os.environ)
    keys = f" ({'' if given else 'environment variable '}{', '.join(named)})" if named and "key" in what else ""
    return f"({model}): {base or 'its provider'} {what}{keys}: {error_line(problem, request.get('api_base'))}. {fix}"


def error_line(problem: BaseException, base: str | None) -> str:
    """Format an error of litellm in one line, with the proxy for `base` or the provider."""
    return " ".join(str(problem).split())[:300] + through_proxy(base)


def causes(problem: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes."""
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__


def address_arguments(base: str | None, key: str) -> dict[str, Any]:
    """Return litellm arguments for a self-hosted server: its address with references resolved, and its user and password as a
    header, since litellm's asynchronous calls fail on these in an address. `key`: its key in the config.
    Raises ConfigError for a variable that is not set, and for a query in the address."""
    address = check_base(base, key)
    if not address:
        return {}
    exempt_own(address)
    parts = urlsplit(address)
    if parts.username is None and parts.password is None:
        return {"api_base": address}
    learn(address)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return {"api_base": bare, "extra_headers": {"Authorization": f"Basic {basic(address)}"}}


def load_litellm() -> Any:
    """Import litellm on first use (it takes seconds), with its packaged price table, not the network's."""
    name = "LITELLM_LOCAL_MODEL_COST_MAP"
    with _IMPORTING:  # the variable is set for the import only, and a concurrent import must not save or restore it
        before = os.environ.get(name)
        os.environ[name] = "True"
        try:
            litellm = importlib.import_module("litellm")
        except ImportError as error:
            raise DependencyError("API models need litellm: pip install 'agentrl[litellm]'") from error
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
    setattr(litellm, "suppress_debug_info", True)  # noqa: B010 - litellm has no types
    return litellm
