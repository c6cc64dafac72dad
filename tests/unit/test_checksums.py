"""Checksums by block: what they cover, and that no change of a covered byte goes unseen."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.checksums import BLOCK_BYTES, digests, first_mismatch, num_blocks, whole_blocks
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.store.store import Lease, TensorStore
from rlhf.errors import InvalidRequest, Refused, TransferError

ENDPOINT = Endpoint("127.0.0.1:7001", "host", 3, "actor", 0)
LEASE = Lease("run", 1)
SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5]


def new_store(checksums: bool = True) -> TensorStore:
    store = TensorStore(1 << 20, checksums)
    store.endpoint = ENDPOINT
    return store


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_shard_carries_the_xxh3_of_each_of_its_blocks(nbytes: int) -> None:
    data = random_bytes(nbytes)
    expected = [
        xxhash.xxh3_64(data[i : i + BLOCK_BYTES].tobytes()).intdigest() for i in range(0, nbytes, BLOCK_BYTES)
    ]
    assert list(new_store().put(data, LEASE).checksums) == expected
    assert num_blocks(nbytes) == len(expected)


def test_a_strided_array_is_digested_as_it_is_stored() -> None:
    array = random_bytes(400).reshape(20, 20).T
    shard = new_store().put(array, LEASE)
    assert shard.checksums == tuple(digests(np.ascontiguousarray(array).reshape(-1).data))


def test_a_shard_has_no_checksums_unless_asked_for() -> None:
    assert new_store(checksums=False).put(random_bytes(9), LEASE).checksums == ()


@given(st.integers(1, 5 * BLOCK_BYTES), st.data())
@settings(deadline=None)
def test_whole_blocks_cover_the_range_and_less_than_a_block_more_at_either_end(total, data):
    start = data.draw(st.integers(0, total - 1))
    nbytes = data.draw(st.integers(1, total - start))
    first, count = whole_blocks(start, nbytes, total)
    assert first % BLOCK_BYTES == 0
    assert first + count == total or (first + count) % BLOCK_BYTES == 0
    assert start - BLOCK_BYTES < first <= start
    assert start + nbytes <= first + count < start + nbytes + BLOCK_BYTES


@given(st.integers(0, 3 * BLOCK_BYTES + 4), st.integers(1, 255))
@settings(max_examples=50, deadline=None)
def test_a_changed_byte_is_found_in_its_block(position, difference):
    data = random_bytes(3 * BLOCK_BYTES + 5)
    expected = tuple(digests(data.data))
    assert first_mismatch(data.data, 0, expected) is None
    data[position] ^= difference
    block = position // BLOCK_BYTES * BLOCK_BYTES
    assert first_mismatch(data.data, 0, expected) == block
    assert first_mismatch(data.data[block:], block, expected) == block
    if position >= BLOCK_BYTES:
        assert first_mismatch(data.data[:BLOCK_BYTES], 0, expected) is None


def test_a_range_of_a_shard_without_checksums_is_not_widened() -> None:
    shard = Shard(ENDPOINT, 1, 64, 1000)
    assert ByteRange(shard, 10, 20).whole_blocks() == ByteRange(shard, 10, 20)


def test_checksums_travel_with_the_reference() -> None:
    batch = Batch(4, {"x": new_store().put_column(random_bytes(4), "uint8", LEASE)})
    column = from_proto(to_proto(batch))["x"]
    assert isinstance(column, RemoteColumn)
    assert column.shards == batch["x"].shards  # type: ignore[union-attr]
    assert len(column.shards[0].checksums) == 1


def test_a_reference_with_too_few_checksums_is_refused() -> None:
    message = to_proto(Batch(4, {"x": new_store().put_column(random_bytes(4), "uint8", LEASE)}))
    message.shards[0].nbytes = BLOCK_BYTES + 1
    with pytest.raises(InvalidRequest, match="has 1 checksums, expected 2"):
        from_proto(message)


def test_a_corrupt_shard_cannot_be_read_in_any_way_until_it_is_released() -> None:
    store = new_store()
    bad, good = (store.put(random_bytes(9), LEASE) for _ in range(2))
    assert store.mark_corrupt(bad.id)
    for read in (
        lambda: store.view(bad.id, 0, 1),
        lambda: store.read_bytes(bad.id, 0, 1),
        lambda: store.reader.check([good, bad]),
    ):
        with pytest.raises(TransferError, match=f"shard {bad.id} is marked bad"):
            read()
    store.reader.check([good])
    store.release("run")
    with pytest.raises(Refused, match="was released"):
        store.reader.check([bad])
    assert not store.mark_corrupt(bad.id)
    assert store.stat().used_bytes == 0
