"""Assigns rows to mini-batches by their numbers and a random key, independently of the number of ranks."""

from __future__ import annotations

import hashlib

import numpy as np

from rlhf.errors import InvalidRequest

MAX_STEPS = 1 << 16
"""Most optimizer steps of one update: all mini-batches are planned before the first step."""


def check_schedule(epochs: int, mini_batches: int) -> None:
    """Raises InvalidRequest if the optimizer steps of an update, epochs times mini-batches, are not from 1 to
    `MAX_STEPS`."""
    if not 1 <= epochs * mini_batches <= MAX_STEPS:
        raise InvalidRequest(
            f"epochs and mini_batches must be at least 1, and {epochs} times {mini_batches} at most {MAX_STEPS}"
        )


def deal(numbers: np.ndarray, parts: int, key: tuple[int, ...]) -> list[np.ndarray]:
    """Deals this rank's rows out to `parts` mini-batches.

    The rows of the whole batch are taken in blocks of `parts` consecutive row numbers. Each block gives one row to
    every mini-batch, in an order drawn from `key`. So each mini-batch consists of the same rows however rows are
    distributed over ranks, and a rank that has whole blocks has equally many rows in each mini-batch.

    Args:
        numbers: Number of each of this rank's rows in the whole batch, [rows] int64.
        parts: Number of mini-batches.
        key: Key of the shuffle, the same on every rank: (seed, step, call, epoch).

    Returns:
        For each mini-batch, this rank's rows as ascending indices into `numbers`.
    """
    if parts == 1 or not len(numbers):
        return [np.arange(len(numbers))] + [np.arange(0)] * (parts - 1)
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    blocks = int(numbers.max()) // parts + 1
    assignment = np.argsort(generator.random((blocks, parts)), axis=1, kind="stable").reshape(-1)
    return [np.flatnonzero(assignment[numbers] == part) for part in range(parts)]
