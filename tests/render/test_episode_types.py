"""The tools of an episode reach the parser: a syntax without types still gives a tool what it declares."""

import asyncio

from agentrl.data.trajectory import Message, ToolCall
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from tests.players import Script
from tests.render.families import FAMILIES
from tests.render.render_tokenizers import build_tokenizer


def test_a_string_that_looks_like_a_number_reaches_its_tool_as_a_string():
    template, tokens, bos, eos, *_ = FAMILIES["qwen3-coder"]
    renderer = make_renderer(build_tokenizer(tokens, template, bos=bos, eos=eos))
    env = EnvRef("key_value")
    ids = renderer.assistant(Message("assistant", "", (ToolCall("get", {"key": "7"}),)))
    limits = Limits(2, 99, 10**5, 60.0, 60.0, 10**5)
    scorer = compile_spec(load_spec(env.default_reward()))
    spec = EpisodeSpec(1, "train", 1, 0, key="a")
    trajectory = asyncio.run(run_episode(env.build(), Policy(Script([ids, ids]), renderer), spec, limits, scorer))
    (call,) = trajectory.turns[0].message.tool_calls
    assert call.arguments == {"key": "7"}
    assert trajectory.turns[0].results[0].error != "invalid_arguments"
