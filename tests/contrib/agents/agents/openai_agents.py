"""An agent of the openai-agents SDK, with the environment's MCP server as it is."""

import asyncio
import os

from agents import Agent, ModelSettings, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI

KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def main() -> None:
    set_tracing_disabled(True)
    model = KINDS[os.environ.get("KIND", "chat")](model=os.environ["AGENTRL_MODEL"], openai_client=AsyncOpenAI())
    async with MCPServerStreamableHttp(params={"url": os.environ["AGENTRL_MCP_URL"]}) as server:
        agent = Agent(
            name="shopkeeper", instructions="Answer.", model=model, mcp_servers=[server], model_settings=ModelSettings()
        )
        result = await Runner.run(agent, os.environ["AGENTRL_PROMPT"])
        print(result.final_output)


asyncio.run(main())
