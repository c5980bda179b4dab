"""Success is told apart from reward: a `success` node, or the task part of the root."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.env.catalog import EnvRef, find_reward
from agentrl.reward import Scorer, compile_spec, make_context
from agentrl.reward.lint import probe_episodes
from agentrl.utils.errors import RewardSpecError
from tests.conftest import examples
from tests.reward.reward_episodes import SHELF, call, episode, gold, leaf, spec
from tests.reward.test_reward_properties import episodes, leaves, nodes

RIGHT = leaf("number.close", {"expect": {"$": "/task/gold/answer"}})
CALLS = leaf("calls.match", {"expect": {"$": "/task/gold/calls"}})
TURN_COST = leaf("cost.turns", {"max": 10}, weight=-0.2)
SHAPED = leaf("calls.match", {"expect": {"$": "/task/gold/calls"}, "compare": "subset", "credit": "matched"}, scope="turn",
              reduce="sum", emit="step", missing=0, when={"$": "/turn/calls", "ne": []})  # fmt: skip


def total(*of, **mods):
    return {"op": "sum", "of": list(of), **mods}


MADE_UP = {
    "a cost of tokens": total(RIGHT, leaf("cost.tokens", {"max": 100}, weight=-0.5)),
    "a cost of turns": total(RIGHT, TURN_COST),
    "a saving, not a cost": total(RIGHT, leaf("cost.turns", {"max": 10}, scale=[1, 0])),
    "scale to [-1, 1]": {**total(RIGHT, TURN_COST), "scale": [-1, 1]},
    "clip below the top": {**total(RIGHT, TURN_COST), "clip": [0, 0.75]},
    "a sum over turns beside": total(RIGHT, {**SHAPED, "weight": 0.1}),
    "a gate over a sum": {"op": "gate", "if": RIGHT, "then": total(SHAPED, TURN_COST), "else": 0},
    "a product with a cost": {"op": "product", "of": [RIGHT, leaf("cost.turns", {"max": 20}, scale=[1, 0.5])]},
    "a mean with a cost": {"op": "mean", "of": [RIGHT, CALLS, leaf("cost.calls", {"max": 20}, scale=[0, -1])]},
    "compared with others": total(RIGHT, leaf("group.rank", {"of": leaf("cost.turns", {"max": 10})}, scope="group", weight=-0.1)),
    "a group leaf over the task": leaf("group.zscore", {"of": RIGHT}, scope="group"),
    "only taking away": {**RIGHT, "scale": [-1, 0]},
}
ENVS = {
    "bfcl_ast": None, "bfcl_ast_parity": None, "bfcl_multi_turn": None, "bfcl": None, "tau_bench": None, "toolrl": None,
    "appworld": None, "tau2": None, "toolsandbox": None,  # of suites: their own tests in tests/shelf
    "toolrl_parity": None, "judge": None, "schema": None, "openenv": None,
    "function_calling": "function_calling", "harbor": "harbor", "mcp": "mcp", "own_tools": "own_tools", "python": "python",
    "search": "search",
    "service_desk": "service_desk", "sql": "sql", "workspace": "workspace", "workspace_dense": "workspace",
    "workspace_turns": "workspace",
}  # fmt: skip
SHELF_SPECS = {path.stem: ENVS.get(path.stem, "key_value") for path in sorted(SHELF.glob("*.json"))}


def played(env: str, name_or_spec, tasks: int = 2) -> tuple[Scorer, dict[str, list[Trajectory]]]:
    ref = EnvRef(env)
    source = find_reward(name_or_spec) if isinstance(name_or_spec, str) else name_or_spec
    from agentrl.config.schema import RewardConfig

    scorer = compile_spec(source, context=make_context(RewardConfig(), replay_env=lambda task: ref.build()))
    return scorer, probe_episodes(ref.build, tasks)


def successes(scorer: Scorer, made: list[Trajectory]) -> list[bool | None]:
    return [scorer.score(trajectory).success for trajectory in made]


@pytest.fixture(scope="module")
def key_value() -> dict[str, list[Trajectory]]:
    return probe_episodes(EnvRef("key_value").build, 3)


@pytest.mark.parametrize("root", MADE_UP.values(), ids=MADE_UP)
def test_gold_succeeds_whatever_shapes_its_reward(root, key_value) -> None:
    scorer = compile_spec(spec(root))
    assert successes(scorer, key_value["gold"]) == [True] * 3
    assert successes(scorer, [*key_value["empty"], *key_value["silent"]]) == [False] * 6


@pytest.mark.parametrize("name", [name for name, env in SHELF_SPECS.items() if env is not None])
def test_gold_succeeds_under_every_spec_of_the_shelf_and_spam_does_not(name) -> None:
    scorer, made = played(SHELF_SPECS[name], name)
    assert successes(scorer, made["gold"]) == [True] * 2
    for kind in ("empty", "silent", "spam"):
        assert not any(successes(scorer, made[kind])), kind


@pytest.mark.parametrize(("name", "turns", "tokens", "reward"), [("key_value_dapo", 3, 112, 0.5), ("costs", 24, 2560, 0.85)])
def test_a_long_gold_episode_earns_less_and_succeeds_as_well(name, turns, tokens, reward) -> None:
    """112 of 96 to 128 tokens: half of the penalty of 1. 24 of 16 to 32 turns: half of 0.2; 2560 of 1024 to 4096 tokens: half
    of 0.1; no calls."""
    trajectory = episode(*[""] * (turns - 1), "7", task_gold={"answer": "7"})
    for turn in trajectory.turns:
        turn.sampled_tokens = 0
    trajectory.turns[0].sampled_tokens = tokens
    score = compile_spec(SHELF / f"{name}.json").score(trajectory)
    assert (score.value, score.success) == (pytest.approx(reward), True)


def test_gold_succeeds_under_the_specs_of_papers() -> None:
    """They have no environment on the shelf; ToolRL's reward asks for reasoning, success only for the calls."""
    expect, wrong = gold(call("f", x=1)), [call("f", x=2)]
    for name in ("toolrl", "toolrl_parity"):
        scorer = compile_spec(SHELF / f"{name}.json")
        right = scorer.score(episode([call("f", x=1)], task_gold={"calls": expect}))
        assert (right.value, right.success) == (3.0, True)
        assert scorer.score(episode(wrong, task_gold={"calls": expect}, reasoning="so")).success is False
    sets = [{"f": {"x": [1]}}]
    scorer = compile_spec(SHELF / "bfcl_ast.json")
    assert scorer.score(episode([call("f", x=1)], task_gold={"calls": sets})).success is True
    assert scorer.score(episode(wrong, task_gold={"calls": sets})).success is False


def test_the_spec_s_own_node_decides() -> None:
    """0.9 x 1 + 0.1 x 0 is not a full reward; the spec says that the calls alone are the task."""
    root = total({**CALLS, "weight": 0.9}, {**RIGHT, "weight": 0.1})
    trajectory = episode([call("f", x=1)], "8", task_gold={"calls": gold(call("f", x=1)), "answer": 7})
    assert compile_spec(spec(root)).score(trajectory).success is False
    scorer = compile_spec(spec(root, success={**CALLS, "id": "did_it"}))
    score = scorer.score(trajectory)
    assert (score.value, score.success, score.metrics["did_it"]) == (0.9, True, 1.0)
    assert str(scorer.rule) == "/success" and score.evidence["success"]["by"] == "/success"


def test_a_threshold_on_a_node_with_an_id() -> None:
    root = {**CALLS, "id": "share", "args": {"expect": {"$": "/task/gold/calls"}, "credit": "matched"}}
    two = {"calls": gold(call("f", x=1), call("f", x=2))}
    half, none = episode([call("f", x=1), call("g")], task_gold=two), episode("no", task_gold=two)
    for gte, expected in ((0.5, True), (0.51, False), (1, False)):
        scorer = compile_spec(spec(root, success={"id": "share", "gte": gte}))
        assert (scorer.score(half).success, scorer.score(none).success) == (expected, False), gte


def test_a_node_called_success_decides_if_every_episode_reaches_it() -> None:
    named = {**RIGHT, "id": "success"}
    reached = {"/root/of/1": total(CALLS, named), "/metrics/0": CALLS,
               "/root/if": {"op": "gate", "if": named, "then": CALLS}}  # fmt: skip
    for at, root in reached.items():
        metrics = [named] if at.startswith("/metrics") else []
        assert str(compile_spec(spec(root, metrics=metrics)).rule) == f"the task part of {at}"
    for root in ({"op": "gate", "if": CALLS, "then": named}, total(CALLS, {"op": "all", "of": [named], "scope": "turn"})):
        assert str(compile_spec(spec(root)).rule) == "the task part of /root"


def test_nothing_decides_where_nothing_has_a_best() -> None:
    for root in (SHAPED, leaf("cost.turns", {"max": 3}, scale=[1, 0]), total(SHAPED, TURN_COST)):
        scorer = compile_spec(spec(root))
        assert scorer.rule is None and scorer.score(episode([call("f")], task_gold={"calls": []})).success is None


def test_a_group_s_success_is_known_of_each_member_and_of_one_alone() -> None:
    """A tie of ranks gives each of two members 0.5; the reward of one alone is unknown."""
    root = total(RIGHT, leaf("group.rank", {"of": leaf("cost.turns", {"max": 10})}, scope="group", weight=-0.1))
    scorer = compile_spec(spec(root))
    right, wrong = (episode(text, task_gold={"answer": 7}) for text in ("7", "8"))
    pair = scorer.score_group([right, wrong])
    assert [(s.value, s.success) for s in pair] == [(0.95, True), (-0.05, False)]
    alone = scorer.score(right)
    assert (alone.value, alone.success) == (None, True)


def test_a_success_node_compares_nobody() -> None:
    rank = leaf("group.rank", {"of": leaf("cost.turns", {"max": 10})}, scope="group")
    for success in (rank, {"op": "all", "of": [RIGHT, rank]}, {"id": "rank"}):
        with pytest.raises(RewardSpecError, match=r"/success.*group\.rank"):
            compile_spec(spec(total(RIGHT, {**rank, "id": "rank"}), success=success))


@pytest.mark.parametrize(("success", "place", "says"), [
    ({"id": "succes"}, "/success/id", "known: success"),
    ({"id": "success", "gt": 1}, "/success/gt", "did you mean 'gte'"),
    ({}, "/success", "'id' is missing"),
    ("success", "/success", "must be an object"),
    ({"use": "calls.mach"}, "/success/use", "calls.match"),
    ({"use": "calls.none", "scope": "turn", "emit": "step"}, "/success/emit", "success emits nothing"),
    ({"use": "calls.none", "id": "success"}, "/success/id", "also the id of /root"),
])  # fmt: skip
def test_a_wrong_success_is_refused_with_its_place(success, place, says) -> None:
    with pytest.raises(RewardSpecError) as caught:
        compile_spec(spec({**RIGHT, "id": "success"}, success=success))
    assert f"at {place}: " in str(caught.value) and says in str(caught.value)


def test_a_gate_between_numbers() -> None:
    scorer = compile_spec(spec({"op": "gate", "if": CALLS, "then": 2, "else": -1}))
    assert scorer.range == (-1.0, 2.0)
    score = scorer.score(episode([call("f")], task_gold={"calls": gold(call("f"))}))
    assert (score.value, score.success) == (2.0, True)
    assert scorer.score(episode("no", task_gold={"calls": gold(call("f"))})).value == -1.0


def test_a_function_is_asked_once_though_success_repeats_its_leaf() -> None:
    from agentrl.reward import Context

    asked = []
    python = {"f": lambda view, args: asked.append(1) or 1.0}
    root = total(leaf("python", {"name": "f"}), TURN_COST)
    score = compile_spec(spec(root), context=Context(python=python)).score(episode("x"))
    assert score.success is True and len(asked) == 1


# -- properties ------------------------------------------------------------------------------------


def success(root, trajectory) -> bool | None:
    return compile_spec(spec(root)).score(trajectory).success


def bare(root):
    return {key: value for key, value in root.items() if key not in ("weight", "scale", "clip")}


amounts = st.integers(-30, 30).map(lambda n: n / 10)


@settings(max_examples=examples(300), deadline=None)
@given(nodes(), episodes, amounts)
def test_adding_a_cost_changes_no_success_whatever_its_weight(root, trajectory, weight) -> None:
    assume(root.get("missing") != "skip")  # beside a cost it leaves a reward, alone it leaves none
    root = {key: value for key, value in root.items() if key != "weight"}
    cost = leaf("cost.calls", {"max": 3}, weight=weight)
    assert success(total(root, cost), trajectory) == success(root, trajectory)


@settings(max_examples=examples(300), deadline=None)
@given(nodes(), episodes, st.tuples(amounts, amounts).map(sorted), st.tuples(amounts, amounts).map(sorted))
def test_scale_and_clip_at_the_root_change_no_success(root, trajectory, scale, clip) -> None:
    assume(scale[0] < scale[1])
    plain = bare(root)
    assert success({**plain, "scale": scale, "clip": clip}, trajectory) == success(plain, trajectory)


@settings(max_examples=examples(300), deadline=None)
@given(leaves, leaves, episodes, st.integers(1, 30), st.integers(1, 30))
def test_weights_of_parts_that_only_take_away_change_no_success(task, other, trajectory, one, two) -> None:
    roots = [total(task, {**other, "weight": -weight / 10}) for weight in (one, two)]
    assume(not task["use"].startswith("cost"))
    assert success(roots[0], trajectory) == success(roots[1], trajectory)


@settings(max_examples=examples(300), deadline=None)
@given(nodes(), episodes, st.sampled_from([None, *StopReason]))
def test_an_unscored_episode_has_no_success(root, trajectory, stop) -> None:
    if stop is not None:
        trajectory.stop = stop
    score = compile_spec(spec(root)).score(trajectory)
    if score.value is None:
        assert score.success is None
    assert not (trajectory.stop.infrastructure and score.success is not None)


@st.composite
def plain_trees(draw, depth=2, sums=True):
    """Nodes without mods, costs and references that may dangle: their best is where the value is highest. Sums stand in sums and
    means alone: the least of 1 and of a sum that may be 2 is 1 already if that sum has half of its parts."""
    if depth == 0 or draw(st.booleans()):
        return draw(leaves.filter(lambda item: not item["use"].startswith("cost")))
    if draw(st.integers(0, 3)) == 0:
        below = plain_trees(depth=depth - 1, sums=False)
        return {"op": "gate", "if": draw(below), "gte": draw(st.sampled_from([0.5, 1])), "then": draw(below), "else": draw(below)}
    op = draw(st.sampled_from(["mean", "product", "min", "max", "all", "any", *["sum"] * sums]))
    below = plain_trees(depth=depth - 1, sums=sums and op in ("sum", "mean"))
    return {"op": op, "of": draw(st.lists(below, min_size=1, max_size=3))}


@settings(max_examples=examples(500), deadline=None)
@given(plain_trees(), episodes)
def test_without_costs_and_scales_success_is_the_highest_reward_that_the_spec_can_give(root, trajectory) -> None:
    scorer = compile_spec(spec(root))
    score = scorer.score(trajectory)
    expected = None if score.value is None else score.value >= scorer.range[1] - 1e-6
    assert score.success == expected


def test_the_range_of_a_mean_is_that_of_its_parts_together() -> None:
    """A mean of a part of at most 1 and one of at most 2 is at most 1.5; without a part that may be left out, 2."""
    one, two = {"use": "calls.none"}, {"op": "sum", "of": [{"use": "calls.none"}, {"use": "calls.none"}]}

    def found(**root) -> tuple[float, float]:
        return compile_spec(spec(root)).range

    assert found(op="mean", of=[one, two]) == (0.0, 1.5)
    assert found(op="mean", of=[one, {**two, "weight": 3}]) == (0.0, 1.75)
    absent = {"when": {"$": "/task/gold/answer", "ne": 1}}
    assert found(op="mean", of=[{**one, **absent}, two]) == (0.0, 2.0)
    assert found(op="min", of=[one, two]) == (0.0, 1.0)
    assert found(op="min", of=[{**one, **absent}, two]) == (0.0, 2.0)
    assert found(op="max", of=[one, two]) == (0.0, 2.0)
