"""Load tokenizers, configs and models from a folder or hub name, with clear errors.

Also the packaged tokenizer, tiny random models, and shapes of published models."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.config.schema import InitModelConfig, ModelConfig
from agentrl.engines.weights.parameters import positions_of
from agentrl.render.chatml import CHATML_TEMPLATE, set_chat_template
from agentrl.render.modality import auto_class, make_modality, tiny_modality
from agentrl.utils.errors import ConfigError, ModelError, hint_text
from agentrl.utils.parsing import read_json

# The packaged tokenizer

PAD = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", END_OF_TURN, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY = 400


def packaged_tokenizer(context: int, vision: bool = False, chat_template: str | None = None) -> Any:
    """Create the packaged tokenizer, a `PreTrainedTokenizerFast`, with its chat template or `chat_template`.

    `vision`: add the control tokens of images. All control tokens are special: with `split_special_tokens=True`, text that spells
    one is encoded as ordinary tokens, so a tool's output cannot forge a turn.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    assets = files("agentrl.trainer") / "assets"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str((assets / "tokenizer.json").read_text(encoding="utf-8")),
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=[
            *(token for token in SPECIAL_TOKENS if token not in (PAD, END_OF_TURN)),
            *(tiny_modality().tiny_tokens if vision else ()),
        ],
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


# Tiny random models


def init_model(cfg: InitModelConfig, folder: str | Path, seed: int, chat_template: str | None = None) -> Path:
    """Write a random model to `folder`: config, weights, tokenizer, chat template; equal seeds give equal bytes.

    Embeddings are tied; matrices are normal with standard deviation `cfg.init_std`. `chat_template`: as `model.chat_template`.
    Raises ConfigError if the head counts do not fit, ModelError if `folder` is a file.
    """
    import torch

    config = architecture(cfg)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target}: expected a folder to write the model to, found a file")
    tokenizer = packaged_tokenizer(cfg.context, cfg.vision, chat_template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=torch.float32)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if (modality := make_modality(str(target), config)) is not None:
        modality.processor.save_pretrained(target)
    return target


def architecture(cfg: InitModelConfig) -> Any:
    """Return the transformers config of a random model. Raises ConfigError if the head counts do not fit."""
    from transformers import Qwen3Config

    if cfg.heads % cfg.kv_heads:
        raise ConfigError(f"model.init.heads={cfg.heads} is not a multiple of model.init.kv_heads={cfg.kv_heads}")
    tokenizer = packaged_tokenizer(cfg.context, cfg.vision)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "max_position_embeddings": cfg.context,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    if cfg.vision:
        return tiny_modality().tiny(cfg, text, tokenizer)
    return Qwen3Config(**text, head_dim=cfg.head_dim, dtype="float32")


# Loading

REACH_S = 8.0
"""Timeout in seconds for asking the hub about a model."""


def named_anywhere(model: str) -> str:
    """Return a model name that is valid in other working directories: the absolute path of a folder, or a hub name."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def load_tokenizer(path: str, trust: bool = False, chat_template: str | None = None) -> Any:
    """Load the tokenizer of a model, with `chat_template` (`model.chat_template`) if given.

    `trust`: run the model's code (`model.trust_remote_code`). Raises ModelError without a tokenizer, or if it needs code that is
    not trusted; ConfigError for an invalid chat template."""
    from transformers import AutoTokenizer

    check_path(path, trust)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:  # damaged files raise a KeyError, or a plain Exception of the Rust library
        raise ModelError(f"{path}: no tokenizer can be loaded from it: {_brief(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # without files, some classes create an empty tokenizer
        raise ModelError(f"{path}: no tokenizer can be loaded from it: its files are missing. Copy them, such as tokenizer.json")
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    tokenizer.model_ends = _ends_of(path)
    return tokenizer


def _ends_of(path: str) -> list[int]:
    """Return the end-of-text ids of the model's generation config, or without any those of its config, as transformers does."""
    from transformers import GenerationConfig, PretrainedConfig

    found: Any = None
    with suppress(OSError, ValueError):
        found = GenerationConfig.from_pretrained(path).eos_token_id
    if found is None:
        with suppress(OSError, ValueError):
            config = PretrainedConfig.get_config_dict(path)[0]
            found = config.get("eos_token_id") or (config.get("text_config") or {}).get("eos_token_id")
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, int)]


def load_model_config(path: str, trust: bool = False) -> Any:
    """Load the transformers config of a model. `trust`: as for `load_tokenizer`. Raises ModelError without a config."""
    from transformers import AutoConfig

    check_path(path, trust)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:  # wrong values in config.json raise any error
        raise ModelError(f"{path}: no model config can be loaded from it: {_brief(error)}") from error
    if not trust and hasattr(config, "auto_map"):
        del config.auto_map  # transformers' classes are used, and a saved model must not name code that its folder lacks
    return config


def model_config(cfg: ModelConfig) -> Any:
    """Return the transformers config of `cfg.path`, or of a random model. Raises ModelError, ConfigError."""
    return architecture(cfg.init or InitModelConfig()) if cfg.path is None else load_model_config(cfg.path, cfg.trust_remote_code)


def empty_model(path: str | None, config: Any, *, classifier: bool = False, dtype: Any = None, **options: Any) -> Any:
    """Create a model on the meta device, without weights: a causal language model, or a sequence `classifier`.

    `path`: name for errors. `dtype`: of the weights; default float32 for any compute dtype, because these are master weights: a
    step at a learning rate of 1e-6 is far below the resolution of bfloat16 (2^-8 of the weight). Raises ModelError for a config
    of another kind.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if classifier else auto_class(config)
    options["trust_remote_code"] = hasattr(config, "auto_map")  # `load_model_config` deletes it if it is not trusted
    try:
        with torch.device("meta"):
            # A copy, because from_config writes the attention implementation into its argument.
            return kind.from_config(copy.deepcopy(config), dtype=dtype or torch.float32, **options)
    except Exception as error:  # wrong values in config.json raise any error
        what = "a classifier" if classifier else "a causal language model"
        raise ModelError(f"{path}: not {what}: {_brief(error)}") from error


def model_context(path: str, trust: bool = False) -> int:
    """Return the maximum sequence length of a model in tokens. Raises ModelError if its config has none."""
    context = positions_of(load_model_config(path, trust))
    if context is None:
        raise ModelError(f"{path}: its config.json has no max_position_embeddings")
    return context


def unused_ids(tokenizer: Any, path: str, trust: bool = False) -> list[int]:
    """Return the ids of a model's vocabulary without a token, because embeddings are often padded. Raises ModelError."""
    return sorted(set(range(vocabulary(path, trust))) - set(tokenizer.get_vocab().values()))


def vocabulary(path: str, trust: bool = False) -> int:
    """Return the vocabulary size of a model, i.e. of its embedding. Raises ModelError."""
    size = getattr(load_model_config(path, trust).get_text_config(), "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"{path}: its config.json has no vocab_size")
    return size


def head_dim(path: str, trust: bool = False) -> int | None:
    """Return the dimension of an attention head; None if the config has none. Raises ModelError."""
    text = load_model_config(path, trust).get_text_config()
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    size = getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else None)
    return size if isinstance(size, int) else None


def count_parameters(path: str, trust: bool = False) -> int:
    """Count the parameters of a causal language model from its config (tied ones once). Raises ModelError."""
    return sum(parameter.numel() for parameter in meta_model(ModelConfig(path=path, trust_remote_code=trust)).parameters())


def meta_model(cfg: ModelConfig, *, classifier: bool = False, **options: Any) -> Any:
    """Create the model of `cfg` on the meta device, without weights; a `classifier` has one label.

    Raises ModelError, ConfigError."""
    config = model_config(cfg)
    if classifier:
        config.num_labels = 1
    return empty_model(cfg.path, config, classifier=classifier, **options)


_OBJECTS = ("config", "generation_config", "tokenizer_config", "preprocessor_config")
"""Optional JSON files of a model folder, each a single object, that transformers and the engines read."""


def check_path(path: str, trust: bool = False) -> None:
    """Raise ModelError for a missing folder, one without a model, an unknown hub name, or untrusted code."""
    folder = Path(path)
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():  # transformers would add it to the model, and the trainer would not
            raise ModelError(
                f"{path}: it holds an adapter (adapter_config.json). Merge it (peft: merge_and_unload), or move it out"
            )
        if not (folder / "config.json").is_file():
            raise ModelError(f"{path}: the folder has no config.json, so it is not a model folder")
        for file in filter(Path.is_file, (folder / f"{part}.json" for part in _OBJECTS)):
            try:
                found = read_json(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ModelError(f"{file}: not valid JSON: {error}") from error
            if not isinstance(found, dict):
                raise ModelError(f"{file}: expected an object, got a {type(found).__name__}. Fetch it again")
    elif folder.suffix == ".gguf" and folder.exists():
        raise ModelError(
            f"{path}: expected a model folder, found a GGUF file; agentrl init-model FOLDER --from {path} writes one"
        )
    elif folder.exists():
        raise ModelError(f"{path}: expected a model folder, found a file")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1 or (folder.parent.is_dir() and "/" in path):
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = hint_text(folder.name, siblings, show=lambda name: str(folder.parent / name))
        raise ModelError(f"{path}: no such model folder{hint}")
    else:
        check_hub(path)
    try:
        code = [] if trust else own_code(path)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: its config cannot be read: {_brief(error)}") from error
    if code:
        raise ModelError(
            f"{path}: it needs code of its own ({', '.join(code)}), as transformers has no class for it. Read the code, "
            "then allow it to run with model.trust_remote_code = true; or take a model of a family that transformers has"
        )


def own_code(path: str) -> list[str]:
    """Describe the model's code for parts without a transformers class: "config.json names y.Z" each."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS
    from transformers.models.auto.tokenization_auto import (
        TOKENIZER_MAPPING_NAMES,
        get_tokenizer_config,
        tokenizer_class_from_name,
    )

    config, _ = PreTrainedConfig.get_config_dict(path)
    kind, names = config.get("model_type"), config.get("auto_map") or {}
    known = {"AutoConfig": kind in CONFIG_MAPPING, "AutoModelForCausalLM": kind in CAUSAL}
    if "AutoModelForCausalLM" not in names:
        known["AutoModelForSequenceClassification"] = kind in CLASSIFIERS
    found = [f"config.json names {names[part]}" for part, there in known.items() if part in names and not there]
    tokens = get_tokenizer_config(path)
    maps = tokens.get("auto_map") or {}
    own = maps.get("AutoTokenizer") if isinstance(maps, dict) else maps
    given = str(tokens.get("tokenizer_class") or "").removesuffix("Fast")
    has_class = any(tokenizer_class_from_name(name) is not None for name in (given, given + "Fast") if given)
    if own and kind not in TOKENIZER_MAPPING_NAMES and not has_class:
        found.append(f"tokenizer_config.json names {next(filter(None, own[::-1]), '') if isinstance(own, list | tuple) else own}")
    return found


@cache
def check_hub(path: str) -> None:
    """Raise ModelError if a hub name is neither cached nor, within `REACH_S`, on the hub.

    transformers would retry for a minute, log each try, and not name the model."""
    import httpx
    from huggingface_hub import constants, get_session, get_token, hf_hub_url, try_to_load_from_cache

    what = f"{path}: there is no such folder here"
    ways = "Give a model folder, or fetch it where there is a network (hf download NAME --local-dir FOLDER)"
    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return
        if constants.is_offline_mode():
            raise ModelError(
                f"{what}, it is not in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set. {ways}"
            )
        url, token = hf_hub_url(path, "config.json"), get_token()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        answer = get_session().head(url, headers=headers, timeout=REACH_S, follow_redirects=True)
    except (httpx.HTTPError, OSError) as error:
        raise ModelError(
            f"{what}, it is not in the hub's cache, and the hub ({constants.ENDPOINT}) cannot be reached: {_brief(error)}. "
            f"{ways}; a mirror of the hub is named by HF_ENDPOINT"
        ) from error
    except ValueError as error:
        raise ModelError(f"{what}, and it is no name of the hub: {_brief(error)}") from error
    if answer.status_code in (401, 403, 404):
        raise ModelError(
            f"{what}, and the hub answers {answer.status_code} for its config.json: the name is wrong, or the model is private "
            "or gated (hf auth login)"
        )


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    kind = "" if isinstance(error, OSError | ValueError) or type(error).__module__ != "builtins" else f"{type(error).__name__}: "
    return kind + (lines[-1].strip() if lines[0].endswith(":") else lines[0])


# Classifiers


def is_classifier(path: str, model: ModelConfig) -> bool:
    """Return True if the model at `path` is a sequence classifier."""
    config = load_model_config(path, model.trust_remote_code)
    return any("SequenceClassification" in kind for kind in config.architectures or [])


# Shapes of published models

_COMMON = {"vocab_size": 151_936, "head_dim": 128, "rms_norm_eps": 1e-6}
_QWEN3 = {**_COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}
_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings",
          "rope_theta", "tie_word_embeddings")  # fmt: skip
_DENSE = {
    "Qwen/Qwen3-0.6B": (28, 1024, 16, 3072, 40_960, 1e6, True),
    "Qwen/Qwen3-1.7B": (28, 2048, 16, 6144, 40_960, 1e6, True),
    "Qwen/Qwen3-4B-Instruct-2507": (36, 2560, 32, 9728, 262_144, 5e6, True),
    "Qwen/Qwen3-8B": (36, 4096, 32, 12_288, 40_960, 1e6, False),
}
_SPARSE = dict(zip(_NAMES, (48, 2048, 32, 6144, 262_144, 1e7, False), strict=True)) | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    **{name: {**_QWEN3, **dict(zip(_NAMES, sizes, strict=True))} for name, sizes in _DENSE.items()},
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {**_COMMON, **_SPARSE},
}
"""config.json by hub name, with the keys that a plan needs, from the model cards."""


@contextmanager
def shape_folder(model: str | None) -> Iterator[str | None]:
    """Provide a temporary folder with the config.json of a model of `SHAPES`; None if the model is on this machine."""
    from huggingface_hub import try_to_load_from_cache

    known = model is not None and model in SHAPES and not Path(model).is_dir()
    if model is None or not known or isinstance(try_to_load_from_cache(model, "config.json"), str):
        yield None
        return
    with TemporaryDirectory(prefix="agentrl-plan-") as place:
        folder = Path(place) / model
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[model]))
        yield str(folder)
