"""Load tokenizers and causal language models from a folder or a hub name, with clear errors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from agentrl.backends.parameters import positions_of
from agentrl.config.schema import InitModelConfig, ModelConfig
from agentrl.errors import ModelError, hinted
from agentrl.plain_data import read_json
from agentrl.render.chat_templates import set_chat_template
from agentrl.train.init_model import architecture
from agentrl.vision import auto_class

REACH_S = 8.0
"""For the hub's answer whether it has a model."""


def named_anywhere(model: str) -> str:
    """A model as processes with other working directories can name it: a folder by its absolute path, a hub's as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def load_tokenizer(path: str, trust: bool = False, chat_template: str | None = None) -> Any:
    """The tokenizer of a model, with `model.chat_template` if one is given. `trust`: the model's own code may run
    (`model.trust_remote_code`). Raises ModelError if there is none, or if it needs code that is not trusted; ConfigError for a
    chat template that does not fit."""
    from transformers import AutoTokenizer

    check_path(path, trust)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:  # of a damaged file: a KeyError, or what the Rust library raises, which is no kind of its own
        raise ModelError(f"{path}: no tokenizer can be loaded from it: {_brief(error)}") from error
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


def load_model_config(path: str, trust: bool = False) -> Any:
    """The transformers config of a model. `trust` as of `load_tokenizer`. Raises ModelError if there is none."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    check_path(path, trust)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{path}: no model config can be loaded from it: {_brief(error)}") from error
    if not trust and hasattr(config, "auto_map"):
        del config.auto_map  # transformers' own classes are used, and a saved model must not name code that is not beside it
    return config


def empty_causal_lm(path: str, *, trust: bool = False, **options: Any) -> Any:
    """A causal language model of float32 tensors on the meta device, which `train.loading.Loader` fills.

    Float32 whatever the computing type: these are the master weights. A step at a learning rate of 1e-6 is far below what
    bfloat16 resolves (2^-8 of the weight) and would be rounded away.

    Raises ModelError if there is none, or if it is of another kind.
    """
    import torch

    options["dtype"] = torch.float32
    options["trust_remote_code"] = trust
    config = load_model_config(path, trust)
    return _empty(auto_class(config), path, config, "no causal language model can be loaded", options)


def empty_classifier(path: str, *, trust: bool = False, **options: Any) -> Any:
    """The same for a sequence classifier (a reward model). Raises ModelError if there is none, or if the model has no trained
    classification head."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config = load_model_config(path, trust)
    kinds = config.architectures or []
    if not any("SequenceClassification" in kind for kind in kinds):
        raise ModelError(f"{path}: expected a sequence classifier, found {', '.join(kinds) or 'no architecture'}")
    options |= {"dtype": torch.float32, "trust_remote_code": trust}
    return _empty(AutoModelForSequenceClassification, path, config, "the sequence classifier cannot be loaded", options)


def _empty(kind: Any, path: str | None, config: Any, problem: str, options: dict[str, Any]) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return kind.from_config(config, **options)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {problem}: {_brief(error)}") from error


def model_context(path: str, trust: bool = False) -> int:
    """The longest sequence, in tokens, that a model supports. Raises ModelError if its config does not say."""
    context = positions_of(load_model_config(path, trust))
    if context is None:
        raise ModelError(f"{path}: its config.json has no max_position_embeddings")
    return context


def unused_ids(tokenizer: Any, path: str, trust: bool = False) -> list[int]:
    """The ids of a model's vocabulary that its tokenizer has no token for: the embedding is often padded. Raises ModelError."""
    return sorted(set(range(vocabulary(path, trust))) - set(tokenizer.get_vocab().values()))


def vocabulary(path: str, trust: bool = False) -> int:
    """The number of ids that a model has an embedding for. Raises ModelError."""
    size = getattr(load_model_config(path, trust).get_text_config(), "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"{path}: its config.json has no vocab_size")
    return size


def head_dim(path: str, trust: bool = False) -> int | None:
    """The dimension of an attention head; None if the model's config does not say. Raises ModelError."""
    text = load_model_config(path, trust).get_text_config()
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    size = getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else None)
    return size if isinstance(size, int) else None


def count_parameters(path: str, trust: bool = False) -> int:
    """Number of parameters of a causal language model, from its config alone (tied ones count once). Raises ModelError."""
    return sum(parameter.numel() for parameter in meta_model(ModelConfig(path=path, trust_remote_code=trust)).parameters())


def meta_model(cfg: ModelConfig, *, classifier: bool = False, **options: Any) -> Any:
    """The model of `path` or `init` without weights, on the meta device: a causal language model, or a `classifier` with one
    label. Raises ModelError, ConfigError."""
    from transformers import AutoModelForSequenceClassification

    trust = cfg.trust_remote_code
    config = load_model_config(cfg.path, trust) if cfg.path is not None else architecture(cfg.init or InitModelConfig())
    if classifier:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if classifier else auto_class(config)
    options["trust_remote_code"] = trust
    return _empty(kind, cfg.path, config, f"not {'a classifier' if classifier else 'a causal language model'}", options)


def check_path(path: str, trust: bool = False) -> None:
    """Raise ModelError if `path` looks like a folder but does not exist, is a folder without a model, is a name that the hub does
    not give, or if the model needs code of its own that is not trusted."""
    folder = Path(path)
    if folder.is_dir():
        _check_folder(path)
    elif folder.exists():
        raise ModelError(f"{path}: expected a model folder, found a file")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1 or (folder.parent.is_dir() and "/" in path):
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = hinted(folder.name, siblings, show=lambda name: str(folder.parent / name))
        raise ModelError(f"{path}: no such model folder{hint}")
    else:
        check_hub(path)
    try:
        code = [] if trust else own_code(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: its config cannot be read: {_brief(error)}") from error
    if code:
        raise ModelError(
            f"{path}: it brings code of its own ({', '.join(code)}), and transformers has no class of its kind. Read that code, "
            "then allow it to run with model.trust_remote_code = true; or take a model whose family transformers has"
        )


def _check_folder(path: str) -> None:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path}: the folder has no config.json, so it is not a model folder")
    try:
        read_json((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'}: not valid JSON: {error}") from error


def own_code(path: str) -> list[str]:
    """The code that a model brings along for parts that transformers has no class for: "config.json names y.Z" each."""
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
    """Raise ModelError if a hub name can be read neither from this machine's cache nor, within `REACH_S`, from the hub.

    transformers tries for a minute, with a line for each try, and does not say what the name is."""
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
    return lines[-1].strip() if lines[0].endswith(":") else lines[0]
