"""Which vLLM is taken, and how a replica reads a turn's tokens and their versions, with a stand-in for vLLM."""

import asyncio
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engines.vllm import options as version
from agentrl.engines.vllm import replica_actor as actor
from agentrl.engines.vllm.replica_actor import VllmActor
from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import DependencyError


@pytest.mark.parametrize(
    ("found", "said"),
    [("0.32.5.post1+cu130", None), (None, None), ("dev", None), ("0.31.2", r"vLLM 0.31.2 is older than .* install 0.32"),
     ("0.33.0", r"vLLM 0.33.0 is newer than .* install 0.32"), ("1.0", "vLLM 1.0 is newer")],
)  # fmt: skip
def test_a_version_that_was_never_tried_is_refused(found: str | None, said: str | None) -> None:
    with nullcontext() if said is None else pytest.raises(DependencyError, match=said):
        version.check_version(found)


def test_the_extra_pins_the_same_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    major, minor = version.VERSION
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={major}.{minor},<{major}.{minor + 1}"]


class Sampler:
    """vLLM as the replica sees it: each step adds a token, 100 x version + its place in the whole sequence, to every request
    that is inside; a pause keeps requests inside."""

    errored = False

    def __init__(self) -> None:
        self.weights, self.paused = 0, False
        self.inside: dict[str, Any] = {}
        self.output_processor = SimpleNamespace(request_states={})
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace())  # it does not tell the cache's size

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any) -> Any:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ids: list[int] = []
        self.inside[name] = (len(prompt), params, ids, ended)
        seen = 0
        while params.each and not ended.done():
            await asyncio.sleep(0)
            if len(ids) > seen:
                seen = len(ids)
                yield self.output(ids, None)
        yield self.output(ids, await ended)

    @staticmethod
    def output(ids: list[int], finish: str | None) -> Any:
        logprobs = [{token: SimpleNamespace(logprob=-float(token))} for token in ids]
        of = [token // 100 for token in ids]
        starts = [at for at, each in enumerate(of) if at == 0 or of[at - 1] != each]
        ends = [*starts[1:], len(ids)]
        spans = [SimpleNamespace(version=str(of[at]), start=at, end=end) for at, end in zip(starts, ends, strict=bool(ids))]
        found = SimpleNamespace(token_ids=list(ids), logprobs=logprobs, finish_reason=finish, weight_versions=spans or None)
        return SimpleNamespace(outputs=[found], num_cached_tokens=0)

    async def abort(self, names: str | list[str]) -> None:
        for name in [names] if isinstance(names, str) else names:
            if name in self.inside:
                self.inside.pop(name)[-1].set_result("abort")

    def step(self) -> None:
        for name, (before, params, ids, ended) in () if self.paused else list(self.inside.items()):
            ids.append(100 * self.weights + before + len(ids))
            if len(ids) == params.max_tokens:
                del self.inside[name]
                ended.set_result("length")

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", True)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def collective_rpc(self, name: str) -> list[list[str]]:
        assert self.paused
        return [[]]  # of one worker, which left out no layer

    async def reset_prefix_cache(self) -> None: ...

    async def update_weight_version(self, new: str) -> None:
        assert int(new) == self.weights


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A replica around a Sampler."""
    params = lambda sampling, *, each: SimpleNamespace(max_tokens=sampling.max_tokens, each=each)  # noqa: E731
    monkeypatch.setattr(actor, "_params", params)
    made: Any = VllmActor({"model": "none"})
    made._engine, made._prompt = Sampler(), lambda ids, images: ids
    return made


async def settle(replica: Any, steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0.002)
        replica._engine.step()


async def update(replica: Any, new: int) -> None:
    await replica.pause()
    await replica.begin_update()
    replica._engine.weights = new
    await replica.end_update(new)
    await replica.resume()


async def ask(replica: Any, name: str, tokens: int = 30) -> Any:
    return await replica.generate([7, 8], Sampling(max_tokens=tokens, seed=5), f"key of {name}", name)


async def test_each_token_of_a_request_has_the_version_that_sampled_it(replica: Any) -> None:
    one = asyncio.create_task(ask(replica, "one"))
    await settle(replica, 6)
    for new in (1, 2):
        await update(replica, new)
        await settle(replica, 6)
    await settle(replica, 30)
    found = await one
    assert found.finish == "length" and len(found.token_ids) == 30
    assert found.versions == [token // 100 for token in found.token_ids] and sorted(set(found.versions)) == [0, 1, 2]
    assert found.logprobs == [-float(token) for token in found.token_ids]
    assert (await replica.stats()).prompt_tokens == 2 and (await replica.stats()).sampled_tokens == 30
    assert (await replica.stats()).kv_used is None


async def test_a_stream_and_its_stop_string_go_on_over_an_update(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The string spans an update: nothing after it is in the turn, and all in it came once, in time."""
    monkeypatch.setattr(replica.words, "load", lambda: None)
    # Tokens spell their places' letters; the update comes between two of them.
    monkeypatch.setattr(replica.words, "decode", lambda ids: "".join(chr(ord("a") + token % 100 - 2) for token in ids))
    told: list[tuple[int, float]] = []
    cut = 6
    sampling = Sampling(max_tokens=24, seed=5, stop=(ALPHABET[cut - 2 : cut + 3], "never"))
    call = replica.generate([7, 8], sampling, "key", "one", lambda ids, logprobs: told.extend(zip(ids, logprobs, strict=True)))
    one = asyncio.create_task(call)
    while len(told) < cut:
        await settle(replica, 1)
    await update(replica, 1)
    begun = list(told)
    await settle(replica, 40)
    found = await one
    assert found.finish == "stop_string" and len(begun) >= cut
    assert replica.words.decode(found.token_ids) == ALPHABET[: cut + 3]
    assert told == list(zip(found.token_ids, found.logprobs, strict=True)) and told[: len(begun)] == begun
    assert found.versions == [token // 100 for token in found.token_ids] and set(found.versions) == {0, 1}
    assert (await replica.stats()).sampled_tokens == cut + 3 and not replica._engine.inside


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


async def test_a_request_that_is_stopped_during_an_update_ends_with_what_it_has(replica: Any) -> None:
    one, other = (asyncio.create_task(ask(replica, name)) for name in ("one", "other"))
    await settle(replica, 5)
    await replica.pause()
    late = asyncio.create_task(ask(replica, "late"))
    await asyncio.sleep(0.01)
    assert not one.done() and not late.done()
    await replica.abort("key of one")
    await replica.cancel("late")
    found, nothing = await asyncio.wait_for(asyncio.gather(one, late), 1)
    assert found.finish == nothing.finish == "abort" and len(found.token_ids) == len(found.versions) > 0
    assert (nothing.token_ids, nothing.versions) == ([], [])
    await replica.resume()
    await settle(replica, 40)
    assert (await other).finish == "length" and not replica._requests
