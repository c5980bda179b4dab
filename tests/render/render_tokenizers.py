"""Tokenizers that the tests build themselves."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    '<tool_call>\n{"name": "get", "arguments": {"key": "k3"}}\n</tool_call>',
    "Tools: get(key) set(key, value) list() add(a, b)",
    "system user assistant tool store 7 under k3, then report the total",
] * 4


def build_tokenizer(special_tokens, template, *, bos=None, eos="<|im_end|>"):
    """A byte-level BPE that knows every text; `special_tokens` become added tokens."""
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
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer
