"""What a wrong spec is told: the place as a JSON Pointer, what was expected, and what is near it."""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from agentrl.config import load_config
from agentrl.config.schema import RewardConfig
from agentrl.reward import Context, compile_spec, load_spec, make_context
from agentrl.reward.spec import published_schema
from agentrl.utils.errors import ConfigError, RewardSpecError
from tests.reward.reward_episodes import SHELF, call, episode, leaf, spec
from tests.run.starts import scorer_of

FINE = leaf("episode.stopped")


WRONG: list[Any] = [
    (spec({"use": "calls.mach", "args": {"expect": []}}), "/root/use", "did you mean 'calls.match'?"),
    (spec({"op": "add", "of": [FINE]}), "/root/op", "known: sum, mean"),
    (spec({"uses": "judge"}), "/root", "'uses': did you mean 'use'?"),
    (spec({"use": "judge", "op": "sum"}), "/root", "this one has both"),
    (spec(leaf("calls.match", {"expect": [], "oder": "free"})), "/root/args/oder", "did you mean 'order'?"),
    (spec(leaf("calls.match", {"expect": [], "order": "fre"})), "/root/args/order", "did you mean 'free'?"),
    (spec(leaf("calls.match", {"order": "free"})), "/root/args", "'expect' is missing"),
    (spec(leaf("calls.match")), "/root", "'args' is missing"),
    (spec(leaf("state.match", {"by": "hash"})), "/root/args", "exactly one of expect, replay"),
    (spec(leaf("state.assert", {"path": "/a"})), "/root/args", "at least one of eq"),
    (spec({"op": "sum", "of": []}), "/root/of", "non-empty"),
    (spec({"op": "sum", "of": [FINE, {"op": "gate", "if": FINE}]}), "/root/of/1", "'then' is missing"),
    (spec({"op": "gate", "if": FINE, "then": FINE, "else": "0"}), "/root/else", "an object"),
    (spec({"op": "gate", "if": FINE, "then": FINE, "else": True}), "/root/else", "an object"),
    (spec(leaf("episode.stopped", wieght=2)), "/root/wieght", "did you mean 'weight'?"),
    (spec(leaf("episode.stopped", weight="2")), "/root/weight", "must be a number, not a string"),
    (spec(leaf("episode.stopped", clip=[1, 0])), "/root/clip", "above the upper"),
    (spec(leaf("episode.stopped", scale=[1])), "/root/scale", "short"),
    (spec(leaf("episode.stopped", missing="maybe")), "/root/missing", "known: skip, 0, 1, invalid"),
    (spec(leaf("episode.stopped", {"reasons": ["env_error"]})), "/root/args/reasons/0", "known: done"),
    (spec(leaf("number.close", {"expect": {"$": "/gold/answer"}})), "/root/args/expect/$", ""),
    (spec(leaf("number.close", {"expect": {"$": "/task/glod/answer"}})), "/root/args/expect/$", "did you mean 'gold'?"),
    (spec(leaf("number.close", {"expect": {"$": "task/gold"}})), "/root/args/expect", ""),
    (spec(leaf("text.equals", {"expect": "x"}, when={"$": "/episode/stp", "eq": 1})), "/root/when/$", "did you mean 'stop'?"),
        # Literals, which no state equals: every episode was paid 0.
    (spec(leaf("state.match", {"expect": {"$ref": "/task/gold/x"}})), "/root/args/expect/$ref", "it looks like a reference"),
    (spec(leaf("state.match", {"expect": {"$": "/task/gold/x", "or": 1}})), "/root/args/expect/$", "alone or next to"),
    (spec(leaf("text.equals", {"expect": "x"}, when={"$": "/episode/stop"})), "/root/when", ""),
    (spec(FINE, metrics=[leaf("cost.turns", {"max": 3})]), "/metrics/0", 'needs an "id"'),
    (spec(leaf("episode.stopped", id="a"), metrics=[leaf("calls.none", id="a")]), "/metrics/0/id", "also the id of /root"),
    (spec(leaf("episode.stopped", weight=float("nan"))), "/root/weight", "must be finite"),
    (spec(leaf("episode.stopped", weight=10**400)), "/root/weight", "a double can hold"),
    ({"agentrl_reward": 2, "name": "x", "root": FINE}, "/agentrl_reward", "must be 1"),
    ({"agentrl_reward": 1, "root": FINE}, "(the top)", "'name' is missing"),
    ({"agentrl_reward": 1, "name": "x", "rot": FINE}, "/rot", "did you mean 'root'?"),
    (spec([FINE]), "/root", "not an array"),
    (spec({"op": "sum", "of": [None]}), "/root/of/0", "not null"),
    (spec(leaf("text.equals", {"expect": {1, 2}})), "/root/args/expect", "not a JSON value"),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "place", "says"), WRONG)
def test_load_names_the_place_and_a_way_out(broken, place, says):
    with pytest.raises(RewardSpecError) as caught:
        load_spec(broken)
    assert f"at {place}" in str(caught.value)
    assert says in str(caught.value)


TURN = {"scope": "turn", "reduce": "sum"}


@pytest.mark.parametrize(("root", "place", "says"), [
    (leaf("format.regex", {"pattern": "("}), "/root/args", "not a regular expression"),
    (leaf("python", {"name": "os.system"}), "/root/args", "does not allow a function 'os.system'"),
    (leaf("python", {"name": "polit"}), "/root/args", "did you mean 'polite'?"),
    (leaf("state.match", {"replay": []}), "/root/args", "name it with --env ID"),
    (leaf("results.contains", {"replay": []}), "/root/args", "name it with --env ID"),
    (leaf("state.match", {"expect": 1, "by": "hash", "abs": 1}), "/root/args", "no effect with by: hash"),
    (leaf("calls.match", {"expect": [], "order": "ordered", "assign": "greedy"}), "/root/args", "only for order: free"),
    (leaf("calls.match", {"expect": [], "order": "prefix", "credit": "partial"}), "/root/args", "needs assign: optimal"),
    (leaf("cost.turns", {"max": 2, "free": 2}), "/root/args", "must be below max"),
    (leaf("calls.none", when={"$": "/task/id", "eq": {"$": "/task/gold/a"}}), "/root/when/eq", "not a reference"),
    (leaf("text.contains", {"expect": "a", "mode": "any", "credit": "partial"}), "/root/args", "cannot be used with"),
    (leaf("results.contains", {"expect": "a", "mode": "any", "credit": "partial"}), "/root/args", "cannot be used with"),
    ({"op": "mean", "of": [leaf("calls.none", weight=-1)]}, "/root/of", "weights of a mean"),
    (leaf("episode.stopped", scope="turn"), "/root", "sees episode, not a turn"),
    (leaf("calls.none", scope="group"), "/root/scope", "only for group.rank"),
    (leaf("calls.none", reduce="sum"), "/root/reduce", "nothing to reduce"),
    (leaf("calls.none", emit="step"), "/root/emit", "only a node with a scope"),
    (leaf("calls.match", {"expect": []}, emit="step"), "/root/emit", "with credit matched or partial"),
    (leaf("calls.match", {"expect": [], "credit": "matched"}, emit="step", clip=[0, 1]), "/root/emit", "clips the total"),
    ({"op": "max", "of": [leaf("calls.match", {"expect": [], "credit": "matched"}, emit="step")]}, "/root/of/0/emit",
     "no share of its own"),
    ({"op": "max", "of": [leaf("calls.none", emit="step", **TURN)]}, "/root/of/0/emit", "no share of its own"),
    ({"op": "sum", "clip": [0, 1], "of": [leaf("calls.none", emit="step", **TURN)]}, "/root/of/0/emit", "clips the total"),
    ({"op": "sum", "of": [leaf("calls.none", scope="episode")], "scope": "turn"}, "/root/of/0/scope", "wider"),
    (leaf("text.equals", {"expect": {"$": "/turn/content"}}), "/root/args/expect/$", "needs scope 'turn'"),
    (leaf("text.equals", {"expect": {"$": "/task/gold/x", "at": "turn"}}), "/root/args/expect/at", "needs scope 'turn'"),
    (leaf("group.rank", {"of": leaf("group.rank", {"of": FINE})}), "/root/args/of", "another group leaf"),
])  # fmt: skip
def test_compile_names_the_place_and_a_way_out(root, place, says):
    with pytest.raises(RewardSpecError) as caught:
        compile_spec(spec(root), context=Context(python={"polite": lambda view, args: 1.0}))
    assert f"at {place}:" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(("text", "says"), [
    ("", "not JSON"), ("{", "line 1 column 2"), ("[1, 2]", "must be a JSON object, not an array"),
    ('{"a": NaN}', "NaN is not JSON"), ('{"a": Infinity}', "Infinity is not JSON"),
    ('{"name": "a", "name": "b"}', "given twice"), ("[" * 100_000, "nested too deeply"),
    ("junk" * 25_000, "not JSON"), ("\x00", "not JSON"), ("null", "not null"),
])  # fmt: skip
def test_a_file_that_is_no_spec(tmp_path, text, says):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(RewardSpecError) as caught:
        load_spec(file)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(RewardSpecError, match="a JSON object or a path, not set"):
        load_spec({1})
    with pytest.raises(RewardSpecError, match="cannot be read"):
        load_spec(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RewardSpecError, match="cannot be read"):
        load_spec(tmp_path / "bytes.json")


@pytest.mark.parametrize(("levels", "says"), [(50, "nested more than"), (1000, "nested too deeply")])
def test_a_tree_that_is_too_deep(levels, says):
    node, test = FINE, {"$": "/episode/turns", "gt": 1}
    for _ in range(levels):
        node, test = {"op": "sum", "of": [node]}, {"not": {"not": {"not": test}}}
    with pytest.raises(RewardSpecError, match=says):
        load_spec(spec(node))
    with pytest.raises(RewardSpecError, match="nested too deeply"):
        load_spec(spec({**FINE, "when": test}))


def test_loading_copies():
    given = spec(leaf("episode.stopped"))
    loaded = load_spec(given)
    loaded["root"]["weight"] = 5
    assert "weight" not in given["root"]


def test_the_published_schema_agrees_with_load_spec():
    """Editors that validate by `$schema` accept the shelf and refuse what load_spec refuses of the grammar."""
    schema = published_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    editor = jsonschema.Draft202012Validator(schema)
    for path in SHELF.glob("*.json"):
        if path.stem != "schema":
            assert editor.is_valid(json.loads(path.read_text())) and load_spec(path)["name"] == path.stem, path
    beyond_a_grammar = [
        "above the upper", "did you mean 'gold'?", "did you mean 'stop'?", "it looks like a reference", "alone or next to",
        'needs an "id"', "also the id of /root", "must be finite", "a double can hold",
    ]  # fmt: skip
    assert [says for broken, _, says in WRONG if editor.is_valid(broken)] == beyond_a_grammar


def test_a_python_leaf_runs_what_the_run_allows_by_name():
    def share(view, args):
        return len(view.calls) / args["of"], {"calls": len(view.calls)}

    functions = {
        "share": share, "none": lambda view, args: None, "big": lambda view, args: 3.0,
        "nan": lambda view, args: float("nan"), "text": lambda view, args: "1", "yes": lambda view, args: True,
    }  # fmt: skip
    context = Context(python=functions)

    def value(name, args=None):
        node = leaf("python", {"name": name, **({} if args is None else {"args": args})})
        return compile_spec(spec(node), context=context).score(episode([call("f")], "x"))

    assert value("share", {"of": 4}).value == 0.25
    assert value("share", {"of": 4}).evidence["root"]["evidence"] == {"calls": 1}
    assert value("yes").value == 1.0 and value("none").value is None
    for name in ("big", "nan", "text"):
        found = value(name)
        assert found.value is None and "expected a number in [0, 1], a truth value or None" in json.dumps(found.evidence), name


# -- what the config of a run lets a spec use ------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_reward_functions.py").write_text("def half(view, args):\n    return 0.5\n\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_reward_functions"
    sys.modules.pop("my_reward_functions", None)


def test_a_python_leaf_runs_only_where_the_config_allows_it_by_name(module):
    node = spec(leaf("python", {"name": "half"}))
    allowed = make_context(RewardConfig(python={"half": f"{module}:half"}))
    assert compile_spec(node, context=allowed).score(episode("x")).value == 0.5
    for context in (None, make_context(RewardConfig())):
        with pytest.raises(RewardSpecError, match="does not allow a function 'half'"):
            compile_spec(node, context=context)
    direct = spec(leaf("python", {"name": f"{module}:half"}))  # a spec cannot import by itself
    with pytest.raises(RewardSpecError, match="does not allow"):
        compile_spec(direct, context=allowed)


@pytest.mark.parametrize("kind", [BaseException, GeneratorExit, SystemExit, ValueError])
def test_whatever_a_function_raises_leaves_the_episode_unscored_and_the_run_going(kind):
    def broken(view, args):
        raise kind("boo")

    score = compile_spec(spec(leaf("python", {"name": "f"})), context=Context(python={"f": broken})).score(episode("x"))
    assert score.value is None and f"f raised {kind.__name__}: boo" in score.evidence["root"]["unscored"]


@pytest.mark.parametrize("target", ["half", ":half", "my_reward_functions:", "a b:c d", "no_such_module_here:f",
                                    "my_reward_functions:hlaf", "my_reward_functions:number"])  # fmt: skip
def test_a_function_that_is_not_there(module, target):
    with pytest.raises(ConfigError, match=r"reward\.python\.f"):
        make_context(RewardConfig(python={"f": target}))


def test_a_run_compiles_the_replaying_profiles():
    """The wiring of a training run: its environment is the replay environment of its reward spec."""
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.toml", ["env.reward=tau_bench"])
    assert scorer_of(config).name == "tau_bench"
