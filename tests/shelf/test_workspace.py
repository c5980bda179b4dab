"""workspace: gold holds at every size, the three kinds of traps are traps, any order of work is as good."""

import json
from collections import Counter

import pytest

from agentrl.config.schema import ToolsConfig
from agentrl.env import Message
from agentrl.env.catalog import EnvRef, find_env, find_reward, make_env
from agentrl.reward import compile_spec
from agentrl.utils.errors import ToolError
from agentrl.utils.search_path import load_module
from tests.conftest import proof
from tests.env.toyenvs import call
from tests.shelf.conversation_probes import again, first_task, gold_episode, idle_values, play, say

PATH = find_env("workspace").path
assert PATH is not None
PLAN = load_module(PATH.parent / "plan.py")
USER = load_module(PATH.parent / "user.py")


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("params", [
    {},
    {"calls": 1, "requests": 1},
    {"calls": 60, "requests": [6, 8]},
    {"calls": [10, 30], "requests": [3, 6], "missing": 0.6, "withheld": 0.5, "questions": 0.3},
    {"calls": [2, 6], "requests": 2, "offered": 0, "distractors": 0},
])  # fmt: skip
def test_gold_scores_one_in_the_number_of_calls_asked_for(params, split):
    env = make_env("workspace", **params)
    low, high = env.wish.calls
    for seed in range(3):
        reward, record = gold_episode(env, seed, split)
        assert reward == 1.0
        results = [result for _, _, result in record.calls()]
        assert low <= len(results) <= high
        assert "[cut:" not in "".join(result.content for result in results)


def test_tools_of_a_set_are_offered_beside_those_of_the_task():
    """Notes are what is left of results that a context policy removed, so they must be there."""
    alone, env = EnvRef("workspace").build(scorer=None), EnvRef("workspace", tools=ToolsConfig(sets=["notes"])).build(scorer=None)
    for one in (alone, env):
        one.reset(seed=0)
    assert env.toolbox.names == (*alone.toolbox.names, "write_note", "read_notes")
    assert env.step(call("write_note", title="a", text="b"))[0][0].content == "noted"


@pytest.mark.parametrize("spec", ["workspace", "workspace_dense"])
def test_null_policies_score_nothing(spec):
    env = make_env("workspace", reward=spec, withheld=0.4, questions=0.3)
    assert idle_values(env, ("train", "heldout"), range(3)) == {0.0}


LONG = {50: [8, 14], 100: [16, 28], 200: [32, 56]}


@pytest.mark.parametrize("calls", [50, pytest.param(100, marks=proof), 200])
def test_long_tasks_take_exactly_the_calls_asked_for_in_many_different_requests(calls):
    requests = LONG[calls]
    env = make_env("workspace", calls=calls, requests=requests, recalls=0.4)
    taken_back = 0
    for seed, split in [(0, "train"), (1, "heldout")]:
        reward, record = gold_episode(env, seed, split)
        assert reward == 1.0 and len(list(record.calls())) == calls
        asked = record.task.data["requests"]
        used = Counter(call.name for turn in record.turns for call in turn.message.tool_calls)
        assert requests[0] <= len(asked) <= requests[1] and len({row["text"] for row in asked}) >= 0.9 * len(asked)
        # Not one request over and over: many functions, none for more than half of the calls.
        assert len(used) >= 9 and max(used.values()) <= calls / 2
        told = " ".join(row["text"] for row in asked)
        taken_back += sum(told.count(part) for part in ("before you last moved it", "gave you the new one", "Create it again"))
    assert taken_back, "no request builds on an earlier one"
    assert idle_values(env, ["train"], [0]) == {0.0}


def test_what_is_taken_back_is_nowhere_but_in_what_was_read_before():
    """Of a request to move an event back: its old time stands in no state any more when the request comes."""
    env = make_env("workspace", calls=50, requests=[10, 14], recalls=0.5, apps=["calendar"])
    checked = 0
    for seed in range(5):
        env.reset(seed=seed)
        for turn in env.gold_turns(env.task):
            made = turn.tool_calls[0] if turn.tool_calls else None
            asked = [m.content for m in env.trajectory.messages if m.role == "user"][-1]
            if made is not None and made.name == "move_event" and "before you last moved it" in asked:
                old = {key: made.arguments[key] for key in ("day", "start")}
                now = env.world["events"][made.arguments["event_id"]]
                read = [m.content for m in env.trajectory.messages if m.role == "tool"]
                assert {key: now[key] for key in old} != old
                assert any(f'"day": "{old["day"]}", "start": "{old["start"]}"' in text for text in read)
                checked += 1
            env.step(turn)
        assert env.trajectory.reward == 1.0
    assert checked


def test_requests_and_functions_are_of_the_apps_asked_for():
    env = make_env("workspace", apps=["calendar"], calls=[5, 9], missing=0.0)
    for seed in range(10):
        task = env.make_task(seed, "train")
        assert set(task.data["tools"]) <= {item.name for item in PLAN.APPS["calendar"]} and len(task.data["tools"]) >= 6
    assert set(PLAN.APPS) == {"files", "mail", "calendar", "contacts"}


def test_a_long_task_costs_in_proportion_to_its_calls(monkeypatch):
    """Counted, not timed: the state is written out once an episode, and the world grows no faster than the calls."""
    sizes, states = {}, []
    for calls in (50, 200):
        env = make_env("workspace", calls=calls, requests=LONG[calls])
        plain = env.state
        monkeypatch.setattr(env, "state", lambda plain=plain: states.append(0) or plain())
        states.clear()
        env.reset(seed=1)
        play(env, env.gold_turns(env.task))
        assert len(states) <= 3, "the state is written out in every turn"
        sizes[calls] = len(json.dumps(env.trajectory.to_json()["task"]))
    assert sizes[200] < 4 * sizes[50]


def test_there_are_over_thirty_functions_and_nearly_all_are_needed_somewhere():
    env = make_env("workspace", calls=[4, 16], requests=4, missing=0.0)
    used = Counter()
    for seed in range(60):
        used.update(t.tool_calls[0].name for t in env.gold_turns(env.make_task(seed, "train")) if t.tool_calls)
    assert len(PLAN.TOOLS) == 41 and len(used) >= 25


def test_a_detail_left_out_is_told_when_asked_for_and_cannot_be_guessed():
    env = make_env("workspace", missing=1.0, withheld=0.0)
    checked = 0
    for seed in range(40):
        task = env.make_task(seed, "train")
        for request in task.data["requests"]:
            if request["slot"] is None:
                continue
            secret = request["slot"]["reply"].split(" ", 1)[-1].strip('."')
            assert secret not in request["text"], request
            checked += 1
        if not any(request["slot"] for request in task.data["requests"]):
            continue
        # Without its questions the gold policy gets no answers, and its calls then come a request too early.
        env.reset(options={"task": task})
        turns = env.gold_turns(task)
        reward, _ = play(env, turns)
        assert reward == 1.0
        replies = [m.content for m in env.trajectory.messages if m.role == "user"]
        assert all(r["slot"]["reply"] in replies for r in task.data["requests"] if r["slot"])
        silent = [t for t in turns if t.tool_calls or "?" not in t.content]
        again(env, silent)
        heard = [m.content for m in env.trajectory.messages if m.role == "user"]
        assert not any(r["slot"]["reply"] in heard for r in task.data["requests"] if r["slot"])
    assert checked > 20


def test_what_cannot_be_done_is_declined_and_nothing_else():
    env = make_env("workspace", withheld=1.0, missing=0.0, questions=0.0)
    gold = first_task(env, lambda task, _: any(r["withheld"] and not r["restored"] for r in task.data["requests"]))
    withheld = [r["withheld"] for r in env.task.data["requests"] if r["withheld"]]
    assert not set(withheld) & set(env.toolbox.names)
    assert play(env, gold) == (1.0, True)
    for other in ("Done.", "I did that.", "I cannot do that."):
        assert again(env, [say(other) if t.content.startswith("CANNOT") else t for t in gold])[0] == 0.0
    # Declining what could be done costs as much as claiming what was not.
    assert again(env, [say("CANNOT: no") if t.content == "Done." else t for t in gold])[0] == 0.0
    assert again(env, [say("Done.\nCANNOT: no") if t.content == "Done." else t for t in gold])[0] == 0.0


def test_a_function_that_comes_back_is_offered_and_used():
    env = make_env("workspace", withheld=1.0, missing=0.0)
    gold = first_task(env, lambda task, _: task.data["requests"][0]["restored"])
    name = env.task.data["requests"][0]["withheld"]
    assert name not in env.toolbox.names
    observation, *_ = env.step(gold[0])
    assert f'"name": "{name}"' in observation[0].content and name in env.toolbox.names
    assert play(env, gold[1:]) == (1.0, True)
    assert name in [tool["function"]["name"] for tool in env.trajectory.tools]
    # The next episode begins without it again.
    env.reset(options={"task": env.task})
    assert name not in env.toolbox.names
    observation, *_ = env.step(call(name))
    assert "unknown_tool" in observation[0].content


def test_a_way_round_a_missing_function_does_not_count():
    env = make_env("workspace", withheld=1.0, missing=0.0, questions=0.0)
    gold = first_task(env, lambda task, _: task.data["requests"][0]["withheld"] == "forward_mail"
                      and not task.data["requests"][0]["restored"])  # fmt: skip
    extra = call("send_mail", to="a@b.example", subject="Fwd", body="text")
    assert play(env, [extra, *gold])[0] == 0.0


def test_values_are_answered_in_their_line():
    env = make_env("workspace", questions=0.5, withheld=0.0, missing=0.0)
    gold = first_task(env, lambda task, _: len(task.gold["talk"]["told"]) == 1)
    at = next(i for i, turn in enumerate(gold) if turn.content.startswith("ANSWER"))
    value = gold[at].content.removeprefix("ANSWER: ")
    said = {f"Here you are.\n\n**ANSWER:** {value}.": 1.0, f"answer: {value}\nIs there anything else I can do for you?": 1.0,
            value: 0.0, f"ANSWER: {value} or 7": 0.0, f"ANSWER: {value}\nANSWER: no": 0.0, "ANSWER:": 0.0}  # fmt: skip
    for text, reward in said.items():
        assert again(env, [*gold[:at], say(text), *gold[at + 1 :]])[0] == reward, text


def test_the_order_of_work_and_a_detour_do_not_matter_but_leftovers_do():
    env = make_env("workspace", calls=[5, 9], requests=1, missing=0.0, withheld=0.0, questions=0.0)
    gold = first_task(env, lambda task, _: len(task.gold["writes"]) >= 4 and task.gold["writes"][0]["name"] == "send_mail")
    assert play(env, [gold[0], *gold[-2:0:-1], gold[-1]]) == (1.0, True)
    together = Message("assistant", tool_calls=tuple(turn.tool_calls[0] for turn in gold[1:-1]))
    detour = [call("create_folder", path="/x"), call("list_groups"), call("read_file", path="/no")]
    assert again(env, [gold[0], together, gold[-1]]) == (1.0, True)
    assert again(env, [*detour, *gold])[0] == 0.0
    assert again(env, [*detour[1:], *gold])[0] == 1.0
    assert again(env, [*gold[:-1], gold[1], gold[-1]])[0] == 0.0  # one mail sent twice


def test_an_episode_cut_short_does_not_score():
    env = make_env("workspace", questions=0.0)
    env.reset(seed=0)
    play(env, env.gold_turns(env.task)[:-1])
    score = env.scorer.score(env.trajectory)
    assert score.value == 0.0 and score.metrics["world"] == 1.0


def test_the_dense_spec_pays_for_part_of_the_work():
    env = make_env("workspace", calls=8, requests=2, missing=0.0, withheld=0.0, questions=0.0)
    dense = compile_spec(find_reward("workspace_dense"))
    env.reset(seed=1)
    gold = env.gold_turns(env.task)
    values = [dense.score(env.trajectory).value]
    for turn in gold:
        env.step(turn)
        values.append(dense.score(env.trajectory).value)
    assert values[0] == 0.0 and values[-1] == 1.0 and values == sorted(values)
    assert 0.0 < values[-2] < 1.0 and len(set(values)) >= 3


def test_the_spec_by_turns_pays_each_right_change_once_where_it_was_made():
    """Gold, with a lookup before it and its first change made twice: half of the reward at the turns of the first makings, in
    equal shares, the other half at the end only if making it twice changed nothing."""
    env = make_env("workspace", calls=8, requests=2, missing=0.0, withheld=0.0, questions=0.0)
    by_turn = compile_spec(find_reward("workspace_turns"))
    env.reset(seed=1)
    writes = [(call["name"], call["arguments"]) for call in env.task.gold["writes"]]
    gold = env.gold_turns(env.task)
    made = [[(call.name, call.arguments) for call in turn.tool_calls] for turn in gold]
    first = next(place for place, calls in enumerate(made) if calls and calls[0] in writes)
    for turn in [*gold[: first + 1], gold[first], *gold[first + 1 :]]:
        env.step(turn)
    score = by_turn.score(env.trajectory)
    places = [place + (place > first) for place, calls in enumerate(made) if any(call in writes for call in calls)]
    assert len(places) == len(writes) >= 3
    assert score.turns == pytest.approx(dict.fromkeys(places, 0.5 / len(writes)))
    assert score.terminal in (0.0, 0.5) and (score.success is True) == (score.terminal == 0.5)
    assert idle_values(make_env("workspace", reward="workspace_turns"), ["train"], [0]) == {0.0}


def test_the_user_takes_questions_for_what_they_are():
    requests = [
        {"text": "one", "slot": {"words": ["time"], "reply": "At 09:00."}, "question": False, "withheld": None,
         "restored": False},
        {"text": "two", "slot": None, "question": False, "withheld": None, "restored": False},
    ]  # fmt: skip
    user = USER.User(requests)
    assert user.hear("Who are you?") == ("What do you need to know?", None)
    assert user.hear("At what time?") == ("At 09:00.", None)
    assert user.hear("All set! Is there anything else I can help you with?") == ("two", None)
    for _ in range(USER.PATIENCE):
        assert user.hear("Shall I go on?")[0] == "I have nothing to add. Please do what you can."
    assert user.hear("Shall I go on?") == (None, None)
    assert user.talk() == {"told": {}, "declined": [], "closed": 2}


def test_asking_for_what_is_not_missing_costs_half():
    env = make_env("workspace", missing=0.0, withheld=0.0)
    env.reset(seed=0)
    gold = env.gold_turns(env.task)
    assert play(env, [say("At what time, who, which folder and what text?"), *gold])[0] == 0.5
    polite = [say("Done. Is there anything else I can do?") if t.content == "Done." else t for t in gold]
    assert again(env, polite)[0] == 1.0


def test_gold_and_details_stay_hidden():
    env = make_env("workspace", missing=1.0)
    for seed in range(20):
        observation, info = env.reset(seed=seed)
        assert [m.role for m in observation] == ["system", "user"] and set(info) <= {"task_id", "split", "turns"}
        slot = env.task.data["requests"][0]["slot"]
        assert slot is None or slot["reply"] not in str(observation)


def test_knobs_change_the_task():
    def tasks(**params):
        env = make_env("workspace", **params)
        return [env.make_task(seed, "train") for seed in range(10)]

    def count(found, key):
        return sum(bool(request[key]) for task in found for request in task.data["requests"])

    assert all(len(task.data["requests"]) == 3 for task in tasks(requests=3, withheld=0.0))
    assert count(tasks(missing=0.0), "slot") == 0 < count(tasks(missing=1.0), "slot")
    assert count(tasks(withheld=0.0), "withheld") == 0 < count(tasks(withheld=1.0), "withheld")
    assert count(tasks(questions=0.0), "question") == 0 < count(tasks(questions=0.5), "question")
    few, many = tasks(distractors=0), tasks(distractors=60)
    assert len(few[0].data["world"]["mail"]) + 50 < len(many[0].data["world"]["mail"])
    assert all(len(task.data["tools"]) < 15 for task in tasks(offered=2))


ENV = make_env("workspace", withheld=0.0)
ENV.reset(seed=0)


def test_tools_refuse_what_makes_no_sense():
    desk = PLAN.Desk(PLAN.private(ENV.task.data["world"]))
    path = next(iter(desk.world["files"]))
    for name, arguments in [
        ("create_event", {"title": "x", "day": "2031-02-30", "start": "09:00", "minutes": 30}),
        ("create_event", {"title": "x", "day": "2031-03-03", "start": "9:00", "minutes": 30}),
        ("write_file", {"path": "notes.txt", "text": ""}),
        ("write_file", {"path": "/nowhere/x.txt", "text": ""}),
        ("create_folder", {"path": "/notes/../x"}),
        ("move_file", {"path": path, "folder": path.rpartition("/")[0]}),
        ("send_mail", {"to": "Cleo", "subject": "", "body": ""}),
        ("move_mail", {"mail_id": "m1", "folder": "nowhere"}),
        ("remove_attendee", {"event_id": "e1", "email": "nobody@x.example"}),
        ("list_group", {"group": "nobody"}),
    ]:
        with pytest.raises(ToolError):
            PLAN.run_tool(desk, name, arguments)


def test_leaving_out_or_spoiling_any_one_change_scores_nothing():
    env = make_env("workspace", questions=0.0, missing=0.0)
    spoilt = {str: lambda text: text + "x", int: lambda n: n + 5, bool: lambda flag: not flag}
    tried = set()
    for seed in (6, 9, 20, 25, 26, 27, 29, 36, 62, 64, 67, 79):  # short ones, with every function that changes something
        task = env.make_task(seed, "train")
        gold = env.gold_turns(task)
        for at, turn in enumerate(gold):
            if not turn.tool_calls or env.toolbox[(made := turn.tool_calls[0]).name].options.read_only:
                continue
            for key, value in made.arguments.items():
                wrong = call(made.name, **{**made.arguments, key: spoilt[type(value)](value)})
                assert again(env, [*gold[:at], wrong, *gold[at + 1 :]], task)[0] == 0.0, (made, key)
            assert again(env, [*gold[:at], *gold[at + 1 :]], task)[0] == 0.0, made
            tried.add(made.name)
    assert len(tried) == 21


def test_a_fork_goes_its_own_way_also_with_other_tools():
    env = make_env("workspace", withheld=1.0, missing=0.0)
    gold = first_task(env, lambda task, _: task.data["requests"][0]["restored"])
    name = env.task.data["requests"][0]["withheld"]
    snapshot, before = env.snapshot(), env.state()
    replay_env = env.fork()
    assert play(replay_env, gold)[0] == 1.0
    assert env.state() == before and name not in env.toolbox.names
    play(env, [gold[0]])
    assert name in env.toolbox.names
    env.restore(snapshot)
    assert env.state() == before and name not in env.toolbox.names
    assert play(env, gold)[0] == 1.0
