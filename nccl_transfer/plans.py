"""Transfer plans: who sends which bytes to whom. Pure functions of what ranks hold and what they need.

Rows: every rank of a group needs the rows its protocol deals to it. Where ranks of one host need the same bytes
of a rank on another host, the first of them fetches the bytes and the others take them from it: each byte
crosses to a host once.

Slices: rectangular pieces of a tensor that ranks hold, against those that ranks need; what plans for weights
are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nccl_transfer.arena import ByteRange
from nccl_transfer.batch import Batch, Endpoint, RemoteColumn, Run
from rlhf.errors import TransferError

Ranges = Mapping[Endpoint, Sequence[ByteRange]]
"""Bytes by the rank that holds them; each byte once, in the order of shards and of bytes."""


def needed(batch: Batch) -> dict[Endpoint, list[ByteRange]]:
    """The bytes that the rows of a batch are made of, by the rank that holds them, each of them once; whole blocks
    where they are to be verified."""
    wanted: dict[Endpoint, list[ByteRange]] = {}
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            for run in column.runs:
                if run.nbytes:
                    r = ByteRange(run.shard, run.start, run.nbytes, name, column.dtype, column.row_shape)
                    wanted.setdefault(run.shard.endpoint, []).append(r.whole_blocks())
    return {source: union(ranges) for source, ranges in wanted.items()}


def endpoints_of(batch: Batch) -> set[Endpoint]:
    """The ranks that hold rows of a batch."""
    columns = [column for column in batch.columns.values() if isinstance(column, RemoteColumn)]
    return {shard.endpoint for column in columns for shard in column.shards}


def union(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """The same bytes of one rank's shards, each of them once: ranges that overlap or touch become one.

    So rows that are repeated travel once, and rows that were shuffled travel in one piece.
    """
    merged: list[ByteRange] = []
    for r in sorted(ranges, key=position):
        last = merged[-1] if merged else None
        if last is not None and last.shard.id == r.shard.id and r.start <= last.start + last.nbytes:
            stop = max(last.start + last.nbytes, r.start + r.nbytes)
            merged[-1] = replace(last, nbytes=stop - last.start)
        else:
            merged.append(r)
    return merged


def position(r: ByteRange | Run) -> tuple[int, int]:
    """The order of ranges within a rank."""
    return r.shard.id, r.start


def intersection(left: Sequence[ByteRange], right: Sequence[ByteRange]) -> list[ByteRange]:
    """The bytes that are in both. Both, and the result, are unions of one rank's ranges."""
    common: list[ByteRange] = []
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = left[i], right[j]
        if a.shard.id == b.shard.id:
            start, stop = max(a.start, b.start), min(_stop(a), _stop(b))
            if start < stop:
                common.append(replace(a, start=start, nbytes=stop - start))
        if (a.shard.id, _stop(a)) <= (b.shard.id, _stop(b)):
            i += 1
        else:
            j += 1
    return common


def difference(left: Sequence[ByteRange], right: Sequence[ByteRange]) -> list[ByteRange]:
    """The bytes of `left` that are not in `right`. Both, and the result, are unions of one rank's ranges."""
    rest: list[ByteRange] = []
    for r in left:
        start = r.start
        for hole in intersection([r], right):
            if start < hole.start:
                rest.append(replace(r, start=start, nbytes=hole.start - start))
            start = _stop(hole)
        if start < _stop(r):
            rest.append(replace(r, start=start, nbytes=_stop(r) - start))
    return rest


def _stop(r: ByteRange) -> int:
    return r.start + r.nbytes


@dataclass(frozen=True, slots=True)
class Relay:
    """Bytes of `source` that `reader` fetches and keeps, for itself and for other ranks of its host."""

    source: Endpoint
    reader: Endpoint
    ranges: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What one rank does to get its rows.

    Attributes:
        direct: What it reads from the ranks that hold it.
        relayed: What it takes from other ranks of its host, which read it.
        kept: What it reads and keeps for other ranks of its host.
    """

    direct: Ranges = field(default_factory=dict)
    relayed: tuple[Relay, ...] = ()
    kept: tuple[Relay, ...] = ()

    @property
    def direct_bytes(self) -> int:
        """Bytes read from the ranks that hold them."""
        return sum(r.nbytes for ranges in self.direct.values() for r in ranges)

    @property
    def relayed_bytes(self) -> int:
        """Bytes taken from ranks that read them for this one too."""
        return sum(r.nbytes for relay in self.relayed for r in relay.ranges)


def plan_rows(parts: Sequence[Batch], destinations: Sequence[Endpoint]) -> list[RowPlan]:
    """A plan per rank: rank i at `destinations[i]` gets the rows `parts[i]`.

    Ranks of one host share memory, so what they hold for each other is read where it lies and needs no relay.
    """
    wants = [needed(part) for part in parts]
    direct: list[dict[Endpoint, list[ByteRange]]] = [{} for _ in parts]
    relayed: list[list[Relay]] = [[] for _ in parts]
    kept: list[list[Relay]] = [[] for _ in parts]
    readers: dict[tuple[str, Endpoint], list[int]] = {}
    for rank, (want, here) in enumerate(zip(wants, destinations, strict=True)):
        for source, ranges in want.items():
            missing = list(ranges)
            if source.host_id != here.host_id and here.host_id:
                earlier = readers.setdefault((here.host_id, source), [])
                for reader in earlier:
                    shared = intersection(missing, direct[reader][source])
                    if shared:
                        relay = Relay(source, destinations[reader], tuple(shared))
                        relayed[rank].append(relay)
                        kept[reader].append(relay)
                        missing = difference(missing, shared)
                if missing:
                    earlier.append(rank)
            if missing:
                direct[rank][source] = missing
    return [
        RowPlan(reads, tuple(takes), _once(keeps))
        for reads, takes, keeps in zip(direct, relayed, kept, strict=True)
    ]


def _once(relays: Sequence[Relay]) -> tuple[Relay, ...]:
    """One relay per source, for all who take from it."""
    by_source: dict[tuple[Endpoint, Endpoint], list[ByteRange]] = {}
    for relay in relays:
        by_source.setdefault((relay.source, relay.reader), []).extend(relay.ranges)
    return tuple(
        Relay(source, reader, tuple(union(ranges))) for (source, reader), ranges in by_source.items()
    )


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangular piece of a tensor: elements `starts[i]` to `stops[i]` of every axis i."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Slice:
        """All of a tensor."""
        return Slice((0,) * len(shape), tuple(shape))

    @staticmethod
    def shard(shape: Sequence[int], axis: int, index: int, parts: int) -> Slice:
        """Part `index` of `parts` equal parts along an axis.

        Raises:
            TransferError: The axis does not divide.
        """
        if shape[axis] % parts:
            raise TransferError(f"axis {axis} of {tuple(shape)} does not divide into {parts} parts")
        starts, stops, each = [0] * len(shape), list(shape), shape[axis] // parts
        starts[axis], stops[axis] = index * each, (index + 1) * each
        return Slice(tuple(starts), tuple(stops))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def intersect(self, other: Slice) -> Slice | None:
        """What is in both; None where that is nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Slice(starts, stops) if all(a < b for a, b in zip(starts, stops, strict=True)) else None

    def without(self, other: Slice) -> list[Slice]:
        """What is left, as disjoint slices: along each axis, what lies before and behind."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest = []
        starts, stops = list(self.starts), list(self.stops)
        for axis, (start, stop) in enumerate(zip(common.starts, common.stops, strict=True)):
            for a, b in ((starts[axis], start), (stop, stops[axis])):
                if a < b:
                    piece_starts, piece_stops = starts.copy(), stops.copy()
                    piece_starts[axis], piece_stops[axis] = a, b
                    rest.append(Slice(tuple(piece_starts), tuple(piece_stops)))
            starts[axis], stops[axis] = start, stop
        return rest

    def within(self, outer: Slice) -> tuple[slice, ...]:
        """The index of this piece in an array that holds `outer`."""
        return tuple(
            slice(a - base, b - base)
            for a, b, base in zip(self.starts, self.stops, outer.starts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class SliceMove:
    """A piece of a tensor that rank `source` holds and rank `destination` needs; they may be the same rank."""

    source: int
    destination: int
    piece: Slice


def plan_slices(
    held: Mapping[int, Slice], wanted: Mapping[int, Slice], hosts: Mapping[int, str] | None = None
) -> list[SliceMove]:
    """Every element that is wanted, from one rank that holds it: the rank itself, else one on its host, else the
    one that has been given the fewest elements to send.

    Args:
        held: What each rank holds of the tensor; ranks may hold the same (replicas).
        wanted: What each rank needs of it.
        hosts: Host of each rank; None: all on one.

    Raises:
        TransferError: Nobody holds some of what is wanted; the text names the rank and the piece.
    """
    sent = dict.fromkeys(held, 0)
    moves = []
    for destination, want in wanted.items():
        missing = [want]
        while missing:
            piece = missing.pop()
            holders = [(rank, common) for rank, slice_ in held.items() if (common := piece.intersect(slice_))]
            if not holders:
                raise TransferError(
                    f"no rank holds {piece.starts} to {piece.stops}, which rank {destination} needs"
                )
            source, common = min(
                holders, key=lambda holder: (*_distance(holder[0], destination, hosts), sent[holder[0]])
            )
            if source != destination:
                sent[source] += common.numel
            moves.append(SliceMove(source, destination, common))
            missing += piece.without(common)
    return moves


def _distance(source: int, destination: int, hosts: Mapping[int, str] | None) -> tuple[bool, bool]:
    return source != destination, hosts is not None and hosts[source] != hosts[destination]
