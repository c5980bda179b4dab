"""Requests travel together and answers come back as they are ready; each caller hears of its own, whatever happens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from ray.exceptions import RayActorError

from agentrl.engines.vllm.replica_calls import Request, RequestBatcher, answer_batches
from agentrl.rollout.engine import Generation, OnTokens, Sampling
from agentrl.utils.errors import EngineError


class Local:
    """The actor's side in this process, called as Ray calls it; `breaks`: what its calls end with after one part."""

    def __init__(self, *breaks: Exception | None) -> None:
        self.calls: list[int] = []
        self.breaks = breaks
        self.generate_many = self

    def options(self, num_returns: str) -> "Local":
        assert num_returns == "streaming"
        return self

    def remote(self, requests: Sequence[Request], live: Sequence[bool]) -> AsyncIterator[Any]:
        self.calls.append(len(requests))
        return self._parts(requests, live)

    async def _parts(self, requests: Sequence[Request], live: Sequence[bool]) -> AsyncIterator[Any]:
        async for part in answer_batches(self._one, requests, live):
            yield asyncio.sleep(0, part)
            if self.breaks == (None,):
                return
            if self.breaks:
                raise self.breaks[0]  # type: ignore[misc]

    @staticmethod
    async def _one(ids: list[int], sampling: Sampling, key: str, request_id: str, emit: OnTokens | None = None) -> Generation:
        for count in range(4 if emit is not None else 0):
            emit([count, count], [-1.0, -2.0])  # type: ignore[misc]
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.002 * ids[0])
        if ids[0] == 3:
            raise EngineError(f"{request_id} failed")
        return Generation([ids[0]], [-1.0], [0], "length")


def request(number: int) -> Request:
    return ([number], Sampling(4), f"k{number}", f"r{number}")


async def test_requests_of_one_turn_of_the_loop_share_a_call_and_each_gets_its_own_answer() -> None:
    actor = Local()
    request_batcher = RequestBatcher(actor)
    found = await asyncio.gather(*(request_batcher.generate(request(n)) for n in (5, 1, 3, 0)), return_exceptions=True)
    assert actor.calls == [4]
    assert [f.token_ids for f in found if isinstance(f, Generation)] == [[5], [1], [0]]
    assert isinstance(found[2], EngineError) and str(found[2]) == "r3 failed"
    assert (await request_batcher.generate(request(2))).token_ids == [2] and actor.calls == [4, 1]


async def test_a_quick_answer_does_not_wait_for_a_slow_one() -> None:
    request_batcher = RequestBatcher(Local())
    slow = asyncio.create_task(request_batcher.generate(request(5000)))
    quick = await asyncio.create_task(request_batcher.generate(request(0)))
    assert quick.token_ids == [0] and not slow.done()
    slow.cancel()


async def test_a_caller_that_left_before_the_call_is_not_sent() -> None:
    actor = Local()
    request_batcher = RequestBatcher(actor)
    gone, stays = (asyncio.create_task(request_batcher.generate(request(n))) for n in (1, 2))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).token_ids == [2]
    assert sum(actor.calls) <= 2 and gone.cancelled()


@pytest.mark.parametrize(("breaks", "heard"), [
    (RayActorError(), "The actor experienced"), (ZeroDivisionError("unforeseen"), "unforeseen"),
    (None, "stopped before all requests"),
])  # fmt: skip
async def test_a_call_that_breaks_off_fails_all_that_wait_and_none_that_were_answered(
    breaks: Exception | None, heard: str
) -> None:
    request_batcher = RequestBatcher(Local(breaks))
    calls = [asyncio.create_task(request_batcher.generate(request(n))) for n in (0, 40, 80)]
    answered, *failed = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert isinstance(answered, Generation) and len(failed) == 2
    for one in failed:
        assert type(one) is (EngineError if breaks is None else type(breaks)) and heard in str(one)


async def test_a_call_that_cannot_begin_fails_all_that_wait() -> None:
    request_batcher = RequestBatcher(object())
    calls = [asyncio.create_task(request_batcher.generate(request(n))) for n in (1, 2)]
    found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert [type(one) for one in found] == [AttributeError, AttributeError]


@pytest.mark.parametrize("how", ["it is closed", "an error that nobody foresaw"])
async def test_a_stream_that_ends_early_ends_its_requests(how: str) -> None:
    ended: list[str] = []

    async def generate(ids: list[int], sampling: Sampling, key: str, request_id: str) -> Generation:
        if ids == [1] and how == "it is closed":
            return Generation([7], [-1.0], [0], "stop")
        if ids == [1]:
            raise ZeroDivisionError
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(request_id)
        raise AssertionError

    stream = answer_batches(generate, [([n], Sampling(4), "", str(n)) for n in (1, 2, 3)], [False] * 3)
    if how == "it is closed":
        [(place, answer)] = await anext(stream)
        assert place == 0 and isinstance(answer, Generation)
        await stream.aclose()  # type: ignore[attr-defined] # raises nothing
    else:
        with pytest.raises(ZeroDivisionError):
            await anext(stream)
    assert ended == ["2", "3"]


async def test_who_listens_is_told_of_the_tokens_in_order_and_before_the_answer() -> None:
    """Two that listen and one that does not share a call: each hears its own, four times, before its answer."""
    request_batcher = RequestBatcher(actor := Local())
    heard: dict[int, list[tuple[Sequence[int], Sequence[float]]]] = {1: [], 2: []}
    early = []

    def listener(number: int) -> OnTokens:
        def emit(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
            heard[number].append((token_ids, logprobs))
            early.append(not tasks[number].done())

        return emit

    tasks = {n: asyncio.create_task(request_batcher.generate(request(n), listener(n))) for n in heard}
    silent = asyncio.create_task(request_batcher.generate(request(0)))
    assert [(await task).token_ids for task in (*tasks.values(), silent)] == [[1], [2], [0]]
    assert actor.calls == [3] and all(early) and len(early) == 8
    assert heard[1] == heard[2] == [([count, count], [-1.0, -2.0]) for count in range(4)]
