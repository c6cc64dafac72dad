"""A call whose rows were sent in chunks, each by a call of its own: its columns and its record."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from controller.role_groups.call import Callee, mean_over_ranks, protocol_of
from controller.role_groups.chunks import ChunkedColumn
from controller.role_groups.dataflow import CallRecord
from controller.role_groups.futures import all_of, then
from nccl_transfer.refs.batch import Batch, Column
from rlhf.contract import Method

Made = Sequence[Future[tuple[Batch, CallRecord]]]
"""Futures of the results of the calls of the chunks, in order; one where all rows are in one call."""


def is_row_wise(method: Method) -> bool:
    """Returns whether a method computes columns of its rows, each row by itself or with its group, on the rank that its
    protocol sends it to; so that rows may be sent in several calls. An update is not: it makes no columns."""
    return bool(method.outputs) and method.takes_rows and protocol_of(method).splits


def column_of(callee: Callee, made: Made, sizes: Sequence[int], name: str) -> Future[Column]:
    """Returns column `name` of a call, in its chunks, which have these sizes."""
    chunks: list[Future[Column]] = [then(each, lambda result: result[0][name]) for each in made]
    if len(chunks) == 1:
        return chunks[0]
    return ChunkedColumn(then(all_of(chunks), partial(callee.codec.joined, name)), chunks, sizes)


def record_of(callee: Callee, made: Made, method: Method) -> Future[CallRecord]:
    """Returns the record of a call of a method."""
    chunks: list[Future[CallRecord]] = [then(each, lambda result: result[1]) for each in made]
    return chunks[0] if len(chunks) == 1 else then(all_of(chunks), partial(_joined, callee, method))


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
