"""LangGraph's ready-made agent, with the environment's tools through the MCP SDK."""

import asyncio
import json
import os
from typing import Any

from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from mcp import Client


def tool_of(client: Client, tool: Any) -> StructuredTool:
    async def call(**arguments: Any) -> str:
        result = await client.call_tool(tool.name, arguments)
        return result.content[0].text

    schema = {**tool.input_schema, "title": tool.name, "description": tool.description}
    return StructuredTool(name=tool.name, description=tool.description, args_schema=schema, coroutine=call)


async def main() -> None:
    task = json.loads(os.environ["AGENTRL_TASK"])
    async with Client(os.environ["AGENTRL_MCP_URL"]) as client:
        tools = [tool_of(client, tool) for tool in (await client.list_tools()).tools]
        agent = create_react_agent(ChatOpenAI(model=os.environ["AGENTRL_MODEL"]), tools)
        state = await agent.ainvoke({"messages": task["messages"]})
        print(state["messages"][-1].content)


asyncio.run(main())
