"""Columns and record of a call whose rows were sent in chunks, one call per chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate

from controller.role_groups.call import Callee, mean_over_ranks, protocol_of
from controller.role_groups.chunks import ChunkedColumn
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import all_of, then
from nccl_transfer.refs.batch import Batch, Column
from rlhf.contract import Method

Made = Sequence[Future[tuple[Batch, CallRecord]]]
"""Futures of the results of the calls, one per chunk, in row order; one future if the rows were not chunked."""


def is_row_wise(method: Method) -> bool:
    """Returns whether a method computes output columns row by row or group by group, so that its rows may be sent in
    several calls. False for an update, which has no output columns."""
    return bool(method.outputs) and method.takes_rows and protocol_of(method).splits


def first_rows(chunks: Sequence[FutureBatch]) -> list[int]:
    """Returns the number of the first row of each chunk among all rows."""
    return [0, *accumulate(chunk.rows for chunk in chunks[:-1])]


def batch_of(
    callee: Callee, method: Method, chunks: Sequence[FutureBatch], made: Made, names: Iterable[str]
) -> FutureBatch:
    """Returns the rows that a call of a method makes, in the chunks that its rows were sent in.

    Args:
        callee: The ranks that were called.
        method: The method.
        chunks: Inputs of the calls of the chunks.
        made: Futures of their results.
        names: Names of the columns.
    """
    sizes = [chunk.rows for chunk in chunks]
    columns: dict[str, Future[Column]] = {}
    for name in names:
        parts: list[Future[Column]] = [then(each, lambda result, name=name: result[0][name]) for each in made]
        whole = then(all_of(parts), partial(callee.codec.joined, name)) if len(parts) > 1 else parts[0]
        columns[name] = ChunkedColumn(whole, parts, sizes) if len(parts) > 1 else whole
    records: list[Future[CallRecord]] = [then(each, lambda result: result[1]) for each in made]
    record = then(all_of(records), partial(_joined, callee, method)) if len(records) > 1 else records[0]
    return FutureBatch(sum(sizes), columns, (record,), chunks[0].step)


def _joined(callee: Callee, method: Method, chunks: Sequence[CallRecord]) -> CallRecord:
    """Returns the record of a call from those of its chunks, in order. Its metrics are those of one call with all
    rows."""
    collected = protocol_of(method).collect(callee.mesh)
    return CallRecord(
        service=callee.name,
        method=method.snake_name,
        started_s=min(chunk.started_s for chunk in chunks),
        ended_s=max(chunk.ended_s for chunk in chunks),
        metrics=mean_over_ranks([chunk.responses[rank] for chunk in chunks for rank in collected]),
        policy_version=chunks[-1].policy_version,
        responses=tuple(response for chunk in chunks for response in chunk.responses),
        parts=tuple(part for chunk in chunks for part in chunk.parts),
        chunks=tuple(chunks),
    )
