import asyncio
import shutil
import threading
import time
from functools import partial

import pytest
import pytest_asyncio
from llguidance import LLMatcher
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import agentrl.engines.embedded.embedded_engine as embedded_engine
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.token_text import DEAD_END
from agentrl.engines.weights.host_routes import MemorySender
from agentrl.render.chatml import CHATML_TEMPLATE
from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import EngineError, ModelError, ResourceError
from tests.engines.contract import UNUSED, EngineContract, off, prompt_of
from tests.engines.engine_models import build_model, changed, load, parameters
from tests.engines.text_contract import TextContract
from tests.publishing import publish
from tests.render.render_tokenizers import CONTROL_TOKENS, build_tokenizer
from tests.trainer.tiny_families import FAMILIES, VOCAB, tiny_model


@pytest.fixture(params=["on the loop", "in a thread"])
def passes(request, monkeypatch):
    """As of a tiny model, and as of a real one."""
    if request.param == "in a thread":
        monkeypatch.setattr(embedded_engine, "ON_LOOP", 0)


@pytest_asyncio.fixture
async def started():
    """`await started(folder, ...)` -> an engine on the CPU, which is closed after the test."""
    made = []

    async def start(folder, **options):
        made.append(engine := EmbeddedEngine(folder, device="cpu", **options))
        await engine.start()
        return engine

    yield start
    for engine in made:
        await engine.close()


@pytest_asyncio.fixture
async def engine(model_folder, passes, started):
    return await started(model_folder, max_slots=96, unused=UNUSED)


class TestEmbedded(EngineContract, TextContract):
    tolerance, context, unused = 1e-5, 2048, UNUSED


async def test_a_grammar_that_the_vocabulary_cannot_write_fails_its_own_request(started, tmp_path):
    """It failed every request of the batch."""
    letters = build_tokenizer(CONTROL_TOKENS, CHATML_TEMPLATE, alphabet=[chr(number) for number in range(33, 127)])
    letters.save_pretrained(folder := build_model(tmp_path))
    engine, e_acute = await started(folder), LLMatcher.grammar_from_json_schema('{"const": "\u00e9"}')
    other, *ends = await asyncio.gather(
        engine.generate(prompt_of(9), Sampling(20, seed=1), "other"),
        *(engine.generate(prompt_of(9), Sampling(20, stop_token_ids=ids, grammar=e_acute), f"{ids}") for ids in ((), (1,))),
        return_exceptions=True,
    )
    assert len(other.token_ids) == 20
    assert [str(end) for end in ends] == [DEAD_END] * 2


def test_a_tokenizer_that_no_grammar_can_be_of_is_refused_by_name(tmp_path):
    """It raised, in every rollout worker too, which ask at their start."""
    backend = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="b").save_pretrained(build_model(tmp_path))
    refusal = EmbeddedEngine(str(tmp_path)).refusal(Sampling(1, grammar='start: "a"'))
    assert refusal.startswith("grammar: llguidance does not read this model's tokenizer: ")


async def _episodes(engine, count, turns=3, tokens=20):
    """Multi-turn episodes with instant tools; returns the ids of each."""

    async def episode(number):
        ids = prompt_of(40, seed=number // 4)
        for turn in range(turns):
            sampling = Sampling(max_tokens=tokens + number % 7, seed=100 * number + turn)
            ids += (await engine.generate(ids, sampling, f"e{number}")).token_ids + [7] * 5
        return ids

    return await asyncio.gather(*(episode(number) for number in range(count)))


@pytest.mark.usefixtures("passes")
async def test_a_run_is_reproduced_exactly(started, model_folder):
    """Logprobs to the last bit, which takes the same batches at the same steps."""
    runs = []
    for _ in range(2):
        engine = await started(model_folder)
        episodes = await _episodes(engine, 24)
        last = await engine.generate(episodes[3], Sampling(max_tokens=5, seed=1), "e3")
        runs.append((episodes, last.logprobs, (await engine.stats()).extra["steps"]))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_loop_turns_while_a_real_model_computes(started, tmp_path, dtype):
    """Neither a caller that goes away nor an abort waits for the pass, and both leave the cache to others."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    engine = await started(build_model(tmp_path / "wide", **wide), dtype=dtype)
    batcher, forward, where, turns = engine._batcher, engine._model.forward, [], 0

    def watched(*args):
        where.append((threading.get_ident(), turns))
        found = forward(*args)
        where.append((threading.get_ident(), turns))
        return found

    engine._model.forward = watched
    long = asyncio.create_task(engine.generate(prompt_of(1000, seed=1), Sampling(max_tokens=3, seed=1), "long"))
    gone, aborted = (
        asyncio.create_task(engine.generate(prompt_of(700, seed=n), Sampling(max_tokens=900), f"{n}")) for n in (2, 3)
    )
    while not where:
        await asyncio.sleep(0)
    gone.cancel()
    while len(where) < 2:
        turns += 1
        await asyncio.sleep(0.001)
    assert gone.cancelled() and threading.get_ident() not in {thread for thread, _ in where} and where[1][1] - where[0][1] > 3
    await engine.abort("3")
    assert (await aborted).finish == "abort"
    again = await engine.generate(prompt_of(1000, seed=1), Sampling(max_tokens=3, seed=1), "again")
    assert len(again.token_ids) == 3 and (dtype == "bfloat16" or again.token_ids == (await long).token_ids)
    assert (await engine.stats()).running == 0 and batcher.requests() == []


async def test_a_publish_a_pause_and_the_end_wait_for_the_pass_under_way(engine, model):
    """What is done meanwhile would meet a pass that reads the same memory in its thread."""
    forward, inside = engine._model.forward, []

    def slow(*args):
        inside.append(1)
        time.sleep(0.05)
        found = forward(*args)
        inside.pop()
        return found

    engine._model.forward = slow
    tasks = [asyncio.create_task(engine.generate(prompt_of(40, seed=n), Sampling(max_tokens=200), f"{n}")) for n in range(4)]
    for act in (engine.pause, engine.resume, engine.forget, partial(publish, engine, 7, changed(model, 1))):
        for _ in range(50 if act == engine.pause else 1):
            await asyncio.sleep(0.002)
            if inside:  # seen only if passes run in a thread
                break
        await act()
        assert act != engine.pause or not inside
    assert engine._batcher.version == 7
    await asyncio.sleep(0.06)
    await engine.close()
    assert not inside and all(isinstance(one, EngineError) for one in await asyncio.gather(*tasks, return_exceptions=True))


async def test_where_weights_lie_in_their_file_or_after_a_sleep_changes_no_digit(started, model_folder, model, tmp_path):
    """Products of a single token round by where in memory weights begin, which a resume changes."""
    prompts = [prompt_of(40, seed=seed) for seed in range(8)]

    async def logprobs(engine):
        return [(await engine.generate(ids, Sampling(max_tokens=12, seed=1), f"e{n}")).logprobs for n, ids in enumerate(prompts)]

    found = []
    for bytes_more in (0, 8):
        folder = shutil.copytree(model_folder, tmp_path / str(bytes_more))
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors, folder / "model.safetensors", {"format": "pt", "more": "x" * (64 + bytes_more)})
        engine = await started(str(folder))
        found.append(await logprobs(engine))
        await engine.sleep()
        await engine.wake("weights")
        await publish(engine, 1, parameters(model))
        found.append(await logprobs(engine))
    assert found[1] == found[0] and found[2] == found[0] and found[3] == found[0]


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_slots": 3}, id="few slots"),
        pytest.param({"kv_cache_mib": 1, "max_context": 512}, id="little memory"),
        pytest.param({"step_tokens": 16}, id="prompts in chunks"),
    ],
)
async def test_tight_limits_change_nothing_but_time(started, model_folder, limits):
    """Queueing, eviction, preemption and chunked prompts never change what a request samples; memory stays under its limit."""
    reference, tight = await started(model_folder), await started(model_folder, **limits)
    slots, most = tight._batcher.slots, 0

    async def watch():
        nonlocal most
        while True:
            most = max(most, sum(pool.kv.nbytes for pool in slots.pools))
            await asyncio.sleep(0)

    watcher = asyncio.ensure_future(watch())
    assert await _episodes(tight, 16, tokens=70) == await _episodes(reference, 16, tokens=70)
    watcher.cancel()
    assert 0 < most <= slots.limit and ("kv_cache_mib" not in limits or most > slots.limit / 2)


async def test_forgetting_makes_it_as_new(started, model_folder):
    """A resumed run has a fresh engine: what went before in the unbroken one must not show in the last digits."""

    async def answers(*, before, forget):
        engine = await started(model_folder)
        if before:
            await _episodes(engine, 8)
        if forget:
            await engine.forget()
        cached = (await engine.stats()).cached_tokens
        sampling = [Sampling(max_tokens=16, seed=n) for n in range(4)]
        out = await asyncio.gather(*(engine.generate(prompt_of(40, seed=0), s, f"x{s.seed}") for s in sampling))
        hit = (await engine.stats()).cached_tokens - cached
        return [(o.token_ids, o.logprobs) for o in out], hit

    fresh = await answers(before=False, forget=False)
    assert await answers(before=True, forget=True) == fresh
    assert (await answers(before=True, forget=False))[1] > fresh[1]  # the control: it did remember


async def test_a_branch_computes_nothing_of_the_turns_that_it_shares(started, model_folder):
    """The last blocks alone are its own, and it samples what an engine samples that knows of nothing."""

    async def answer(engine, key, prompt, seed):
        out = await engine.generate(prompt, Sampling(max_tokens=24, seed=seed), key)
        return out, [*prompt, *out.token_ids, *prompt_of(20, seed=seed)]

    engine, fresh = await started(model_folder), await started(model_folder)
    turns = [prompt_of(40, seed=0)]
    for turn in range(4):
        turns.append((await answer(engine, "root", turns[-1], turn))[1])
    for turn in (3, 1, 3):
        before = (await engine.stats()).cached_tokens
        out, _ = await answer(engine, f"branch{turn}{before}", turns[turn], 7)
        assert (await engine.stats()).cached_tokens - before >= len(turns[turn]) - 16 - 1
        same, _ = await answer(fresh, f"x{before}", turns[turn], 7)
        assert out.token_ids == same.token_ids and out.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    # A history that is rewritten is another: of the tokens before the change all is known, of those after it nothing.
    rewritten = [*turns[2][:70], *prompt_of(60, seed=9)]
    await answer(engine, "root", rewritten, 1)
    before = (await engine.stats()).cached_tokens
    out, _ = await answer(engine, "other", rewritten, 7)
    assert (await engine.stats()).cached_tokens - before >= len(rewritten) - 16 - 1
    same, _ = await answer(fresh, "y", rewritten, 7)
    assert out.token_ids == same.token_ids


async def test_where_there_is_no_memory_for_more_slots_the_next_requests_take_those_that_there_are(
    started, model_folder, monkeypatch, caplog
):
    def full(*args, **kwargs):
        raise RuntimeError("no memory")

    engine, short = await started(model_folder), Sampling(max_tokens=2)
    await engine.generate(prompt_of(9), short, "has the only slot")
    with monkeypatch.context() as now, pytest.raises(EngineError, match="no memory"):
        now.setattr("agentrl.engines.embedded.kv_cache.torch.zeros", full)
        await asyncio.wait_for(engine.generate(prompt_of(9), short, "needs another"), 20)
    later = await asyncio.gather(*(engine.generate(prompt_of(9), short, f"comes later {number}") for number in range(2)))
    assert [len(one.token_ids) for one in later] == [2, 2]
    assert "in full" in caplog.text, "the log has the place"


async def test_a_sleeping_engine_holds_no_memory_and_wakes_in_two_stages(started, model_folder, model, monkeypatch):
    """torch's allocator gives the memory to other processes once everything is freed."""
    engine, held = await started(model_folder), []

    def note():
        batcher, model = engine._running_parts()
        weights = sum(p.untyped_storage().nbytes() for p in model.module.parameters())
        held.append(weights + sum(pool.kv.untyped_storage().nbytes() for pool in batcher.slots.pools))

    monkeypatch.setattr("torch.cuda.empty_cache", note)
    before = await engine.generate(prompt_of(40), Sampling(max_tokens=8, seed=1), "a")
    note()
    await engine.pause()
    await engine.sleep()
    note()
    assert held[0] > 100_000 and held[1:] == [0, 0]
    with pytest.raises(EngineError, match="the engine sleeps"):
        await engine.generate(prompt_of(40), Sampling(max_tokens=8), "a")
    with pytest.raises(EngineError, match="wake its weights"):
        await engine.receive(1, nothing())
    await engine.wake("weights")
    with pytest.raises(EngineError, match="no weights yet"):
        await engine.generate(prompt_of(40), Sampling(max_tokens=8), "a")
    await publish(engine, 1, parameters(model))
    after = await engine.generate(prompt_of(40), Sampling(max_tokens=8, seed=1), "a")
    assert (after.token_ids, set(after.versions)) == (before.token_ids, {1})
    assert after.logprobs == before.logprobs


async def nothing():
    return
    yield


async def test_nothing_sleeps_while_requests_run(engine):
    waiting = asyncio.create_task(engine.generate(prompt_of(40), Sampling(max_tokens=64), "a"))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="under way"):
        await engine.sleep()
    waiting.cancel()


async def test_members_of_a_group_share_their_prompt(engine):
    """Eight requests with one prompt compute it once, even when they come at the same moment."""
    prompt = prompt_of(100)
    await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=4, seed=i), f"m{i}") for i in range(8)))
    stats = await engine.stats()
    assert stats.prompt_tokens == 800
    assert stats.cached_tokens == 7 * 96


async def test_unfinished_weights_fail_what_waits(engine, model):
    """A request that was running when a publish failed hears of it, and is not sampled from a mixture."""
    task = asyncio.ensure_future(engine.generate(prompt_of(9), Sampling(max_tokens=500), "a"))
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="not published"):
        await publish(engine, 1, {"model.norm.weight": parameters(model)["model.norm.weight"]})
    with pytest.raises(EngineError, match="not published"):
        await task


async def test_a_request_that_comes_while_weights_arrive_waits_and_is_sampled_from_them(engine, model):
    prompt = prompt_of(40)
    await engine.generate(prompt, Sampling(max_tokens=5, seed=1), "a0")  # its cache is of the old weights
    sender = MemorySender(1 << 17, 1)
    await engine.attach(sender.open())
    sender.attached()
    new = changed(model, 5)
    tasks = []

    async def buckets():
        for bucket in sender.buckets(iter(new.items())):
            tasks.append(asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=5, seed=1), f"a{len(tasks)}")))
            await asyncio.sleep(0)
            yield bucket

    await engine.pause()
    await engine.receive(1, buckets())
    await engine.resume()
    for generation in await asyncio.gather(*tasks):
        assert set(generation.versions) == {1}
        assert off(model, prompt, generation, weights=new) < 1e-5
    assert len(tasks) > 1


async def test_weights_that_are_not_finite_are_an_engine_error(engine, model):
    weights = {name: tensor * float("nan") for name, tensor in parameters(model).items()}
    await publish(engine, 1, weights)
    with pytest.raises(EngineError, match="version 1 is not finite"):
        await engine.generate(prompt_of(9), Sampling(max_tokens=5), "a")
    await publish(engine, 2, parameters(model))
    generation = await engine.generate(prompt_of(9), Sampling(max_tokens=5, seed=1), "a")
    assert off(model, prompt_of(9), generation) < 1e-5


async def test_a_closed_engine_says_so(model_folder):
    engine = EmbeddedEngine(model_folder, device="cpu")
    with pytest.raises(EngineError, match="not started"):
        await engine.generate([1], Sampling(max_tokens=1), "a")
    await engine.start()
    task = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=2000), "a"))
    await asyncio.sleep(0.02)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task


async def test_what_cannot_start_says_why(model_folder, tmp_path):
    with pytest.raises(ModelError, match="no model folder"):
        await EmbeddedEngine(str(tmp_path / "nothing")).start()
    with pytest.raises(ModelError, match="cannot load"):
        await EmbeddedEngine(str(tmp_path)).start()
    with pytest.raises(ResourceError, match="kv_cache_mib"):
        await EmbeddedEngine(model_folder, kv_cache_mib=1, max_context=2048).start()
    with pytest.raises(ResourceError, match="2048 positions"):
        await EmbeddedEngine(model_folder, max_context=4096).start()


@pytest.mark.parametrize("family", FAMILIES)
async def test_families_with_sinks_caps_windows_chunks_and_latent_attention_are_their_own_eager_forward(
    started, family, tmp_path
):
    """Prompts shorter and longer than the windows, prefilled in chunks, with idle slots between busy ones in decode."""
    tiny_model(family).save_pretrained(tmp_path)
    engine = await started(str(tmp_path), step_tokens=16)
    model = load(tmp_path)
    model.set_attn_implementation("eager")
    prompts = [[1 + (5 * i + seed) % (VOCAB - 1) for i in range(n)] for seed, n in enumerate((4, 21, 9, 30, 13))]
    lengths = (9, 3, 12, 2, 14)
    generations = await asyncio.gather(
        *(engine.generate(p, Sampling(max_tokens=n, seed=n), f"{n}") for p, n in zip(prompts, lengths, strict=True))
    )
    for prompt, generation in zip(prompts, generations, strict=True):
        assert off(model, prompt, generation) < 2e-5


async def test_without_a_cache_a_prompt_may_be_longer_than_a_step(started, tmp_path):
    """Its first parts are stored, and nothing is sampled from them."""
    folder = build_model(tmp_path)
    engine = await started(folder, cache=False, step_tokens=16)
    generation = await engine.generate(prompt_of(50), Sampling(max_tokens=6, seed=1), "a")
    assert off(load(folder), prompt_of(50), generation) < 5e-5


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
async def test_a_model_it_would_get_wrong_is_refused(family, tmp_path):
    """State that no cache of keys holds: refused at the start, with the way out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    changes = {"mamba": {"state_size": 4}, "lfm2": {**heads, "layer_types": ["conv", "full_attention"]}}[family]
    config = AutoConfig.for_model(family, vocab_size=400, hidden_size=64, num_hidden_layers=2, pad_token_id=0, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    why = {"mamba": "0 of its 2 layers attend", "lfm2": r"1 of its 2 layers attend .* of the types conv\)"}[family]
    with pytest.raises(ModelError, match=f"{why}.*engine = vllm"):
        await EmbeddedEngine(str(tmp_path), device="cpu").start()
