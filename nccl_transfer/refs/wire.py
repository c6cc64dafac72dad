"""Conversion of batches to and from protobuf messages."""

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
from nccl_transfer.refs.shards import Endpoint, Shard, Space
from nccl_transfer.refs.wire_ranks import endpoint_from_proto, endpoint_to_proto
from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2 as pb

ELEMENT_TYPES: dict[str, Any] = {
    name: pb.ElementType.Value(f"ELEMENT_TYPE_{name.upper()}") for name in ELEMENT_BYTES
}
"""Value of the enum rlhf.v1.ElementType by name of the element type."""

MAX_ROWS = 1 << 24
"""Maximum number of rows of a batch, and of the whole batch of a call, so that row numbers are below it."""
MAX_RANK = 8
"""Maximum number of dimensions of a row."""

SPACES: dict[Space, Any] = {Space.HOST: pb.SPACE_UNSPECIFIED, Space.DEVICE: pb.SPACE_DEVICE}
"""Value of the enum rlhf.v1.Space by memory."""

_SPACES = {value: space for space, value in SPACES.items()}

DTYPES = {value: name for name, value in ELEMENT_TYPES.items()}
"""Name of the element type by value of the enum rlhf.v1.ElementType."""


_known_endpoint = functools.lru_cache(maxsize=1024)(endpoint_to_proto)
"""Encodes an endpoint. Messages are cached and shared: callers copy them and do not modify them."""


def to_proto(batch: Batch, row_numbers: np.ndarray | None = None, relays: Sequence[Relay] = ()) -> pb.Batch:
    """Encodes a batch. The message lists only shards that contain rows of the batch. Raises InvalidRequest where a
    local column has a dtype that is not in ELEMENT_TYPES.

    Args:
        batch: The rows of one part of a call.
        row_numbers: Number of each row in the whole batch of the call, [rows] int64. Default: left out, which stands
            for 0, 1, ....
        relays: Relays of the part; their sources hold bytes of the batch. Default: none.
    """
    message = pb.Batch(rows=batch.rows)
    endpoints: dict[Endpoint, int] = {}
    shards: dict[Shard, int] = {}
    known: dict[int, np.ndarray] = {}
    for number, (name, column) in enumerate(batch.columns.items(), start=1):
        encoded = message.columns.add(name=name)
        lengths = _encode(encoded, column, shards)
        if lengths is not None:
            encoded.jagged = True
            _encode_lengths(encoded, number, lengths, known)
    for shard in shards:
        number = endpoints.setdefault(shard.endpoint, len(endpoints))
        message.shards.add(
            endpoint=number,
            id=shard.id,
            offset=shard.offset,
            nbytes=shard.nbytes,
            checksums=shard.checksums,
            space=SPACES[shard.space],
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
    """Encodes a column without its lengths into `message`, and adds the shards that hold its rows to `shards`, under
    the next free numbers. Returns the lengths if the column is jagged, else None. Raises InvalidRequest where a local
    column has a dtype that is not in ELEMENT_TYPES."""
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
    message: pb.Column, number: int, lengths: np.ndarray, known: dict[int, np.ndarray]
) -> None:
    """Encodes the lengths of jagged column `number` into `message`: as a reference to the earlier column in `known`
    with equal lengths, as most have, or else in full, and then adds them to `known`."""
    for other, theirs in known.items():
        if theirs is lengths or (theirs == lengths).all():
            message.lengths_of = other
            return
    known[number] = lengths
    message.lengths.extend(lengths.tolist())


_MAX_SIZE = 1 << 47
"""Maximum number of elements, and of bytes, of a column, so that sums do not overflow int64."""


class _Lengths(NamedTuple):
    """Number of entries of a jagged column: of each row ([rows] int64), and in total."""

    lengths: np.ndarray
    entries: int


def from_proto(message: pb.Batch) -> Batch:
    """Decodes a batch.

    Raises:
        InvalidRequest: The message is inconsistent or has too many rows; the error says where.
    """
    if message.rows > MAX_ROWS:
        raise InvalidRequest(f"a batch has {message.rows} rows; at most {MAX_ROWS} are allowed")
    # A column of one run takes no memory for its rows, others 16 bytes a row.
    scattered = sum(len(column.runs.runs) > 1 for column in message.columns)
    if scattered * message.rows > MAX_ROWS:
        raise InvalidRequest(
            f"a batch has {message.rows} rows in {scattered} columns of several runs; at most {MAX_ROWS} are allowed "
            "in all of these columns together"
        )
    shards = _shards(message)
    columns: dict[str, Column] = {}
    known: dict[int, _Lengths] = {}
    for number, column in enumerate(message.columns, start=1):
        if column.name in columns:
            raise InvalidRequest(f"column {column.name!r} is given twice")
        jagged = _decode_lengths(column, number, message.rows, known) if column.jagged else None
        columns[column.name] = _decode(column, message.rows, shards, jagged)
    return Batch(message.rows, columns)


def relays_from_proto(message: pb.Batch) -> list[Relay]:
    """Decodes the relays of a batch, of all hosts.

    Raises:
        InvalidRequest: A relay refers to an endpoint that the message does not contain.
    """
    endpoints = [endpoint_from_proto(endpoint) for endpoint in message.endpoints] if message.relays else []
    relays = []
    for relay in message.relays:
        if max(relay.source, relay.reader) >= len(endpoints):
            raise InvalidRequest(f"a relay names an endpoint beyond the {len(endpoints)} of the batch")
        relays.append(Relay(endpoints[relay.source], endpoints[relay.reader]))
    return relays


def _shards(message: pb.Batch) -> tuple[Shard, ...]:
    """Decodes the shards of a batch. Raises InvalidRequest where they are inconsistent."""
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
        if shard.space not in _SPACES:
            raise InvalidRequest(f"shard {shard.id} lies in memory of unknown kind {shard.space}")
        space = _SPACES[shard.space]
        shards.append(
            Shard(endpoints[shard.endpoint], shard.id, shard.offset, shard.nbytes, checksums, space)
        )
    return tuple(shards)


def row_numbers(message: pb.Batch) -> np.ndarray:
    """Returns the number of each row in the whole batch of the call, [rows] int64; 0, 1, ... if the message has none.

    Raises:
        InvalidRequest: There are more or fewer row numbers than rows, a range of them stops before it starts, or a
            row number is MAX_ROWS or more.
    """
    if not message.row_numbers:
        return np.arange(message.rows, dtype=np.int64)
    # Counted before they are built: a message of a few bytes can name more rows than fit into memory.
    if any(r.start > r.stop for r in message.row_numbers):
        raise InvalidRequest("a range of row numbers stops before it starts")
    count = sum(r.stop - r.start for r in message.row_numbers)
    if count != message.rows:
        raise InvalidRequest(f"{count} row numbers for {message.rows} rows")
    if any(r.stop > MAX_ROWS for r in message.row_numbers):
        raise InvalidRequest(f"row numbers must be below {MAX_ROWS}")
    return np.concatenate([np.arange(r.start, r.stop, dtype=np.int64) for r in message.row_numbers])


def _decode_lengths(message: pb.Column, number: int, rows: int, known: dict[int, _Lengths]) -> _Lengths:
    if message.lengths_of:
        if message.lengths_of not in known:
            raise InvalidRequest(
                f"column {message.name!r}: lengths_of is {message.lengths_of}, which is not the number of an earlier "
                "column with lengths"
            )
        return known[message.lengths_of]
    if len(message.lengths) != rows:
        raise InvalidRequest(f"column {message.name!r} has {len(message.lengths)} lengths for {rows} rows")
    if sum(message.lengths) > _MAX_SIZE:
        raise InvalidRequest(f"column {message.name!r} has lengths beyond {_MAX_SIZE} in all")
    lengths = np.fromiter(message.lengths, np.int64, len(message.lengths))
    known[number] = _Lengths(lengths, int(lengths.sum()))
    return known[number]


def _decode(message: pb.Column, rows: int, shards: tuple[Shard, ...], jagged: _Lengths | None) -> Column:
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
    # A size of 0 does not make the others possible: arrays have a limit for their product without it.
    most = math.prod(max(size, 1) for size in (elements, *row_shape)) * ELEMENT_BYTES[dtype]
    if len(row_shape) > MAX_RANK or most > _MAX_SIZE:
        raise InvalidRequest(
            f"column {message.name!r} has rows of shape {list(row_shape)}, more than there can be"
        )
    if dtype == TEXT and (lengths is None or row_shape):
        raise InvalidRequest(f"column {message.name!r}: text by reference is a jagged column of bytes")
    if content == "inline":
        return _decode_inline(message, dtype, row_shape, lengths, elements)
    runs = _decode_runs(message, rows, len(shards))
    if len(runs) == 1:
        shard, _, first = runs[0]
        return RemoteColumn.of_run(dtype, row_shape, lengths, shards[shard], rows, first, elements)
    return RemoteColumn.of_runs(dtype, row_shape, lengths, shards, runs)


def _decode_runs(message: pb.Column, rows: int, num_shards: int) -> list[tuple[int, int, int]]:
    """Returns the shard, the rows and the first element of each run of rows that is not empty."""
    runs, first_row = [], 0
    for run in message.runs.runs:
        stop = first_row + run.rows
        if run.shard >= num_shards or stop > rows:
            raise InvalidRequest(f"column {message.name!r}: a run names shard {run.shard} of {num_shards}, "
                                 f"or row {stop} of {rows}")  # fmt: skip
        if run.first_element > _MAX_SIZE:
            raise InvalidRequest(
                f"column {message.name!r}: a run begins at element {run.first_element}, beyond {_MAX_SIZE}"
            )
        if run.rows:
            runs.append((run.shard, run.rows, run.first_element))
        first_row = stop
    if first_row != rows:
        raise InvalidRequest(f"column {message.name!r}: runs cover {first_row} of {rows} rows")
    return runs


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
