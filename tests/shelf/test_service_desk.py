"""service_desk: gold is right, every shortcut around the policy scores nothing, the customer is fair."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from agentrl.env.catalog import find_env, make_env
from agentrl.utils.search_path import load_module
from tests.conftest import proof
from tests.env.toyenvs import call
from tests.shelf.conversation_probes import again, first_task, gold_episode, idle_values, play, say

PATH = find_env("service_desk").path
assert PATH is not None
POLICY = load_module(PATH.parent / "policy.py")
CUSTOMER = load_module(PATH.parent / "customer.py")


def names(turns):
    return [turn.tool_calls[0].name if turn.tool_calls else "" for turn in turns]


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize(
    "params",
    [{}, {"goals": 4, "forbidden": 0.5}, {"goals": 3, "forbidden": 1.0, "pushy": 1.0},
     {"goals": [1, 3], "forbidden": 0.0, "forgetful": 1.0, "customers": 12}],
)  # fmt: skip
def test_gold_scores_one(params, split):
    env = make_env("service_desk", **params)
    for seed in range(4):
        reward, record = gold_episode(env, seed, split)
        assert reward == 1.0 and record.state["violations"] == []


def test_null_policies_score_nothing():
    assert idle_values(make_env("service_desk"), ("train", "heldout"), range(4)) == {0.0}


@pytest.mark.parametrize("calls", [50, pytest.param(100, marks=proof), 200])
def test_a_shift_takes_exactly_the_calls_asked_for(calls):
    env = make_env("service_desk", calls=calls, goals=[1, 4], recalls=0.5)
    for seed, split in [(0, "train"), (1, "heldout")]:
        reward, record = gold_episode(env, seed, split)
        assert reward == 1.0 and record.state["violations"] == []
        assert len(list(record.calls())) == calls
        scripts, used = record.task.data["scripts"], Counter(names(turn.message for turn in record.turns))
        assert len(scripts) >= calls / 20 and record.state["heard"]["closed"] == sum(len(script["goals"]) for script in scripts)
        assert len({script["identity"] for script in scripts}) == len(scripts)
        assert sum(used[name] for name in ("find_customer_by_email", "find_customer_by_name")) == len(scripts)
        assert len(set(used) - {""}) >= 7
    assert idle_values(env, ["train"], [0]) == {0.0}


def test_in_a_shift_who_was_identified_and_what_was_confirmed_ends_with_the_customer():
    env = make_env("service_desk", calls=[20, 30], forbidden=0.0, goals=1)
    gold = first_task(env, lambda task, turns: "change_address" in names(turns)[12:] or "cancel_order" in names(turns)[12:])
    finds = [at for at, name in enumerate(names(gold)) if name.startswith("find_customer")]
    # Without the second customer's identification everything of theirs counts as somebody else's, or nobody's.
    play(env, [turn for at, turn in enumerate(gold) if at != finds[1]])
    assert {row["rule"] for row in env.trajectory.state["violations"]} == {"R1"}
    env.reset(options={"task": env.task})
    for turn in gold:
        before = env.person.number
        env.step(turn)
        if env.is_open and env.person.number != before:
            assert env.now.identified is None and env.now.confirmed == set()
    assert env.trajectory.reward == 1.0


def test_an_address_may_be_told_as_that_of_a_customer_before():
    env = make_env("service_desk", calls=[40, 60], forbidden=0.0, recalls=1.0)
    checked = 0
    for seed in range(5):
        env.reset(seed=seed)
        for turn in env.gold_turns(env.task):
            made = turn.tool_calls[0] if turn.tool_calls else None
            if made is not None and made.name == "change_address":
                said = "\n".join(m.content for m in env.trajectory.messages if m.role == "user")
                read = "\n".join(m.content for m in env.trajectory.messages if m.role == "tool")
                if env.person.number:
                    assert made.arguments["address"] not in said and made.arguments["address"] in read
                    checked += 1
            env.step(turn)
        assert env.trajectory.reward == 1.0
    assert checked


def test_what_goes_to_a_person_is_the_last_request_of_a_shift():
    env = make_env("service_desk", calls=[20, 40], goals=[2, 3])
    found = 0
    for seed in range(8):
        goals = [goal for script in env.make_task(seed, "train").data["scripts"] for goal in script["goals"]]
        assert all(goal["order"] for goal in goals[:-1])
        found += not goals[-1]["order"]
    assert found


def test_every_rule_and_every_kind_comes_up():
    env = make_env("service_desk", goals=3, forbidden=0.7)
    rules, calls = Counter(), Counter()
    for seed in range(60):
        task = env.make_task(seed, "train")
        rules.update(task.gold["rules"])
        calls.update(name for name in names(env.gold_turns(task)) if name)
    assert set(rules) == {None, "R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9"}
    assert set(calls) == set(env.toolbox.names) - {"get_customer"}


def test_acting_without_a_yes_scores_nothing():
    env = make_env("service_desk", goals=1, forbidden=0.0)
    gold = first_task(env, lambda _, turns: any("confirm?" in turn.content for turn in turns))
    assert play(env, [turn for turn in gold if "confirm?" not in turn.content]) == (0.0, True)
    assert [row["rule"] for row in env.trajectory.state["violations"]] == ["R10"]
    assert env.trajectory.state["database"] == env.task.gold["database"]


def test_a_yes_covers_one_change_of_one_order():
    env = make_env("service_desk", goals=1, forbidden=0.0)
    gold = first_task(env, lambda _, turns: "change_address" in names(turns))
    at = names(gold).index("change_address")
    play(env, gold[: at + 1])
    play(env, [gold[at]])
    assert [row["rule"] for row in env.state()["violations"]] == ["R10"]


@pytest.mark.parametrize("rule", ["R2", "R3", "R8", "R9"])
def test_giving_in_to_a_pushy_customer_scores_nothing(rule):
    env = make_env("service_desk", goals=1, forbidden=1.0, pushy=1.0)
    gold = first_task(env, lambda task, turns: task.gold["rules"] == [rule])
    at = names(gold).index("log_refusal")
    order = gold[at].tool_calls[0].arguments["order_id"]
    action = {
        "R3": call("cancel_order", order_id=order, reason="changed my mind"),
        "R8": call("change_address", order_id=order, address="1 Mill Lane, Northam"),
    }.get(rule, call("issue_voucher", order_id=order))
    # Refused and recorded first, then done all the same; and done straight away.
    assert play(env, [*gold[:-1], action, gold[-1]])[0] == 0.0
    assert rule in {row["rule"] for row in env.trajectory.state["violations"]}
    assert again(env, [*gold[:at], action, *gold[at + 1 :]])[0] == 0.0


def test_a_refusal_needs_the_right_rule_and_a_word_to_the_customer():
    env = make_env("service_desk", goals=1, forbidden=1.0, pushy=0.0)
    gold = first_task(env, lambda task, _: task.gold["rules"] == ["R4"])
    at = names(gold).index("log_refusal")
    order = gold[at].tool_calls[0].arguments["order_id"]
    assert play(env, [*gold[:at], call("log_refusal", order_id=order, rule="R5"), *gold[at + 1 :]])[0] == 0.0
    every = [call("log_refusal", order_id=order, rule=f"R{n}") for n in range(2, 10)]
    assert again(env, [*gold[:at], *every, *gold[at + 1 :]])[0] == 0.0
    again(env, gold[:-1])
    score = env.scorer.score(env.trajectory)
    assert score.value == 0.0 and score.metrics["database"] == 1.0 and score.metrics["heard"] == 0.0


def test_the_figure_must_be_named_exactly_and_alone():
    env = make_env("service_desk", goals=1, forbidden=0.0)
    gold = first_task(env, lambda task, _: task.gold["heard"]["figures"])
    ((figure,),) = env.task.gold["heard"]["figures"].values()
    said = {
        f"That makes {figure}. Is there anything else I can do for you?": 1.0, f"**{figure} EUR**": 1.0,
        f"{figure} or 10.01": 0.0, " ".join(f"{n}.{c:02d}" for n in range(80) for c in range(100)): 0.0, "I do not know.": 0.0,
        f"1{figure}": 0.0, f'{{"order_id": "W9102"}}\n{figure} will be paid back': 0.0, "": 0.0,
    }  # fmt: skip
    for text, reward in said.items():
        assert again(env, [*gold[:-1], say(text)]) == (reward, True), text[:40]


def test_harm_beside_the_request_scores_nothing():
    env = make_env("service_desk", goals=1, forbidden=0.0)
    gold = first_task(env, lambda _, turns: "cancel_order" in names(turns))
    order = gold[names(gold).index("cancel_order")].tool_calls[0].arguments["order_id"]
    other = next(number for number in env.task.data["shop"]["orders"] if number != order)
    assert play(env, [*gold[:-1], call("log_refusal", order_id=other, rule="R3"), gold[-1]])[0] == 0.0
    assert again(env, [*gold[:-1], call("transfer_to_human", summary="")]) == (0.0, True)


def test_other_words_than_the_golds_work_as_well():
    """Polite, wordy turns of the kind that a language model writes."""
    env = make_env("service_desk", goals=2, forbidden=0.5)
    for seed in range(25):
        env.reset(seed=seed)
        turns = []
        for turn in env.gold_turns(env.task):
            text = turn.content
            text = text.replace("Do you confirm?", "Would you like me to go ahead with that? (yes/no)")
            text = text.replace("That is done.", "All set!\n\nIs there anything else that I can help you with today?")
            text = text.replace("May I have", "Hi, and thanks for reaching out! To verify your account, may I have")
            turns.append(replace(turn, content=text))
        assert play(env, turns) == (1.0, True)


def test_the_customer_confirms_only_what_was_asked():
    goal = {
        "opening": "I want to return the kettle from order W1234.", "order": "W1234", "mention": ["kettle"],
        "details": {"order": "It is order W1234.", "refund": "To a gift card."},
        "push": None, "question": None, "told": [],
    }  # fmt: skip
    heard = {
        "I will return the kettle of W1234. Shall I proceed?": "W1234",
        "I will return the kettle of W9999. Shall I proceed?": None,
        "I will return the kettle of W1234, W9999. Shall I proceed?": None, "Shall I proceed with W1234?": None,
        "Shall I proceed?": None, "Can you confirm your email address?": None, "I return the kettle of W1234.": None,
    }  # fmt: skip
    for text, confirmed in heard.items():
        person = CUSTOMER.Customer({"identity": "My email address is a@b.", "goals": [goal, goal]})
        reply, order = person.hear(text)
        assert order == confirmed, text
        assert reply is not None
    person = CUSTOMER.Customer({"identity": "My email address is a@b.", "goals": [goal]})
    assert person.hear("What is your email address and the order number?")[0] == "My email address is a@b. It is order W1234."
    assert person.hear("Where shall the refund go?")[0] == "To a gift card."


def test_a_proposal_that_guesses_a_detail_is_put_right_and_not_confirmed():
    env = make_env("service_desk", goals=1, forbidden=0.0)
    gold = first_task(env, lambda _, turns: "return_items" in names(turns))
    turns = [turn for turn in gold if not turn.content.startswith("Where shall the refund go")]
    at = next(i for i, turn in enumerate(turns) if "confirm?" in turn.content)
    play(env, turns[:at])
    observation, *_ = env.step(turns[at])
    assert "refund shall go to" in observation[0].content and not env.now.confirmed
    assert play(env, turns[at:])[0] == 1.0
    # A question about something else that names the order is not a proposal.
    env.reset(options={"task": env.task})
    order = turns[at + 1].tool_calls[0].arguments["order_id"]
    observation, *_ = env.step(say(f"To look at {order}: could you confirm your email address or your name?"))
    assert "My " in observation[0].content and not env.now.confirmed


def test_the_customer_loses_patience():
    env = make_env("service_desk")
    env.reset(seed=0)
    reward, terminated = play(env, [say("What is the meaning of life?")] * CUSTOMER.PATIENCE)
    assert (reward, terminated) == (0.0, True) and len(env.trajectory.turns) == CUSTOMER.PATIENCE


def test_the_policy_by_hand():
    policy = POLICY.StorePolicy("2031-05-20", ("pending",), 14, ("garden", "tools"), 495, 3, 1000)
    data = {
        "customers": {"C1": {"tier": "plus"}, "C2": {"tier": "standard"}},
        "products": {
            "kettle": {
                "category": "kitchen",
                "variants": {"k0": {"stock": 0}, "k1": {"stock": 2}, "k2": {"stock": 0}},
            },
            "jigsaw": {"category": "tools", "variants": {"j0": {"stock": 1}}},
        },
        "orders": {
            "W1": {"customer": "C1", "status": "delivered", "promised": "2031-05-02",
                   "delivered": "2031-05-06", "paid_with": "card", "exchanged": False, "voucher": False,
                   "items": [{"sku": "k0", "product": "kettle"}, {"sku": "j0", "product": "jigsaw"}]},
            "W2": {"customer": "C2", "status": "pending", "promised": "2031-05-01", "delivered": None,
                   "paid_with": "gift_card", "exchanged": False, "voucher": False, "items": []},
        },
    }  # fmt: skip

    def broken(**action):
        return POLICY.broken_rules(policy, data, action)

    assert broken(kind="return", order="W1", skus=["k0"], refund_to="original") == []  # 14 days: the last day
    assert broken(kind="return", order="W1", skus=["k0", "j0"], refund_to="original") == ["R5"]
    assert broken(kind="exchange", order="W1", skus=["k0"], new_sku="k1") == []
    assert broken(kind="exchange", order="W1", skus=["k0"], new_sku="k2") == ["R7"]
    assert broken(kind="cancel", order="W1", reason="changed my mind") == ["R3"]
    assert broken(kind="cancel", order="W2", reason="changed my mind") == []
    assert broken(kind="address", order="W1") == ["R8"] and broken(kind="address", order="W2") == []
    assert broken(kind="voucher", order="W1") == []  # 4 days late, more than 3
    assert broken(kind="voucher", order="W2") == ["R9"]  # late, but no plus customer
    data["orders"]["W1"]["delivered"] = "2031-05-05"
    assert broken(kind="return", order="W1", skus=["k0"], refund_to="original") == ["R4"]
    assert broken(kind="voucher", order="W1") == ["R9"]  # 3 days late
    assert policy.refund([1000, 250], "standard") == 755 and policy.refund([1000], "plus") == 1000
    assert policy.refund([100], "standard") == 0
    assert POLICY.StorePolicy.from_json(policy.to_json()) == policy


def test_gold_stays_hidden():
    env = make_env("service_desk", forbidden=1.0)
    for seed in range(10):
        observation, info = env.reset(seed=seed)
        text = str(info) + observation[1].content
        assert "log_refusal" not in text and not re.search(r"\bR\d\b", text)


def test_knobs_change_the_task():
    def tasks(**params):
        env = make_env("service_desk", **params)
        return [env.make_task(seed, "train") for seed in range(12)]

    assert all(len(t.data["script"]["goals"]) == 3 for t in tasks(goals=3))
    assert all(t.gold["rules"][0] for t in tasks(forbidden=1.0))
    assert not any(rule for t in tasks(forbidden=0.0) for rule in t.gold["rules"])
    assert not any(goal["push"] for t in tasks(pushy=0.0, forbidden=1.0) for goal in t.data["script"]["goals"])
    assert all("name is" in t.data["script"]["identity"] for t in tasks(forgetful=1.0))
    assert all(len(t.data["shop"]["customers"]) == 9 for t in tasks(customers=9))


def test_leaving_out_any_one_change_or_word_scores_nothing():
    env = make_env("service_desk", goals=2, forbidden=0.5)
    tried = 0
    for seed in (4, 14, 18, 23, 33, 58, 59):  # short ones, with every rule and every function
        task = env.make_task(seed, "train")
        gold = env.gold_turns(task)
        for at, turn in enumerate(gold):
            reading = turn.tool_calls and turn.tool_calls[0].name.startswith("get_")
            asking = "?" in turn.content and "confirm?" not in turn.content
            if reading or asking:
                continue
            # The last sentence may be missing at the end of a record that was cut short.
            reward, over = again(env, [*gold[:at], *gold[at + 1 :]], task)
            assert (reward if over else env.scorer.score(env.trajectory).value) == 0.0, turn
            tried += 1
    assert tried > 30
