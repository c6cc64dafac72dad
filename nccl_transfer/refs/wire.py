"""Batches to and from their protobuf form."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.checksums import num_blocks
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import ELEMENT_BYTES, TEXT
from nccl_transfer.refs.plans import Relay
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.refs.wire_ranks import endpoint_from_proto, endpoint_to_proto
from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2 as pb

ELEMENT_TYPES: dict[str, Any] = {
    name: pb.ElementType.Value(f"ELEMENT_TYPE_{name.upper()}") for name in ELEMENT_BYTES
}
"""rlhf.v1.ElementType by dtype name."""

MAX_ROWS = 1 << 24
"""Most rows of a batch, of a part of it as of the whole batch of a call: row numbers are below it."""
MAX_RANK = 8
"""Most dimensions of a row."""

DTYPES = {value: name for name, value in ELEMENT_TYPES.items()}
"""The other way round."""


_known_endpoint = functools.lru_cache(maxsize=1024)(endpoint_to_proto)
"""To be copied, not changed."""


def to_proto(batch: Batch, row_numbers: np.ndarray | None = None, relays: Sequence[Relay] = ()) -> pb.Batch:
    """The batch as a message; only the shards its rows are in are named.

    Args:
        batch: The rows of one part.
        row_numbers: Their numbers in the whole batch of the call, [rows] int64.
        relays: Which ranks of the part read for others, of sources that hold bytes of the batch.
    """
    message = pb.Batch(rows=batch.rows)
    endpoints: dict[Endpoint, int] = {}
    shards: dict[Shard, int] = {}
    said: dict[int, np.ndarray] = {}
    for number, (name, column) in enumerate(batch.columns.items(), start=1):
        encoded = message.columns.add(name=name)
        lengths = _encode(encoded, column, shards)
        if lengths is not None:
            encoded.jagged = True
            _encode_lengths(encoded, number, lengths, said)
    for shard in shards:
        number = endpoints.setdefault(shard.endpoint, len(endpoints))
        message.shards.add(
            endpoint=number,
            id=shard.id,
            offset=shard.offset,
            nbytes=shard.nbytes,
            checksums=shard.checksums,
        )
    for relay in relays:
        source, reader = (endpoints.setdefault(e, len(endpoints)) for e in (relay.source, relay.reader))
        message.relays.add(source=source, reader=reader)
    message.endpoints.extend(map(_known_endpoint, endpoints))
    if row_numbers is not None and len(row_numbers):
        breaks = np.flatnonzero(np.diff(row_numbers) != 1)
        starts = row_numbers[np.concatenate(([0], breaks + 1))].tolist()
        stops = (row_numbers[np.append(breaks, len(row_numbers) - 1)] + 1).tolist()
        for start, stop in zip(starts, stops, strict=True):
            message.row_numbers.add(start=start, stop=stop)
    return message


def _encode(message: pb.Column, column: Column, shards: dict[Shard, int]) -> np.ndarray | None:
    """Writes all of a column but its lengths, and returns these."""
    if isinstance(column, RemoteColumn):
        message.dtype = ELEMENT_TYPES[column.dtype]
        message.row_shape.extend(column.row_shape)
        message.runs.SetInParent()
        add = message.runs.runs.add
        places = column.run_places
        used = dict.fromkeys(shard for shard, _, _ in places)
        numbers = {shard: shards.setdefault(column.shards[shard], len(shards)) for shard in used}
        for shard, rows, first in places:
            add(shard=numbers[shard], rows=rows, first_element=first)
        return column.lengths
    if isinstance(column.values, list):
        message.text.SetInParent()
        message.text.rows.extend(column.values)
        return None
    values = column.values
    array, lengths = (values.values, values.lengths) if isinstance(values, Jagged) else (values, None)
    if str(array.dtype) not in ELEMENT_TYPES:
        raise InvalidRequest(
            f"column {message.name!r} has dtype {array.dtype}; allowed: {sorted(ELEMENT_TYPES)}"
        )
    message.dtype = ELEMENT_TYPES[str(array.dtype)]
    message.row_shape.extend(array.shape[1:])
    message.inline = np.ascontiguousarray(array).tobytes()
    return lengths


def _encode_lengths(
    message: pb.Column, number: int, lengths: np.ndarray, said: dict[int, np.ndarray]
) -> None:
    """Of the many columns of a batch most are of the same tokens: their lengths are said once."""
    for other, theirs in said.items():
        if theirs is lengths or (theirs == lengths).all():
            message.lengths_of = other
            return
    said[number] = lengths
    message.lengths.extend(lengths.tolist())


_MOST = 1 << 47
"""More elements or bytes than any column has, and few enough that sums of int64 do not overflow."""


class _Said(NamedTuple):
    """Claimed sizes of a column: entries of each row, and in total."""

    lengths: np.ndarray
    entries: int


def from_proto(message: pb.Batch) -> Batch:
    """The batch of a message.

    Raises:
        InvalidRequest: The message contradicts itself; the text says where.
    """
    if message.rows > MAX_ROWS:
        raise InvalidRequest(f"a batch has {message.rows} rows; at most {MAX_ROWS} are allowed")
    shards = tuple(_places(message)[1])
    columns: dict[str, Column] = {}
    said: dict[int, _Said] = {}
    for number, column in enumerate(message.columns, start=1):
        if column.name in columns:
            raise InvalidRequest(f"column {column.name!r} is given twice")
        jagged = _decode_lengths(column, number, message.rows, said) if column.jagged else None
        columns[column.name] = _decode(column, message.rows, shards, jagged)
    return Batch(message.rows, columns)


def relays_from_proto(message: pb.Batch) -> list[Relay]:
    """Which ranks read for others, of all hosts.

    Raises:
        InvalidRequest: A relay names an endpoint that the message does not have.
    """
    endpoints = [endpoint_from_proto(endpoint) for endpoint in message.endpoints] if message.relays else []
    relays = []
    for relay in message.relays:
        if max(relay.source, relay.reader) >= len(endpoints):
            raise InvalidRequest(f"a relay names an endpoint beyond the {len(endpoints)} of the batch")
        relays.append(Relay(endpoints[relay.source], endpoints[relay.reader]))
    return relays


def _places(message: pb.Batch) -> tuple[list[Endpoint], list[Shard]]:
    endpoints = [endpoint_from_proto(endpoint) for endpoint in message.endpoints]
    shards = []
    for shard in message.shards:
        if shard.endpoint >= len(endpoints):
            raise InvalidRequest(f"shard {shard.id} names endpoint {shard.endpoint} of {len(endpoints)}")
        checksums = tuple(shard.checksums)
        if checksums and len(checksums) != num_blocks(shard.nbytes):
            raise InvalidRequest(
                f"shard {shard.id} of {shard.nbytes} bytes has {len(checksums)} checksums, "
                f"expected {num_blocks(shard.nbytes)}"
            )
        shards.append(Shard(endpoints[shard.endpoint], shard.id, shard.offset, shard.nbytes, checksums))
    return endpoints, shards


def row_numbers(message: pb.Batch) -> np.ndarray:
    """Numbers of the batch's rows in the whole batch of the call, [rows] int64; 0, 1, ... where not given.

    Raises:
        InvalidRequest: The message has another number of them than of rows, or one of MAX_ROWS or beyond.
    """
    if not message.row_numbers:
        return np.arange(message.rows, dtype=np.int64)
    # Counted first: a few bytes can name more rows than there is memory for.
    if any(r.start > r.stop for r in message.row_numbers):
        raise InvalidRequest("a range of row numbers stops before it starts")
    count = sum(r.stop - r.start for r in message.row_numbers)
    if count != message.rows:
        raise InvalidRequest(f"{count} row numbers for {message.rows} rows")
    if any(r.stop > MAX_ROWS for r in message.row_numbers):
        raise InvalidRequest(f"row numbers must be below {MAX_ROWS}")
    return np.concatenate([np.arange(r.start, r.stop, dtype=np.int64) for r in message.row_numbers])


def _decode_lengths(message: pb.Column, number: int, rows: int, said: dict[int, _Said]) -> _Said:
    if message.lengths_of:
        if message.lengths_of not in said:
            raise InvalidRequest(
                f"column {message.name!r} has the lengths of column {message.lengths_of}, which says none before it"
            )
        return said[message.lengths_of]
    if len(message.lengths) != rows:
        raise InvalidRequest(f"column {message.name!r} has {len(message.lengths)} lengths for {rows} rows")
    if sum(message.lengths) > _MOST:
        raise InvalidRequest(f"column {message.name!r} has lengths beyond {_MOST} in all")
    lengths = np.fromiter(message.lengths, np.int64, len(message.lengths))
    said[number] = _Said(lengths, int(lengths.sum()))
    return said[number]


def _decode(message: pb.Column, rows: int, shards: tuple[Shard, ...], jagged: _Said | None) -> Column:
    content = message.WhichOneof("content")
    if content == "text":
        if len(message.text.rows) != rows:
            raise InvalidRequest(
                f"column {message.name!r} has {len(message.text.rows)} texts for {rows} rows"
            )
        return LocalColumn(list(message.text.rows))
    if content is None or message.dtype not in DTYPES:
        raise InvalidRequest(f"column {message.name!r} has no content or no known element type")
    dtype, row_shape = DTYPES[message.dtype], tuple(message.row_shape)
    lengths, elements = jagged or (None, rows)
    if len(row_shape) > MAX_RANK or elements * math.prod(row_shape) * ELEMENT_BYTES[dtype] > _MOST:
        raise InvalidRequest(
            f"column {message.name!r} has rows of shape {list(row_shape)}, more than there can be"
        )
    if dtype == TEXT and (lengths is None or row_shape):
        raise InvalidRequest(f"column {message.name!r}: text by reference is a jagged column of bytes")
    if content == "inline":
        return _decode_inline(message, dtype, row_shape, lengths, elements)
    runs, first_row = [], 0
    for run in message.runs.runs:
        stop = first_row + run.rows
        if run.shard >= len(shards) or stop > rows:
            raise InvalidRequest(f"column {message.name!r}: a run names shard {run.shard} of {len(shards)}, "
                                 f"or row {stop} of {rows}")  # fmt: skip
        if run.first_element > _MOST:
            raise InvalidRequest(
                f"column {message.name!r}: a run begins at element {run.first_element}, beyond {_MOST}"
            )
        if run.rows:
            runs.append((run.shard, run.rows, run.first_element))
        first_row = stop
    if first_row != rows:
        raise InvalidRequest(f"column {message.name!r}: runs cover {first_row} of {rows} rows")
    if len(runs) == 1:
        shard, _, first = runs[0]
        return RemoteColumn.of_run(dtype, row_shape, lengths, shards[shard], rows, first, elements)
    return RemoteColumn.of_runs(dtype, row_shape, lengths, shards, runs)


def _decode_inline(
    message: pb.Column, dtype: str, row_shape: tuple[int, ...], lengths: np.ndarray | None, elements: int
) -> LocalColumn:
    expected = elements * math.prod(row_shape) * ELEMENT_BYTES[dtype]
    if len(message.inline) != expected:
        raise InvalidRequest(f"column {message.name!r} has {len(message.inline)} bytes, expected {expected}")
    if dtype not in np.sctypeDict:
        raise InvalidRequest(f"column {message.name!r}: {dtype} cannot travel inline")
    array = np.frombuffer(message.inline, dtype).reshape(elements, *row_shape)
    return LocalColumn(array if lengths is None else Jagged(array, lengths))
