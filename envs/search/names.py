"""Invented names. Every word of a name belongs to one split only, so that the splits share no name."""

from __future__ import annotations

import random

from agentrl.env import content_split

_ONSETS = ("br", "dr", "gr", "st", "tr", *"bcdfghjklmnprstvwz")
_VOWELS = (*"aeiou", "ai", "ea")
_CODAS = ["", "", "l", "n", "r", "s", "th", "nd", "rk", "m"]
_ENDINGS = {
    "town": ["ford", "wick", "mouth", "stad", "by"],
    "river": ["a", "en", "era"],
    "mountain": ["horn", "tor", "spitz"],
    "ship": ["", "is", "one"],
    "": [""],
}
_SUFFIX = {"company": ["Works", "Instruments", "Foundry", "Mills"], "college": ["College", "Academy"]}
_BOOKS = ["The Silence of", "A Winter in", "Letters from", "The Last Days of", "Songs of", "Beyond"]


class Names:
    """Draws unique names of one split."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self._rng, self._split = rng, split
        self._taken: set[str] = set()
        self._families: list[str] = []

    def draw(self, kind: str) -> str:
        """A new name for an entity of that kind."""
        while True:
            name = self._propose(kind)
            if name not in self._taken:
                self._taken.add(name)
                return name

    def _propose(self, kind: str) -> str:
        if kind == "person":
            return f"{self._word('')} {self._family()}"
        if kind in _SUFFIX:
            return f"{self._word('')} {self._rng.choice(_SUFFIX[kind])}"
        if kind == "book":
            return f"{self._rng.choice(_BOOKS)} {self._word('')}"
        return self._word(kind if kind in _ENDINGS else "")

    def _family(self) -> str:
        # Shared family names, so that searching for a surname alone is not enough.
        if self._families and self._rng.random() < 0.3:
            return self._rng.choice(self._families)
        self._families.append(self._word(""))
        return self._families[-1]

    def _word(self, kind: str) -> str:
        rng = self._rng
        while True:
            count = 2 if kind in ("", "ship") else 1
            stem = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))
            word = (stem + rng.choice(_ENDINGS[kind])).capitalize()
            if len(word) >= 4 and content_split(word) == self._split:
                return word
