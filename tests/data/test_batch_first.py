import pytest
import torch

from agentrl.data.rows import Ragged, collate, concat, pack, select
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, Trajectory, Turn


def ledger(spec: list[tuple[int, int]]) -> TokenLedger:
    """(context tokens, sampled tokens) a turn."""
    out = TokenLedger()
    for turn, (context, sampled) in enumerate(spec):
        out.append_context([1 + turn] * context, turn)
        out.append_sampled([50 + turn] * sampled, [-0.5] * sampled, [3] * sampled, turn)
    return out


def trajectory(reward: float | None, member: int = 0, task: str = "t", **kw) -> Trajectory:
    one = ledger([(3, 2), (2, 1)])
    one.append_context([9, 9], 1)  # a tool answer after the last sampled token
    turns = [
        Turn(0, Message("assistant"), reward=0.25, ledger=0, end=4),
        Turn(1, Message("assistant"), reward=None, ledger=0, end=7),
    ]
    return Trajectory("E-v0", Task(task, 1), member=member, ledgers=[one], turns=turns, reward=reward, **kw)


def test_collate_columns_and_rewards():
    batch = collate([trajectory(1.0), trajectory(0.0, member=1), trajectory(0.5, task="u")])
    assert batch["group"].tolist() == [0, 0, 1] and batch["member"].tolist() == [0, 1, 0]
    assert Ragged.of(batch).lengths.tolist() == [10, 10, 10]
    first = batch["rewards"].unbind()[0]
    assert first.nonzero().flatten().tolist() == [4, 7] and first[4] == 0.25 and first[7] == 0.75
    sums = torch.stack([row.sum() for row in batch["rewards"].unbind()])
    assert torch.allclose(sums, batch["reward"])
    assert batch["sampled"].values().sum() == 9


def test_collate_keeps_the_ledgers_own_types_and_takes_19_bytes_a_token():
    """`token_ids` int64 and `turns` int32 made 25."""
    batch = collate([trajectory(1.0), trajectory(0.0, member=1)])
    columns = {name: value.values() for name, value in batch.items() if value.is_nested}
    assert {name: values.dtype for name, values in columns.items()} == {
        "token_ids": torch.int32, "sampled": torch.bool, "logprobs": torch.float32,
        "versions": torch.int32, "turns": torch.int16, "rewards": torch.float32,
    }  # fmt: skip
    assert sum(values.nbytes for values in columns.values()) == 19 * 20
    one = trajectory(1.0).ledgers[0]
    for name in ("token_ids", "sampled", "logprobs", "versions", "turns"):
        assert columns[name].tolist() == 2 * getattr(one, name).tolist(), name


def test_collate_refuses_unscored_and_can_keep_it_as_nan():
    with pytest.raises(ValueError, match="unscored"):
        collate([trajectory(None)])
    assert torch.isnan(collate([trajectory(None)], allow_unscored=True)["reward"]).all()


def test_pack_positions_select_and_concat():
    batch = collate([trajectory(1.0), trajectory(0.0, member=1)])
    packed = pack(Ragged.of(batch), [1, 0])
    assert packed["position_ids"].tolist() == [*range(10), *range(10)]
    assert packed["cu_seqlens"].tolist() == [0, 10, 20] and packed["cu_seqlens"].dtype == torch.int32
    assert packed["member"].tolist() == [1, 0]
    view = Ragged.of(batch)
    assert view.positions([1, 0]).tolist() == [*range(10, 20), *range(10)] and view.positions([]).tolist() == []
    assert concat([batch, select(batch, [])])["token_ids"].values().equal(batch["token_ids"].values())
    dummy = pack(Ragged.of(select(batch, [])), [])
    assert dummy["token_ids"].shape == (1,) and not dummy["sampled"].any()
