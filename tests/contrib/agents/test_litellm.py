"""API models: the real litellm client against our own endpoint."""

import pytest

from agentrl.config.schema import ApiConfig
from agentrl.contrib.agents.endpoint import Endpoint
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message
from agentrl.engines.api_models import LiteLlmEngine
from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import EngineError, UserError
from tests.contrib.agents.test_endpoint import Scripted, call
from tests.contrib.agents.test_endpoint import renderer as renderer  # the fixtures

from tests.render.render_conversations import TOOLS  # isort: skip

SAMPLING = Sampling(max_tokens=64)


def api(server, **options):
    access = server.open("s")
    return LiteLlmEngine(
        "openai/policy", ApiConfig(base=access.openai_url, retries=0, **options), options={"api_key": access.key}
    )


async def test_an_episode_with_tools(renderer):
    scripted = Scripted(renderer, [call("get", key="a"), Message("assistant", "It is 7.")])
    async with Endpoint(scripted, renderer) as server:
        engine = api(server)
        await engine.start()
        ledger = TokenLedger()
        ledger.append_context(engine.renderer.start([Message("user", "What is a?")], TOOLS), 0)
        first = await engine.generate(ledger.ids(), SAMPLING, "e")
        turn = engine.renderer.parse(first.token_ids, first.finish)
        assert [(c.name, c.arguments) for c in turn.tool_calls] == [("get", {"key": "a"})]
        ledger.append_sampled(first.token_ids, first.logprobs, first.versions, 0)
        answer = Message("tool", "7", tool_call_id=turn.tool_calls[0].id, name="get")
        ledger.append_context(engine.renderer.extend(first.finish, [answer]), 1)
        second = await engine.generate(ledger.ids(), SAMPLING, "e")
        assert engine.renderer.parse(second.token_ids, second.finish).content == "It is 7."
        assert (await engine.stats()).sampled_tokens > 0
        await engine.close()
    # the API model saw the conversation as one that grows
    assert scripted.prompts[1][: len(scripted.prompts[0])] == scripted.prompts[0]


async def test_a_failing_api_is_an_engine_error(renderer):
    scripted = Scripted(renderer, [EngineError("out of order")])
    async with Endpoint(scripted, renderer) as server:
        engine = api(server)
        await engine.start()
        prompt = engine.renderer.start([Message("user", "q")], [])
        with pytest.raises(EngineError, match="out of order"):
            await engine.generate(prompt, SAMPLING, "e")
    with pytest.raises(EngineError, match="not a message"):
        await engine.generate([99], SAMPLING, "e")
    with pytest.raises(UserError, match="no token ids: scripted turns cannot be trained"):
        engine.renderer.assistant(Message("assistant", "x"))
