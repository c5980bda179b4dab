"""The packaged tokenizer: byte-level BPE with about 400 entries and ChatML special tokens.

The file `assets/tokenizer.json` is frozen: training BPE again may give another merge list, and ids must
mean the same in every run. It was made from `assets/tokenizer_corpus.jsonl` by
`python -m agentrl.train.tokenizer CORPUS OUT`; run that again only for a new tokenizer with a new name.

Text is first split into words, single digits and the rest, and merges never cross a split: so a word in a
prompt and the same word inside a JSON call have the same tokens, and a small model can learn to copy it.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from agentrl.render.chat_templates import set_chat_template
from agentrl.render.chatml import CHATML_TEMPLATE
from agentrl.shown import say

PAD = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    PAD,
    "<|im_start|>",
    END_OF_TURN,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""Of a model that takes images, behind the vocabulary, in the order of their ids."""
VOCABULARY = 400
PRE_SPLIT = r"[A-Za-z_]+|[0-9]|[^A-Za-z_0-9]+"


def train_bpe(lines: list[str], entries: int = VOCABULARY) -> Any:
    """A `tokenizers.Tokenizer` trained on `lines`, with at most `entries` entries, special tokens first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def packaged_tokenizer(context: int, vision: bool = False, chat_template: str | None = None) -> Any:
    """The frozen tokenizer as a `PreTrainedTokenizerFast` with its chat template, or with `chat_template`
    (`model.chat_template`); with `vision` it has `VISION_TOKENS` too.

    All seven control tokens are special: plain text that spells one is encoded as ordinary tokens with
    `split_special_tokens=True`, so a tool's output cannot forge a turn.
    """
    from transformers import PreTrainedTokenizerFast

    assets = files("agentrl.train") / "assets"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_from_text((assets / "tokenizer.json").read_text(encoding="utf-8")),
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=[
            *(token for token in SPECIAL_TOKENS if token not in (PAD, END_OF_TURN)),
            *(VISION_TOKENS if vision else ()),
        ],
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


def _from_text(text: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)


def main(corpus: str, out: str) -> int:
    lines = Path(corpus).read_text(encoding="utf-8").splitlines()
    tokenizer = train_bpe([json.loads(line) for line in lines])
    tokenizer.save(out, pretty=True)
    say(f"{tokenizer.get_vocab_size()} entries -> {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
