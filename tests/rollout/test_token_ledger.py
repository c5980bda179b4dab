"""The token ledger against plain lists, its memory, its files, and what it refuses."""

import base64
import json
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import RolloutConfig
from agentrl.data.expert_routing import FREE
from agentrl.data.rows import Ragged, collate, pack, select
from agentrl.data.token_ledger import MAX_TURN, TokenLedger
from agentrl.data.trajectory import Group, Message, StopReason, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from tests.conftest import examples
from tests.rollout.conftest import FaultyEngine

ids = st.lists(st.integers(0, 2**31 - 1), max_size=90)
finite = st.floats(-(2.0**100), 0.0, width=32)
part = st.one_of(
    st.tuples(st.just("context"), ids, st.integers(0, MAX_TURN)),
    st.tuples(st.just("sampled"), st.lists(st.tuples(st.integers(0, 2**31 - 1), finite, st.integers(0, 9)), max_size=90),
              st.integers(0, MAX_TURN)),
)  # fmt: skip


def built(parts: list[tuple[str, Any, int]]) -> tuple[TokenLedger, dict[str, list[Any]]]:
    """A ledger, and the same by plain lists."""
    ledger, rows = TokenLedger(), []
    for kind, tokens, turn in parts:
        if kind == "context":
            ledger.append_context(tokens, turn)
            rows += [(token, 0, 0.0, -1, turn) for token in tokens]
        else:
            ledger.append_sampled([t[0] for t in tokens], [t[1] for t in tokens], [t[2] for t in tokens], turn)
            rows += [(token, 1, logprob, version, turn) for token, logprob, version in tokens]
    names = ("token_ids", "sampled", "logprobs", "versions", "turns")
    return ledger, {name: [row[at] for row in rows] for at, name in enumerate(names)}


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(part, max_size=6), st.data())
def test_columns_files_and_forks_are_those_of_plain_lists(parts: list[Any], data: st.DataObject) -> None:
    ledger, plain = built(parts)
    assert ledger.to_json() == plain and ledger.ids() == plain["token_ids"] and len(ledger) == len(plain["turns"])
    assert ledger.oldest == min((v for v in plain["versions"] if v >= 0), default=None)
    kinds = {name: getattr(ledger, name).dtype for name in plain}
    assert kinds == {"token_ids": np.int32, "sampled": np.bool_, "logprobs": np.float32, "versions": np.int32,
                     "turns": np.int16}  # fmt: skip
    for copy in (
        TokenLedger.from_json(json.loads(json.dumps(ledger.to_json()))),
        TokenLedger.from_json(json.loads(json.dumps(ledger.to_packed_json()))),
        pickle.loads(pickle.dumps(ledger)),
    ):
        assert copy == ledger and copy.to_json() == plain and copy.oldest == ledger.oldest
        copy.append_context([1], 0)
        assert copy != ledger and len(copy) == len(ledger) + 1
    keep = data.draw(st.integers(0, len(ledger)))
    fork = ledger.fork(keep)
    assert fork.to_json() == {
        "token_ids": plain["token_ids"][:keep], "sampled": [0] * keep, "logprobs": [0.0] * keep,
        "versions": [-1] * keep, "turns": plain["turns"][:keep],
    }  # fmt: skip
    assert fork.oldest is None and ledger.to_json() == plain


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(part, max_size=3), max_size=3), st.text())
def test_the_text_of_episodes_and_groups_is_that_of_their_json(ledgers: list[list[Any]], text: str) -> None:
    said = Message("assistant", text, (ToolCall("f", {text: [1, {"a": None}]}, "c0"), ToolCall("g", None, raw=text, error="cut")))
    answers = [ToolResult("c0", "f", text, value={"rows": [text, 2.5]}), ToolResult("c1", "g", "", error="malformed")]
    episode = Trajectory(
        "x", Task(text, 0, data={text: [text]}, gold={"answer": {"is": text}}), messages=[Message("user", text), said],
        turns=[Turn(0, said, answers, reward=0.5), Turn(1, Message("assistant", reasoning=text))], stop=StopReason.MAX_TURNS,
        ledgers=[built(parts)[0] for parts in ledgers], state={text: [text, None, 1.5]}, reward=0.25,
    )  # fmt: skip
    assert "".join(episode.json_chunks()) == json.dumps(episode.to_json())
    assert Trajectory.from_json(json.loads("".join(episode.json_chunks()))) == episode
    for group in (Group(3, 4, [episode, episode]), Group(0, 0, [], episode)):
        assert "".join(group.json_chunks()) == json.dumps(group.to_json())
        assert Group.from_json(json.loads("".join(group.json_chunks()))) == group


def test_the_text_of_an_episode_comes_in_chunks_no_longer_than_a_column() -> None:
    """As one string it was joined three times over before a byte was written: 0.65 GiB of pages a GiB of file."""
    ledger = built([("context", list(range(6000)), 0), ("sampled", [(7, -0.5, 1)] * 3000, 0)])[0]
    member = Trajectory("x", Task("t", 0), ledgers=[ledger, ledger])
    chunks = list(Group(0, 0, [member] * 5, member).json_chunks())
    assert max(len(chunk) for chunk in chunks) == 4 * 4 * 9000 // 3  # base64 of the ids
    assert sum(len(chunk) > 10_000 for chunk in chunks) == 2 * 2 * 6


def test_what_is_no_json_in_an_episode_is_named() -> None:
    for kind, state in (("set", {1}), ("Group", Group(0, 0))):
        with pytest.raises(TypeError, match=f"Object of type {kind} is not JSON serializable"):
            list(Trajectory("x", Task("t", 0), state={"a": state}).json_chunks())


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.floats(-3.4e38, 0.0, width=64), min_size=1, max_size=20))
def test_log_probabilities_are_rounded_to_float32_as_numpy_does(values: list[float]) -> None:
    ledger = TokenLedger()
    ledger.append_sampled([1] * len(values), values, [0] * len(values), 0)
    assert ledger.logprobs.tobytes() == np.array(values, dtype=np.float32).tobytes()


def test_a_column_that_was_given_out_neither_changes_nor_can_be_changed() -> None:
    ledger = TokenLedger()
    ledger.append_context([1, 2, 3], 0)
    before = {name: getattr(ledger, name) for name in ("token_ids", "sampled", "logprobs", "versions", "turns")}
    for _ in range(10):  # within the room that there is, and beyond it
        ledger.append_sampled([7] * 20, [-1.0] * 20, [4] * 20, 1)
    assert [len(column) for column in before.values()] == [3] * 5 and before["token_ids"].tolist() == [1, 2, 3]
    for column in before.values():
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    taken = ledger.ids()
    taken[0] = 99
    assert ledger.ids()[0] == 1


def test_a_token_takes_15_bytes_and_at_most_a_quarter_more() -> None:
    """Plain lists took 80: five pointers and two boxed numbers."""
    ledger = TokenLedger()
    rng = np.random.default_rng(0)
    for turn in range(200):
        ledger.append_context(rng.integers(0, 150_000, 120).tolist(), turn)
        ledger.append_sampled(rng.integers(0, 150_000, 40).tolist(), (-rng.random(40)).tolist(), [turn] * 40, turn)
    assert 15 * len(ledger) <= ledger.nbytes <= 15 * 1.25 * len(ledger)
    assert len(pickle.dumps(ledger)) <= 15 * len(ledger) + 1000  # no room to grow is sent
    size = len(json.dumps(ledger.to_packed_json()))
    assert size < 8 * len(ledger), size / len(ledger)
    assert size < len(json.dumps(ledger.to_json())) / 3
    assert sys.getsizeof(ledger) < 100


def test_a_ledger_that_grows_token_by_token_is_copied_a_few_times_only() -> None:
    """By a quarter each time: log(20,000 / 64) / log(1.25) = 26 times."""
    ledger, copies = TokenLedger(), 0
    for token in range(20_000):
        before = ledger._buffers["token_ids"]
        ledger.append_context([token], 0)
        copies += ledger._buffers["token_ids"] is not before
    assert copies <= 40 and ledger.ids() == list(range(20_000))


INT32, NOT_FINITE = "column of int32", r"sampled token 1 of 2 is {}, not a finite number"
REFUSED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    # What a ledger of one token is asked for, and what it says.
    **{f"turn {turn}": ("append_context", ([1], turn), f"turn {turn}: a ledger counts turns from 0 to 32767")
       for turn in (-1, MAX_TURN + 1)},
    **{f"sampled in turn {turn}": ("append_sampled", ([1], [0.0], [0], turn), "counts turns") for turn in (-1, MAX_TURN + 1)},
    "another number of logprobs": ("append_sampled", ([1], [0.0, 0.0], [0], 0), "1 ids, 2 logprobs, 1 versions"),
    "a version below 0": ("append_sampled", ([1], [0.0], [-1], 0), ">= 0"),
    "a longer fork": ("fork", (2,), "first 2 tokens of a ledger of 1"),
    "no logprob": ("append_sampled", ([1], [None], [0], 0), "column of float32"),
    "a logprob beyond float32": ("append_sampled", ([1], [-1e39], [0], 0), "is -inf"),
    "a token below 0": ("append_sampled", ([5, -3], [-0.5, -0.5], [0, 0], 0), "sampled token 1 of 2 has the id -3"),
    "a probability above 1": ("append_sampled", ([5, 6], [0.001, 0.02], [0, 0], 0), "token 1 of 2 is 0.0199.*, above 0"),
    **{f"a logprob of {bad}": ("append_sampled", ([5, 6], [-0.5, bad], [0, 0], 0), NOT_FINITE.format(bad))
       for bad in (math.nan, math.inf, -math.inf)},
    **{f"{bad} as {what}": (name, args, INT32)
       for bad in (2**31, -(2**31) - 1, 2**70, 0.5, None)
       for what, name, args in (("context", "append_context", ([1, bad], 0)),
                                ("a token", "append_sampled", ([1, bad], [0.0, 0.0], [0, 0], 0)),
                                ("a version", "append_sampled", ([1, 1], [0.0, 0.0], [0, bad], 0)))},
    **{f"an array {bad}": (name, (bad, *more), INT32)
       for bad in (np.array([5, 2**31]), np.array([-(2**31) - 1]), np.array([2**40 + 7], dtype=np.uint64), np.array([1.5]))
       for name, more in (("append_context", (0,)), ("append_sampled", ([0.0] * len(bad), [0] * len(bad), 0)))},
    "an array of versions": ("append_sampled", ([1], [0.0], np.array([2**31]), 0), INT32),
}  # fmt: skip


@pytest.mark.parametrize(("name", "args", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(name: str, args: tuple[Any, ...], said: str) -> None:
    ledger = TokenLedger()
    ledger.append_context([1], MAX_TURN)
    with pytest.raises(ValueError, match=said):
        getattr(ledger, name)(*args)
    assert len(ledger) == 1 and ledger.oldest is None
    ledger.append_context(np.array([2**31 - 1, 0]), 0)
    ledger.append_context(np.array([7.0]), 0)
    assert ledger.ids() == [1, 2**31 - 1, 0, 7]
    for version in (3, 5):
        ledger.append_sampled([7], [-1.0], [version], 0)
    assert ledger.oldest == 3


def test_a_file_whose_columns_do_not_fit_together_is_refused() -> None:
    ledger = TokenLedger()
    ledger.append_context([1], MAX_TURN)
    plain, packed = ledger.to_json(), ledger.to_packed_json()
    for columns, said in (
        ({**plain, "turns": []}, "differ in length"),
        ({**plain, "sampled": [1]}, "on the sampled tokens"),
        ({**packed, "spans": [[2, 0, -1]]}, "differ in length"),
        ({**packed, "spans": [[1, 0, 3]]}, "1 sampled tokens, 0 logprobs"),
    ):
        with pytest.raises(ValueError, match=said):
            TokenLedger.from_json(columns)


WRONG: dict[str, tuple[Callable[[Generation, int], Generation], str]] = {
    # Such a token went into the batch: one update on it and every weight was NaN.
    "nan": (lambda right, most: replace(right, logprobs=[math.nan, *right.logprobs[1:]]), "log probability of sampled token 0"),
    "above 1": (lambda right, most: replace(right, logprobs=[0.7, *right.logprobs[1:]]), "log probability of sampled token 0"),
    "more": (
        lambda right, most: Generation([5] * (most + 1), [-1.0] * (most + 1), [0] * (most + 1), "length"),
        "tokens of at most",
    ),
    "finish": (lambda right, most: replace(right, finish="eos"), "finish = 'eos'; expected one of stop, length"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("wrong", "says"), WRONG.values(), ids=WRONG)
async def test_an_impossible_answer_is_an_engine_fault_and_no_token_of_it_is_kept(
    renderer: Renderer, wrong: Callable[[Generation, int], Generation], says: str
) -> None:

    class Broken(FaultyEngine):
        async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
            return wrong(await super().generate(token_ids, sampling, request_key), sampling.max_tokens)

    env = EnvRef("key_value")
    policy, scorer = Policy(Broken(renderer.stop_token_ids[0]), renderer), compile_spec(load_spec(env.default_reward()))
    limits = Limits.of(RolloutConfig(), 2048)
    episode = await run_episode(env.build(), policy, EpisodeSpec(0, "train", 0, 0, "k"), limits, scorer)
    assert episode.stop is StopReason.ENGINE_ERROR and episode.reward is None and episode.sampled_tokens == 0
    assert str(episode.error).startswith("turn 0: ") and says in str(episode.error)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_file_with_a_log_probability_that_is_no_number_is_refused(wrong: float) -> None:
    ledger = TokenLedger()
    ledger.append_context([1, 2], 0)
    ledger.append_sampled([3, 4], [-0.5, -0.25], [0, 0], 0)
    columns = ledger.to_json()
    assert TokenLedger.from_json(columns) == ledger
    packed = ledger.to_packed_json()
    columns["logprobs"][3] = wrong
    found = np.array([-0.5, wrong], dtype="<f4")
    packed["logprobs"] = base64.b64encode(found.tobytes()).decode()
    for damaged in (columns, packed):
        with pytest.raises(ValueError, match=r"the log probability of token 3 of 4 is (nan|inf|-inf), not a finite number"):
            TokenLedger.from_json(damaged)
    for name, value in (("token_ids", 2**31), ("turns", 2**15), ("versions", 2**40)):
        with pytest.raises(ValueError, match="a column of int"):
            TokenLedger.from_json(ledger.to_json() | {name: [*ledger.to_json()[name][:3], value]})


# -- experts of a token ----------------------------------------------------------------------------


SHAPE = (3, 2)


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 999), min_size=1, max_size=20),  # context
        st.lists(st.integers(0, 999), max_size=20),  # sampled
        st.integers(0, 3),  # how many tokens the engine did not compute, beside the last
        st.booleans(),  # whether the turn's experts are lost
        st.booleans(),  # whether the engine tells all tokens or those that are missing
    ),
    max_size=5,
)


@settings(max_examples=examples(150), deadline=None)
@given(turns, st.sampled_from([np.uint8, np.int16]), st.data())
def test_experts_stay_with_their_tokens(parts: list[Any], kind: Any, data: st.DataObject) -> None:
    ledger, ids, want = TokenLedger(), [], []
    for turn, (context, sampled, behind, lost, whole) in enumerate(parts):
        ledger.append_context(context, turn)
        ledger.append_sampled(sampled, [-1.0] * len(sampled), [0] * len(sampled), turn)
        ids += context + sampled
        start, stop = 0 if whole else ledger.routed_tokens, max(ledger.routed_tokens, len(ids) - 1 - behind)
        if not lost:  # by token and position; in the last column by turn, as if the engine were asked again
            rows = [[[token % 200, at % 200], [(token + at) % 200, 7], [turn, 1]] for at, token in enumerate(ids)][start:stop]
            told = np.asarray(rows, dtype=kind).reshape(-1, *SHAPE)
            ledger.add_experts(start, told)
            want += told[len(want) - start :].tolist()  # a token keeps those of the turn that first told them
    assert ledger.routed_tokens == len(want) and (ledger.experts is None) == all(part[3] for part in parts)
    if ledger.experts is None:
        return
    assert ledger.experts.tolist() == want and ledger.experts.dtype == kind
    for copy in (
        pickle.loads(pickle.dumps(ledger)),
        TokenLedger.from_json(json.loads("".join(ledger.json_chunks()))),
        TokenLedger.from_json(json.loads(json.dumps(ledger.to_json()))),
    ):
        assert copy == ledger and copy.experts.dtype == kind and copy.experts.tolist() == want
    keep = data.draw(st.integers(0, len(ledger)))
    fork = ledger.fork(keep)
    assert fork.experts is not None and fork.experts.tolist() == want[:keep]
    fork.append_context([5, 6], 0)
    if fork.routed_tokens == keep:
        fork.add_experts(keep, np.ones((1, *SHAPE), kind))
        assert fork.experts.tolist() == [*want[:keep], np.ones(SHAPE).tolist()] and ledger.experts.tolist() == want


def test_what_a_ledger_refuses() -> None:
    ledger = TokenLedger()
    ledger.append_context([1, 2, 3, 4], 0)
    ledger.add_experts(0, np.zeros((2, 3, 2), np.uint8))
    for start, rows, why in (
        (3, np.zeros((1, 3, 2), np.uint8), "the ledger has 4 tokens and those of the first 2"),
        (2, np.zeros((3, 3, 2), np.uint8), "experts of tokens 2 to 5"),
        (2, np.zeros((1, 4, 2), np.uint8), r"shape \(4, 2\) after some of shape \(3, 2\)"),
        (2, np.zeros((1, 3, 2), np.int16), "after some of"),
        (2, np.zeros((1, 3, 2), np.int64), "uint8 or int16, got int64"),
        (2, np.zeros((1, 3), np.uint8), r"got uint8 \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=why):
            ledger.add_experts(start, rows)
    assert ledger.routed_tokens == 2 and TokenLedger() != ledger
    other = ledger.fork(4)
    assert other == ledger
    other.add_experts(2, np.ones((1, 3, 2), np.uint8))
    assert other != ledger, "experts count in a comparison"


def test_a_batch_has_the_experts_of_its_rows() -> None:
    """Of rows of 3, 5 and 4 tokens, 2, none and 4 have experts, also when taken out and put end to end."""
    lengths, known = (3, 5, 4), (2, 0, 4)
    rows = []
    for number, (length, count) in enumerate(zip(lengths, known, strict=True)):
        ledger = TokenLedger()
        ledger.append_context(list(range(length)), 0)
        if count:
            ledger.add_experts(0, np.full((count, *SHAPE), 10 * number + 1, np.int16))
        rows.append(Trajectory("made-up", Task("t", 0), member=number, ledgers=[ledger], reward=1.0))
    batch = collate(rows)
    want = [1, 1, -1, *[-1] * 5, *[21] * 4]
    assert batch["experts"].values().tolist() == [np.full(SHAPE, value).tolist() for value in want]
    packed = pack(Ragged.of(select(batch, [2, 0])), [0, 1])
    assert packed["experts"][:, 0, 0].tolist() == [21, 21, 21, 21, 1, 1, -1]
    assert "experts" not in collate(rows[1:2])
    rows[0].ledgers[0].experts = np.zeros((2, *SHAPE), np.uint8)
    with pytest.raises(ValueError, match="several models"):
        collate(rows)
    narrow = collate(rows[:1])["experts"].values()
    assert narrow[:, 0, 0].tolist() == [0, 0, FREE[narrow.dtype]]
