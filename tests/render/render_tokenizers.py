"""Tokenizers that the tests build themselves."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Of ChatML with Hermes' tool tags."""

CORPUS = [
    '<tool_call>\n{"name": "get", "arguments": {"key": "k3"}}\n</tool_call>',
    "Tools: get(key) set(key, value) list() add(a, b)",
    "system user assistant tool store 7 under k3, then report the total",
] * 4


def build_tokenizer(special_tokens, template, *, bos=None, eos="<|im_end|>", alphabet=()):
    """A byte-level BPE that knows every text, or that of its `alphabet`; `special_tokens` become added tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[A-Za-z_]+|[0-9]|[^A-Za-z_0-9]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(alphabet or pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


_METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
# kind: (model, normalizer, pre-tokenizer) of the sentencepiece tokenizers that transformers converts
SENTENCEPIECE = {
    "prepend": ("bpe", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _REPLACE]}, None),
    "first": ("bpe", None, {**_METASPACE, "prepend_scheme": "first"}),
    "always": ("bpe", None, {**_METASPACE, "prepend_scheme": "always"}),
    "never": ("bpe", _REPLACE, None),
    "unigram": ("unigram", None, {**_METASPACE, "prepend_scheme": "always", "split": True}),
}  # fmt: skip


def build_sentencepiece(kind, special_tokens, template, *, bos=None, eos="<|im_end|>"):
    """Spaces as `▁`, unknown characters as bytes, a prefix space if `kind` has one. Like sentencepiece's own,
    the model's vocabulary holds the control tokens too."""
    model, normalizer, pre_tokenizer = SENTENCEPIECE[kind]
    special = ["<unk>", *(token for token in special_tokens if token != "<unk>")]
    settings = {"vocab_size": 700, "special_tokens": special, "show_progress": False}
    if model == "bpe":
        backend, trainer = Tokenizer(models.BPE(unk_token="<unk>")), trainers.BpeTrainer(**settings)
    else:
        backend, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(unk_token="<unk>", **settings)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator([*CORPUS, '<>/|[]_{}",:;'], trainer)
    spec = json.loads(backend.to_str())
    taken = len(spec["model"]["vocab"])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    if model == "bpe":
        spec["model"] |= {"byte_fallback": True, "fuse_unk": True}
        spec["model"]["vocab"] |= {piece: taken + number for number, piece in enumerate(fallback)}
    else:
        spec["model"] |= {"byte_fallback": True}
        spec["model"]["vocab"] += [[piece, -20.0] for piece in fallback]
    spec["normalizer"], spec["pre_tokenizer"] = normalizer, pre_tokenizer
    spec["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}  # fmt: skip
    backend = Tokenizer.from_str(json.dumps(spec))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer
