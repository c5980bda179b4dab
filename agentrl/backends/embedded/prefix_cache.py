"""Finds a cached sequence that starts with the same tokens: a hash chain over blocks, verified token by token."""

from __future__ import annotations

from agentrl.backends.embedded.kv_cache import Sequence

BLOCK = 16


class PrefixIndex:
    """Maps a block's hash to the sequence that holds (or is about to compute) the tokens up to that block."""

    def __init__(self) -> None:
        self._holders: dict[int, Sequence] = {}

    def find(self, tokens: list[int]) -> tuple[Sequence | None, int, list[int]]:
        """The holder of the longest known prefix of `tokens[:-1]`, that prefix's length in tokens (a
        multiple of BLOCK), and the hashes of all blocks of `tokens`. The last token is never part of the prefix,
        because its logits are needed."""
        blocks: list[int] = []
        chain = 0
        for start in range(0, len(tokens) - BLOCK, BLOCK):
            chain = hash((chain, *tokens[start : start + BLOCK]))
            blocks.append(chain)
        for number in range(len(blocks), 0, -1):
            holder = self._holders.get(blocks[number - 1])
            length = number * BLOCK
            # Hashes may collide, and a wrong hit would attend to another prompt's cache.
            if holder is not None and holder.tokens[:length] == tokens[:length]:
                return holder, length, blocks
        return None, 0, blocks

    def add(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.blocks = blocks
        for block in blocks:
            self._holders.setdefault(block, sequence)

    def grow(self, sequence: Sequence, kept: int) -> None:
        """An episode goes on with another prompt, of whose tokens the first `kept` are those that it had: its turns may be the
        prefix of another episode (`rollout.branch`). Not if its history was rewritten from within its first prompt on."""
        places = kept // BLOCK - len(sequence.blocks)
        if places < 0:
            return
        self._forget(sequence, sequence.later[places:])
        del sequence.later[places:]
        chain = (sequence.later or sequence.blocks or [0])[-1]
        for start in range((len(sequence.blocks) + len(sequence.later)) * BLOCK, len(sequence.tokens) - BLOCK, BLOCK):
            chain = hash((chain, *sequence.tokens[start : start + BLOCK]))
            sequence.later.append(chain)
            self._holders.setdefault(chain, sequence)

    def remove(self, sequence: Sequence) -> None:
        self._forget(sequence, [*sequence.blocks, *sequence.later])
        sequence.blocks, sequence.later = [], []

    def _forget(self, sequence: Sequence, blocks: list[int]) -> None:
        for block in blocks:
            if self._holders.get(block) is sequence:
                del self._holders[block]

    def clear(self) -> None:
        self._holders.clear()


def common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    # Bisection: comparing list slices runs in C, and contexts have tens of thousands of tokens.
    low, high = 0, shorter
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
