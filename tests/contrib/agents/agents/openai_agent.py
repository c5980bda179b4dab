"""A loop on the openai client, with the environment's tools through the MCP SDK."""

import asyncio
import json
import os

import openai
from mcp import Client


async def main() -> None:
    model = openai.AsyncOpenAI()
    async with Client(os.environ["AGENTRL_MCP_URL"]) as server:
        tools = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.input_schema}}
            for t in (await server.list_tools()).tools
        ]
        messages = json.loads(os.environ["AGENTRL_TASK"])["messages"]
        while True:
            answer = await model.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                print(message.content)
                return
            for call in message.tool_calls:
                made = await server.call_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": made.content[0].text})


asyncio.run(main())
