"""Transfer plans: pure functions that assign to each rank the bytes to read and the rank to read them from.

Rows: the transfer protocol splits a call's rows into parts, and every rank of a part needs the same bytes. If several
ranks of a part run on one host, one of them reads the bytes of a rank on another host, and the others map its memory,
so that the bytes of a part are sent to a host once.

Slices: rectangular pieces of a tensor, by which weights are moved from ranks that hold them to ranks that need them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from operator import lt
from typing import Any

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, ShardRun
from rlhf.errors import TransferError

Ranges = Mapping[Endpoint, Sequence[ByteRange]]
"""Byte ranges by the rank that holds them, disjoint and ordered by shard and position."""


def needed(batch: Batch) -> dict[Endpoint, list[ByteRange]]:
    """Returns the byte ranges of the rows of a batch's remote columns by the rank that holds them, disjoint and ordered
    by shard and position. Ranges of shards with checksums are widened to whole blocks."""
    wanted: dict[Endpoint, list[ByteRange]] = {}
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            for run in column.runs:
                if run.nbytes:
                    r = ByteRange(run.shard, run.start, run.nbytes, name, column.dtype, column.row_shape)
                    wanted.setdefault(run.shard.endpoint, []).append(r.whole_blocks())
    return {source: union(ranges) for source, ranges in wanted.items()}


def sources_of(batch: Batch) -> list[Endpoint]:
    """Returns the ranks that hold bytes of a batch's rows, each once, in an order that depends on the batch alone."""
    columns = [column for column in batch.columns.values() if isinstance(column, RemoteColumn)]
    return list(dict.fromkeys(holder for column in columns for holder in column.holders))


def union(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Merges byte ranges of one rank's shards that overlap or touch, and sorts them by shard and position.

    Repeated rows are thus sent once, and shuffled rows as one range.
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
    """Sort key of ranges of one rank: (shard id, start)."""
    return r.shard.id, r.start


@dataclass(frozen=True, slots=True)
class Relay:
    """Assignment of a read across hosts: of one part of a call's rows, rank `reader` reads all bytes that rank `source`
    on another host holds, and keeps them for the other ranks of its own host."""

    source: Endpoint
    reader: Endpoint


def plan_relays(part: Batch, ranks: Sequence[Endpoint]) -> list[Relay]:
    """Returns the relays of one part: which rank of a host reads the bytes of which source on another host.

    On every host with several of `ranks`, the sources on other hosts are assigned to these ranks round-robin. Sources
    on the host itself share their memory with its ranks and need no relay.

    Args:
        part: The rows that all of `ranks` need.
        ranks: Endpoints of the ranks of the part. A rank with an empty host id shares memory with no other rank.
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
    """A rectangular piece of a tensor: elements `starts[i]` to `stops[i]`, exclusive, of every axis i."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Slice:
        """Returns the slice of a whole tensor of shape `shape`."""
        return Slice((0,) * len(shape), tuple(shape))

    @staticmethod
    def at(starts: Sequence[int], shape: Sequence[int]) -> Slice:
        """Returns the slice of shape `shape` that begins at index `starts` of its tensor."""
        return Slice(tuple(starts), tuple(a + size for a, size in zip(starts, shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements of the slice."""
        return math.prod(self.shape)

    def overlaps(self, other: Slice) -> bool:
        """Returns whether the intersection with another slice of the tensor, which has elements, is not empty."""
        return all(map(lt, self.starts, other.stops)) and all(map(lt, other.starts, self.stops))

    def intersect(self, other: Slice) -> Slice | None:
        """Returns the intersection with another slice of the tensor, or None if it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Slice(starts, stops) if all(map(lt, starts, stops)) else None

    def without(self, other: Slice) -> list[Slice]:
        """Returns the elements of this slice that are not in `other`, as disjoint slices; empty if there are none."""
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
        """Returns the index of this slice in an array of the elements of `outer`, which contains this slice, as one
        Python slice per axis."""
        return tuple(
            slice(a - base, b - base)
            for a, b, base in zip(self.starts, self.stops, outer.starts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class SliceMove:
    """A transfer: rank `source` sends `piece` of a tensor to `destination`, which may be the same rank."""

    source: Any
    destination: Any
    piece: Slice


def regions(slices: Iterable[tuple[Hashable, Slice]]) -> list[tuple[Slice, frozenset[Hashable]]]:
    """Cuts slices of a tensor that may overlap into disjoint ones; returns each with the names of all that contain it.

    Args:
        slices: Name and slice; a name may have several.
    """
    together: dict[Slice, frozenset[Hashable]] = {}
    for name, slice_ in slices:
        together[slice_] = together.get(slice_, frozenset()) | {name}
    found: list[tuple[Slice, frozenset[Hashable]]] = []
    for slice_, names in together.items():
        rest, cut = [slice_], []
        for region, others in found:
            common = region.intersect(slice_) if region.overlaps(slice_) else None
            if common is None:
                cut.append((region, others))
                continue
            cut += [(part, others) for part in region.without(common)]
            cut.append((common, others | names))
            rest = [part for piece in rest for part in piece.without(common)]
        found = cut + [(part, names) for part in rest]
    return found


def plan_slices(
    held: Mapping[Any, Sequence[Slice]],
    wanted: Mapping[Any, Sequence[Slice]],
    hosts: Mapping[Any, str] | None = None,
    sent: MutableMapping[Any, int] | None = None,
) -> list[SliceMove]:
    """Plans the transfers that give every rank its slices of one tensor. The source of an element is the destination
    itself if it holds it, else a rank on its host, else any rank; among equals the one with the fewest elements to
    send so far. Moves of a rank to itself are returned too. Ranks are named by anything hashable.

    Args:
        held: Slices of the tensor that each rank holds; ranks may hold equal slices (replicas).
        wanted: Disjoint slices of the tensor that each rank needs.
        hosts: Host of each rank. Default: all ranks share one host.
        sent: Elements that each rank has to send by earlier plans; this plan's are added. Default: none.

    Raises:
        TransferError: No rank holds some of the elements; the message names the destination and the piece.
    """
    sent = {} if sent is None else sent
    parts = regions((rank, each) for rank, slices in held.items() for each in slices)
    order = {rank: number for number, rank in enumerate(held)}
    moves = []
    for destination, want in ((rank, want) for rank, wants in wanted.items() for want in wants):
        missing = want.numel
        for part, holders in parts:
            piece = want.intersect(part) if want.overlaps(part) else None
            if piece is None:
                continue
            missing -= piece.numel
            source = min(
                holders,
                key=lambda rank: (*_distance(rank, destination, hosts), sent.get(rank, 0), order[rank]),
            )
            if source != destination:
                sent[source] = sent.get(source, 0) + piece.numel
            moves.append(SliceMove(source, destination, piece))
        if missing:
            lacking = [want]
            for part, _ in parts:
                lacking = [rest for piece in lacking for rest in piece.without(part)]
            piece = lacking[0]
            raise TransferError(
                f"no rank holds {list(piece.starts)} to {list(piece.stops)}, which {destination} needs"
            )
    return moves


def _distance(source: Any, destination: Any, hosts: Mapping[Any, str] | None) -> tuple[bool, bool]:
    """Sort key of sources, nearest first: the destination itself, ranks on its host, others."""
    return source != destination, hosts is not None and hosts[source] != hosts[destination]
