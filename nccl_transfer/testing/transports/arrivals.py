"""The tests of `TransportContract` of rows that arrive."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.store.arena import COPIED_BYTES
from nccl_transfer.testing.peer_process import MIB
from nccl_transfer.testing.transports.rows import assert_same_bits, fetch, fetch_array, random_array


class RowsArrive:
    """Rows of all types, shapes and sizes arrive bit by bit, in any order, once; readers may write to their copies."""

    @pytest.mark.parametrize("dtype", ITEM_BYTES)
    def test_every_element_type_arrives_bit_by_bit(self, fetcher, peer, dtype):
        array = random_array(dtype, (5, 3))
        got = fetch(fetcher, peer.put(array, dtype))
        assert_same_bits(got["x"], array)
        assert got.dtypes == {"x": dtype}

    @pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (1,), (2, 3, 4)], ids=str)
    def test_any_shape_arrives_also_without_rows(self, fetcher, peer, shape):
        array = random_array("float32", shape)
        assert_same_bits(fetch(fetcher, peer.put(array))["x"], array)

    @pytest.mark.parametrize("lengths", [[3, 0, 2, 0], [0, 0], [], [5]], ids=str)
    def test_jagged_rows_arrive_also_empty_ones(self, fetcher, peer, lengths):
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
    def test_sources_need_not_be_contiguous(self, fetcher, peer, layout, view):
        array = random_array("float64", (6, 10))
        assert_same_bits(
            fetch(fetcher, peer.put(array, layout=layout))["x"], np.ascontiguousarray(view(array))
        )

    @pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB + 7, 64 * MIB])
    def test_any_size_arrives(self, fetcher, peer, nbytes):
        array = random_array("uint8", (1, nbytes))
        assert_same_bits(fetch(fetcher, peer.put(array))["x"], array)

    def test_a_gibibyte_arrives(self, fetcher, big_peer):
        array = random_array("uint8", (1, 1 << 30))
        assert np.array_equal(fetch_array(fetcher, big_peer.put(array)), array)

    def test_many_small_columns_arrive_in_one_transfer(self, fetcher, transport_name, peer):
        arrays = {f"column {i}": random_array("int32", (4, 1 + i % 7), seed=i) for i in range(300)}
        batch = peer.put_columns({name: (array, "int32", None) for name, array in arrays.items()})
        got = fetch(fetcher, batch)
        for name, array in arrays.items():
            assert_same_bits(got[name], array)
        assert fetcher.traffic()[transport_name].transfers == 1

    def test_rows_arrive_in_the_order_asked_for(self, fetcher, peer):
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

    def test_repeated_rows_travel_once(self, fetcher, transport_name, peer):
        array = random_array("int64", (4, 8))
        got = fetch(fetcher, peer.put(array).repeat(16))
        assert_same_bits(got["x"], np.repeat(array, 16, axis=0))
        assert fetcher.traffic()[transport_name].bytes == got.fetched_bytes == array.nbytes

    def test_columns_held_here_pass_through(self, fetcher, peer):
        array = random_array("int32", (2,))
        floats = np.ones(2, np.float32)
        got = fetch(fetcher, peer.put(array) | Batch.of(text=["a", "b"], floats=floats))
        assert got["text"] == ["a", "b"]
        assert got["floats"] is floats
        assert got.dtypes == {"x": "int32", "floats": "float32"}

    @pytest.mark.parametrize("rows", [1000, 70_000], ids=["copied", "mapped"])
    def test_what_the_reader_writes_neither_the_peer_nor_later_reads_see(self, fetcher, peer, rows):
        array = random_array("int32", (rows, 8))
        assert (array.nbytes > COPIED_BYTES) is (rows == 70_000)
        batch = peer.put(array)
        got = fetcher.fetch(batch, time.monotonic() + 20, writable=True)["x"]
        assert isinstance(got, np.ndarray)
        got[:] = 0
        assert_same_bits(fetch(fetcher, batch)["x"], array)

    def test_rows_are_read_only_unless_they_are_asked_for_otherwise(self, fetcher, peer):
        batch = peer.put(random_array("int32", (1000, 8)))
        for rows in (batch, batch.take(np.array([3, 1, 2]))):  # side by side, and put together out of pieces
            with pytest.raises(ValueError, match="read-only"):
                fetch_array(fetcher, rows)[0] = 0

    def test_threads_may_read_at_the_same_time(self, fetcher, peer):
        arrays = [random_array("uint8", (4, 100_000 + 1000 * i), seed=i) for i in range(8)]
        batches = [peer.put(array) for array in arrays]

        def read(number):
            for turn in range(5):
                which = (number + turn) % 8
                assert_same_bits(fetch_array(fetcher, batches[which]), arrays[which])

        with ThreadPoolExecutor(8) as threads:
            for reading in [threads.submit(read, number) for number in range(8)]:
                reading.result(20)

    def test_rows_of_several_ranks_arrive_in_one_batch(self, fetcher, peer, other_peer):
        array = random_array("int32", (10, 2))
        both = Batch.concat([peer.put(array[:6]), other_peer.put(array[6:])])
        assert_same_bits(fetch(fetcher, both)["x"], array)
