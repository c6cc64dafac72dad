"""Rows, and fetches of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.dtypes import CARRIERS, ITEM_BYTES
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Shard, ShardRun
from nccl_transfer.rows import FetchedRows


def fetch(fetcher: Fetcher, batch: Batch, within_s: float = 20.0) -> FetchedRows:
    """Fetches a batch within `within_s` seconds."""
    return fetcher.fetch(batch, time.monotonic() + within_s)


def fetch_array(fetcher: Fetcher, batch: Batch) -> np.ndarray:
    """Fetches a batch; returns its column "x", which has rows of one shape."""
    got = fetch(fetcher, batch)["x"]
    assert isinstance(got, np.ndarray)
    return got


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns random bits, all of them where the type has no invalid ones: NaNs must arrive too."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    nbytes = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return np.frombuffer(rng.bytes(nbytes), CARRIERS[dtype]).reshape(shape)


def assert_same_bits(got: object, expected: np.ndarray) -> None:
    """Asserts that an array has the type, shape and bits of another."""
    assert isinstance(got, np.ndarray)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Blocks until `condition()` is true, at most `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def moved_to(batch: Batch, **changes: object) -> Batch:
    """Returns the same rows by reference, with changed fields of their endpoint."""

    def move(column: RemoteColumn) -> RemoteColumn:
        assert isinstance(column.place, ShardRun)
        shard = column.place.shard
        moved = replace(shard, endpoint=replace(shard.endpoint, **changes))
        return replace(column, place=column.place._replace(shard=moved))

    return Batch(batch.rows, {n: move(c) for n, c in batch.columns.items() if isinstance(c, RemoteColumn)})


def shard_of(batch: Batch) -> Shard:
    """Returns the first shard of column "x" of a batch by reference."""
    column = batch["x"]
    assert isinstance(column, RemoteColumn)
    return column.shards[0]
