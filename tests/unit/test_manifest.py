"""A manifest says what its bytes are, as far as that is known, and is held against itself."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.checksums import BLOCK_BYTES
from nccl_transfer.refs.plans import needed
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.transports.gpu.manifest import check_manifest, manifest_item
from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2, transfer_pb2
from rlhf.v1 import nccl_pb2 as pb

SOURCE = Endpoint("source:1")
ROWS, ROW_SHAPE = 20_000, (3, 2)
ROW_BYTES = 24


def batch(checksums: tuple[int, ...] = ()) -> Batch:
    """One column "x" of float32 rows that fill a shard."""
    shard = Shard(SOURCE, 1, 64, ROWS * ROW_BYTES, checksums)
    return Batch(ROWS, {"x": RemoteColumn.of_shard("float32", ROW_SHAPE, ROWS, shard)})


def item_of(batch: Batch) -> pb.ManifestItem:
    (r,) = needed(batch)[SOURCE]
    return manifest_item(r)


def test_rows_are_told_with_their_shape():
    item = item_of(batch().take(np.array([7, 5, 6, 8])))
    assert (item.column, item.dtype) == ("x", common_pb2.ELEMENT_TYPE_FLOAT32)
    assert list(item.shape) == [4, 3, 2]
    assert (item.range.start, item.range.nbytes) == (5 * ROW_BYTES, 4 * ROW_BYTES)
    check_manifest([item], 4 * ROW_BYTES)


def test_blocks_that_cut_rows_have_no_shape():
    checksums = (0,) * -(-ROWS * ROW_BYTES // BLOCK_BYTES)
    item = item_of(batch(checksums).take(np.arange(4)))
    assert (list(item.shape), item.range.nbytes) == ([], BLOCK_BYTES)
    check_manifest([item], BLOCK_BYTES)
    assert list(item_of(batch(checksums)).shape) == [ROWS, 3, 2]


def test_bytes_of_which_nothing_is_known_have_no_shape():
    item = manifest_item(ByteRange(Shard(SOURCE, 1, 64, 100), 4, 50))
    assert (item.column, item.dtype, list(item.shape)) == ("", common_pb2.ELEMENT_TYPE_UNSPECIFIED, [])
    check_manifest([item], 50)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "text"),
    [
        (common_pb2.ELEMENT_TYPE_FLOAT32, [4, 3, 2], 95, "the items are 96 bytes, not 95"),
        (
            common_pb2.ELEMENT_TYPE_FLOAT32,
            [4, 6, 2],
            96,
            r"column 'x', shard 1: 96 bytes are not the 192 of float32 \(4, 6, 2\)",
        ),
        (common_pb2.ELEMENT_TYPE_INT64, [4, 3, 2], 96, "96 bytes are not the 192 of int64"),
        (common_pb2.ELEMENT_TYPE_UNSPECIFIED, [4, 3, 2], 96, "a shape and no known element type"),
        (99, [4, 3, 2], 96, "a shape and no known element type"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(dtype, shape, nbytes, text):
    r = transfer_pb2.ByteRange(shard=1, start=0, nbytes=96)
    item = pb.ManifestItem(range=r, column="x", dtype=dtype, shape=shape)
    with pytest.raises(InvalidRequest, match=text):
        check_manifest([item], nbytes)
