"""A reward model to begin with: a causal language model with a scalar head of zeros in place of its output embedding."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.config.schema import ModelConfig
from agentrl.errors import ModelError
from agentrl.train.pretrained import load_model_config, load_tokenizer
from agentrl.train.seal import MANIFEST, check_model, seal


def is_classifier(path: str, model: ModelConfig) -> bool:
    """Whether the model at `path` is a sequence classifier already."""
    config = load_model_config(path, model.trust_remote_code)
    return any("SequenceClassification" in kind for kind in config.architectures or [])


def classifier_of(path: str, folder: Path, model: ModelConfig) -> str:
    """The sequence classifier to train: the model at `path` if it is one, else one that is made of it in `folder`, once. The
    model is loaded as a whole, in this process. Raises ModelError if transformers has no classifier of its family."""
    if is_classifier(path, model):
        return path
    if os.path.lexists(folder / MANIFEST):
        check_model(folder)
        return str(folder)
    import torch
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(path, model.trust_remote_code, model.chat_template)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    options = {"num_labels": 1, "pad_token_id": pad, "dtype": torch.float32, "trust_remote_code": model.trust_remote_code}
    try:
        with _without_report():
            made = AutoModelForSequenceClassification.from_pretrained(path, **options)
    except (OSError, ValueError) as problem:
        raise ModelError(
            f'model.path = {path}: data.loss = "reward": no sequence classifier can be made of it: {problem}'
        ) from None
    if not isinstance(getattr(made, "score", None), torch.nn.Linear):
        raise ModelError(
            f'model.path = {path}: data.loss = "reward" needs a family whose classifier has a linear head `score`, and '
            f"{type(made).__name__} has none"
        )
    torch.nn.init.zeros_(made.score.weight)  # every episode begins with score 0
    shutil.rmtree(folder, ignore_errors=True)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seal(folder, 0)
    return str(folder)


@contextmanager
def _without_report() -> Iterator[None]:
    """Inside, transformers does not say that the head is missing, and to be trained: it is made here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
