"""The order in which rows are drawn: a function of the seed and of a position, which consists of a few integers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhf.errors import ConfigError


@dataclass(frozen=True)
class Position:
    """Position of a loader in one source.

    Attributes:
        epoch: Number of finished passes over all rows of the source.
        index: Number of rows read in the current pass.
        left_out: Number of rows that were read and left out, in all passes.
    """

    epoch: int = 0
    index: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class State:
    """State of a loader, which consists of integers only.

    Attributes:
        seed: Seed of the orders.
        sizes: Number of rows of each source.
        positions: Position in each source.
    """

    seed: int
    sizes: tuple[int, ...]
    positions: tuple[Position, ...]


class NothingKept(ConfigError):
    """Raised where every row of a source is left out, so that none can be drawn."""


MAX_LOOKAHEAD = 256
"""Maximum number of rows of a source passed to `Keeps` in one call while none is kept; the number doubles from call
to call."""

Keeps = Callable[[np.ndarray], np.ndarray]
"""Function that takes numbers of rows [n] int64 and returns whether each of them may be drawn [n] bool."""


class Loader:
    """Draws rows of several sources in proportion to their weights. Each source is read pass after pass, every pass
    in an order of its own that depends on the seed and the number of the pass, or in that of the rows.

    Args:
        sizes: Number of rows of each source. Numbers of rows continue from source to source.
        weights: Weight of each source, above 0.
        seed: Seed of the orders.
        name: Name that enters the orders beside the seed: loaders with different names draw different orders.
        shuffles: Whether passes are shuffled. False: each is in the order of the rows.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        name: str = "data",
        *,
        shuffles: bool = True,
    ) -> None:
        self._weights = np.asarray(weights, np.float64)
        self._first = np.cumsum([0, *sizes])
        self._name, self._shuffles = name, shuffles
        self._state = State(seed, tuple(sizes), tuple(Position() for _ in sizes))

    @property
    def state(self) -> State:
        """Current position in all sources. A loader that `restore` sets to it draws the same rows from there on."""
        return self._state

    def take(self, count: int, keeps: Keeps | None = None) -> np.ndarray:
        """Draws the next rows: returns their numbers [count] int64 and advances the state.

        Args:
            count: Number of rows.
            keeps: Selects the rows that may be drawn; the next rows of the same source replace the others. Default:
                all rows may be drawn.

        Raises:
            NothingKept: A source has no row that may be drawn.
        """
        positions = self._state.positions
        dealt = [
            p.epoch * size + p.index - p.left_out
            for p, size in zip(positions, self._state.sizes, strict=True)
        ]
        rows = np.empty(count, np.int64)
        owners = in_proportion(self._weights, dealt, count)
        after = []
        for source, position in enumerate(positions):
            mine = np.flatnonzero(owners == source)
            rows[mine], position = self._take_from(source, position, len(mine), keeps)
            after.append(position)
        self._state = replace(self._state, positions=tuple(after))
        return rows

    def restore(self, state: State) -> None:
        """Sets the loader to a state that a loader of the same data and seed had.

        Raises:
            ConfigError: The state has a different seed, or does not fit the sizes of the sources.
        """
        if state.seed != self._state.seed:
            raise ConfigError(
                f"run.seed: {self._state.seed} draws other rows than {state.seed}, the seed of the state to go on from"
            )
        fits = state.sizes == self._state.sizes and len(state.positions) == len(state.sizes)
        fits = fits and all(
            0 <= each.index < size
            and each.epoch >= 0
            and 0 <= each.left_out <= each.epoch * size + each.index
            for each, size in zip(state.positions, state.sizes, strict=True)
        )
        if not fits:
            raise ConfigError(f"data: {state} is not a valid position in sources of {self._state.sizes} rows")
        self._state = state

    def _take_from(
        self, source: int, position: Position, count: int, keeps: Keeps | None
    ) -> tuple[np.ndarray, Position]:
        """Returns the numbers of the next `count` rows of a source [count] int64, and the position after them."""
        size, first = self._state.sizes[source], self._first[source]
        read, left_out, in_vain = position.epoch * size + position.index, position.left_out, 0
        parts, missing, chunk = [np.empty(0, np.int64)], count, count
        while missing > 0:
            places = read + np.arange(chunk)
            rows = first + (shuffled(places, size, self._key(source)) if self._shuffles else places % size)
            kept = np.arange(chunk) if keeps is None else np.flatnonzero(keeps(rows))
            used = kept[:missing]
            # Rows behind the last one that is used are left for the next call.
            passed = int(used[-1]) + 1 if len(used) == missing else chunk
            read, left_out, missing = read + passed, left_out + passed - len(used), missing - len(used)
            in_vain = 0 if len(used) else in_vain + chunk
            if in_vain >= 2 * size:
                raise NothingKept(f"data: every row of source {source + 1} is left out")
            parts.append(rows[used])
            chunk = missing if len(used) else min(2 * chunk, max(missing, MAX_LOOKAHEAD))
        return np.concatenate(parts), Position(*divmod(read, size), left_out)

    def _key(self, source: int) -> str:
        key = f"{self._name}/{self._state.seed}"
        return f"{key}/{source}" if source else key


def in_proportion(weights: np.ndarray, before: Sequence[int], count: int) -> np.ndarray:
    """Returns the index of the source of each of the next rows [count] int64.

    Each row comes from the source that is furthest behind its share: the one with the smallest (rows + 1/2) / weight,
    as Webster's method assigns seats. So every stretch of rows is in proportion, to within about one row.

    Args:
        weights: Weight of each source, above 0.
        before: Number of rows drawn from each source so far.
        count: Number of rows.
    """
    given = np.asarray(before, np.float64)
    owners = np.empty(count, np.int64)
    for place in range(count):
        owners[place] = np.argmin((given + 0.5) / weights)
        given[owners[place]] += 1
    return owners


def shuffled(places: np.ndarray, size: int, key: str) -> np.ndarray:
    """Returns the rows at given places of a sequence of shuffled passes over `size` rows. The order of a pass depends
    on `key` and the number of the pass.

    Args:
        places: Places in the sequence, from 0 [n] int64.
        size: Number of rows of a pass.
        key: Seed of the orders, as text.

    Returns:
        Numbers of the rows [n] int64. Each is computed by itself, so that the cost does not depend on `size`.
    """
    passes, indices = np.divmod(np.asarray(places, np.int64), size)
    rows = np.empty(len(indices), np.int64)
    for number in np.unique(passes):
        mine = passes == number
        rows[mine] = permuted(indices[mine], size, f"{key}/{number}")
    return rows


ROUNDS = 90
"""Number of rounds of the swap-or-not shuffle; Ethereum uses the same number to shuffle up to 2^40 validators."""


def permuted(indices: np.ndarray, size: int, key: str) -> np.ndarray:
    """Applies a pseudorandom permutation of range(size) to indices: the swap-or-not shuffle (Hoang, Morris and
    Rogaway 2012, "An Enciphering Scheme Based on a Card Shuffle").

    Each round pairs index x with (pivot - x) mod size, and swaps the pair where a pseudorandom bit of the larger one
    is 1.

    Args:
        indices: Indices from 0 to size - 1 [n] int64.
        size: Size of the permutation.
        key: Text that selects the permutation.

    Returns:
        Permuted indices [n] int64.
    """
    digest = hashlib.sha256(key.encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    pivots = generator.integers(size, size=ROUNDS)
    salts = generator.integers(2**64, size=ROUNDS, dtype=np.uint64)
    for pivot, salt in zip(pivots, salts, strict=True):
        partners = (pivot - indices) % size
        indices = np.where(_bits(np.maximum(indices, partners), salt), partners, indices)
    return indices


def _bits(numbers: np.ndarray, salt: np.uint64) -> np.ndarray:
    """Returns one pseudorandom bit for each number [n] bool: the lowest bit of its hash with `salt` by the finalizer
    of SplitMix64 (Steele et al. 2014)."""
    mixed = numbers.astype(np.uint64) ^ salt
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ mixed >> np.uint64(31)) & np.uint64(1) == 1
