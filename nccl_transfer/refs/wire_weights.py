"""Conversion of weight transfers to and from protobuf messages."""

from __future__ import annotations

import math
from collections.abc import Iterable

from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.weight_plans import DEFAULT_BUCKET_BYTES, RankWeights, WeightSlice, WeightTransfer
from nccl_transfer.refs.wire import DTYPES, ELEMENT_TYPES, MAX_RANK
from nccl_transfer.refs.wire_ranks import endpoint_from_proto, endpoint_to_proto
from rlhf.errors import InvalidRequest
from rlhf.v1 import weights_pb2 as pb

MAX_ELEMENTS = 1 << 44
"""Most elements of a tensor."""
MAX_ID = 64
"""Most characters of the id of a transfer."""
MAX_NAME = 1024
"""Most characters of the name of a tensor."""


def slice_to_proto(slice_: WeightSlice) -> pb.WeightSlice:
    """Encodes a slice; the bounds of a whole tensor are left out."""
    message = pb.WeightSlice(name=slice_.name, shape=slice_.shape, dtype=ELEMENT_TYPES[slice_.dtype])
    if slice_.box != Slice.whole(slice_.shape):
        message.starts.extend(slice_.box.starts)
        message.stops.extend(slice_.box.stops)
    return message


def slice_from_proto(message: pb.WeightSlice) -> WeightSlice:
    """Decodes a slice.

    Raises:
        InvalidRequest: The slice is not within the shape of its tensor; the message names the tensor.
    """
    name, shape = message.name, tuple(message.shape)
    where = f"weight {name[:100]!r}"
    if not name or len(name) > MAX_NAME:
        raise InvalidRequest(f"{where}: a name has 1 to {MAX_NAME} characters, this one {len(name)}")
    if len(shape) > MAX_RANK or math.prod(shape) > MAX_ELEMENTS:
        raise InvalidRequest(
            f"{where}: shape {list(shape[:MAX_RANK])} has more than {MAX_RANK} axes or {MAX_ELEMENTS} elements"
        )
    starts = tuple(message.starts) or (0,) * len(shape)
    stops = tuple(message.stops) or shape
    if len(starts) != len(shape) or len(stops) != len(shape):
        raise InvalidRequest(f"{where}: starts and stops need {len(shape)} numbers each, one per axis")
    if not all(a <= b <= size for a, b, size in zip(starts, stops, shape, strict=True)):
        raise InvalidRequest(f"{where}: {list(starts)} to {list(stops)} is not within shape {list(shape)}")
    dtype = DTYPES.get(message.dtype, "")
    if dtype not in ITEM_BYTES:
        raise InvalidRequest(f"{where}: dtype {message.dtype} is not a numeric element type")
    return WeightSlice(name, shape, Slice(starts, stops), dtype)


def transfer_to_proto(transfer: WeightTransfer) -> pb.WeightTransfer:
    return pb.WeightTransfer(
        id=transfer.id,
        policy_version=transfer.policy_version,
        bucket_bytes=transfer.bucket_bytes,
        sources=map(_rank_to_proto, transfer.sources),
        receivers=map(_rank_to_proto, transfer.receivers),
    )


def transfer_from_proto(message: pb.WeightTransfer) -> WeightTransfer:
    """Decodes a transfer.

    Raises:
        InvalidRequest: A field is missing or a slice is invalid.
    """
    if not message.id or len(message.id) > MAX_ID:
        raise InvalidRequest(f"transfer.id has {len(message.id)} characters; 1 to {MAX_ID} are allowed")
    if not message.sources:
        raise InvalidRequest(f"transfer {message.id}: it has no sources")
    return WeightTransfer(
        message.id,
        message.policy_version,
        message.bucket_bytes or DEFAULT_BUCKET_BYTES,
        _ranks_from_proto(message.sources),
        _ranks_from_proto(message.receivers),
    )


def _rank_to_proto(rank: RankWeights) -> pb.RankWeights:
    return pb.RankWeights(endpoint=endpoint_to_proto(rank.endpoint), slices=map(slice_to_proto, rank.slices))


def _ranks_from_proto(messages: Iterable[pb.RankWeights]) -> tuple[RankWeights, ...]:
    return tuple(
        RankWeights(endpoint_from_proto(each.endpoint), tuple(map(slice_from_proto, each.slices)))
        for each in messages
    )
