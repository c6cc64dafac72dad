"""Manifest of an NCCL transfer: one item per message. The source checks it before it sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nccl_transfer.refs.dtypes import ELEMENT_BYTES
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.wire import DTYPES, ELEMENT_TYPES
from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2, transfer_pb2
from rlhf.v1 import nccl_pb2 as pb


def manifest_item(r: ByteRange) -> pb.ManifestItem:
    """Returns the manifest item of a range, with column, element type and shape where known."""
    return pb.ManifestItem(
        range=transfer_pb2.ByteRange(shard=r.shard.id, start=r.start, nbytes=r.nbytes),
        column=r.column,
        dtype=ELEMENT_TYPES[r.dtype] if r.dtype else common_pb2.ELEMENT_TYPE_UNSPECIFIED,
        shape=r.shape,
    )


def check_manifest(items: Sequence[pb.ManifestItem], nbytes: int) -> None:
    """Checks that a manifest is consistent.

    Args:
        items: Items of the manifest, one per message.
        nbytes: Total size in bytes that the request states.

    Raises:
        InvalidRequest: The sizes do not add up to `nbytes`, or an item's size does not match its shape and element
            type.
    """
    total = sum(item.range.nbytes for item in items)
    if total != nbytes:
        raise InvalidRequest(f"the items are {total} bytes, not {nbytes}")
    for item in items:
        if not item.shape:
            continue
        if item.dtype not in DTYPES:
            raise InvalidRequest(f"column {item.column!r} has a shape and no known element type")
        dtype, shape = DTYPES[item.dtype], tuple(item.shape)
        expected = ELEMENT_BYTES[dtype] * math.prod(shape)
        if item.range.nbytes != expected:
            raise InvalidRequest(
                f"column {item.column!r}, shard {item.range.shard}: {item.range.nbytes} bytes are not the {expected} "
                f"of {dtype} {shape}"
            )
