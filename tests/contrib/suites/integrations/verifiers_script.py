"""Run by test_integrations.py with an interpreter that has verifiers: both directions, without a model."""

from __future__ import annotations

import asyncio
import json

import verifiers as vf
from datasets import Dataset
from verifiers.types import AssistantMessage
from verifiers.types import ToolCall as TheirCall

from agentrl.contrib.suites.verifiers import VerifiersEnv, no_client, to_verifiers
from agentrl.data.trajectory import Message, StopReason, ToolCall
from agentrl.env.catalog import EnvRef
from agentrl.reward import compile_spec, load_spec
from agentrl.utils.errors import EnvError


def double(n: int) -> int:
    """twice a number"""
    return 2 * n


async def imported() -> dict[str, object]:
    rows = [{"question": f"double {n}", "answer": str(2 * n)} for n in range(4)]

    def right(completion, answer) -> float:
        return float(completion[-1].content == answer)

    theirs = vf.ToolEnv(
        dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:2]), tools=[double], rubric=vf.Rubric(funcs=[right])
    )
    env = VerifiersEnv(environment=theirs)
    rewards = []
    for text in ("2", "7"):
        observation, _ = await env.areset(seed=1, options={"split": "heldout"})
        assert observation[-1].content == "double 1"
        assert env.toolbox.schemas()[0]["function"]["parameters"]["properties"]["n"]["type"] == "integer"
        turn = Message("assistant", tool_calls=(ToolCall("double", {"n": 1}),))
        observation, _, over, _, _ = await env.astep(turn)
        assert [m.content for m in observation] == ["2"] and not over, observation
        _, _, over, _, _ = await env.astep(text)
        assert over
        rewards.append(env.trajectory.state["reward"])
    return {"rewards": rewards, "tasks": [env.make_task(seed, "train").id for seed in range(3)], **await ends()}


async def ends() -> dict[str, object]:
    """An episode that stops at our limit, one whose judge is out, and one whose reward function answers nothing."""

    def thought(completion) -> float:
        return float(completion[-1].reasoning_content == "7 x 2")

    def judged(completion) -> float:
        raise RuntimeError("Judge model rate limit exceeded")

    def forgot(completion):
        return None

    rows = Dataset.from_list([{"question": "double 7", "answer": "14"}])
    found = {}
    for function in (thought, judged, forgot):
        rubric = vf.RubricGroup([vf.Rubric(funcs=[function])])
        theirs = vf.ToolEnv(dataset=rows, eval_dataset=rows, tools=[double], rubric=rubric)
        for _ in range(2):  # each episode may build one over the same environment of theirs
            env = VerifiersEnv(environment=theirs)
        await env.areset(seed=0)
        await env.astep(Message("assistant", tool_calls=(ToolCall("double", {"n": 7}),), reasoning="7 x 2"))
        try:
            await env.aend(StopReason.MAX_TURNS)
            found[function.__name__] = env.trajectory.state["reward"]
        except EnvError as problem:
            found[function.__name__] = str(problem)
    return {"ends": found}


async def main() -> None:
    ref = EnvRef("key_value", {"calls": 4, "set_share": 0.0})
    scorer = compile_spec(load_spec(ref.default_reward()))
    env = to_verifiers(ref.build, scorer, tasks=3)
    assert len(env.get_dataset()) == 3 and [tool.name for tool in env.tool_defs] == ["get", "set", "list", "add"]
    rewards = []
    for seed, right in ((0, True), (1, False)):
        row = env.get_eval_dataset()[seed]
        task = ref.build().make_task(seed, "heldout")
        gold = ref.build().gold_turns(task)
        turns = gold if right else [Message("assistant", "I do not know")]
        played = iter(turns)

        async def answer(state, messages, played=played, **more):
            """In place of the model: the next scripted turn."""
            turn = next(played)
            calls = [TheirCall(id=f"c{len(messages)}", name=c.name, arguments=json.dumps(c.arguments)) for c in turn.tool_calls]
            return AssistantMessage(content=turn.content, tool_calls=calls or None)

        async def add(state, prompt, response):
            step = {
                "prompt": prompt,
                "completion": [response],
                "response": None,
                "tokens": None,
                "reward": None,
                "advantage": None,
                "is_truncated": False,
                "trajectory_id": "",
                "extras": {},
            }
            await env.add_trajectory_step(state, step)

        env.get_model_response, env.add_model_response = answer, add
        state = await env.rollout({**row, "example_id": seed}, client=no_client(), model="none")
        assert state["error"] is None, state["error"]
        await env.rubric.score_rollout(state)
        rewards.append(state["reward"])
        assert not state["agentrl_env"].is_open
    print(json.dumps({"version": vf.__version__, "export": {"rewards": rewards}, "import": await imported()}))


asyncio.run(main())
