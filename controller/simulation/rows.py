"""The rows that simulated ranks make: columns by reference without values, with lengths drawn by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged, encode_texts
from nccl_transfer.refs.dtypes import ELEMENT_BYTES, TEXT
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.refs.wire import from_proto, to_proto
from rlhf.v1 import common_pb2

Shares = Sequence[tuple[int, float]]
"""Distribution of lengths: numbers of tokens with their shares, which add up to 1."""
TEXTS = ("response", "reward_errors")
"""Columns of texts, which are in the response itself."""
PER_ROW = ("rewards", "chosen_scores", "rejected_scores", "pretrain_loss")
"""Columns of one number per row."""


def drawn_lengths(shares: Shares, numbers: np.ndarray, seed: tuple[int, ...]) -> np.ndarray:
    """Returns a length for each row [rows] int64, drawn by seed and number of the row, whatever the other rows are.

    Args:
        shares: Distribution of lengths.
        numbers: Numbers of the rows in the batch of their call [rows] int64.
        seed: Seed of the draw.
    """
    tokens, weights = zip(*shares, strict=True)
    if len(tokens) == 1 or not len(numbers):
        return np.full(len(numbers), tokens[0], np.int64)
    places = np.random.default_rng(seed).random(int(numbers.max()) + 1)[numbers]
    return np.asarray(tokens, np.int64)[np.searchsorted(np.cumsum(weights)[:-1], places, side="right")]


def lengths_in(batch: common_pb2.Batch, name: str) -> np.ndarray | None:
    """Returns the lengths of a jagged column of a message [rows] int64; None where it is not there."""
    for column in batch.columns:
        if column.name == name and column.jagged:
            source = batch.columns[column.lengths_of - 1] if column.lengths_of else column
            return np.fromiter(source.lengths, np.int64, len(source.lengths))
    return None


def made_column(name: str, lengths: np.ndarray, holder: Endpoint, number: int) -> Column:
    """Returns an output column of a method.

    Args:
        name: Name of the column.
        lengths: Entries of each row [rows] int64; for columns of one number per row only their count matters.
        holder: Endpoint of the rank that has the rows.
        number: Number of the shard on this rank.
    """
    if name in TEXTS:
        return LocalColumn(["x"] * len(lengths))
    dtype = "int32" if name.endswith("_ids") else "float32"
    is_jagged = name not in PER_ROW
    elements = int(lengths.sum()) if is_jagged else len(lengths)
    shard = Shard(holder, number, 64, elements * ELEMENT_BYTES[dtype])
    return RemoteColumn.of_shard(dtype, (), lengths if is_jagged else len(lengths), shard)


def stored(batch: common_pb2.Batch, holder: Endpoint, first: int) -> common_pb2.Batch:
    """Returns the rows of a Put as references to a rank, with shards from number `first` on."""
    columns: dict[str, Column] = {}
    for number, (name, column) in enumerate(from_proto(batch).columns.items(), start=first):
        if not isinstance(column, LocalColumn):
            columns[name] = column
            continue
        is_text = isinstance(column.values, list)
        values: Any = encode_texts(column.values) if isinstance(column.values, list) else column.values
        array = values.values if isinstance(values, Jagged) else values
        rows = values.lengths if isinstance(values, Jagged) else len(values)
        dtype = TEXT if is_text else str(array.dtype)
        shard = Shard(holder, number, 64, array.nbytes)
        columns[name] = RemoteColumn.of_shard(dtype, array.shape[1:], rows, shard)
    return to_proto(Batch(batch.rows, columns))


def made_up_values(column: Column) -> Any:
    """Returns values of a column for the controller to compute with: those that it holds, or numbers from -1 to 0 that
    differ from entry to entry."""
    if isinstance(column, LocalColumn):
        return column.values
    lengths = column.lengths
    count = column.rows if lengths is None else int(lengths.sum())
    values = (np.arange(count, dtype=np.float32) % 7) / -7
    return values if lengths is None else Jagged(values, lengths)
