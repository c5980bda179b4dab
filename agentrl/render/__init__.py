"""Rendering of messages to token ids by appending only, and parsing of sampled ids to messages and tool calls."""

from agentrl.render.base import Renderer
from agentrl.render.template import make_renderer
from agentrl.render.tool_calls import parse_tool_calls

__all__ = ["Renderer", "make_renderer", "parse_tool_calls"]
