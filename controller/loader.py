"""Which rows a step trains on: a function of the seed and a position that is a few plain numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf.errors import ConfigError


@dataclass(frozen=True)
class Position:
    """How far a source has been read.

    Attributes:
        epoch: Passes over all of its rows that are over.
        index: Rows of the pass under way that are over.
    """

    epoch: int = 0
    index: int = 0


class Loader:
    """Deals out rows, pass after pass over each source in an order drawn from (seed, pass), the sources in proportion
    to their weights.

    Args:
        sizes: Rows of each source. They are numbered on from source to source.
        weights: Share of each source, above 0.
        seed: Of the orders.

    Attributes:
        position: Of each source. Put an earlier one back, and the same rows come again.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self._sizes = tuple(sizes)
        self._weights = np.asarray(weights, np.float64)
        self._first = np.cumsum([0, *sizes])
        self._seed = seed
        self.position = tuple(Position() for _ in sizes)

    def take(self, count: int) -> np.ndarray:
        """The next rows [count] int64."""
        read = [p.epoch * size + p.index for p, size in zip(self.position, self._sizes, strict=True)]
        rows = np.empty(count, np.int64)
        owners = in_proportion(self._weights, read, count)
        for source, size in enumerate(self._sizes):
            mine = np.flatnonzero(owners == source)
            places = read[source] + np.arange(len(mine))
            rows[mine] = self._first[source] + shuffled(places, size, self._key(source))
            read[source] += len(mine)
        self.position = tuple(
            Position(*divmod(number, size)) for number, size in zip(read, self._sizes, strict=True)
        )
        return rows

    def restore(self, position: Sequence[Position]) -> None:
        """Goes to a position that a loader of the same data had.

        Raises:
            ConfigError: It is one of other data.
        """
        fits = len(position) == len(self._sizes) and all(
            0 <= each.index < size and each.epoch >= 0
            for each, size in zip(position, self._sizes, strict=True)
        )
        if not fits:
            raise ConfigError(f"data: {position} is no position in sources of {self._sizes} rows")
        self.position = tuple(position)

    def _key(self, source: int) -> str:
        return f"data/{self._seed}/{source}" if source else f"data/{self._seed}"


def in_proportion(weights: np.ndarray, before: Sequence[int], count: int) -> np.ndarray:
    """Which source each of the next rows comes from [count] int64.

    Row by row, the source that is furthest behind its share: the one with the smallest (rows + 1/2) / weight, as
    Webster's method deals out seats. So every stretch of rows is in proportion, to within a row or so, and where
    it begins does not matter.

    Args:
        weights: Share of each source, above 0.
        before: Rows that each source has given already.
    """
    given = np.asarray(before, np.float64)
    owners = np.empty(count, np.int64)
    for place in range(count):
        owners[place] = np.argmin((given + 0.5) / weights)
        given[owners[place]] += 1
    return owners


def shuffled(places: np.ndarray, size: int, key: str) -> np.ndarray:
    """Rows at these places, from 0, of pass after pass over `size` rows, each in an order drawn from (key, pass)."""
    passes = {int(p): _order(size, f"{key}/{p}") for p in np.unique(places // size)}
    return np.asarray([passes[int(place) // size][place % size] for place in places], np.int64)


def _order(size: int, key: str) -> np.ndarray:
    digest = hashlib.sha256(key.encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.permutation(size)
