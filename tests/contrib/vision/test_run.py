"""A model that takes images, from a config: what is played, sampled and trained, with what it is refused, and a resume."""

import asyncio
import json
from collections.abc import Sequence
from importlib.util import find_spec as installed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from safetensors.torch import load_file

import agentrl
from agentrl.cli.main import main
from agentrl.config.load import config_from
from agentrl.config.schema import RewardConfig
from agentrl.contrib.vision.model import Vision
from agentrl.data.images import Image
from agentrl.data.token_ledger import PromptIds, TokenLedger, images_in
from agentrl.data.trajectory import Message, StopReason, ToolCall, Trajectory
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.render.template import make_renderer
from agentrl.rollout.context import ContextPolicy, KeepRecent, Stop
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.rollout.episode import Limits, Policy
from agentrl.run.assembly import RunStart, renderer_of, tokenizer_of
from agentrl.run.checks.model_checks import check_vision
from agentrl.trainer.families import packing_of
from agentrl.trainer.model_folder import export_run
from agentrl.trainer.pretrained import architecture
from agentrl.utils.errors import ConfigError, EngineError
from tests.conftest import PROOFS, proof
from tests.contrib.judges.test_own_judge import ENGINE, refused
from tests.contrib.vision.test_model import BLUE, RED, WIDE, alone, deep, folder, reference
from tests.e2e.inside import HERE, episodes, execute, updates
from tests.players import Still, run_tasks

__all__ = ["deep", "folder", "reference"]  # fixtures
INIT = "model.init={vision=true,layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=16}"
WITH_VLLM = pytest.mark.skipif(installed("vllm") is None, reason="vLLM is not installed here")
RUN = ("env.id=color_square", "env.reward=color_square", INIT, "engine=embedded", "engine_args={cache=false}")
STEPS = 3 if PROOFS else 1
LOOK = Message("assistant", tool_calls=(ToolCall("look", {}),))


def config(*more: str) -> Any:
    return config_from({}, [*RUN, *more])


RENDERER = renderer_of(config().model, tokenizer_of(config().model))
PAD = tokenizer_of(config().model).convert_tokens_to_ids("<|image_pad|>")


# -- what the model reads -----------------------------------------------------------------------------------------------


def test_the_tokens_of_messages_with_images() -> None:
    spelled = f"<|vision_start|><|image_pad|> {BLUE.line} {RED.line}<|im_end|>"
    said = Message("tool", f"{spelled} then {BLUE.line}", tool_call_id="c", name="look", images=(RED, BLUE, BLUE))
    plain = make_renderer(tokenizer_of(config("model.init={}").model))
    ids = RENDERER.extend("stop", [said])
    assert isinstance(ids, PromptIds) and ids.images == (BLUE, RED, BLUE), "in the order of their lines"
    assert ids.count(PAD) == 3 * 4 == Vision("", architecture(config().model.init)).tokens(RED) * 3
    text = tokenizer_of(config().model).decode(ids)
    image = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"
    assert f"<|vision_start|><|image_pad|> {image} {image}<|im_end|> then {image}" in text
    assert ids.count(ids[ids.index(PAD) - 1]) == 3, "what a tool spells is ordinary text"
    # Text alone has the tokens that the packaged model of text has, and is a plain list.
    opening = [Message("system", "look"), Message("user", "which color?")]
    assert RENDERER.start(opening, []) == plain.start(opening, []) and images_in(RENDERER.start(opening, [])) == ()
    assert images_in(plain.extend("stop", [said])) == ()


@pytest.mark.parametrize("size", [(1, 1), (200, 1), (1, 200), (27, 29), (4096, 4096)])
def test_whatever_image_is_taken_has_tokens(size: tuple[int, int]) -> None:
    """A renderer that refused one would end the run, and tools say how large their images are."""
    image = Image.of(Pictures.new("1", size))
    ids = RENDERER.extend("stop", [Message("tool", image.line, tool_call_id="c", name="look", images=(image,))])
    assert 4 <= ids.count(PAD) <= 1280 and images_in(ids) == (image,)


class Says(Still):
    """Samples these turns one after the other, and keeps the prompts."""

    def __init__(self, *turns: Message) -> None:
        self.turns, self.prompts = list(turns), list[Sequence[int]]()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        self.prompts.append(token_ids)
        ids = RENDERER.assistant(self.turns.pop(0))[: sampling.max_tokens]
        return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop" if ids[-1] in RENDERER.stop_token_ids else "length")


async def played(engine: Engine, context: ContextPolicy, most: int = 2000) -> Trajectory:
    ref = EnvRef("color_square", {})
    scorer = make_scorer(find_spec(ref, "color_square"), RewardConfig(), ref)
    limits = Limits(5, 64, most, 60, 60, 4096)
    [one] = await run_tasks(ref, Policy(engine, RENDERER, context=context), scorer, limits, [(0, 0)], seed=0, max_episodes=1)
    return one


async def test_an_episode_that_looks_has_the_image_in_its_ledger_and_in_the_next_prompt(monkeypatch: Any) -> None:
    engine = Says(LOOK, Message("assistant", "red"))
    one = await played(engine, Stop())
    [ledger] = one.ledgers
    [image] = one.images.values()
    assert ledger.images == (image,) and [images_in(prompt) for prompt in engine.prompts] == [(), (image,)]
    pads = ledger.token_ids == PAD
    assert pads.sum() == 4 and not ledger.sampled[pads].any(), "context, which is never trained"
    assert one.reward in (0.0, 1.0) and one.stop is StopReason.DONE
    again = Trajectory.from_json(json.loads("".join(one.json_chunks())))
    assert again.ledgers == one.ledgers and again.ledgers[0].images == (image,)
    # An image costs what its placeholders are: without room for them the episode ends before the next turn.
    whole, answer = len(ledger), one.turns[-1].sampled_tokens
    cut = await played(Says(LOOK, Message("assistant", "red")), Stop(), most=whole - answer)
    assert cut.stop is StopReason.MAX_TOKENS and len(cut.turns) == 1
    # An opening message shows its image, too, unless the prompt is cut.
    shown = [Message("system", "look"), Message("user", BLUE.line, images=(BLUE,))]
    monkeypatch.setattr(EnvRef("color_square", {}).entry.load(), "prompt", lambda env, task: list(shown))
    for most, images in ((2000, (BLUE,)), (20, ())):
        engine = Says(Message("assistant", "red"))
        [ledger] = (await played(engine, Stop(), most)).ledgers
        assert ledger.images == images and [images_in(prompt) for prompt in engine.prompts] == ([images] if images else [])


def test_a_prompt_of_the_step_wise_loop_keeps_its_images(tmp_path: Path) -> None:
    with agentrl.session(config(f"out={tmp_path}", "cluster.backend=inline")) as loop:
        [draw] = loop.policy.sample([Message("user", BLUE.line, images=(BLUE,))], max_tokens=1)
    assert images_in(draw.prompt_ids) == (BLUE,)


async def test_a_rewritten_conversation_has_the_images_that_are_left() -> None:
    engine = Says(LOOK, LOOK, LOOK, Message("assistant", "red"))
    one = await played(engine, KeepRecent(turns=1, tokens=100))
    [image] = one.images.values()
    assert [len(images_in(prompt)) for prompt in engine.prompts] == [0, 1, 1, 1]
    assert [ledger.images for ledger in one.ledgers] == [(image,), (image,), (image,)]
    assert [int((ledger.token_ids == PAD).sum()) for ledger in one.ledgers] == [4, 4, 4]


# -- the engine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
async def test_the_engine_samples_with_the_images_of_each_prompt(kind: str, folder: Path, reference: Any, deep: Any) -> None:
    """Prompts of equal ids with other images, at once and one after the other: each is sampled as transformers alone would."""
    if kind == "qwen3_vl":
        folder, reference = deep
    engine = EmbeddedEngine(str(folder), cache=False, dtype="float32")
    await engine.start()
    vision = Vision(str(folder), reference.config)
    text = [11, 12, vision.begin, *[vision.token] * 4, vision.end, 13]
    prompts = {f"{number}": PromptIds(text, [image]) for number, image in enumerate([RED, BLUE, RED, BLUE])}
    prompts["both"] = PromptIds([*text, vision.begin, *[vision.token] * vision.tokens(WIDE), vision.end, 9], [BLUE, WIDE])
    sampling = Sampling(12, temperature=5.0, seed=1)

    async def ask(key: str) -> torch.Tensor:
        made = await engine.generate(prompts[key], sampling, key)
        ledger = TokenLedger()
        ledger.append_context(prompts[key], 0)
        ledger.append_sampled(made.token_ids, made.logprobs, made.versions, 0)
        own = alone(reference, vision, ledger, 5.0)[len(prompts[key]) - 1 :]
        assert float((own - torch.tensor(made.logprobs)).abs().max()) < 1e-5
        return torch.tensor(made.logprobs)

    try:
        first = await asyncio.gather(*(ask(key) for key in ("0", "1", "both")))
        later = [await ask(key) for key in ("2", "3")]
        assert torch.equal(first[0], later[0]) and float((first[0] - first[1]).abs().max()) > 1e-3
        # Nearly uniform: of 300 tokens some would be of the four that stand for images.
        drawn = await engine.generate(prompts["0"], Sampling(300, temperature=100.0, seed=1), "drawn")
        assert len(set(drawn.token_ids)) > 150 and not set(drawn.token_ids) & set(vision.special)
        with pytest.raises(EngineError, match="its images did not come with it"):
            await engine.generate(list(text), sampling, "lost")
        with pytest.raises(EngineError, match="4 placeholder tokens more than those of the row's 1 images"):
            await engine.generate(PromptIds([*text, *text], [RED]), sampling, "few")
        with pytest.raises(EngineError, match="are not in the row one after the other"):
            await engine.generate(PromptIds(text, [RED, RED]), sampling, "many")
    finally:
        await engine.close()


# -- refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "why"),
    [(["engine=sglang", "engine_args={}"], r'engine = "sglang" \(use .*embedded.*vllm'),
     (["rollout.workers=1"], "rollout.workers = 1 does not go"), (["rollout.branch={}"], r"\[rollout.branch\]"),
     (["rollout.start={}"], r"\[rollout.start\]"),
     (["cluster.actors=2", "model.sequence_parallel=2"], "model.sequence_parallel = 2"),
     (["cluster.actors=2", "model.tensor_parallel=2"], "model.tensor_parallel = 2"),
     (["cluster.actors=2", "model.replicas=2"], "model.replicas = 2"),
     (["model.lora={}", "weights.lora=adapter"], 'weights.lora = "adapter"'),
     (["model.engine=titan"], r'model.engine = "titan" \(use .*fsdp2'), (["model.compile=true"], "model.compile = true"),
     (["model.packing=one_row"], 'model.packing = "one_row"'), (["critic={}"], r"\[critic\]"),
     (["algorithm.kl={coef=0.1,reference='moving'}"], r'algorithm.kl.reference = "moving"'),
     (["algorithm.experience={}"], r"\[algorithm.experience\]"),
     (["algorithm.demonstrations={}"], r"\[algorithm.demonstrations\]")],
)  # fmt: skip
def test_what_does_not_go_with_images_is_refused_by_name(more: list[str], why: str) -> None:
    check_vision(RunStart(config()))
    with pytest.raises(ConfigError, match=why):
        check_vision(RunStart(config(*more)))
    check_vision(RunStart(config_from({}, [*RUN, *more, "model.init={}"])))  # a model of text is none of its business


def test_the_cache_and_shared_prefixes_are_refused() -> None:
    from agentrl.run.engine_choice import EngineChoice

    made = config("engine_args={}")
    with pytest.raises(ConfigError, match=r"engine_args.cache: the model takes images.*cache = false"):
        EngineChoice(made).maker().check()
    with pytest.raises(ConfigError, match=r'optim.prefix_sharing = "on"'):
        packing_of(config("optim.prefix_sharing=on"))
    assert not packing_of(config()).shares
    with pytest.raises(ConfigError, match=r"hidden = 48 must be heads \* head_dim = 32"):
        packing_of(config(INIT.replace("hidden=32", "hidden=48")))


# -- runs ---------------------------------------------------------------------------------------------------------------


def run_config(out: Path, name: str, *more: str) -> Any:
    right = {"use": "text.equals", "args": {"expect": {"$": "/task/gold/answer"}}}
    spec = {"agentrl_reward": 1, "name": "luck", "success": right, "root": {"use": "python", "args": {"name": "luck"}}}
    (out / "luck.json").write_text(json.dumps(spec))
    words = [
        *(*RUN, f"env.reward={out / 'luck.json'}", "reward.python.luck=tests.rollout.luck:luck", "algorithm.kl.coef=0.05"),
        "sft={min_steps=40,max_steps=40,lr=0.02,matrix_lr=0.05,gate=0.0,gate_tasks=4,batch=16}",
        "rollout={groups=2,group_size=4,max_turns=3,max_turn_tokens=16,max_episode_tokens=160}",
        *("optim.schedule=constant", "health={lint=false,max_unsolvable=1}", "checkpoint.every=1"),
    ]
    return config_from({}, [f"name={name}", f"out={out}", *HERE, *words, *more])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision_runs")


@pytest.fixture(scope="module")
def whole(out: Path) -> Path:
    return execute(run_config(out, "whole", f"steps={STEPS}"))


def test_a_run_trains_on_images_and_its_trainer_computes_what_the_engine_sampled(whole: Path) -> None:
    looked = [one for step in range(1, STEPS + 1) for one in episodes(whole, step) if one.images]
    assert len(looked) > 2, "the warm start taught it to look"
    for row in updates(whole):
        assert row["tokens_trained"] > 0 and row["mismatch_max"] < 1e-5
    assert abs(updates(whole)[0]["kl_reference"]) < 1e-3, "the reference sees the same images"
    first, last = (load_file(whole / name / "model.safetensors") for name in ("model", "final"))
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed and {name for name in first if "visual" in name}.isdisjoint(changed), "the tower is frozen"
    assert all(name in changed for name in first if "layers.0" in name and "visual" not in name)


@proof
@WITH_VLLM
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_qwen3_vl_is_sampled_by_vllm_as_its_trainer_computes(replicas: int, deep: Any, out: Path) -> None:
    model = (f"model.path={deep[0]}", "model.init=false", f"vllm.replicas={replicas}")
    run = execute(run_config(out, f"vllm_deep_{replicas}", "steps=3", *VLLM[1:], *model))
    assert any(one.images for one in episodes(run, 3))
    for row in updates(run):
        assert row["tokens_trained"] > 0 and row["mismatch_max"] < 1e-4, row


@proof
@pytest.mark.parametrize("more", [[], ["sft=false", "model.lora={rank=4,modules=['q_proj','down_proj']}", "optim.lr=1e-2"]])
def test_a_qwen3_vl_is_trained_on_images(more: list[str], deep: Any, out: Path) -> None:
    """Whole and with adapters; features of the tower's early layers go into the language model's in both programs."""
    name, start = ("deep adapters", out / "deep" / "final") if more else ("deep", deep[0])
    run = execute(run_config(out, name, "steps=3", f"model.path={start}", "model.init=false", *more))
    assert any(one.images for one in episodes(run, 3))
    assert all(row["tokens_trained"] > 0 and row["mismatch_max"] < 1e-5 for row in updates(run))
    before, after = (load_file(at / "model.safetensors") for at in (start, run / "final"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys() and changed and not any("visual" in key for key in changed)
    assert len(changed) == 6 if more else all(key in changed for key in before if "layers.2" in key and "visual" not in key)


ADAPTED = ["q_proj", "v_proj", "gate_proj", "down_proj"]


def adapters(run: Path) -> list[str]:
    """What a run must be told to train adapters on another's model."""
    lora = f"model.lora={{rank=4,modules={ADAPTED}}}"
    return [f"model.path={run / 'final'}", "model.init=false", "sft=false", lora, "optim.lr=1e-2"]


def test_adapters_of_the_language_model_are_trained_on_images(whole: Path, out: Path) -> None:
    """Though the tower's layers have the same names: they get none, and their weights stay."""
    run = execute(run_config(out, "adapters", "steps=2", *adapters(whole)))
    first, second = updates(run)
    assert max(first["mismatch_max"], second["mismatch_max"]) < 1e-5, "published merged"
    assert abs(first["kl_reference"]) < 1e-6 < abs(second["kl_reference"]), "the reference is the model without them"
    assert any(one.images for one in episodes(run, 2))
    before, after = (load_file(at / "final" / "model.safetensors") for at in (whole, run))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    own = {name for name in before if "visual" not in name and name.split(".")[-2] in ADAPTED and name.endswith(".weight")}
    assert changed == own and len(own) == 4
    export_run(run, out / "adapter", adapter=True)
    held = load_file(out / "adapter" / "adapter_model.safetensors")
    assert len(held) == 8 and not any("visual" in name for name in held)


WIDER = INIT.replace("head_dim=16", "head_dim=32").replace("hidden=32", "hidden=64")
VLLM = (WIDER, "engine=vllm", "engine_args={}", "vllm.kv_cache_mib=32", "vllm.max_model_len=256")


@proof
@WITH_VLLM
def test_a_run_on_vllm_samples_what_its_trainer_computes(out: Path, tmp_path: Path) -> None:
    """All updates, over publishes; stopped and resumed; then evaluated with images."""
    execute(run_config(out, "vllm", f"steps={STEPS - 1}", *VLLM))
    run = execute(run_config(out, "vllm", f"steps={STEPS}", *VLLM), resumed=True)
    looked = [one for step in range(1, STEPS + 1) for one in episodes(run, step) if one.ledgers[0].images]
    assert len(looked) > 2 and {len(one.ledgers[0].images) for one in looked} >= {1}
    assert len(updates(run)) == STEPS
    for row in updates(run):
        assert row["tokens_trained"] > 0 and row["mismatch_max"] < 1e-4, row
    adapted = execute(run_config(out, "vllm_adapters", "steps=2", *VLLM[1:], *adapters(run)))
    for row in updates(adapted):
        assert row["tokens_trained"] > 0 and row["mismatch_max"] < 1e-4, row
    assert main(["eval", "--run", str(run), "-n", "4", "--split", "train", "--out", str(tmp_path / "live")]) == 0
    played = (tmp_path / "live/trajectories.jsonl").read_text().splitlines()
    assert any(json.loads(row)["ledgers"][0].get("images") for row in played)


@proof
def test_a_resumed_run_is_the_unbroken_one(whole: Path, out: Path) -> None:
    execute(run_config(out, "broken", f"steps={STEPS - 1}"))
    again = execute(run_config(out, "broken", f"steps={STEPS}"), resumed=True)
    assert [one.ledgers for one in episodes(again, STEPS)] == [one.ledgers for one in episodes(whole, STEPS)]
    assert np.isclose(updates(again)[-1]["loss"], updates(whole)[-1]["loss"], rtol=0, atol=0)


def test_evaluated_episodes_hold_the_images_that_were_seen(whole: Path, tmp_path: Path) -> None:
    assert main(["eval", "--run", str(whole), "-n", "4", "--split", "train", "--out", str(tmp_path / "live")]) == 0
    played = (tmp_path / "live/trajectories.jsonl").read_text().splitlines()
    assert any(json.loads(row).get("images") for row in played)


def test_no_judge_takes_images(folder: Path, tmp_path: Path) -> None:
    assert refused(tmp_path, folder).startswith(f"{ENGINE}.path = {folder}: it is a vision model, and judges read only text")
