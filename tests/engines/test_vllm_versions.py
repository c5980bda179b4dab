"""Which vLLM is taken, and what a replica does on one that does not say which weights sampled a token.

There a request is cut before every update and goes on as another one. test_vllm_older.py puts real vLLM through the whole
contract so; here a stand-in samples token after token, which says when it was asked for what.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engines.vllm import options as version
from agentrl.engines.vllm import replica_actor as actor
from agentrl.engines.vllm.replica_actor import Segments, VllmActor
from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import DependencyError

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("0.26.0", None),
        ("0.32.5.post1+cu130", None),
        (None, None),
        ("dev", None),
        ("0.25.3", r"vLLM 0.25.3 is older than .* install 0.26 to 0.32"),
        ("0.33.0", r"vLLM 0.33.0 is newer than .* install 0.26 to 0.32"),
        ("1.0", "vLLM 1.0 is newer"),
    ],
)
def test_a_version_that_was_never_tried_is_refused(found: str | None, said: str | None) -> None:
    if said is None:
        version.check_version(found)
        return
    with pytest.raises(DependencyError, match=said):
        version.check_version(found)


def test_the_extra_pins_the_same_versions() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (_, oldest), (newest, _) = version.OLDEST, version.NEWEST
    assert project["optional-dependencies"]["vllm"] == [f"vllm>=0.{oldest},<{newest}.{version.NEWEST[1] + 1}"]


@installed
def test_a_vllm_without_a_call_is_refused_by_the_calls_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    version.check_calls()
    assert version.tells_versions() == (tuple(map(int, version.installed_version().split(".")[:2])) >= (0, 32))  # type: ignore[union-attr]
    monkeypatch.setattr(AsyncLLM, "pause_generation", lambda self, clear_cache: None)
    monkeypatch.delattr(AsyncLLM, "add_lora")
    monkeypatch.setattr("vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info", None)
    with pytest.raises(DependencyError) as refused:
        version.check_calls()
    for name in ("AsyncLLM.pause_generation(mode=)", "reload.layerwise.get_layerwise_info", "install 0.26 to 0.32"):
        assert name in str(refused.value)


class Sampler:
    """vLLM as the replica sees it: each step adds a token, 100 x version + its place in the whole sequence, to every request
    that is inside; a request enters a moment after it was asked for."""

    errored = False

    def __init__(self) -> None:
        self.weights, self.paused, self.asked = 0, False, []  # type: ignore[var-annotated]
        self.inside: dict[str, Any] = {}
        self.output_processor = SimpleNamespace(request_states={})
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace())  # it does not tell the cache's size either
        self.weights_during: list[int] = []

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any) -> Any:
        self.asked.append((name, list(prompt["prompt_token_ids"]), params.max_tokens, params.seed))
        await asyncio.sleep(0.003)
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ids: list[int] = []
        self.inside[name] = (len(prompt["prompt_token_ids"]), params, ids, ended)
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
        found = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=finish)
        return SimpleNamespace(outputs=[found], num_cached_tokens=0)

    async def abort(self, names: str | list[str]) -> None:
        for name in [names] if isinstance(names, str) else names:
            if name in self.inside:
                self.inside.pop(name)[-1].set_result("abort")

    def step(self) -> None:
        assert not self.paused or not self.inside, "a step during an update"
        for name, (before, params, ids, ended) in list(self.inside.items()):
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
        assert self.paused and not self.inside
        return [[]]  # of one worker, which left out no layer

    async def reset_prefix_cache(self) -> None: ...


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A replica around a Sampler, with no spans."""

    def params(sampling: Sampling, before: int, *, each: bool) -> Any:
        return SimpleNamespace(max_tokens=sampling.max_tokens, seed=sampling.seed, before=before, each=each)

    monkeypatch.setattr(actor, "_params", params)
    made: Any = VllmActor({"model": "none"})
    made._engine, made._spans = Sampler(), False
    made._prompt = lambda ids, sampled: {"prompt_token_ids": [*ids, *sampled]}
    made._segments = Segments(made._engine.abort)
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


async def test_a_request_goes_on_under_the_new_weights_and_each_token_has_its_own(replica: Any) -> None:
    one = asyncio.create_task(ask(replica, "one"))
    await settle(replica, 6)
    for new in (1, 2):
        await update(replica, new)
        await settle(replica, 6)
    await settle(replica, 30)
    found = await one
    assert found.finish == "length" and len(found.token_ids) == 30
    # The place in the sequence runs on from the prompt's two tokens, whatever was cut.
    assert [token % 100 for token in found.token_ids] == list(range(2, 32))
    assert found.versions == [token // 100 for token in found.token_ids]
    assert sorted(set(found.versions)) == [0, 1, 2] and found.logprobs == [-float(token) for token in found.token_ids]
    cuts = [found.versions.count(each) for each in (0, 1)]
    prompts = [([7, 8, *found.token_ids[:done]], 30 - done) for done in (0, cuts[0], sum(cuts))]
    assert [asked[1:3] for asked in replica._engine.asked] == prompts
    seeds = [asked[3] for asked in replica._engine.asked]
    assert seeds[0] == 5 and len(set(seeds)) == 3  # the numbers that a token was drawn with are not used again
    assert (await replica.stats()).prompt_tokens == 2 and (await replica.stats()).sampled_tokens == 30
    assert (await replica.stats()).kv_used is None


async def test_a_stream_and_its_stop_string_go_on_over_an_update(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop string begins under the old weights and ends under the new: nothing sampled after it is in the turn, and all that
    is in it was told, once, before the end."""
    monkeypatch.setattr(replica._words, "load", lambda: None)
    # Tokens spell their places' letters; the update comes between two of them.
    monkeypatch.setattr(replica._words, "decode", lambda ids: "".join(chr(ord("a") + token % 100 - 2) for token in ids))
    told: list[tuple[int, float]] = []
    cut = 6
    sampling = Sampling(max_tokens=24, seed=5, stop=(ALPHABET[cut - 2 : cut + 3], "never"))
    call = replica.generate([7, 8], sampling, "key", "one", lambda ids, logprobs: told.extend(zip(ids, logprobs, strict=True)))
    one = asyncio.create_task(call)
    while len(told) < cut:
        await settle(replica, 1)
    await update(replica, 1)
    begun = list(told)
    for _ in range(40):
        await settle(replica, 1)
    found = await one
    assert found.finish == "stop_string" and len(begun) >= cut
    assert replica._words.decode(found.token_ids) == ALPHABET[: cut + 3]
    assert told == list(zip(found.token_ids, found.logprobs, strict=True)) and told[: len(begun)] == begun
    assert found.versions == [token // 100 for token in found.token_ids] and set(found.versions) == {0, 1}
    assert (await replica.stats()).sampled_tokens == cut + 3 and not replica._engine.inside


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


async def test_what_enters_as_the_gate_closes_is_of_one_version(replica: Any) -> None:
    """Requests come all the time, in every state of entering, while weights change six times."""
    tasks = []
    for new in range(1, 7):
        for _ in range(8):
            tasks.append(asyncio.create_task(ask(replica, f"r{len(tasks)}", tokens=9)))
            await asyncio.sleep(0.001)
            replica._engine.step()
        await update(replica, new)
    while not all(task.done() for task in tasks):
        await settle(replica, 1)
    for task in tasks:
        found = task.result()
        assert found.versions == [token // 100 for token in found.token_ids] and len(found.token_ids) == 9
    assert sum(len(set(task.result().versions)) > 1 for task in tasks) > 5


async def test_a_request_that_is_stopped_during_an_update_ends_with_what_it_has(replica: Any) -> None:
    one, other = (asyncio.create_task(ask(replica, name)) for name in ("one", "other"))
    await settle(replica, 5)
    await replica.pause()
    late = asyncio.create_task(ask(replica, "late"))
    await asyncio.sleep(0.01)
    assert not one.done() and not late.done() and not replica._engine.inside
    assert (await replica.progress())["one"] > 0  # it is still under way, with the tokens that it has
    await replica.abort("key of one")
    await replica.cancel("late")
    found, nothing = await asyncio.wait_for(asyncio.gather(one, late), 1)
    assert found.finish == nothing.finish == "abort" and len(found.token_ids) == len(found.versions) > 0
    assert (nothing.token_ids, nothing.versions) == ([], [])
    await replica.resume()
    await settle(replica, 40)
    assert (await other).finish == "length" and not replica._requests
