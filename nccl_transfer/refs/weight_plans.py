"""Plans of weight transfers: which rank of a service packs which slices of weights into which buckets, and which ranks
of other services read these. Pure functions, which every rank of both sides calls with the same transfer."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple, cast

from nccl_transfer.refs.dtypes import FLOATING, ITEM_BYTES
from nccl_transfer.refs.plans import Slice, plan_slices, regions
from nccl_transfer.refs.shards import Endpoint
from rlhf.errors import TransferError

LEAST_BUCKET_BYTES = 4096
DEFAULT_BUCKET_BYTES = 16 << 20
"""Three of them, as many as a source holds at a time, fit into the default arena."""
MOST_BUCKETS = 1 << 16
"""Most buckets that the weights of a transfer may amount to, so that a plan has an end."""

Plan = tuple[tuple["Bucket", ...], ...]
"""The buckets of each source, in the order in which it packs them."""
Destinations = frozenset[int]
"""Indices of receiving ranks in their transfer."""


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A box of a tensor of the model, with its element type.

    Attributes:
        name: Name of the tensor in the checkpoint.
        shape: Shape of the whole tensor.
        box: The part of it.
        dtype: Name of the element type in which the rank holds or wants the box.
    """

    name: str
    shape: tuple[int, ...]
    box: Slice
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RankWeights:
    """A rank, and the slices that it holds (as a source) or lacks (as a receiver)."""

    endpoint: Endpoint
    slices: tuple[WeightSlice, ...]


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """A transfer of the weights of one policy version; the message rlhf.v1.WeightTransfer describes the fields."""

    id: str
    policy_version: int
    bucket_bytes: int
    sources: tuple[RankWeights, ...]
    receivers: tuple[RankWeights, ...]


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """A slice in a bucket: `slice.nbytes` bytes, row-major, from byte `start` of the bucket on."""

    slice: WeightSlice
    start: int

    def position(self, elements: int) -> int:
        """Returns the position in the bucket, in bytes, where the first `elements` elements of the slice end."""
        return self.start + elements * ITEM_BYTES[self.slice.dtype]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slices that one rank packs together for several ranks.

    Attributes:
        source: Index of the packing rank in `WeightTransfer.sources`.
        number: Number of the bucket among those of its source, from 0.
        destinations: The ranks that read it, in order; they want all of it.
        pieces: The slices, all of one element type, end to end.
        nbytes: Size in bytes.
    """

    source: int
    number: int
    destinations: tuple[int, ...]
    pieces: tuple[BucketPiece, ...]
    nbytes: int


def plan_weights(transfer: WeightTransfer) -> Plan:
    """Plans a transfer: every receiver gets every element that it lacks once, and nothing else.

    The source of an element is a rank on the receiver's host if one holds the element; among several candidates, the
    rank that sends the fewest bytes. Slices for several receivers of the same source are packed once. Slices larger
    than a bucket are cut.

    Raises:
        TransferError: No source holds a slice that a receiver lacks, or holds it in an element type that cannot be
            cast, sides differ on a shape, or the buckets are too small for the amount of weights.
    """
    return _planned(transfer.bucket_bytes, transfer.sources, transfer.receivers)


def buckets_of(plan: Plan, receiver: int) -> list[Bucket]:
    """Returns the buckets that a receiver reads, in reading order: by number, and among equal numbers starting from a
    different source for each receiver.

    If every receiver reads in this order and acknowledges each bucket, every receiver can make progress while each
    source packs only its next bucket: all buckets before the lowest unread number have been read by all receivers.
    """
    own = [bucket for source in plan for bucket in source if receiver in bucket.destinations]
    return sorted(own, key=lambda bucket: (bucket.number, (bucket.source - receiver) % len(plan)))


@functools.lru_cache(maxsize=4)  # transfers between the same ranks follow each other
def _planned(bucket_bytes: int, sources: tuple[RankWeights, ...], receivers: tuple[RankWeights, ...]) -> Plan:
    """Plans a transfer, as `plan_weights`."""
    _check_size(bucket_bytes, receivers)
    hosts = {number: source.endpoint.host_id for number, source in enumerate(sources)}
    held: dict[str, dict[int, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    known: dict[str, WeightSlice] = {}
    for number, source in enumerate(sources):
        for each in source.slices:
            held[each.name][number].append(each.box)
            first = known.setdefault(each.name, each)
            if (first.shape, first.dtype) != (each.shape, each.dtype):
                raise TransferError(
                    f"sources differ on {each.name}: {first.dtype} {list(first.shape)}, and {each.dtype} "
                    f"{list(each.shape)} on {source.endpoint}"
                )
    groups: list[dict[tuple[Destinations, str], list[WeightSlice]]] = [{} for _ in sources]
    sent: dict[Any, int] = {}
    for (name, dtype), wants in sorted(_wanted(receivers, known).items()):
        shape = known[name].shape
        try:
            assigned = _assign(held[name], wants, hosts, receivers, sent)
        except TransferError as error:
            raise TransferError(f"{name}: {error}") from None
        for source, box, destinations in assigned:
            each = WeightSlice(name, shape, box, dtype)
            groups[source].setdefault((destinations, dtype), []).append(each)
    return tuple(tuple(_buckets(number, group, bucket_bytes)) for number, group in enumerate(groups))


def _check_size(bucket_bytes: int, receivers: Sequence[RankWeights]) -> None:
    """Raises TransferError if the plan of a transfer would have more than MOST_BUCKETS full buckets."""
    total = sum(each.nbytes for receiver in receivers for each in receiver.slices)
    if bucket_bytes < LEAST_BUCKET_BYTES:
        raise TransferError(f"bucket_bytes is {bucket_bytes}; at least {LEAST_BUCKET_BYTES} are allowed")
    if total > MOST_BUCKETS * bucket_bytes:
        raise TransferError(
            f"{total} bytes of weights in buckets of {bucket_bytes} are more than {MOST_BUCKETS} buckets: "
            "raise bucket_bytes"
        )


def _wanted(
    receivers: Sequence[RankWeights], known: Mapping[str, WeightSlice]
) -> dict[tuple[str, str], list[tuple[Slice, int]]]:
    """Returns the boxes that receivers lack, and the index of the receiver of each, by name and element type.

    Args:
        receivers: Receivers of the transfer.
        known: A slice of each tensor that a source holds, by name.

    Raises:
        TransferError: A source and a receiver differ on a tensor.
    """
    wanted: dict[tuple[str, str], list[tuple[Slice, int]]] = defaultdict(list)
    for number, receiver in enumerate(receivers):
        for each in receiver.slices:
            held = known.get(each.name)
            if held is None:
                raise TransferError(f"no rank holds {each.name}, which {receiver.endpoint} needs")
            if held.shape != each.shape:
                raise TransferError(
                    f"{each.name} has shape {held.shape}, but {receiver.endpoint} needs it with {each.shape}"
                )
            if held.dtype != each.dtype and not {held.dtype, each.dtype} <= FLOATING:
                raise TransferError(
                    f"{each.name} is {held.dtype}, but {receiver.endpoint} needs it as {each.dtype}; only floating "
                    "point is cast"
                )
            if each.box.numel:
                wanted[each.name, each.dtype].append((each.box, number))
    return wanted


class _Group(NamedTuple):
    """Receivers on one host that want the same box; planned as one rank that holds nothing.

    Attributes:
        destinations: Their indices.
        name: Name of the first, for messages.
        host: Id of the host.
        number: Number of the box.
    """

    destinations: Destinations
    name: str
    host: str
    number: int

    def __str__(self) -> str:
        return self.name


def _assign(
    held: Mapping[int, Sequence[Slice]],
    wants: Iterable[tuple[Slice, int]],
    hosts: Mapping[Any, str],
    receivers: Sequence[RankWeights],
    sent: dict[Any, int],
) -> list[tuple[int, Slice, Destinations]]:
    """Returns which source sends which box of a tensor to which receivers, as (source, box, destinations); no box
    twice from the same source. Other arguments as for `plan_slices`."""
    wanted: dict[_Group, list[Slice]] = {}
    for number, (box, destinations) in enumerate(regions((receiver, box) for box, receiver in wants)):
        by_host: dict[str, list[int]] = {}
        for receiver in sorted(cast(Destinations, destinations)):
            by_host.setdefault(receivers[receiver].endpoint.host_id, []).append(receiver)
        for host, those in by_host.items():
            wanted[_Group(frozenset(those), str(receivers[those[0]].endpoint), host, number)] = [box]
    found: dict[tuple[int, Slice], Destinations] = {}
    for move in plan_slices(held, wanted, {**hosts, **{group: group.host for group in wanted}}, sent):
        key, group = (cast(int, move.source), move.piece), cast(_Group, move.destination)
        found[key] = found.get(key, frozenset()) | group.destinations
    return [(source, box, destinations) for (source, box), destinations in found.items()]


def _buckets(
    source: int, groups: Mapping[tuple[Destinations, str], Sequence[WeightSlice]], bucket_bytes: int
) -> list[Bucket]:
    """Packs the slices of one source into buckets. Slices with the same destinations form a group; buckets of different
    groups alternate, so that no receiver waits for all buckets of another group."""
    filled = [
        [(destinations, pieces) for pieces in _fill(slices, bucket_bytes)]
        for (destinations, _), slices in groups.items()
    ]
    in_turn = (each for each in chain.from_iterable(zip_longest(*filled)) if each is not None)
    return [
        Bucket(source, number, tuple(sorted(destinations)), pieces, sum(each.slice.nbytes for each in pieces))
        for number, (destinations, pieces) in enumerate(in_turn)
    ]


def _fill(slices: Iterable[WeightSlice], bucket_bytes: int) -> Iterator[tuple[BucketPiece, ...]]:
    """Yields the contents of buckets that contain slices of one element type in order."""
    pieces: list[BucketPiece] = []
    used = 0
    for each in slices:
        for box in _cut(each.box, bucket_bytes // ITEM_BYTES[each.dtype]):
            piece = WeightSlice(each.name, each.shape, box, each.dtype)
            if used + piece.nbytes > bucket_bytes:
                yield tuple(pieces)
                pieces, used = [], 0
            pieces.append(BucketPiece(piece, used))
            used += piece.nbytes
    if pieces:
        yield tuple(pieces)


def _cut(box: Slice, most: int) -> Iterator[Slice]:
    """Cuts a box into boxes of at most `most` elements, along its first axis of more than one index."""
    if box.numel <= most:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    each = math.prod(box.shape[axis + 1 :])
    step = max(1, most // each)
    for start in range(box.starts[axis], box.stops[axis], step):
        stop = min(start + step, box.stops[axis])
        starts = (*box.starts[:axis], start, *box.starts[axis + 1 :])
        stops = (*box.stops[:axis], stop, *box.stops[axis + 1 :])
        yield from _cut(Slice(starts, stops), most)
