"""The contract of every transport, checked on each of them with a real second process at the other end."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from contract.peer_process import EPOCH, MIB
from contract.transport_helpers import (
    assert_same_bits,
    fetch,
    fetch_array,
    moved_to,
    random_array,
)
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import ShardRun
from nccl_transfer.store.arena import COPIED_BYTES
from rlhf.errors import (
    DeadlineExceeded,
    Refused,
    ServiceLost,
    TransferError,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_element_type_arrives_bit_by_bit(fetcher, peer, dtype):
    array = random_array(dtype, (5, 3))
    got = fetch(fetcher, peer.put(array, dtype))
    assert_same_bits(got["x"], array)
    assert got.dtypes == {"x": dtype}


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (1,), (2, 3, 4)], ids=str)
def test_any_shape_arrives_also_without_rows(fetcher, peer, shape):
    array = random_array("float32", shape)
    assert_same_bits(fetch(fetcher, peer.put(array))["x"], array)


@pytest.mark.parametrize("lengths", [[3, 0, 2, 0], [0, 0], [], [5]], ids=str)
def test_jagged_rows_arrive_also_empty_ones(fetcher, peer, lengths):
    values = random_array("int64", (sum(lengths), 2))
    got = fetch(fetcher, peer.put(values, lengths=lengths))["x"]
    assert isinstance(got, Jagged)
    assert got.lengths.tolist() == lengths
    assert_same_bits(got.values, values)


@pytest.mark.parametrize(
    ("layout", "view"),
    [
        ("transposed", lambda a: a.T),
        ("strided", lambda a: a[::2, 1::3]),
        ("reversed", lambda a: a[::-1, ::-1]),
        ("broadcast", lambda a: np.repeat(a[:1], len(a), axis=0)),
    ],
)
def test_sources_need_not_be_contiguous(fetcher, peer, layout, view):
    array = random_array("float64", (6, 10))
    assert_same_bits(fetch(fetcher, peer.put(array, layout=layout))["x"], np.ascontiguousarray(view(array)))


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB + 7, 64 * MIB])
def test_any_size_arrives(fetcher, peer, nbytes):
    array = random_array("uint8", (1, nbytes))
    assert_same_bits(fetch(fetcher, peer.put(array))["x"], array)


@pytest.mark.full
def test_a_gibibyte_arrives(fetcher, big_peer):
    array = random_array("uint8", (1, 1 << 30))
    assert np.array_equal(fetch_array(fetcher, big_peer.put(array)), array)


def test_many_small_columns_arrive_in_one_transfer(fetcher, transport, peer):
    arrays = {f"column {i}": random_array("int32", (4, 1 + i % 7), seed=i) for i in range(300)}
    batch = peer.put_columns({name: (array, "int32", None) for name, array in arrays.items()})
    got = fetch(fetcher, batch)
    for name, array in arrays.items():
        assert_same_bits(got[name], array)
    assert fetcher.traffic()[transport].transfers == 1


def test_rows_arrive_in_the_order_asked_for(fetcher, peer):
    array, lengths = random_array("int32", (40, 3)), np.arange(40, dtype=np.int64) % 5
    values = random_array("float32", (int(lengths.sum()),))
    columns = {"fixed": (array, "int32", None), "jagged": (values, "float32", lengths.tolist())}
    rows = np.array([7, 7, 0, 39, 3, 4, 5, 6, 7, 8, 1, 5])
    got = fetch(fetcher, peer.put_columns(columns).take(rows))
    assert_same_bits(got["fixed"], array[rows])
    ends = np.cumsum(lengths)
    expected = np.concatenate([values[ends[r] - lengths[r] : ends[r]] for r in rows])
    jagged = got["jagged"]
    assert isinstance(jagged, Jagged)
    assert_same_bits(jagged.values, expected)
    assert jagged.lengths.tolist() == lengths[rows].tolist()


def test_repeated_rows_travel_once(fetcher, transport, peer):
    array = random_array("int64", (4, 8))
    got = fetch(fetcher, peer.put(array).repeat(16))
    assert_same_bits(got["x"], np.repeat(array, 16, axis=0))
    assert fetcher.traffic()[transport].bytes == got.fetched_bytes == array.nbytes


def test_columns_held_here_pass_through(fetcher, peer):
    array = random_array("int32", (2,))
    floats = np.ones(2, np.float32)
    got = fetch(fetcher, peer.put(array) | Batch.of(text=["a", "b"], floats=floats))
    assert got["text"] == ["a", "b"]
    assert got["floats"] is floats
    assert got.dtypes == {"x": "int32", "floats": "float32"}


@pytest.mark.parametrize("rows", [1000, 70_000], ids=["copied", "mapped"])
def test_what_the_reader_writes_neither_the_peer_nor_later_reads_see(fetcher, peer, rows):
    array = random_array("int32", (rows, 8))
    assert (array.nbytes > COPIED_BYTES) is (rows == 70_000)
    batch = peer.put(array)
    got = fetcher.fetch(batch, time.monotonic() + 20, writable=True)["x"]
    assert isinstance(got, np.ndarray)
    got[:] = 0
    assert_same_bits(fetch(fetcher, batch)["x"], array)


def test_rows_are_read_only_unless_they_are_asked_for_otherwise(fetcher, peer):
    batch = peer.put(random_array("int32", (1000, 8)))
    for rows in (batch, batch.take(np.array([3, 1, 2]))):  # side by side, and put together out of pieces
        with pytest.raises(ValueError, match="read-only"):
            fetch_array(fetcher, rows)[0] = 0


def test_threads_may_read_at_the_same_time(fetcher, peer):
    arrays = [random_array("uint8", (4, 100_000 + 1000 * i), seed=i) for i in range(8)]
    batches = [peer.put(array) for array in arrays]

    def read(number):
        for turn in range(5):
            which = (number + turn) % 8
            assert_same_bits(fetch_array(fetcher, batches[which]), arrays[which])

    with ThreadPoolExecutor(8) as threads:
        for reading in [threads.submit(read, number) for number in range(8)]:
            reading.result(20)


def test_rows_of_several_ranks_arrive_in_one_batch(fetcher, peer, other_peer):
    array = random_array("int32", (10, 2))
    both = Batch.concat([peer.put(array[:6]), other_peer.put(array[6:])])
    assert_same_bits(fetch(fetcher, both)["x"], array)


def test_released_rows_are_refused(fetcher, peer):
    batch = peer.put(random_array("int32", (4,)))
    fetch(fetcher, batch)
    peer.release()
    with pytest.raises(Refused, match=rf"{re.escape(str(peer.endpoint))}: .*shard \d+ was released"):
        fetch(fetcher, batch)


def test_rows_whose_place_was_taken_again_are_refused(fetcher, peer):
    batch = peer.put(random_array("int32", (4,)))
    peer.release()
    peer.put(random_array("int32", (4,), seed=1))
    with pytest.raises(Refused, match="was released"):
        fetch(fetcher, batch)


def test_rows_of_another_epoch_are_refused(fetcher, peer):
    batch = moved_to(peer.put(random_array("int32", (4,))), epoch=EPOCH - 1)
    with pytest.raises(Refused, match=rf"{re.escape(str(peer.endpoint))}: .*epoch.* 3.*epoch 2"):
        fetch(fetcher, batch)


def test_a_range_beyond_its_shard_is_an_error(fetcher, peer):
    batch = peer.put(random_array("int32", (4,)))
    column = batch["x"]
    assert isinstance(column, RemoteColumn)
    assert isinstance(column.place, ShardRun)
    beyond = Batch(4, {"x": replace(column, place=column.place._replace(start=4))})
    with pytest.raises(TransferError, match="beyond"):
        fetch(fetcher, beyond)


def test_a_peer_that_has_died_is_lost(fetcher, mortal_peer):
    batch = mortal_peer.put(random_array("int32", (4,)))
    mortal_peer.kill()
    start = time.monotonic()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(fetcher, batch, within_s=10)
    assert time.monotonic() - start < 5


def test_a_peer_that_dies_between_reads_is_lost_and_what_was_read_stays_good(fetcher, mortal_peer):
    array = random_array("int32", (4,))
    batch = mortal_peer.put(array)
    got = fetch(fetcher, batch)
    mortal_peer.kill()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(fetcher, batch)
    got.verify()
    assert_same_bits(got["x"], array)


def test_a_peer_that_hangs_ends_the_read_at_its_deadline(fetcher, mortal_peer):
    batch = mortal_peer.put(random_array("int32", (4,)))
    mortal_peer.stop()
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=re.escape(str(mortal_peer.endpoint))):
        fetch(fetcher, batch, within_s=0.5)
    assert time.monotonic() - start < 1.5


def test_a_deadline_that_has_passed_is_noticed_before_anything_is_asked(fetcher, peer):
    batch = peer.put(random_array("int32", (4,)))
    with pytest.raises(DeadlineExceeded, match=re.escape(str(peer.endpoint))):
        fetch(fetcher, batch, within_s=-1)


def test_one_lost_rank_of_several_is_named(fetcher, peer, mortal_peer):
    array = random_array("int32", (4,))
    both = Batch.concat([peer.put(array), mortal_peer.put(array)])
    mortal_peer.kill()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(fetcher, both)


def test_a_full_arena_is_an_error_that_says_which_key_raises_it_and_what_was_stored_is_not_hurt(
    fetcher, mortal_peer
):
    stored, late = (random_array("uint8", (size * MIB,), seed=size) for size in (10, 8))
    batch = mortal_peer.put(stored)
    reply = mortal_peer.try_put({"x": (late, "uint8", None)}, "as it is")
    assert reply["error"] == "OutOfSpace"
    assert "8.0 MiB do not fit into the arena of 16.0 MiB, of which 10.0 MiB are in use" in reply["message"]
    assert "raise arena_mb" in reply["message"]
    assert_same_bits(fetch_array(fetcher, batch), stored)
    mortal_peer.release()
    assert_same_bits(fetch_array(fetcher, mortal_peer.put(late)), late)
