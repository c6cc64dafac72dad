"""Rows on GPUs: read in place, through the opened arena of another process, by NCCL, and by the host."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from contract.host_devices import HostCuda
from contract.host_tensors import HostTensor, HostTensors
from contract.loopback import CountedCuda
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Space
from nccl_transfer.refs.wire import from_proto
from nccl_transfer.registry import create_readers
from nccl_transfer.rows import FetchedRows
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.device_arrays import DeviceArray
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.peer_process import MIB, PeerProcess
from nccl_transfer.testing.transports.rows import (
    assert_same_bits,
    fetch,
    moved_to,
    random_array,
    shard_of,
    wait_until,
)
from nccl_transfer.transports import host_id
from nccl_transfer.transports.gpu.communicator import Nccl
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcReader
from nccl_transfer.transports.gpu.nccl import NcclReader
from rlhf.errors import DeadlineExceeded, Refused, ServiceLost
from rlhf.v1 import common_pb2 as pb

pytestmark = pytest.mark.timeout(60)

BETWEEN_GPUS = pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"], indirect=True)
Columns = dict[str, tuple[np.ndarray, str, list[int] | None]]
ROWS: Columns = {
    "values": (random_array("float32", (7,)), "float32", [3, 0, 4]),
    "hidden": (random_array("bfloat16", (3, 2, 5)), "bfloat16", None),
}


class Rank:
    """The rank that reads: its store, arena on its GPU, and fetcher."""

    def __init__(self, transport: str, nccl: Nccl, cuda: Cuda) -> None:
        self.cuda = CountedCuda(cuda)
        arena = DeviceArena(self.cuda, 8 * MIB)
        self.store = TensorStore(4 * MIB, device=(arena, HostTensors(cuda)))
        self.store.endpoint = Endpoint("here:1", host_id(), 1)
        between = CudaIpcReader(self.cuda) if transport == "cuda_ipc" else NcclReader(nccl, self.cuda)
        self.fetcher = Fetcher(host_id(), [between, *create_readers(["memfd", "tcp"])], self.store)

    def fetch(self, batch: Batch, within_s: float = 20.0) -> FetchedRows:
        """Fetches with all columns on the GPU."""
        return self.fetcher.fetch(batch, time.monotonic() + within_s, on_device=batch.columns)

    @property
    def used(self) -> int:
        self.store.device.arena.settle()  # type: ignore[union-attr]
        return self.store.stat().device_used_bytes

    def close(self) -> None:
        self.fetcher.close()
        self.store.close()


@pytest.fixture
def rank(transport, gpus) -> Iterator[Rank]:
    rank = Rank(transport, *gpus(transport))
    yield rank
    rank.close()


@pytest.fixture
def lender(peer) -> PeerProcess:
    """The peer with an arena on its GPU, which stays."""
    peer.ask("lend_device", mib=16)
    return peer


steps = itertools.count(1)


def put_on_gpu(peer: PeerProcess, columns: Columns) -> Batch:
    described = {}
    for name, (array, dtype, lengths) in columns.items():
        path = peer.directory / f"device-{next(steps)}.npy"
        np.save(path, array)
        described[name] = {"path": str(path), "dtype": dtype, "lengths": lengths}
    reply = peer.ask("put_device", step=next(peer.steps), columns=described)
    assert "batch" in reply, reply
    return from_proto(pb.Batch.FromString(bytes.fromhex(reply["batch"])))


def one(peer: PeerProcess, nbytes: int = MIB) -> Batch:
    return put_on_gpu(peer, {"x": (random_array("uint8", (4, nbytes // 4)), "uint8", None)})


def host(values: object) -> np.ndarray:
    """Values of a column that is on the GPU."""
    array = values.values if isinstance(values, Jagged) else values
    assert isinstance(array, DeviceArray)
    return array.tensor().array


@BETWEEN_GPUS
def test_rows_on_a_gpu_arrive_on_a_gpu_bit_by_bit_and_no_memory_is_allocated_for_it(rank, lender):
    batch = put_on_gpu(lender, ROWS)
    assert all(
        c.shards[0].space is Space.DEVICE for c in batch.columns.values() if isinstance(c, RemoteColumn)
    )
    rank.fetch(batch)
    before = rank.cuda.mallocs, lender.ask("mallocs")
    for _ in range(3):
        rows = rank.fetch(batch)
        for name, (array, _, lengths) in ROWS.items():
            assert_same_bits(host(rows[name]), array)
            assert lengths is None or rows[name].lengths.tolist() == lengths
    assert rows.dtypes == {"values": "float32", "hidden": "bfloat16"}
    assert rows.fetched_bytes == batch.nbytes
    assert (rank.cuda.mallocs, lender.ask("mallocs")) == before
    assert lender.ask("device_stat")["copied"] == 0
    del rows
    assert rank.used == 0


@BETWEEN_GPUS
def test_rows_in_any_order_are_joined_on_the_gpu(rank, lender):
    array = random_array("int64", (9, 3))
    batch = put_on_gpu(lender, {"x": (array, "int64", None)})
    order = np.array([8, 1, 1, 4, 5, 0])
    assert_same_bits(host(rank.fetch(batch.take(order))["x"]), array[order])


@BETWEEN_GPUS
def test_columns_on_the_host_and_on_the_gpu_come_in_one_fetch(rank, lender):
    ids, values = random_array("int64", (4,)), random_array("float32", (4,))
    on_gpu, on_host = put_on_gpu(lender, {"values": (values, "float32", None)}), lender.put(ids)
    rows = rank.fetch(Batch(4, {**on_gpu.columns, **on_host.columns}))
    assert_same_bits(rows["x"], ids)
    assert_same_bits(host(rows["values"]), values)


@pytest.mark.parametrize("transport", ["cuda_ipc"])
def test_own_rows_are_views_of_the_arena_that_outlive_their_shard(rank):
    array = random_array("float32", (6, 2))
    column = rank.store.device.put_column(HostTensor(array, "float32"), Lease("s", 1))
    tensor = rank.fetch(Batch(6, {"x": column}))["x"].tensor()
    arena = rank.store.device.arena
    assert arena.pointer <= tensor.array.ctypes.data < arena.pointer + arena.nbytes
    rank.store.release("s")
    assert rank.used == 256
    rank.store.device.put_column(HostTensor(random_array("float32", (6, 2), 1), "float32"), Lease("s", 2))
    assert_same_bits(tensor.array, array)
    with pytest.raises(Refused, match="was released"):
        rank.fetch(Batch(6, {"x": column}))
    del tensor
    rank.store.release("s")
    assert rank.used == 0


@pytest.mark.parametrize("transport", ["memfd", "tcp", "grpc"])
def test_readers_without_a_gpu_read_one_copy_on_the_host(fetcher, lender):
    array = random_array("float32", (5, 3))
    batch, before = put_on_gpu(lender, {"x": (array, "float32", None)}), lender.ask("device_stat")["copied"]
    with ThreadPoolExecutor(4) as threads:
        for rows in threads.map(lambda _: fetch(fetcher, batch), range(4)):
            assert_same_bits(rows["x"], array)
    assert_same_bits(fetch(fetcher, batch.take(np.array([4, 0])))["x"], array[[4, 0]])
    assert lender.ask("device_stat")["copied"] == before + array.nbytes
    lender.release()
    with pytest.raises(Refused, match="was released"):
        fetch(fetcher, batch)
    assert lender.ask("device_stat")["used"] == 0


@BETWEEN_GPUS
def test_rows_that_were_released_or_are_of_another_epoch_are_errors(rank, lender):
    batch = one(lender)
    with pytest.raises(Refused, match="epoch is 3, the rows are of epoch 2"):
        rank.fetch(moved_to(batch, epoch=2))
    rank.fetch(batch)
    lender.release()
    with pytest.raises(Refused, match=r"shard \d+ was released"):
        rank.fetch(batch)
    rank.fetch(one(lender))
    assert rank.used == 0


@pytest.mark.parametrize("transport", ["cuda_ipc"])
def test_rows_that_are_released_during_the_copy_are_an_error(rank, lender):
    batch, copy = one(lender), rank.cuda.copy

    def copy_and_release(*arguments):
        copy(*arguments)
        lender.release()

    rank.fetch(batch)
    rank.cuda.copy = copy_and_release
    with pytest.raises(Refused, match="was released"):
        rank.fetch(batch)
    assert rank.used == 0


@BETWEEN_GPUS
def test_rows_that_do_not_fit_into_the_arena_of_the_reader_come_by_the_host(rank, lender, caplog):
    batch = one(lender, 9 * MIB)
    with caplog.at_level(logging.WARNING):
        got = host(rank.fetch(batch)["x"])
    assert_same_bits(got, random_array("uint8", (4, 9 * MIB // 4)))
    assert "do not fit into the arena of 8.0 MiB on the GPU" in caplog.text
    assert rank.used == 0


@pytest.mark.parametrize("transport", ["cuda_ipc"])
def test_rows_that_do_not_fit_into_the_arena_of_the_source_are_put_on_the_host_and_counted(rank, lender):
    before = lender.ask("device_stat")
    batch = one(lender, 17 * MIB)
    assert shard_of(batch).space is Space.HOST
    assert lender.ask("device_stat") == {**before, "spilled": before["spilled"] + 17 * MIB}
    assert_same_bits(rank.fetch(batch)["x"], random_array("uint8", (4, 17 * MIB // 4)))


@pytest.mark.parametrize("transport", ["cuda_ipc"])
def test_an_arena_that_cannot_be_opened_is_tried_once_and_the_rows_come_by_the_host(
    rank, lender, monkeypatch, caplog
):
    opened = []

    def fail(handle):
        opened.append(handle)
        return HostCuda("none").open(b"\0" * 64)

    monkeypatch.setattr(rank.cuda, "open", fail)
    batch = one(lender)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_same_bits(host(rank.fetch(batch)["x"]), random_array("uint8", (4, MIB // 4)))
    assert (len(opened), len(caplog.records)) == (1, 1)
    assert "is read by its host memory, since cuda_ipc failed: memory of process" in caplog.text


@BETWEEN_GPUS
def test_a_source_that_has_died_is_lost_and_one_that_is_stopped_ends_the_read(rank, transport, mortal_peer):
    mortal_peer.ask("lend_device", mib=16)
    batch, fresh = one(mortal_peer), one(mortal_peer)
    rank.fetch(batch)
    if transport == "nccl":  # cuda_ipc reads from a source that is stopped
        mortal_peer.stop()
        with pytest.raises(DeadlineExceeded, match=re.escape(str(mortal_peer.endpoint))):
            rank.fetch(batch, within_s=0.5)
        mortal_peer.process.send_signal(signal.SIGCONT)
        rank.fetch(batch)
    mortal_peer.kill()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        rank.fetch(fresh)
    wait_until(lambda: rank.used == 0)


@pytest.mark.parametrize("transport", ["nccl"])
def test_a_group_that_does_not_end_gives_arena_and_pins_back(rank, lender):
    batch = one(lender)
    rank.fetch(batch)
    lender.ask("pause", at="send")
    with pytest.raises(DeadlineExceeded, match="transfer: no answer"):
        rank.fetch(batch, within_s=0.5)
    assert lender.answer() == {"event": "paused"}
    lender.release()
    wait_until(lambda: rank.used == 0)
    wait_until(lambda: lender.ask("device_stat")["used"] == 0)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_a_reader_that_is_closed_leaves_no_thread(transport, gpus, lender):
    before = threading.active_count()
    rank = Rank(transport, *gpus(transport))
    rank.fetch(one(lender))
    rank.close()
    wait_until(lambda: threading.active_count() <= before)


def test_a_reader_without_a_gpu_keeps_no_connection_to_a_source_that_is_forgotten(lender):
    def open_there() -> int:
        return len(os.listdir(f"/proc/{lender.pid}/fd"))

    fetcher, batch, before = Fetcher(host_id(), create_readers(["tcp"])), one(lender), open_there()
    for _ in range(2):
        assert_same_bits(fetch(fetcher, batch)["x"], random_array("uint8", (4, MIB // 4)))
        fetcher.forget(lender.endpoint)
        wait_until(lambda: open_there() <= before)
    fetcher.close()


@pytest.mark.parametrize("transport", ["cuda_ipc"])
def test_a_reference_that_says_another_size_than_the_shard_has_is_an_error(rank, lender):
    batch = one(lender)
    column = batch["x"]
    assert isinstance(column, RemoteColumn)
    shard = replace(column.shards[0], nbytes=2 * MIB)
    wrong = RemoteColumn.of_run("uint8", (MIB // 2,), None, shard, 4)
    with pytest.raises(Refused, match="was released"):  # its header says another size
        rank.fetch(Batch(4, {"x": wrong}))


@pytest.mark.parametrize("transport", ["cuda_ipc"], indirect=True)
def test_an_arena_whose_headers_cannot_be_mapped_is_read_by_another_transport(
    rank: Rank, lender: PeerProcess
) -> None:
    """As between two containers on one GPU, whose processes cannot connect to each other's sockets by name."""
    array = random_array("float32", (6, 2))
    batch = put_on_gpu(lender, {"x": (array, "float32", None)})
    adverts = {**lender.endpoint.adverts, "memfd": b"rlhf-" + b"0" * 32}
    rows = rank.fetch(moved_to(batch, host_id="far", adverts=adverts))
    assert_same_bits(host(rows["x"]), array)
    assert "its headers cannot be read: it is on host 'far'" in rank.fetcher.failures()["cuda_ipc"]
