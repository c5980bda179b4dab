"""The step-wise loop: the same parts as a run's, the same digits, and calls out of order that say what is missing."""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import agentrl
from agentrl.config import load_config
from agentrl.rollout.engine import Generation
from agentrl.utils.errors import (
    AgentrlError,
    CheckpointError,
    ConfigError,
    EngineError,
    NonFiniteError,
    StepOrderError,
    check_arguments,
)
from agentrl.utils.threads import background
from tests.python import table


@pytest.fixture(scope="module")
def loop() -> Iterator[agentrl.StepLoop]:
    with agentrl.session(table()) as made:
        yield made


def weights(loop: agentrl.StepLoop) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        found = load_file(loop.trainer.export(folder) / "model.safetensors")
        return {name: tensor.clone() for name, tensor in found.items()}


def reinforce(given: agentrl.LossInput) -> agentrl.LossOutput:
    return agentrl.LossOutput(-given.advantages * given.logprobs, {"mine": torch.ones_like(given.logprobs), "one": 1.0})


BEGUN, HELD = threading.Event(), threading.Event()


def slow(given: agentrl.LossInput) -> agentrl.LossOutput:
    if BEGUN.is_set():  # the second call: lets the first go on, if it is still there
        HELD.set()
        time.sleep(0.3)
    BEGUN.set()
    HELD.wait(1.0)
    return reinforce(given)


def test_two_updates_by_hand_are_the_runs_bit_for_bit(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    run = agentrl.train(table(out=str(tmp_path)), on_step=lambda row, session: rows.append(dict(row)))
    with agentrl.session(table()) as loop:
        for row in rows:
            groups = loop.policy.collect()
            batch = loop.trainer.batch(groups)
            steps = []
            for part in batch.minibatches():
                loop.trainer.forward_backward(part)
                steps.append(loop.trainer.optim_step()["grad_norm"])
            loop.trainer.publish()
            rewards = [member.reward for group in groups for member in group.trajectories]
            assert len(set(rewards)) > 2 and sum(rewards) / 8 == pytest.approx(row["reward"], abs=1e-12)  # type: ignore[arg-type]
            assert row["grad_norm"] > 0 and sum(steps) / len(steps) == row["grad_norm"]
        loop.trainer.export(tmp_path / "mine")
    expected, found = (load_file(folder / "model.safetensors") for folder in (run.path / "final", tmp_path / "mine"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert len(rows) == 2 and run.metrics[-1]["phase"] == "after"


LORA = {"model.lora": {"rank": 2}, "algorithm": {"minibatch": 4, "proximal": "recompute", "kl": {"coef": 0.1}}}


@pytest.mark.parametrize("more", [{}, LORA], ids=["plain", "lora, kl, recompute"])
def test_an_update_at_once_is_the_same_and_a_checkpoint_brings_it_back(more: dict[str, Any]) -> None:
    found = []
    for whole in (True, False):
        with agentrl.session(table(**more)) as loop:
            batch = loop.trainer.batch(loop.policy.collect())
            for part in [] if whole else batch.minibatches():
                loop.trainer.forward_backward(part)
                loop.trainer.optim_step()
            if whole:
                metrics = loop.trainer.update(batch)
                assert metrics["optimizer_steps"] == batch.parts == 2
            loop.trainer.publish()
            found.append(weights(loop))
            folder = loop.trainer.save()
            loop.trainer.update(loop.trainer.batch(loop.policy.collect()))
            assert any(not torch.equal(tensor, found[-1][name]) for name, tensor in weights(loop).items())
            loop.trainer.load(folder)
            assert all(torch.equal(tensor, found[-1][name]) for name, tensor in weights(loop).items())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_loss_and_advantages_of_ones_own(loop: agentrl.StepLoop) -> None:
    """-A log pi with A = +1 on the first answer and -1 on the second: a step makes the first more likely, the second less."""
    draws = loop.policy.sample("Say a word", n=2, max_tokens=5, seed=1)
    assert [len(draw.token_ids) for draw in draws] == [5, 5] and draws == loop.policy.sample(
        "Say a word", n=2, max_tokens=5, seed=1
    )
    group = loop.policy.group(draws, [1.0, 0.0])
    batch = loop.trainer.batch([group], advantage=[1.0, -1.0])
    assert batch.advantages == [1.0, -1.0] and len(batch) == 2
    metrics = loop.trainer.forward_backward(batch, reinforce)
    logprobs = [sum(draw.logprobs) for draw in draws]
    assert metrics["mine"] == 1.0 and metrics["loss"] == pytest.approx(-(logprobs[0] - logprobs[1]) / 10, rel=1e-4)
    assert loop.trainer.optim_step(lr=1e-3)["lr"] == pytest.approx(1e-3)
    loop.trainer.publish()
    after = loop.policy.sample("Say a word", n=1, max_tokens=5, seed=1)[0]
    assert after.version == loop.policy.version
    centered = loop.trainer.batch([loop.policy.group([after, after], [1.0, 0.0])], advantage="dr_grpo")
    assert centered.advantages == pytest.approx([0.5, -0.5])

    def half(given: agentrl.AdvantageInput) -> agentrl.AdvantageOutput:
        return agentrl.AdvantageOutput(given.mask * 0.5)

    halves = loop.trainer.batch([loop.policy.group([after, after], [1.0, 0.0])], advantage=half)
    assert halves.advantages == [0.5, 0.5]


def test_two_sessions_have_each_the_loss_of_its_config_though_both_have_one_name() -> None:
    """The first session trained on the loss of the second."""

    def times(factor: float) -> Any:
        def scaled(given: agentrl.LossInput) -> agentrl.LossOutput:
            return agentrl.LossOutput(-factor * given.advantages * given.logprobs, {"factor": factor})

        return table(**{"algorithm.loss": scaled})

    with agentrl.session(times(2.0)) as first, agentrl.session(times(3.0)) as other:
        found = [loop.trainer.update(loop.trainer.batch(loop.policy.collect()))["factor"] for loop in (first, other)]
    assert found == [2.0, 3.0]


def test_a_loss_that_fails_half_way_leaves_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a step, not for an update at once, and none that keeps the actor on the engine's device."""
    for place in ("run.checks.size_checks", "trainer.train_engine"):
        monkeypatch.setattr(f"agentrl.{place}.check_on_host", lambda cfg: None)
    rollout = {**table()["rollout"], "max_episode_tokens": 64, "colocate": True}
    small = table(**{"optim.micro_tokens": 64, "health.max_unsolvable": 1.0, "rollout": rollout, "model.offload": "idle"})
    found = []
    for failures in (2, 0):
        with agentrl.session(small) as loop:
            groups, seen = loop.policy.collect(), list[int]()
            batch = loop.trainer.batch(groups)

            def breaks(given: agentrl.LossInput, seen: list[int] = seen) -> agentrl.LossOutput:
                seen.append(0)  # two micro-batches
                return reinforce(given) if len(seen) % 2 else given.never  # type: ignore[attr-defined, no-any-return]

            for whole in (False, True):
                for _ in range(failures):
                    with pytest.raises(AgentrlError, match="never"):
                        loop.trainer.forward_backward(batch, breaks)
                first = None if whole else loop.trainer.forward_backward(batch)
                found.append((loop.trainer.optim_step() if first else loop.trainer.update(batch))["grad_norm"])
            for leave in (partial(loop.trainer.batch, groups), loop.trainer.publish):
                with pytest.raises(AgentrlError, match="never"):
                    loop.trainer.forward_backward(batch, breaks)
                leave()
    assert found[:2] == found[2:] and min(found) > 0


@pytest.mark.parametrize("late", [0.0, 0.02])
def test_calls_that_overlap_are_those_one_after_the_other(loop: agentrl.StepLoop, late: float) -> None:
    """A second call dropped the gradients of the first, or both were computed at once, each with denominators of its own."""
    trainer, groups = loop.trainer, loop.policy.play(tasks=2, group_size=2)
    batches = [trainer.batch([group], advantage=[1.0, -1.0]) for group in groups]

    async def overlapping() -> None:
        first = asyncio.create_task(trainer.forward_backward.aio(batches[0], reinforce))
        await asyncio.sleep(late)
        await asyncio.gather(first, trainer.forward_backward.aio(batches[1], reinforce))

    for batch in batches:
        trainer.forward_backward(batch, reinforce)
    apart = trainer.optim_step(lr=1e-30)["grad_norm"]
    asyncio.run(overlapping())
    assert trainer.optim_step(lr=1e-30)["grad_norm"] == apart > 0
    trainer.publish()


def test_a_task_that_comes_again_is_played_anew(loop: agentrl.StepLoop) -> None:
    """Its groups had the same episodes, token by token."""
    groups = loop.policy.play(tasks=[5, 5], group_size=2)
    assert [group.task_seed for group in groups] == [5, 5]
    assert len({member.seed for group in groups for member in group.trajectories}) == 4


def test_a_cancelled_call_ends_before_the_next_begins(loop: agentrl.StepLoop) -> None:
    """Ctrl-C in a notebook, say: its thread computes on, and added its gradients to those of the next call."""
    trainer = loop.trainer
    batch = trainer.batch(loop.policy.play(tasks=1, group_size=2), advantage=[1.0, -1.0])

    async def cancelled() -> None:
        call = asyncio.create_task(trainer.forward_backward.aio(batch, slow))
        assert await asyncio.to_thread(BEGUN.wait, 10.0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    trainer.forward_backward(batch, reinforce)
    alone = trainer.optim_step(lr=1e-30)["grad_norm"]
    asyncio.run(cancelled())
    trainer.forward_backward(batch, slow)
    assert trainer.optim_step(lr=1e-30)["grad_norm"] == alone > 0
    trainer.publish()


@pytest.mark.parametrize("name", ["reward", "step", "loss"])
def test_a_metric_of_a_loss_cannot_replace_one_of_the_run(loop: agentrl.StepLoop, name: str) -> None:
    def mine(given: agentrl.LossInput) -> agentrl.LossOutput:
        return agentrl.LossOutput(-given.logprobs, {name: torch.ones_like(given.logprobs)})

    with pytest.raises(ConfigError, match=f"its metric '{name}' has the name of a metric of the run. Rename it"):
        loop.trainer.forward_backward(loop.trainer.batch(loop.policy.play(tasks=1, group_size=2)), mine)


def test_what_is_held_out_is_played_and_not_trained_on(loop: agentrl.StepLoop) -> None:
    held = loop.policy.play(tasks=1, split="heldout")
    assert {member.task.split for group in held for member in group.trajectories} == {"heldout"}
    with pytest.raises(ConfigError, match=r"trainer.batch: task '.*/heldout/.*' is of the split 'heldout'"):
        loop.trainer.batch([*loop.policy.play(tasks=1), *held])


def test_calls_out_of_order_say_what_is_missing(loop: agentrl.StepLoop) -> None:
    trainer, policy = loop.trainer, loop.policy
    batch = trainer.batch(policy.play(tasks=1, group_size=2))
    with pytest.raises(StepOrderError, match=r"there are no gradients; call trainer.forward_backward"):
        trainer.optim_step()
    trainer.forward_backward(batch)
    with pytest.raises(StepOrderError, match=r"publish: the gradients of 1 call of .* call trainer.optim_step\(\)"):
        trainer.publish()
    with pytest.raises(StepOrderError, match='"token_mean" are waiting'):
        trainer.forward_backward(batch, algorithm={"aggregate": "seq_mean_token_mean"})
    trainer.optim_step()
    for call in (lambda: policy.sample("x"), lambda: policy.play(tasks=1), policy.collect, policy.evaluate):
        with pytest.raises(StepOrderError, match=r"1 optimizer steps were taken .* trainer.publish\(\) first"):
            call()
    with pytest.raises(StepOrderError, match=r"trainer.save"):
        trainer.save()
    version = trainer.publish()
    with pytest.raises(StepOrderError, match=rf"of version {version - 1}, and version {version} was published"):
        trainer.forward_backward(batch)
    with pytest.raises(StepOrderError, match=r"published without groups of policy.collect"):
        policy.collect()
    with pytest.raises(ConfigError, match="lr = -1"):
        trainer.forward_backward(trainer.batch(policy.play(tasks=1, group_size=2)))
        trainer.optim_step(lr=-1)
    trainer.drop()
    with pytest.raises(ConfigError, match="2 answers and 3 rewards"):
        policy.group(policy.sample("x", n=2), [1.0, 0.0, 0.5])
    with pytest.raises(ConfigError, match=r"at temperature 0\.5"):
        policy.group(policy.sample("x", temperature=0.5), [1.0])
    with pytest.raises(ConfigError, match="1 advantages for 2"):
        trainer.batch(policy.play(tasks=1, group_size=2), advantage=[1.0])
    with pytest.raises(ConfigError, match=r"unknown name 'grpoo'; did you mean 'grpo'"):
        trainer.batch(policy.play(tasks=1, group_size=2), advantage="grpoo")


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("policy.sample: temperature", "sample", {"prompt": "x", "temperature": -1.0}),
    ("policy.sample: temperature", "sample", {"prompt": "x", "temperature": float("nan")}),
    ("policy.sample: top_p", "sample", {"prompt": "x", "top_p": 0.0}),
    ("policy.sample: max_turn_tokens", "sample", {"prompt": "x", "max_tokens": 0}),
    ("policy.sample: n = 0", "sample", {"prompt": "x", "n": 0}),
    ("sample: n = True is a bool; expected a whole number", "sample", {"prompt": "x", "n": True}),
    ("policy.play: temperature", "play", {"tasks": 1, "temperature": -1.0}),
    ("policy.play: group_size", "play", {"tasks": 1, "group_size": 0}),
    ("policy.play: tasks = -1", "play", {"tasks": -1}),
    ("policy.play: tasks = ", "play", {"tasks": [-1]}),
    ("policy.evaluate: tasks", "evaluate", {"n": 0}),
    ("prompt = \\[\\]: expected at least one", "sample", {"prompt": []}),
    ("messages\\[0\\]: expected an object", "sample", {"prompt": [True]}),
    ("tools\\[0\\] = {}: expected a tool in OpenAI's format", "sample", {"prompt": "x", "tools": [{}]}),
    ("tools\\[0\\]", "sample", {"prompt": "x", "tools": [{"function": {"name": "f", "parameters": 5}}]}),
    ("tools\\[0\\]", "sample", {"prompt": "x", "tools": [{"function": {"name": 5}}]}),
    ("group: draws = 5 is a int", "group", {"draws": 5, "rewards": [1.0]}),
    ("group: draws", "group", {"draws": [5], "rewards": [1.0]}),
    ("group: rewards", "group", {"draws": [], "rewards": ["x"]}),
    ("group: task", "group", {"draws": [], "rewards": [], "task": None}),
]


@pytest.mark.parametrize(("said", "call", "given"), WRONG)
def test_a_number_out_of_its_range_is_refused(loop: agentrl.StepLoop, said: str, call: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=said):
        getattr(loop.policy, call)(**given)


@pytest.mark.parametrize(
    ("said", "advantage"),
    [
        ("multi_reward': argument 'terms' is required", "multi_reward"),
        ("terms: no episode has a term 'colour'; its ids: ", {"name": "multi_reward", "args": {"terms": ["colour"]}}),
        ("expected a number for each episode", [1.0, "x"]),
        ("two groups have the number", "grpo"),
    ],
)
def test_advantages_that_cannot_be_are_refused(loop: agentrl.StepLoop, said: str, advantage: Any) -> None:
    """They were KeyErrors, or, of a term that nobody has and of a group that is there twice, silence."""
    group = loop.policy.group(loop.policy.sample("x", n=2, max_tokens=2), [1.0, 0.0])
    with pytest.raises(ConfigError, match=said):
        loop.trainer.batch([group] * (2 if "two" in said else 1), advantage=advantage)


def test_a_term_that_no_episode_of_a_batch_came_to_is_none_that_is_unknown() -> None:
    """A node of the spec behind an `if`: a run takes it as not scored, and the step-wise loop ended with a ConfigError."""
    equal = {"use": "text.equals", "args": {"expect": {"$": "/task/gold/answer"}}}
    near = {"use": "calls.none", "id": "near", "scale": [0, 0.5]}
    root = {"op": "gate", "if": equal, "then": {**equal, "id": "far"}, "else": near}
    estimator = {"name": "multi_reward", "args": {"terms": ["near", "far"]}}
    with agentrl.session(table(**{"env.reward": {"agentrl_reward": 1, "name": "two", "root": root}})) as loop:
        groups = loop.policy.play(tasks=1, group_size=2)
        assert loop.trainer.batch(groups, advantage=estimator).parts == 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(loop: agentrl.StepLoop, reward: float) -> None:
    with pytest.raises(ConfigError, match="expected a finite number, or None"):
        loop.policy.group(loop.policy.sample("x", max_tokens=2), [reward])


def test_results_of_a_prompt_stand_in_the_order_of_their_calls(loop: agentrl.StepLoop) -> None:
    """The chat template writes no ids: given as they came back, one was shown as the other's."""
    calls = [{"id": one, "function": {"name": one * 2, "arguments": "{}"}} for one in "ab"]
    results = [{"role": "tool", "tool_call_id": one, "content": f"of {one}"} for one in "ab"]
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    one, other = (loop.policy.sample([*asked, *said], max_tokens=2, seed=1)[0] for said in (results, results[::-1]))
    assert one.prompt_ids == other.prompt_ids and one == other


def test_an_answer_that_is_no_sample_is_the_engines_fault(loop: agentrl.StepLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*asked: object) -> Generation:
        return Generation([5], [0.7], [0], "length")

    monkeypatch.setattr(loop.session.envs[0].policy.engine, "generate", answer)
    with pytest.raises(EngineError, match=r"^policy.sample: the log probability of sampled token 0 of 1 is 0.69.*, above 0"):
        loop.policy.sample("x")


def test_a_file_in_place_of_an_export_is_named(loop: agentrl.StepLoop, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", ""):
        with pytest.raises(ConfigError, match="is not a folder; name one"):
            loop.trainer.export(folder)


def test_what_would_do_nothing_to_a_gradient_is_refused(loop: agentrl.StepLoop) -> None:
    batch = loop.trainer.batch(loop.policy.play(tasks=1, group_size=2))
    for given in ({"kl_coef": 0.1}, {"kl_coef": float("nan")}, {"algorithm": {"kl": {"coef": 0.1}}}):
        with pytest.raises(ConfigError, match=r"algorithm\.kl\.coef = .* a session with a reference policy"):
            loop.trainer.forward_backward(batch, **given)  # type: ignore[arg-type]
    for key, value in {"length_norm": 9, "kl": {"where": "reward"}}.items():
        with pytest.raises(ConfigError, match=rf"algorithm\.{key}.* is read with algorithm\..* alone"):
            loop.trainer.forward_backward(batch, algorithm={key: value})
    with pytest.raises(ConfigError, match="optim_step: lr = True is a bool; expected a number or None"):
        loop.trainer.optim_step(lr=True)
    for key, value in {"epochs": 3, "minibatch": 1, "advantage": {"name": "rloo"}}.items():
        with pytest.raises(ConfigError, match=rf"algorithm\.{key} would do nothing here"):
            loop.trainer.forward_backward(batch, algorithm={key: value})
    with pytest.raises(ConfigError, match=r"trainer.forward_backward: aggregate: input should be 'token_mean'"):
        loop.trainer.forward_backward(batch, algorithm={"aggregate": "mean"})


def test_weights_that_broke_are_neither_published_nor_saved_until_others_are_loaded() -> None:
    """The step said so, and the next publish sent them. The rate is that of the checkpoint too: the step does not count."""
    with agentrl.session(table(**{"optim.warmup": 8})) as loop:
        folder = loop.trainer.save()
        loop.trainer.forward_backward(loop.trainer.batch(loop.policy.play(tasks=1, group_size=2)), reinforce)
        with pytest.raises(NonFiniteError, match="optim_step: the weights are no longer finite"):
            loop.trainer.optim_step(lr=1e300)
        for call in (loop.trainer.publish, loop.trainer.save, lambda: loop.trainer.export("model")):
            with pytest.raises(NonFiniteError, match=r"the weights are no longer finite\. Go back .*trainer\.load"):
                call()
        loop.trainer.load(folder)
        with pytest.raises(NonFiniteError), loop.trainer._note_broken_weights():
            raise NonFiniteError("step 3 is skipped (4 in a row), which leaves the weights as they were")
        assert loop.trainer.publish() > 0
        loop.trainer.forward_backward(loop.trainer.batch(loop.policy.play(tasks=1, group_size=2)), reinforce)
        assert loop.trainer.optim_step()["lr"] == pytest.approx(1e-2 / 8)


@pytest.mark.parametrize("old_first", [True, False])
def test_one_answer_of_older_weights_makes_a_batch_stale(loop: agentrl.StepLoop, old_first: bool) -> None:
    """`rollout.max_staleness` is 0: whichever member is older, and however new the batch itself is."""
    [old] = loop.policy.sample("Say a word")
    loop.trainer.update(loop.trainer.batch(loop.policy.play(tasks=1, group_size=2)))
    version = loop.trainer.publish()
    [new] = loop.policy.sample("Say a word")
    batch = loop.trainer.batch([loop.policy.group([old, new] if old_first else [new, old], [1.0, 0.0])])
    with pytest.raises(StepOrderError, match=rf"stale batch: from weights of version {version - 1}, and version {version}"):
        loop.trainer.forward_backward(batch)


async def test_each_call_can_be_awaited_where_an_event_loop_runs(loop: agentrl.StepLoop) -> None:
    """Also blocking: this test itself runs in an event loop, as the cells of a notebook do."""
    draws, found = await asyncio.gather(loop.policy.sample.aio("a", n=2), loop.policy.evaluate.aio(n=2))
    assert len(draws) == 2 and found.scored == 2 and loop.policy.evaluate(n=2).scored == 2

    async def blocking() -> None:
        loop.policy.sample("x")

    with pytest.raises(RuntimeError, match=r"await NAME.aio"):
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(blocking(), background().loop))


def test_a_closed_session_says_so_and_a_folder_goes_on(tmp_path: Path) -> None:
    one = agentrl.session(table(), folder=tmp_path / "kept")
    trainer, policy = one.trainer, one.policy
    batch = trainer.batch(policy.collect())
    trainer.update(batch)
    one.trainer.publish()
    [played] = policy.play(tasks=1)
    one.trainer.save()
    before = weights(one)
    with pytest.raises(ConfigError, match="close that session, or name another folder"):
        agentrl.session(table(), folder=tmp_path / "kept")
    one.close()
    one.close()
    for call in (
        lambda: one.policy.version,
        lambda: trainer.publish(),
        lambda: trainer.forward_backward(batch),
        lambda: policy.sample("x"),
    ):
        with pytest.raises(StepOrderError, match="the session is closed"):
            call()
    for key, value in (("rollout.groups", 1), ("seed", 4), ("model.init.hidden", 64)):  # it hung, or was read by nothing
        with pytest.raises(ConfigError, match=rf"learned with other values: {key} was .*, is {value}"):
            agentrl.session(table(), folder=tmp_path / "kept", overrides={key: value})
    (tmp_path / "kept").rename(tmp_path / "moved")
    with agentrl.session(table(), folder=tmp_path / "moved", overrides={"optim.lr": 2e-2}) as two:
        assert load_config(tmp_path / "moved" / "config.toml").optim.lr == 2e-2
        assert two.policy.version == 1 and two.policy.play(tasks=1)[0].index == played.index + 1, "the next task, not the same"
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(two).items())
        with pytest.raises(ConfigError, match="holds no session"):
            agentrl.session(table(), folder=tmp_path / "moved" / "config.toml")
        with pytest.raises(CheckpointError, match=r"is not a checkpoint .*step_000001"):
            two.trainer.load(tmp_path / "moved")


def test_a_truth_value_in_place_of_a_function_is_named() -> None:
    def call(read: Callable[[int], str]) -> None: ...

    with pytest.raises(ConfigError, match="call: read = True is a bool; expected a function"):
        check_arguments(call, (True,), {})
