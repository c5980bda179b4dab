"""The contract of every engine, over the fixture `engine` (version 0) and its `tolerance` (of logprobs)."""

import asyncio
import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import EngineError
from tests.engines.engine_models import VOCAB, changed, forward_logprobs, kept, log_table, parameters
from tests.publishing import publish

TRUNCATIONS = [(0, 1.0), (0, 0.6), (3, 1.0), (3, 0.6)]  # top_k, top_p


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def off(model, prompt, generation, **options):
    """Largest distance between the engine's logprobs and a forward pass."""
    expected = forward_logprobs(model, prompt, generation.token_ids, **options)
    return (expected - torch.tensor(generation.logprobs)).abs().max().item()


async def until(engine, condition, seconds=30.0):
    """Wait until the engine's counters are so."""
    async with asyncio.timeout(seconds):
        while not condition(await engine.stats()):
            await asyncio.sleep(0.005)


async def sampled(engine, count):
    """Wait until the engine sampled `count` more tokens."""
    start = (await engine.stats()).sampled_tokens
    await until(engine, lambda stats: stats.sampled_tokens >= start + count)


UNUSED = list(range(200, 240))
"""Ids that an engine is told to draw never, as for want of a token."""


def among(probability, unused, top_k, top_p):
    """`kept`, of the ids that may be drawn."""
    allowed = probability.copy()
    allowed[unused] = 0
    chosen = kept(allowed, top_k, top_p)
    return chosen[allowed[chosen] > 0]


class EngineContract:
    """Subclass with fixtures `engine` and `model`, `tolerance`, `context`. `both`: it takes top_k and top_p together."""

    both, unused = True, []

    @pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
    async def test_logprobs_are_of_the_whole_vocabulary_and_tokens_of_the_kept_set(self, engine, model, temperature):
        """Truncation and ids without a token say what may be drawn alone; all kinds share a batch."""
        prompt = prompt_of(13, seed=5)
        options = [(temperature, *truncation) for truncation in TRUNCATIONS] + [(0.0, 0, 1.0), (0.0, 3, 0.6)]
        options = [(t, k, p) for t, k, p in options if self.both or not (k and p < 1)]
        generations = await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(max_tokens=24, temperature=t, top_k=k, top_p=p, seed=4), f"{t} {k} {p}")
                for t, k, p in options
            )
        )
        for (t, k, p), generation in zip(options, generations, strict=True):
            ids = np.array(generation.token_ids)
            table = log_table(model, prompt, generation.token_ids, temperature=t or 1.0)
            whole = table[np.arange(len(ids)), ids]
            assert np.abs(whole - generation.logprobs).max() < self.tolerance, (t, k, p)
            sets = [among(row, self.unused, k, p + 1e-4) for row in np.exp(table)]
            assert all(token in (chosen if t else chosen[:1]) for token, chosen in zip(ids, sets, strict=True)), (t, k, p)
            if t and (k, p) != (0, 1.0):  # control: the kept set's own normalizer would show
                masses = [np.exp(row[list(chosen)]).sum() for row, chosen in zip(table, sets, strict=True)]
                assert np.abs(np.log(masses)).max() > 0.2, (t, k, p)

    @pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.5, 0, 0.6), (0.7, 3, 1.0), (1.0, 8, 0.6), (1.5, 12, 0.9)])
    async def test_draws_follow_the_renormalized_kept_set(self, engine, model, temperature, top_k, top_p):
        """Pearson's statistic of 500 seeded draws, against the expected count of each kept token."""
        if top_k and top_p < 1 and not self.both:
            pytest.skip("the engine does not take top_k and top_p together")
        prompt, draws = prompt_of(13, seed=6), 500
        sampling = Sampling(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
        generations = await asyncio.gather(
            *(engine.generate(prompt, replace(sampling, seed=seed), f"d{seed}") for seed in range(draws))
        )
        counts = np.bincount([generation.token_ids[0] for generation in generations], minlength=VOCAB)
        probability = np.exp(log_table(model, prompt, [0], temperature=temperature)[0])
        chosen = among(probability, self.unused, top_k, top_p)
        assert len(chosen) > 1 and counts[chosen].sum() == draws

        def pearson(expected):
            return ((counts[chosen] - draws * expected) ** 2 / (draws * expected)).sum()

        freedom = len(chosen) - 1
        limit = freedom + 4 * (2 * freedom) ** 0.5
        assert pearson(probability[chosen] / probability[chosen].sum()) < limit
        # controls: the same draws do not follow other temperatures
        for other in (0.5, 2.0):
            wrong = probability[chosen] ** other
            assert pearson(wrong / wrong.sum()) > limit

    async def test_a_stop_token_is_the_last_id(self, engine):
        prompt = prompt_of(9)
        free = await engine.generate(prompt, Sampling(max_tokens=30, seed=2), "a")
        stop = free.token_ids[7]
        first = free.token_ids.index(stop)
        sampling = Sampling(max_tokens=30, seed=2, stop_token_ids=(stop,))
        stopped = await engine.generate(prompt, sampling, "b")
        assert stopped.finish == "stop"
        assert stopped.token_ids == free.token_ids[: first + 1]

    async def test_a_seed_fixes_the_sample_whatever_else_runs(self, engine):
        prompt = prompt_of(11)
        alone = await engine.generate(prompt, Sampling(max_tokens=20, seed=7), "a")
        crowd = [engine.generate(prompt_of(5 + i, seed=i), Sampling(max_tokens=10 + i, seed=i), f"c{i}") for i in range(8)]
        again, *_ = await asyncio.gather(engine.generate(prompt, Sampling(max_tokens=20, seed=7), "b"), *crowd)
        other = await engine.generate(prompt, Sampling(max_tokens=20, seed=8), "c")
        assert alone.token_ids == again.token_ids
        assert alone.token_ids != other.token_ids

    async def test_64_at_once(self, engine, model):
        prompts = [prompt_of(3 + 2 * i, seed=i) for i in range(64)]
        generations = await asyncio.gather(
            *(engine.generate(prompt, Sampling(max_tokens=5 + i % 9, seed=i), f"e{i}") for i, prompt in enumerate(prompts))
        )
        for i, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
            assert len(generation.token_ids) == 5 + i % 9
            assert off(model, prompt, generation) < self.tolerance

    async def test_turns_of_an_episode_reuse_its_cache(self, engine, model):
        before = await engine.stats()
        ids = prompt_of(64)
        for turn in range(3):
            generation = await engine.generate(ids, Sampling(max_tokens=40, seed=turn), "episode")
            assert off(model, ids, generation) < self.tolerance
            ids = [*ids, *generation.token_ids, *prompt_of(10, seed=turn)]
        after = await engine.stats()
        prompts = after.prompt_tokens - before.prompt_tokens
        cached = after.cached_tokens - before.cached_tokens
        assert prompts == 64 + 114 + 164
        assert 64 + 114 <= cached + 2 * 32 <= prompts  # all but the last block of each turn

    async def test_a_rewritten_history_is_not_taken_for_the_cached_one(self, engine, model):
        ids = prompt_of(80)
        await engine.generate(ids, Sampling(max_tokens=8, seed=1), "episode")
        rewritten = [*ids[:40], (ids[40] + 1) % VOCAB, *ids[41:], 1, 2, 3]
        generation = await engine.generate(rewritten, Sampling(max_tokens=8, seed=1), "episode")
        assert off(model, rewritten, generation) < self.tolerance

    async def test_abort_returns_what_was_sampled(self, engine):
        prompt = prompt_of(9)
        task = asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=1500, seed=1), "long"))
        await sampled(engine, 5)
        await engine.abort("another episode")
        assert not task.done()
        await engine.abort("long")
        partial = await asyncio.wait_for(task, 30)
        assert partial.finish == "abort"
        assert len(partial.token_ids) == len(partial.logprobs) == len(partial.versions) < 1500

    async def test_progress_counts_the_tokens_of_a_request(self, engine):
        assert engine.progress("long") is None
        running = asyncio.create_task(engine.generate(prompt_of(10), Sampling(max_tokens=1000, seed=1), "long"))

        async def told(least):
            for _ in range(400):
                seen = engine.progress("long")
                if seen is not None and seen >= least:
                    return seen
                await asyncio.sleep(0.05)
            raise AssertionError(f"no {least} tokens")

        await told(await told(1) + 5)
        await engine.pause()
        await asyncio.sleep(1.0)  # what was sampled before the pause is known by now
        before = engine.progress("long")
        await asyncio.sleep(0.6)
        assert engine.progress("long") == before
        await engine.resume()
        await engine.abort("long")
        assert len((await running).token_ids) >= before
        assert engine.progress("long") is None

    async def test_cancelling_frees_what_the_request_held(self, engine):
        tasks = [
            asyncio.ensure_future(engine.generate(prompt_of(9), Sampling(max_tokens=1500, seed=i), f"k{i}")) for i in range(4)
        ]
        await until(engine, lambda stats: stats.running == 4)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(engine, lambda stats: stats.running == stats.waiting == 0)
        assert len((await engine.generate(prompt_of(9), Sampling(max_tokens=3), "k0")).token_ids) == 3

    async def test_a_request_lives_through_three_updates(self, engine, model):
        """Tokens match the weights of their version: what runs over an update is computed again."""
        first = (await engine.stats()).version
        prompt = prompt_of(30)
        task = asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=1500, seed=1), "long"))
        weights = [parameters(model), *(changed(model, seed=seed) for seed in (3, 4, 5))]
        for update in range(1, 4):
            await sampled(engine, 12)
            await publish(engine, first + update, weights[update])
            assert not task.done()
        await sampled(engine, 12)
        await engine.abort("long")
        generation = await asyncio.wait_for(task, 60)
        versions = torch.tensor(generation.versions) - first
        assert versions.unique_consecutive().tolist() == [0, 1, 2, 3]
        replay_env = copy.deepcopy(model)
        logprobs = torch.tensor(generation.logprobs)
        for version, tensors in enumerate(weights):
            off_by = (forward_logprobs(replay_env, prompt, generation.token_ids, weights=tensors) - logprobs).abs()
            assert off_by[versions == version].max() < self.tolerance
            for other in {0, 1, 2, 3} - {version}:  # control: another version's tokens under these weights
                assert off_by[versions == other].max() > 0.05

    async def test_an_episode_lives_through_three_updates(self, engine, model):
        """An update between every two turns, in any buckets: the cache of earlier turns is dropped."""
        first = (await engine.stats()).version
        weights = [parameters(model), *(changed(model, seed=seed) for seed in (3, 4, 5))]
        replay_env = copy.deepcopy(model)
        ids = prompt_of(40)
        for version, tensors in enumerate(weights):
            if version:
                await publish(engine, first + version, dict(reversed(tensors.items())), bucket_mib=0.01)
            generation = await engine.generate(ids, Sampling(max_tokens=20, seed=version), "episode")
            assert set(generation.versions) == {first + version}
            distances = [off(replay_env, ids, generation, weights=candidate) for candidate in weights]
            assert distances[version] < self.tolerance
            assert all(distance > 0.05 for other, distance in enumerate(distances) if other != version)
            ids = [*ids, *generation.token_ids, *prompt_of(10, seed=version)]

    async def test_while_paused_nothing_is_sampled(self, engine):
        await engine.pause()
        task = asyncio.ensure_future(engine.generate(prompt_of(9), Sampling(max_tokens=4, seed=1), "a"))
        await asyncio.sleep(0.2)
        assert not task.done()
        await engine.resume()
        assert len((await asyncio.wait_for(task, 30)).token_ids) == 4

    @pytest.mark.parametrize("fault", ["shape", "missing", "unknown", "twice"])
    async def test_a_wrong_publish_is_refused_until_a_right_one_comes(self, engine, model, fault):
        weights = parameters(model)
        name = "model.layers.1.mlp.up_proj.weight"
        parts = [weights]
        if fault == "shape":
            weights[name] = weights[name][:-1]
        elif fault == "missing":
            del weights[name]
        elif fault == "unknown":
            weights["model.layers.9.mlp.up_proj.weight"] = weights[name]
            name = "model.layers.9.mlp.up_proj.weight"
        else:
            parts = [weights, {name: weights[name]}]
        with pytest.raises(EngineError, match=name):
            await publish(engine, 9, *parts)
        with pytest.raises(EngineError, match="until a publish succeeds"):
            await engine.generate(prompt_of(5), Sampling(max_tokens=2), "a")
        await publish(engine, 10, parameters(model))
        generation = await engine.generate(prompt_of(5), Sampling(max_tokens=6, seed=1), "a")
        assert off(model, prompt_of(5), generation) < self.tolerance
        assert set(generation.versions) == {10}

    async def test_what_cannot_be_generated_says_why(self, engine):
        sampling = Sampling(max_tokens=2)
        for prompt, reason in [([], "empty"), ([VOCAB], "outside"), ([-1], "outside"), ([1] * 5000, "no room")]:
            with pytest.raises(EngineError, match=reason):
                await engine.generate(prompt, sampling, "a")
        with pytest.raises(EngineError, match="max_tokens"):
            await engine.generate([1], Sampling(max_tokens=0), "a")

    async def test_the_end_of_the_context_ends_a_generation(self, engine):
        generation = await engine.generate(prompt_of(self.context - 5), Sampling(max_tokens=50, seed=1), "a")
        assert generation.finish == "length" and len(generation.token_ids) == 5
