"""Plans of weight transfers: which rank of a service packs which slices of weights into which buckets, and which ranks
of other services read these. Pure functions, which every rank of both sides calls with the same transfer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.refs.plans import Slice, plan_slices
from nccl_transfer.refs.shards import Endpoint
from rlhf.errors import TransferError

LEAST_BUCKET_BYTES = 4096
DEFAULT_BUCKET_BYTES = 64 << 20
MOST_BUCKETS = 1 << 16
"""Most buckets that the weights of a transfer may amount to, so that a plan has an end."""

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


def plan_weights(transfer: WeightTransfer) -> list[list[Bucket]]:
    """Plans a transfer: every receiver gets every element that it lacks once, and nothing else.

    An element comes from a rank on its receiver's host if one holds it, and of several from the one that sends least.
    What several receivers get from the same rank is packed once. Slices larger than a bucket are cut.

    Returns:
        The buckets of each source, in the order in which it packs them.

    Raises:
        TransferError: No source holds a slice that a receiver lacks, or holds it in an element type that cannot be
            cast, sides differ on a shape, or the buckets are too small for the amount of weights.
    """
    _check_size(transfer)
    hosts = {number: source.endpoint.host_id for number, source in enumerate(transfer.sources)}
    held: dict[str, dict[int, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    known: dict[str, WeightSlice] = {}
    for number, source in enumerate(transfer.sources):
        for each in source.slices:
            held[each.name][number].append(each.box)
            first = known.setdefault(each.name, each)
            if (first.shape, first.dtype) != (each.shape, each.dtype):
                raise TransferError(
                    f"sources differ on {each.name}: {first.dtype} {list(first.shape)}, and {each.dtype} "
                    f"{list(each.shape)} on {source.endpoint}"
                )
    groups: list[dict[tuple[Destinations, str], list[WeightSlice]]] = [{} for _ in transfer.sources]
    sent: dict[int, int] = {}
    for (name, dtype), wants in sorted(_wanted(transfer, known).items()):
        shape = known[name].shape
        for source, box, destinations in _assign(held[name], wants, hosts, transfer.receivers, sent):
            each = WeightSlice(name, shape, box, dtype)
            groups[source].setdefault((destinations, dtype), []).append(each)
    return [_buckets(number, group, transfer.bucket_bytes) for number, group in enumerate(groups)]


def buckets_of(plan: Sequence[Sequence[Bucket]], receiver: int) -> list[Bucket]:
    """Returns the buckets that a receiver reads, in the order in which it reads them: by number, and those of the same
    number from another source first for each receiver.

    If every receiver reads in this order, and says so after each bucket, no source has to pack more than its next
    bucket for any receiver to go on: all buckets before the lowest unread number have been read by all.
    """
    own = [bucket for source in plan for bucket in source if receiver in bucket.destinations]
    return sorted(own, key=lambda bucket: (bucket.number, (bucket.source - receiver) % len(plan)))


def _check_size(transfer: WeightTransfer) -> None:
    """Raises TransferError if the plan of a transfer would have more than MOST_BUCKETS full buckets."""
    total = sum(each.nbytes for receiver in transfer.receivers for each in receiver.slices)
    if transfer.bucket_bytes < LEAST_BUCKET_BYTES:
        raise TransferError(
            f"bucket_bytes is {transfer.bucket_bytes}; at least {LEAST_BUCKET_BYTES} are allowed"
        )
    if total > MOST_BUCKETS * transfer.bucket_bytes:
        raise TransferError(
            f"{total} bytes of weights in buckets of {transfer.bucket_bytes} are more than {MOST_BUCKETS} buckets: "
            "raise bucket_bytes"
        )


def _wanted(
    transfer: WeightTransfer, known: Mapping[str, WeightSlice]
) -> dict[tuple[str, str], list[tuple[Slice, int]]]:
    """Returns the boxes that receivers lack, and the index of the receiver of each, by name and element type.

    Args:
        transfer: The transfer.
        known: A slice of each tensor that a source holds, by name.

    Raises:
        TransferError: A source and a receiver differ on a tensor.
    """
    wanted: dict[tuple[str, str], list[tuple[Slice, int]]] = defaultdict(list)
    for number, receiver in enumerate(transfer.receivers):
        for each in receiver.slices:
            held = known.get(each.name)
            if held is None:
                raise TransferError(f"no rank holds {each.name}, which {receiver.endpoint} needs")
            if held.shape != each.shape:
                raise TransferError(
                    f"{each.name} has shape {held.shape}, but {receiver.endpoint} needs it with {each.shape}"
                )
            if held.dtype != each.dtype and not ("float" in held.dtype and "float" in each.dtype):
                raise TransferError(
                    f"{each.name} is {held.dtype}, but {receiver.endpoint} needs it as {each.dtype}; only floating "
                    "point is cast"
                )
            if each.box.numel:
                wanted[each.name, each.dtype].append((each.box, number))
    return wanted


def _assign(
    held: Mapping[int, Sequence[Slice]],
    wants: Iterable[tuple[Slice, int]],
    hosts: Mapping[int, str],
    receivers: Sequence[RankWeights],
    sent: dict[int, int],
) -> list[tuple[int, Slice, Destinations]]:
    """Returns who sends which boxes of a tensor to which receivers, as (source, box, destinations); no box twice from
    the same source. Other arguments as for `plan_slices`."""
    found: dict[tuple[int, Slice], Destinations] = {}
    for box, destinations in _regions(wants):
        for host in dict.fromkeys(receivers[number].endpoint.host_id for number in sorted(destinations)):
            # The receivers of a host are planned as one: number -1, which holds nothing.
            mine = frozenset(n for n in destinations if receivers[n].endpoint.host_id == host)
            try:
                moves = plan_slices(held, {-1: [box]}, {**hosts, -1: host}, sent)
            except TransferError:
                raise TransferError(
                    f"no rank holds all of {list(box.starts)} to {list(box.stops)}, which "
                    f"{receivers[min(mine)].endpoint} needs"
                ) from None
            for move in moves:
                key = move.source, move.piece
                found[key] = found.get(key, frozenset()) | mine
    return [(source, box, destinations) for (source, box), destinations in found.items()]


def _regions(wants: Iterable[tuple[Slice, int]]) -> list[tuple[Slice, Destinations]]:
    """Cuts boxes that may overlap into disjoint ones; returns each with the numbers of all that contain it."""
    together: dict[Slice, Destinations] = {}
    for box, number in wants:
        together[box] = together.get(box, frozenset()) | {number}
    regions: list[tuple[Slice, Destinations]] = []
    for box, numbers in together.items():
        rest, refined = [box], []
        for region, theirs in regions:
            common = region.intersect(box)
            if common is None:
                refined.append((region, theirs))
                continue
            refined += [(part, theirs) for part in region.without(common)]
            refined.append((common, theirs | numbers))
            rest = [part for piece in rest for part in piece.without(common)]
        regions = refined + [(part, numbers) for part in rest]
    return regions


def _buckets(
    source: int, groups: Mapping[tuple[Destinations, str], Sequence[WeightSlice]], bucket_bytes: int
) -> list[Bucket]:
    """Packs the slices of one source into buckets: one group of slices, which go to the same ranks, beside the other in
    turn, so that no receiver waits for the last bucket of another."""
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
