"""Assigns rows to mini-batches: a function of row numbers and a key, independent of the number of ranks."""

from __future__ import annotations

import hashlib

import numpy as np

from rlhf.errors import InvalidRequest

MAX_STEPS = 1 << 16
"""Most optimizer steps of one update: all mini-batches are planned before the first step."""


def check_schedule(epochs: int, mini_batches: int) -> None:
    """Raises InvalidRequest where an update has no optimizer steps, or more than `MAX_STEPS`."""
    if not 1 <= epochs * mini_batches <= MAX_STEPS:
        raise InvalidRequest(
            f"epochs and mini_batches must be at least 1, and {epochs} times {mini_batches} at most {MAX_STEPS}"
        )


def deal(numbers: np.ndarray, parts: int, key: tuple[int, ...]) -> list[np.ndarray]:
    """This rank's rows of each of `parts` mini-batches.

    Row numbers are taken in blocks of `parts`; each block gives one row to every mini-batch, in an order drawn
    from `key`. So a mini-batch has the same rows however rows are distributed over ranks, and a rank with whole blocks
    has the same number of rows of each.

    Args:
        numbers: Numbers of the rank's rows in the whole batch, [rows] int64.
        parts: Number of mini-batches.
        key: Key of the shuffle: (seed, step, call, epoch).

    Returns:
        Indices into `numbers` for each mini-batch, in row order.
    """
    if parts == 1 or not len(numbers):
        return [np.arange(len(numbers))] + [np.arange(0)] * (parts - 1)
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    blocks = int(numbers.max()) // parts + 1
    assignment = np.argsort(generator.random((blocks, parts)), axis=1, kind="stable").reshape(-1)
    return [np.flatnonzero(assignment[numbers] == part) for part in range(parts)]
