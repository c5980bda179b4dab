"""A loop on the anthropic client, with the environment's tools through the MCP SDK."""

import asyncio
import os

import anthropic
from mcp import Client


async def main() -> None:
    model = anthropic.AsyncAnthropic()
    async with Client(os.environ["AGENTRL_MCP_URL"]) as server:
        listed = (await server.list_tools()).tools
        tools = [{"name": t.name, "description": t.description, "input_schema": t.input_schema} for t in listed]
        messages: list = [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]
        while True:
            answer = await model.messages.create(model="policy", max_tokens=64, messages=messages, tools=tools, system="Answer.")
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                print("".join(block.text for block in answer.content if block.type == "text"))
                return
            results = []
            for call in calls:
                made = await server.call_tool(call.name, call.input)
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": made.content[0].text})
            messages.append({"role": "user", "content": results})


asyncio.run(main())
