"""A compact BM25 index over short texts.

Okapi BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework", equation 3.15) with the
non-negative idf ln(1 + (N - df + 0.5) / (df + 0.5)).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"\w+")
_STOP = frozenset(_WORD.findall("a an and at by for from in is it of on the to was were which with"))


def words(text: str) -> list[str]:
    """Return the lower-case words of a text without stop words."""
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP]


class Bm25:
    """Rank N `texts` for a query. Read-only once built, so episodes may share it."""

    def __init__(self, texts: Sequence[str]) -> None:
        k1, b = 1.2, 0.75
        counts = [Counter(words(text)) for text in texts]
        lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
        self._size = len(texts)
        norm = k1 * (1 - b + b * lengths / max(float(lengths.mean()), 1.0)) if len(texts) else lengths
        found: dict[str, tuple[list[int], list[int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                documents, frequencies = found.setdefault(word, ([], []))
                documents.append(number)
                frequencies.append(times)
        self._postings: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}
        for word, (documents, frequencies) in found.items():
            where, often = np.array(documents), np.array(frequencies, dtype=np.float64)
            idf = math.log(1 + (self._size - len(documents) + 0.5) / (len(documents) + 0.5))
            self._postings[word] = where, idf * often * (k1 + 1) / (often + norm[where])

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """Return at most `k` pairs (text number, score > 0), best first; ties in the order of the texts."""
        scores = np.zeros(self._size)
        for word in words(query):
            if word in self._postings:
                where, gains = self._postings[word]
                scores[where] += gains
        order = np.argsort(-scores, kind="stable")[:k]
        return [(int(number), float(scores[number])) for number in order if scores[number] > 0]
