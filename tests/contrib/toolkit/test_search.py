"""search: questions are solvable, splits share no name, nothing but the answer scores."""

import random

import pytest

from agentrl.contrib.toolkit.bm25 import Bm25
from agentrl.env import Message, content_split
from agentrl.env.catalog import find_env, make_env
from agentrl.utils.errors import TaskDataError
from agentrl.utils.search_path import load_module
from tests.shelf.conversation_probes import gold_episode, play, seen_by_policy

PATH = find_env("search").path
assert PATH is not None
WORLD = load_module(PATH.parent / "world.py")


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize(
    "params", [{}, {"hops": 1, "documents": 40, "results": 2}, {"hops": 4, "back_share": 1.0}, {"hops": [5, 8], "documents": 300}]
)
def test_gold_scores_one_and_reads_every_page_it_needs(params, split):
    env = make_env("search", **params)
    for seed in range(12):
        reward, record = gold_episode(env, seed, split)
        assert reward == 1.0
        opened = [call.arguments["page"] for _, call, _ in record.calls() if call.name == "open"]
        assert opened == [page for _, page in env.task.gold["steps"]]
        # The answer was there to be read: it stands on the last page opened.
        pages = [m.content for m in record.messages if m.role == "tool" and m.name == "open"]
        assert env.task.gold["answer"] in pages[-1]
        assert all(call[2] is not None and call[2].error is None for call in record.calls())


def test_only_the_answer_alone_scores():
    env = make_env("search")
    for seed in range(5):
        gold = str(env.make_task(seed, "train").gold["answer"])
        trail = env.make_task(seed, "train").gold["trail"]
        said = {gold: 1, f"  {gold.upper()}. ": 1, f"Answer: {gold}": 1, f"It is {gold}, I think": 0,
                ", ".join([*trail, gold]): 0, trail[-1]: 0, gold[:-1]: 0}  # fmt: skip
        for text, reward in said.items():
            env.reset(seed=seed)
            assert play(env, [Message("assistant", text)]) == (reward, True), text


def test_the_question_holds_no_answer_and_info_no_gold():
    env = make_env("search", hops=[1, 4])
    for seed in range(30):
        observation, info = env.reset(seed=seed)
        gold = env.task.gold["answer"]
        assert gold not in " ".join(m.content for m in observation) and gold not in str(info)
        assert gold not in str(dict(env.task.data))


def test_splits_share_no_name():
    names = {
        split: {name for seed in range(20) for name in WORLD.corpus(seed, split, 60).names} for split in ("train", "heldout")
    }
    assert not names["train"] & names["heldout"]
    fixed = {"Works", "Instruments", "Foundry", "Mills", "College", "Academy"}
    for split, found in names.items():
        for name in found:
            invented = [name.split()[-1]] if name.split()[0] in ("The", "A", "Letters", "Songs", "Beyond") else name.split()
            assert all(content_split(word) == split for word in invented if word not in fixed), name
    with pytest.raises(TaskDataError, match="no split 'test'"):
        make_env("search").make_task(0, "test")


def test_a_question_has_one_answer():
    """Every backward hop leads to one subject only, so no other entity answers as well."""
    pages = WORLD.corpus(3, "train", 200)
    question = load_module(PATH.parent / "question.py")
    rng = random.Random(0)
    for _ in range(60):
        start = rng.randrange(200)
        for fact in question._inverses(pages, start):
            same = [f for f in pages.facts if f.relation is fact.relation and f.object == start]
            assert len(same) == 1


def test_knobs_change_the_task():
    assert make_env("search", hops=5).make_task(0, "train").data["hops"] == 5
    env = make_env("search", results=1)
    env.reset(seed=0)
    observation, *_ = env.step('<tool_call>\n{"name": "search", "arguments": {"query": "town", "limit": 9}}\n</tool_call>')
    assert observation[0].content.count('"page"') == 1
    back = [len(make_env("search", hops=4, back_share=s).make_task(2, "train").data["question"]) for s in (0.0, 1.0)]
    assert back[0] != back[1]


def test_a_wrong_page_id_is_answered_with_the_nearest():
    env = make_env("search")
    env.reset(seed=0)
    env.step('<tool_call>\n{"name": "open", "arguments": {"page": "page12"}}\n</tool_call>')
    assert "tool_error" in seen_by_policy(env.trajectory) and "did you mean 'p" in seen_by_policy(env.trajectory)


def test_bm25_by_hand():
    """Two texts of two words, one query word in the first: idf = ln(1 + 1.5/1.5), tf = 1, length = mean."""
    index = Bm25(["red apple", "green pear"])
    ((number, score),) = index.top("APPLE the", 5)
    assert number == 0 and score == pytest.approx(0.6931471805599453)
    index = Bm25(["owl", "owl owl cat dog", "fox"])
    # N=3, df=2: idf = ln(1 + 1.5/2.5); mean length 2; tf (2.2) / (tf + 1.2 (0.25 + 0.75 len/2))
    idf = 0.4700036292457356
    scores = dict(index.top("owl", 5))
    assert scores[0] == pytest.approx(idf * 2.2 / (1 + 1.2 * 0.625))
    assert scores[1] == pytest.approx(idf * 2 * 2.2 / (2 + 1.2 * 1.75))
    assert index.top("zebra", 5) == [] and index.top("", 5) == []
