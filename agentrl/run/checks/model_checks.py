"""Checks of models: files, images, and router replay."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.config.schema import ModelConfig
from agentrl.config.schema.episodes import entry_name
from agentrl.data.expert_routing import router_code
from agentrl.data.trajectory import Message
from agentrl.env import ToolEnv
from agentrl.env.base import plain_prompt
from agentrl.env.catalog import EnvRef
from agentrl.render.chatml import advice
from agentrl.render.modality import modality_of
from agentrl.rollout.engine import ENGINES
from agentrl.run.assembly import RunStart, model_length, renderer_of, tokenizer_of
from agentrl.run.checks.reward_checks import in_daemon_thread
from agentrl.trainer.pretrained import (
    is_classifier,
    load_model_config,
    load_tokenizer,
    meta_model,
    model_config,
    unused_ids,
    vocabulary,
)
from agentrl.trainer.weight_files import INDEX, SINGLE, check_tensors, has_weights, stored_tensors
from agentrl.utils.errors import ConfigError, ModelError

# Files

PADDING, SHARE = 2048, 0.1
"""Maximum ids without a token in an embedding: this many, or this share of all, whichever is more. Released models have up to
about a thousand (gpt-oss: 1,069 of 201,088). With more, the tokenizer belongs to another model."""
SEEDS = 3
"""Number of tasks whose opening prompts are measured."""
LFS = b"version https://git-lfs"
SAVE = 'M.from_pretrained("FROM", dtype="auto"{how}).save_pretrained("TO"), and the tokenizer likewise'


def check_models(start: RunStart) -> None:
    """Raise ConfigError unless the policy's model has exactly one source, and ModelError if it cannot be used.

    Causes: an unknown folder or name, untrusted code, weights that are quantized, missing, damaged, of other shapes or of another
    model, a missing or unsuitable tokenizer, no chat template. A plan accepts a folder without weights.
    """
    config, path = start.config, start.config.model.path
    if (path is None) == (config.model.init is None):
        raise ConfigError("model: set one of model.path (a folder or hub name) and [model.init] (build a tiny one)")
    if path is None or "messages" in start.engine.traits:
        return
    with _name_model_in_errors("model.path", path):
        computed = start.purpose == "train" or "transformers" in start.engine.traits
        scores = config.data is not None and config.data.loss == "reward" and is_classifier(path, config.model)
        _check_files(config.model, path, start.planned, classifier=scores, computed=computed)
        check_tokenizer(config.model)


def check_other_models(start: RunStart) -> None:
    """Check the models of critic, reward model and teacher as `check_models`; a teacher must also have the policy's token ids."""
    model = start.config.model
    for key, path in start.config.other_models().items():
        with _name_model_in_errors(key, path):
            _check_files(model, path, start.planned, classifier=key == "reward_model.path")
            if key != "algorithm.distillation.path":
                continue
            trust = model.trust_remote_code
            ids, other = tokenizer_of(model).get_vocab(), load_tokenizer(path, trust).get_vocab()
            differing = sorted((number, token) for token, number in ids.items() if other.get(token) != number)
            if differing:
                number, token = differing[0]
                raise ModelError(
                    f"its tokenizer is not the policy's: {len(differing)} of {len(ids)} tokens have another id or none, such as "
                    f"{token!r} ({number}), and a teacher scores the ids that the policy samples; take a teacher of the same "
                    "model family"
                )
            if (largest := max(ids.values())) >= (size := vocabulary(path, trust)):
                raise ModelError(f"it embeds {size} ids, and the policy may sample up to {largest}; take a teacher with as many")


def check_side_model(engine: str, model: ModelConfig, key: str, planned: bool = False) -> None:
    """Check the model of a service engine (`SideEngine.model`) as `check_models`. `key`: config key of the model."""
    path = str(model.path)
    with _name_model_in_errors(key, path):
        _check_files(model, path, planned, computed="transformers" in ENGINES.entry(engine).traits)
        check_tokenizer(model)


def check_prompts(start: RunStart) -> None:
    """Raise ConfigError if an opening prompt of the first tasks leaves no room for a turn."""
    if "messages" in start.engine.traits:
        return  # tokens of an API model are not counted here
    config, rollout, env, model = start.config, start.config.rollout, start.env, model_length(start.config.model)
    context = start.engine.maker().context(model)
    room = min(context, rollout.max_episode_tokens)
    seed, longest = longest_prompt(config.model, env, rollout.env_timeout)
    if longest < room:
        return
    limits = {
        f"the model takes {model} (max_position_embeddings of its config.json, or model.init.context)": model,
        f"the engine takes {context} (vllm.max_model_len)": context,
        f"rollout.max_episode_tokens = {rollout.max_episode_tokens}": rollout.max_episode_tokens,
    }
    least = next(what for what, limit in limits.items() if limit == room)
    raise ConfigError(
        f"the opening prompt of {env.id} (task seed {seed}) has {longest} tokens with its tools, and {least}, so no turn could "
        "be sampled; use a model with a longer context, raise the limit, or make prompts shorter (env.params, fewer tools)"
    )


def model_notes(start: RunStart) -> list[str]:
    """Return warnings about a model: unused tensors of its checkpoint, and first turns that the context cuts."""
    config, path = start.config, start.config.model.path
    if "messages" in start.engine.traits:
        return []
    found = []
    if path is not None and has_weights(path):
        scores = config.data is not None and config.data.loss == "reward" and is_classifier(path, config.model)
        shell = meta_model(config.model, classifier=scores)
        left_out = check_tensors(shell, stored_tensors(path, getattr(shell.config, "transformers_weights", None)))
        found += [f"model.path = {path}: {note}" for note in left_out]
    context = start.engine.maker().context(model_length(config.model))
    for number, one in enumerate(config.each()):
        (env,), rollout = one.envs, one.rollout
        at = f"{entry_name(number, env.called)}: " if len(config.envs) > 1 else ""
        seed, longest = longest_prompt(one.model, EnvRef.of(env, one.tools), rollout.env_timeout)
        room = min(context, rollout.max_episode_tokens) - longest
        if room < rollout.max_turn_tokens:
            found.append(
                f"{at}rollout.max_turn_tokens = {rollout.max_turn_tokens}: after the opening prompt ({longest} tokens, task seed "
                f"{seed}) the context has room for {room}, where a longer first turn is cut off"
            )
    return found


def check_tokenizer(model: ModelConfig) -> None:
    """Raise ModelError if the tokenizer has no chat template, or does not fit the embedding."""
    path, trust = str(model.path), model.trust_remote_code
    tokenizer = load_tokenizer(path, trust, model.chat_template)
    largest, size = max(tokenizer.get_vocab().values()), vocabulary(path, trust)
    if largest >= size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ModelError(
            f"the tokenizer has ids up to {largest} ({token!r}), but the model embeds {size} (vocab_size of config.json): ids "
            f"above {size - 1} cannot be computed. Take the tokenizer that the model was trained with, or enlarge the embedding "
            f"(model.resize_token_embeddings({largest + 1})) and save both"
        )
    unused = len(unused_ids(tokenizer, path, trust))
    if unused > max(PADDING, SHARE * size):
        raise ModelError(
            f"its tokenizer has no token for {unused} of the {size} ids that the model embeds (vocab_size of config.json), which "
            "is more than padding explains: the tokenizer belongs to another model. Copy the files of the right tokenizer into "
            "the folder"
        )
    if not tokenizer.chat_template:
        raise ModelError(
            f"its tokenizer has no chat template, like a base model's: {advice(tokenizer)}, and train the model to follow it "
            "([sft]); or take the model's instruction-tuned form"
        )


def longest_prompt(model: ModelConfig, env: EnvRef, limit: float) -> tuple[int, int]:
    """Return seed and tokens of the longest opening prompt among the first training tasks; 0 tokens if none can be opened.

    Includes tools added by `setup`, and the first message of a scripted user (`ToolEnv.gold_user`). `limit`: seconds per task."""
    renderer = renderer_of(model, tokenizer_of(model))
    openings: dict[int, tuple[list[Message], list[dict[str, Any]]]] = {}  # first messages, and schemas of the tools

    def play() -> None:
        with closing(env.with_gold_user().build()) as built:
            inner: Any = built.unwrapped
            kind, waits = type(inner), inspect.iscoroutinefunction(type(inner).prompt)
            for seed in range(SEEDS):
                with suppress(Exception):  # from code of the environment; `check_success` reports it
                    split = built.splits[0]
                    plain = kind.setup is ToolEnv.setup and not waits and not inner.has_sources
                    asks = waits and inner.user_models() and kind.gold_user is ToolEnv.gold_user
                    # Open an episode if `setup` may add tools, or if the prompt awaits a user that is not a model.
                    if inner.is_remote or plain or asks:
                        messages = plain_prompt(built, built.make_task(seed, split))
                    else:
                        messages, _ = built.reset(seed=seed, options={"split": split})
                    openings[seed] = messages, built.toolbox.schemas()
                if seed not in openings and inner.has_sources:  # do not wait for an unresponsive server again
                    break

    with suppress(TimeoutError):  # `check_success` reports it
        in_daemon_thread(play, SEEDS * limit)
    lengths = ((seed, len(renderer.start(*opening))) for seed, opening in list(openings.items()))
    return max(lengths, key=lambda found: found[1], default=(0, 0))


def _check_files(model: ModelConfig, path: str, planned: bool, *, classifier: bool = False, computed: bool = True) -> None:
    """Raise ModelError for unusable model files. `computed`: by classes of transformers; other engines have their own loaders,
    also for quantized weights."""
    found = load_model_config(path, model.trust_remote_code)
    here = sorted(file for file in Path(path).iterdir() if file.is_file()) if Path(path).is_dir() else []
    for file in here:
        if file.stat().st_size < 1024 and file.read_bytes().startswith(LFS):
            raise ModelError(
                f"{file.name} is a git-LFS pointer ({file.stat().st_size} bytes), not the file itself: run `git lfs pull` in the "
                "folder, or fetch the model with `hf download NAME --local-dir FOLDER`"
            )
    text = found.get_text_config() if computed else found
    section = next((s for c in (found, text) if (s := getattr(c, "quantization_config", None))), None)
    if computed and section is not None:
        given = section if isinstance(section, dict) else section.to_dict()
        method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")) or "an unnamed method")
        options = {"fp8": "FineGrainedFP8Config(dequantize=True)", "mxfp4": "Mxfp4Config(dequantize=True)"}
        ways = "Take the checkpoint that it was made from (bfloat16, float16 or float32)"
        if (option := options.get(method)) is not None:
            how = SAVE.format(how=f", quantization_config={option}")
            ways += f", or write one: from transformers import AutoModelForCausalLM as M, {option.partition('(')[0]}; {how}"
        raise ModelError(
            f"its weights are quantized by {method} (quantization_config of config.json), but training needs plain ones. {ways}"
        )
    # A model of several parts; `check_vision` checks those that take images.
    if computed and text is not found and modality_of(found) is None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

        kind = CAUSAL.get(text.model_type) or CAUSAL.get(found.model_type)
        whole = ", ".join(found.architectures or ()) or found.model_type
        ways = "take a text model"
        if kind:
            ways = f"write its text model: from transformers import {kind} as M; {SAVE.format(how='')}"
        raise ModelError(
            f"it is {whole}, of several parts ({', '.join(sorted(found.sub_configs))}), and only text models are trained: "
            f"{ways}, then model.path = TO"
        )
    if (not has_weights(path) and planned) or (not computed and here and not {SINGLE, INDEX} & {file.name for file in here}):
        return
    stored = stored_tensors(path, getattr(found, "transformers_weights", None))
    if computed:
        check_tensors(meta_model(model.model_copy(update={"path": path, "init": None}), classifier=classifier), stored)


@contextmanager
def _name_model_in_errors(key: str, path: str) -> Iterator[None]:
    """Put the key and the model in front of a ModelError."""
    try:
        yield
    except ModelError as problem:
        raise ModelError(f"{key} = {path}: {str(problem).removeprefix(f'{path}: ')}") from problem


# Images


def check_vision(start: RunStart) -> None:
    """Raise ConfigError with the key if the policy takes images and the config does not fit, or another model takes images."""
    if "messages" in start.engine.traits:
        return
    config, trains = start.config, start.purpose == "train"
    for key, path in config.other_models().items() if trains else ():
        with suppress(ModelError):  # the check of that model reports it
            if modality_of(load_model_config(path, config.model.trust_remote_code)) is not None:
                raise ConfigError(f"{key} = {path}: only the policy may be a model that takes images; take a text model")
    modality = modality_of(model_config(config.model))
    if modality is not None:
        modality.check(config, trains)


# Routers


def check_router_replay(start: RunStart) -> None:
    """Raise ConfigError if router replay is set but the engine does not report choices, or the model cannot repeat them."""
    model, engine = start.config.model, start.engine
    if not start.config.rollout.router_replay:
        return
    if "experts" not in engine.traits:
        raise ConfigError(
            f"rollout.router_replay: engine = {engine.name} does not report the experts of a token; engines that do: "
            f"{ENGINES.that_are('experts')}"
        )
    if model.compile:
        raise ConfigError("rollout.router_replay: routers of compiled layers cannot repeat choices; unset model.compile")
    router_code().check(meta_model(model), model.path or "[model.init]")
