"""Columns in chunks of consecutive rows, each with a future of its own, so that calls on the first rows of a batch
start while later ones are generated (FlexRLHF, Xiao et al. 2023, arXiv 2312.11819)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Self

import numpy as np

from controller.role_groups.futures import Promise, all_of, lateness_of, pass_on, then
from nccl_transfer.refs.batch import Column


class ChunkedColumn(Promise[Column]):
    """Future of a column whose chunks of consecutive rows have futures of their own.

    Args:
        whole: Future of the whole column.
        chunks: See Attributes.
        sizes: See Attributes.

    Attributes:
        chunks: Future of each chunk, in order.
        sizes: Number of rows of each chunk.
    """

    def __init__(self, whole: Future[Column], chunks: Sequence[Future[Column]], sizes: Sequence[int]) -> None:
        super().__init__(lateness_of([whole]))
        self.chunks, self.sizes = tuple(chunks), tuple(sizes)
        pass_on(whole, self)

    @classmethod
    def cut(cls, column: Future[Column], sizes: Sequence[int]) -> Self:
        """Returns a column in chunks of these sizes; one that is in others, or in none, is cut when all of it is
        there."""
        if isinstance(column, cls) and column.sizes == tuple(sizes):
            return column
        ends = np.cumsum(sizes).tolist()
        rows = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return cls(column, [then(column, lambda c, r=each: c.take(r)) for each in rows], sizes)


def sizes_of(columns: Iterable[Future[Column]]) -> tuple[int, ...]:
    """Returns the sizes of the chunks that columns are in; none where no column is in chunks, or two are in different
    ones."""
    found = {column.sizes for column in columns if isinstance(column, ChunkedColumn)}
    return found.pop() if len(found) == 1 else ()


def made_of(
    columns: Sequence[Future[Column]], function: Callable[[Sequence[Column]], Column]
) -> Future[Column]:
    """Returns a future of `function` of columns, in the chunks that they are in. It computes each row by itself, and is
    called for each chunk and for all rows; where it fails for a chunk, the error is that for all rows."""
    whole = then(all_of(columns), function)
    sizes = sizes_of(columns)
    if len(sizes) < 2:
        return whole
    cut = [ChunkedColumn.cut(column, sizes).chunks for column in columns]
    made = [then(all_of(chunks), function) for chunks in zip(*cut, strict=True)]
    return ChunkedColumn(whole, [_or_else(chunk, whole) for chunk in made], sizes)


def _or_else(future: Future[Column], other: Future[Column]) -> Future[Column]:
    """Returns a future of the result of `future`, or of that of `other` where it fails."""
    found: Promise[Column] = Promise(lateness_of([future]))
    future.add_done_callback(lambda done: pass_on(other if done.exception() else done, found))
    return found


def taken(column: Future[Column], rows: np.ndarray) -> Future[Column]:
    """Returns a future of the rows with indices `rows` [n] int64, in this order. They stay in the chunks of `column`
    if they ascend; chunks without a row are left out."""
    whole = then(column, lambda c: c.take(rows))
    if not isinstance(column, ChunkedColumn) or (np.diff(rows) < 0).any():
        return whole
    starts = np.cumsum((0, *column.sizes[:-1]))
    split = np.split(rows, np.searchsorted(rows, starts[1:]))
    found = [(chunk, each - start) for chunk, each, start in zip(column.chunks, split, starts, strict=True)]
    kept = [(chunk, each) for chunk, each in found if len(each)]
    if len(kept) < 2:
        return whole
    chunks = [then(chunk, lambda c, r=each: c.take(r)) for chunk, each in kept]
    return ChunkedColumn(whole, chunks, [len(each) for _, each in kept])


def chunk_sizes(group: np.ndarray, chunks: int) -> list[int]:
    """Cuts rows into at most `chunks` chunks of about equal size, each of which has all rows of its groups. Returns the
    number of rows of each chunk.

    Args:
        group: Number of each row's group [rows].
        chunks: Number of chunks. There are fewer where groups do not allow as many.
    """
    rows = len(group)
    _, member = np.unique(group, return_inverse=True)
    last = np.zeros(rows, np.int64)
    np.maximum.at(last, member, np.arange(rows))
    # No group goes on after such a row.
    ends = np.flatnonzero(np.maximum.accumulate(last[member]) == np.arange(rows)) + 1
    wanted = np.arange(1, chunks) * rows / chunks
    cuts = {int(ends[np.argmin(np.abs(ends - each))]) for each in wanted} | {rows} if rows else {0}
    return np.diff([0, *sorted(cuts)]).tolist()
