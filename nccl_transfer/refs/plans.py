"""Transfer plans: which bytes move between which ranks. Pure functions of what ranks hold and what they need.

Rows: the transfer protocol cuts a call's rows into parts, and every rank of a part needs the same bytes. Where several
ranks of a part run on one host, one of them reads what a rank on another host holds, and the others take it from its
memory: the bytes of a part cross to a host once.

Slices: rectangular pieces of a tensor that ranks hold, against those that ranks need; what plans for weights
are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, ShardRun
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


def sources_of(batch: Batch) -> list[Endpoint]:
    """The ranks that hold bytes of a batch's rows, each once, in an order that depends on the batch alone."""
    columns = [column for column in batch.columns.values() if isinstance(column, RemoteColumn)]
    return list(dict.fromkeys(holder for column in columns for holder in column.holders))


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


def position(r: ByteRange | ShardRun) -> tuple[int, int]:
    """The order of ranges within a rank."""
    return r.shard.id, r.start


@dataclass(frozen=True, slots=True)
class Relay:
    """`reader` reads all bytes of a part that `source` holds, and keeps them for the other ranks of its host."""

    source: Endpoint
    reader: Endpoint


def plan_relays(part: Batch, ranks: Sequence[Endpoint]) -> list[Relay]:
    """Chooses, for the ranks of one part, who reads across hosts.

    On every host with several of the ranks, each rank elsewhere that holds bytes of the part gets one reader, in turn.
    Ranks that hold bytes on the host itself share their memory with all of it, and need no relay.

    Args:
        part: The rows that all of `ranks` need.
        ranks: Where they serve. A rank with an empty host id shares memory with nobody.
    """
    hosts: dict[str, list[Endpoint]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host_id, []).append(rank)
    shared = {host: readers for host, readers in hosts.items() if host and len(readers) > 1}
    relays = []
    for host, readers in shared.items():
        far = [source for source in sources_of(part) if source.host_id != host]
        relays += [Relay(source, readers[number % len(readers)]) for number, source in enumerate(far)]
    return relays


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
        """Intersection of two boxes; None if it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Slice(starts, stops) if all(a < b for a, b in zip(starts, stops, strict=True)) else None

    def without(self, other: Slice) -> list[Slice]:
        """Difference of two boxes, as disjoint boxes: along each axis, the parts before and behind."""
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
