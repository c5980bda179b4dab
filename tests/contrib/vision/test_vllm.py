"""Images in real vLLM: it samples what transformers computes, from its own and from published weights."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from math import log
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from agentrl.config.load import config_from
from agentrl.config.schema import InitModelConfig
from agentrl.contrib.vision.model import Vision
from agentrl.data.images import Image
from agentrl.data.token_ledger import PromptIds, TokenLedger
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.run.engine_choice import EngineChoice
from agentrl.trainer.pretrained import init_model
from agentrl.utils.errors import ConfigError, EngineError, PromptTooLongError
from tests.conftest import proof
from tests.contrib.vision.test_model import BLUE, RED, WIDE, alone, deep, reference
from tests.engines.vllm_parts import SLOW_START, skip_without_vllm
from tests.publishing import publish

__all__ = ["deep", "reference"]  # fixtures
pytestmark = [SLOW_START, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), proof]

skip_without_vllm()

CONTEXT, BLOCK = 160, 32
CLOSE = 1e-4
"""Float32 in two programs; they were seen to differ by 1e-5."""
SAMPLING = Sampling(8, temperature=2.0, seed=1)


def config(*more: str) -> Any:
    small = ["vllm.kv_cache_mib=16", f"vllm.max_model_len={CONTEXT}", "vllm.max_respawns=0"]
    words = ["env={id='color_square',reward='color_square'}", "model.init={vision=true,hidden=64,heads=2,kv_heads=1,head_dim=32}"]
    return config_from({}, [*words, "engine=vllm", *small, *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = InitModelConfig(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, vision=True, init_std=0.2)
    return init_model(tiny, tmp_path_factory.mktemp("vision") / "model", 0)


@pytest.fixture(scope="module")
def vision(folder: Path, reference: Any) -> Vision:
    return Vision(str(folder), reference.config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[Engine]:
    made = EngineChoice(config(), "vllm").make(str(folder))
    await made.start()
    yield made
    await made.close()


def prompt(vision: Vision, *parts: Image | Sequence[int]) -> PromptIds:
    """Token ids and images one after the other."""
    ids: list[int] = []
    images = [part for part in parts if isinstance(part, Image)]
    for part in parts:
        ids += [vision.begin, *[vision.token] * vision.tokens(part), vision.end] if isinstance(part, Image) else part
    return PromptIds(ids, images)


def own(reference: Any, vision: Vision, ids: PromptIds, made: Generation) -> torch.Tensor:
    """What transformers alone says of the sampled tokens."""
    ledger = TokenLedger()
    ledger.append_context(ids, 0)
    ledger.append_sampled(made.token_ids, made.logprobs, made.versions, 0)
    return alone(reference, vision, ledger, SAMPLING.temperature)[len(ids) - 1 :]


async def check(engine: Engine, reference: Any, vision: Vision, ids: PromptIds, key: str) -> Generation:
    made = await engine.generate(ids, SAMPLING, key)
    assert float((own(reference, vision, ids, made) - torch.tensor(made.logprobs)).abs().max()) < CLOSE
    return made


TEXT, MORE = list(range(20, 57)), list(range(60, 90))


async def test_it_samples_with_the_images_of_each_prompt(engine: Engine, reference: Any, vision: Vision) -> None:
    """Prompts of equal ids with other images, at once and one after the other; several images; one image twice; none."""
    red, blue = prompt(vision, TEXT, RED, MORE), prompt(vision, TEXT, BLUE, MORE)
    assert red == blue and red.images != blue.images, "the same ids"
    both, twice = prompt(vision, [9], BLUE, [11, 12], WIDE, [13]), prompt(vision, RED, [14], RED)
    kinds = {"red": red, "blue": blue, "both": both, "twice": twice, "text": PromptIds(TEXT, [])}
    found = await asyncio.gather(*(check(engine, reference, vision, ids, key) for key, ids in kinds.items()))
    made = dict(zip(kinds, found, strict=True))
    # Of the other image's prompt transformers says something else, by far more than the two programs differ.
    assert float((own(reference, vision, blue, made["red"]) - torch.tensor(made["red"].logprobs)).abs().max()) > 100 * CLOSE


async def test_the_cache_of_prefixes_knows_images_apart(engine: Engine, reference: Any, vision: Vision) -> None:
    """A later turn finds all whole blocks of its own prompt, with another image in its place those before it alone."""
    start = [7, *TEXT]  # blocks that no other test has computed

    async def cached(ids: PromptIds) -> int:
        before = (await engine.stats()).cached_tokens
        await check(engine, reference, vision, ids, f"cached {before}")
        return (await engine.stats()).cached_tokens - before

    assert await cached(prompt(vision, start, RED, MORE)) == 0
    longer = prompt(vision, start, RED, MORE, BLUE, MORE)  # a turn later, with another image
    assert await cached(longer) == len(prompt(vision, start, RED, MORE)) // BLOCK * BLOCK == 64
    assert await cached(prompt(vision, start, BLUE, MORE)) == len(start) // BLOCK * BLOCK == 32


async def test_what_is_not_as_its_images_are_is_refused(engine: Engine, vision: Vision) -> None:
    ids = prompt(vision, TEXT, RED, MORE)
    for wrong, why in (
        (list(ids), "its images did not come with it"),
        (PromptIds([*ids, *ids], [RED]), "4 placeholder tokens more than those of the row's 1 images"),
        (PromptIds(ids, [RED, RED]), "are not in the row one after the other"),
        (PromptIds(ids, [WIDE]), "its 21 placeholder tokens are not in the row"),
    ):
        with pytest.raises(EngineError, match=why):
            await engine.generate(wrong, SAMPLING, "wrong")
    with pytest.raises(PromptTooLongError):
        await engine.generate(prompt(vision, [9] * (CONTEXT - vision.tokens(WIDE) - 2), WIDE), SAMPLING, "long")


async def test_a_prompt_may_fill_the_context(engine: Engine, reference: Any, vision: Vision) -> None:
    """An image whose placeholders end where one token is left."""
    ids = prompt(vision, [9] * (CONTEXT - 1 - vision.tokens(WIDE) - 2), WIDE)
    assert len(ids) == CONTEXT - 1
    made = await check(engine, reference, vision, ids, "full")
    assert len(made.token_ids) == 1 and made.finish == "length"


async def test_published_weights_and_tokens_that_stand_for_images(
    engine: Engine, reference: Any, vision: Vision, folder: Path, tmp_path: Path
) -> None:
    ids, weights = prompt(vision, TEXT, RED, MORE), load_file(folder / "model.safetensors")
    changed = {name: value if "visual" in name else value * 1.1 for name, value in weights.items()}
    save_file(changed, copytree(folder, tmp_path / "changed") / "model.safetensors", {"format": "pt"})
    trained = type(reference).from_pretrained(tmp_path / "changed", attn_implementation="eager").eval()
    await publish(engine, 1, changed)
    made = await check(engine, trained, vision, ids, "new")
    assert set(made.versions) == {1}
    assert float((own(reference, vision, ids, made) - torch.tensor(made.logprobs)).abs().max()) > 100 * CLOSE
    # Without the last norm all tokens are as likely; of so many some would be of the four that stand for images.
    [norm] = [name for name in weights if "visual" not in name and name.endswith("model.norm.weight")]
    await publish(engine, 2, weights | {norm: torch.zeros_like(weights[norm])})
    seeds = [Sampling(150, seed=seed) for seed in range(8)]
    drawn = await asyncio.gather(*(engine.generate(prompt(vision, RED), one, f"{one.seed}") for one in seeds))
    vocabulary = reference.config.text_config.vocab_size
    assert drawn[0].logprobs == pytest.approx([-log(vocabulary)] * 150)
    every = {token for one in drawn for token in one.token_ids}
    assert len(every) > 0.8 * vocabulary and not every & set(vision.special)


@pytest.mark.parametrize(("more", "why"), [
    (["vllm.tensor_parallel=2"], "vllm.tensor_parallel = 2: a model that takes images is not split"),
    (["vllm.args={limit_mm_per_prompt={image=1}}"], "vllm.args.limit_mm_per_prompt: the model takes images"),
    (["vllm.args={mm_processor_kwargs={max_pixels=99}}"], "vllm.args.mm_processor_kwargs: the model takes images"),
    (["vllm.args={hf_overrides={architectures=['A']}}"], "vllm.args.hf_overrides.architectures: the model takes images"),
])  # fmt: skip
async def test_what_does_not_go_with_images_is_refused_by_name(more: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineChoice(config(*more), "vllm").maker().check()
    EngineChoice(config(), "vllm").maker().check()


@proof
async def test_a_qwen3_vl_is_sampled_with_its_images(deep: tuple[Path, Any], tmp_path: Path) -> None:
    """Features of the tower's early layers come into the language model's: with and without the cache, also after a publish."""
    folder, own_model = deep
    eyes, weights = Vision(str(folder), own_model.config), load_file(folder / "model.safetensors")
    made = EngineChoice(config(f"model.path={folder}", "model.init=false"), "vllm").make(str(folder))
    await made.start()
    try:
        one, two = prompt(eyes, TEXT, RED, MORE), prompt(eyes, TEXT, BLUE, MORE)
        both, twice = prompt(eyes, [9], BLUE, [11, 12], WIDE, [13]), prompt(eyes, RED, [14], RED)
        for ids in (one, two, one, both, twice, PromptIds(TEXT, [])):
            await check(made, own_model, eyes, ids, "deep")
        await asyncio.gather(*(check(made, own_model, eyes, ids, f"{at}") for at, ids in enumerate((both, two, twice, one))))
        changed = {name: value if "visual" in name else value * 1.1 for name, value in weights.items()}
        save_file(changed, copytree(folder, tmp_path / "changed") / "model.safetensors", {"format": "pt"})
        trained = type(own_model).from_pretrained(tmp_path / "changed", attn_implementation="eager").eval()
        await publish(made, 1, changed)
        await check(made, trained, eyes, one, "new")
    finally:
        await made.close()
