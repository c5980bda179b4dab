"""A ToolCallingAgent of smolagents: it speaks with the model through the openai client; its tools call the MCP server."""

import asyncio
import os
from typing import Any

from mcp import Client
from smolagents import OpenAIModel, Tool, ToolCallingAgent


def listed() -> list[Any]:
    async def ask() -> list[Any]:
        async with Client(os.environ["AGENTRL_MCP_URL"]) as client:
            return (await client.list_tools()).tools

    return asyncio.run(ask())


def tool_of(tool: Any) -> Tool:
    async def made(arguments: dict[str, Any]) -> str:
        async with Client(os.environ["AGENTRL_MCP_URL"]) as client:
            return (await client.call_tool(tool.name, arguments)).content[0].text

    class Remote(Tool):
        name, description, output_type = tool.name, tool.description, "string"
        inputs = {  # noqa: RUF012
            key: {"type": value.get("type", "any"), "description": value.get("description", key)}
            for key, value in tool.input_schema["properties"].items()
        }
        skip_forward_signature_validation = True

        def forward(self, **arguments: Any) -> str:
            return asyncio.run(made(arguments))

    return Remote()


model = OpenAIModel(
    model_id=os.environ["AGENTRL_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[tool_of(tool) for tool in listed()], model=model, max_steps=4, verbosity_level=0)
agent.prompt_templates["system_prompt"] = "Answer by final_answer."  # its own one is longer than a tiny model's context
print(agent.run(os.environ["AGENTRL_PROMPT"]))
