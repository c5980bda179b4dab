"""A named grid of ranks, for example {"dp": 4, "tp": 2}: the last axis varies fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.errors import DispatchError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names and sizes; rank = row-major index over the axes."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int] | None, world_size: int) -> Mesh:
        """The mesh of `sizes`, by default one axis "dp" over all ranks.

        Raises DispatchError if the product of the sizes is not `world_size`.
        """
        mesh = cls(tuple((sizes or {"dp": world_size}).items()))
        if mesh.world_size != world_size or any(size < 1 for _, size in mesh.axes):
            raise DispatchError(f"mesh {dict(mesh.axes)} does not hold exactly {world_size} ranks")
        return mesh

    @property
    def world_size(self) -> int:
        product = 1
        for _, size in self.axes:
            product *= size
        return product

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`. Raises DispatchError for an unknown axis."""
        for name, size in self.axes:
            if name == axis:
                return size
        raise DispatchError(f"no mesh axis {axis!r}; this group has {[name for name, _ in self.axes]}")

    def index(self, rank: int, axis: str) -> int:
        """The coordinate of `rank` along `axis`."""
        self.size(axis)
        return self.coordinates(rank)[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of `rank`, by axis."""
        out: dict[str, int] = {}
        for name, size in reversed(self.axes):
            out[name] = rank % size
            rank //= size
        return {name: out[name] for name, _ in self.axes}

    def sources(self, axis: str) -> list[int]:
        """One rank for each coordinate of `axis`: the one whose other coordinates are all 0."""
        self.size(axis)
        ranks: list[int] = []
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            if all(value == 0 for name, value in at.items() if name != axis):
                ranks.append(rank)
        return ranks
