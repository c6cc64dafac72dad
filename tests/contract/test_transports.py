"""What every transport promises, checked on each of them with a real second process at the other end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from held import Held, assert_no_more_than

from contract.host_devices import HostCuda, HostNccl
from contract.loopback import CountedCuda
from nccl_transfer.fetch import CARRIERS, FetchedRows, Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard, ShardRun
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.refs.wire_ranks import endpoint_from_proto
from nccl_transfer.registry import create_transports
from nccl_transfer.store.arena import COPIED_BYTES
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import ArenaServer, Transport, host_id
from nccl_transfer.transports.gpu.communicator import Nccl
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcTransport
from nccl_transfer.transports.gpu.device import Cuda
from nccl_transfer.transports.gpu.manifest import manifest_item
from nccl_transfer.transports.gpu.nccl import NcclTransport
from nccl_transfer.transports.gpu.sources import DeviceSources
from nccl_transfer.transports.memfd import MemfdTransport
from rlhf.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    OutOfSpace,
    Refused,
    ServiceLost,
    TransferError,
)
from rlhf.v1 import common_pb2 as pb
from rlhf.v1 import transfer_pb2, transfer_pb2_grpc

TESTS = Path(__file__).parents[1]
EPOCH = 3
MIB = 1 << 20
GPU, READERS_GPU = "GPU-of-the-peer", "GPU-of-the-reader"
TRANSPORTS = ["memfd", "cuda_ipc", "nccl", "tcp", "grpc"]

pytestmark = pytest.mark.timeout(60)


Make = Callable[[str], Transport]
"""A new transport of this name."""


class PeerProcess:
    """A second process that stores what it is told to, and serves it."""

    def __init__(
        self,
        directory: Path,
        arena_mib: int = 16,
        epoch: int = EPOCH,
        devices: str = "host",
        checksums: bool = False,
        device_uuid: str = "",
    ) -> None:
        arguments = [str(arena_mib), str(epoch), devices, str(checksums), device_uuid]
        command = [sys.executable, "-m", "contract.transport_peer", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS
        )
        self.pid = self.process.pid
        self.directory = directory
        self.steps = itertools.count(1)
        message = pb.Endpoint.FromString(bytes.fromhex(self.answer()["endpoint"]))
        self.endpoint = endpoint_from_proto(message)

    def answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def ask(self, op: str, **arguments: object) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        while "event" in (reply := self.answer()):
            pass  # of a test that failed before it came to that
        return reply

    def try_put(self, columns: dict[str, tuple[np.ndarray, str, list[int] | None]], layout: str) -> dict:
        step = next(self.steps)
        described = {}
        for number, (name, (array, dtype, lengths)) in enumerate(columns.items()):
            path = self.directory / f"{os.getpid()}-{self.pid}-{step}-{number}.npy"
            np.save(path, array)
            described[name] = {"path": str(path), "dtype": dtype, "lengths": lengths, "layout": layout}
        reply = self.ask("put", step=step, columns=described)
        for column in described.values():
            os.unlink(column["path"])
        return reply

    def put(
        self, array: np.ndarray, dtype: str = "", lengths: list[int] | None = None, layout: str = "as it is"
    ) -> Batch:
        """A batch of one column "x"."""
        return self.put_columns({"x": (array, dtype or str(array.dtype), lengths)}, layout)

    def put_columns(
        self, columns: dict[str, tuple[np.ndarray, str, list[int] | None]], layout: str = "as it is"
    ) -> Batch:
        reply = self.try_put(columns, layout)
        assert "batch" in reply, reply
        return from_proto(pb.Batch.FromString(bytes.fromhex(reply["batch"])))

    def release(self) -> None:
        self.ask("go_on")
        self.ask("release")

    def stop(self) -> None:
        """Returns when the process has stopped: it may still run for a moment after the signal."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate()


@pytest.fixture(scope="module")
def shared_peer(tmp_path_factory) -> Iterator[PeerProcess]:
    peer = PeerProcess(tmp_path_factory.mktemp("peer"), arena_mib=80)
    yield peer
    peer.close()


@pytest.fixture
def peer(shared_peer) -> Iterator[PeerProcess]:
    """A peer that many tests share; empty."""
    yield shared_peer
    shared_peer.release()


@pytest.fixture
def mortal_peer(tmp_path) -> Iterator[PeerProcess]:
    """A peer of one's own, to stop and to kill."""
    peer = PeerProcess(tmp_path)
    yield peer
    peer.kill()
    peer.close()


@pytest.fixture
def other_peer(mortal_peer) -> PeerProcess:
    """A second one."""
    return mortal_peer


@pytest.fixture
def new_peer(tmp_path) -> Callable[[], PeerProcess]:
    """Starts a peer."""
    return lambda: PeerProcess(tmp_path)


def making(devices: Callable[[str], tuple[Nccl, Cuda]]) -> Iterator[Make]:
    """Makes transports; those between GPUs, whose `devices` are asked for by name, have to give back what they take."""
    made: list[CountedCuda] = []

    def make(transport: str) -> Transport:
        if transport not in ("cuda_ipc", "nccl"):
            return create_transports([transport])[0]
        nccl, cuda = devices(transport)
        made.append(counted := CountedCuda(cuda))
        return NcclTransport(nccl, counted) if transport == "nccl" else CudaIpcTransport(counted)

    yield make
    wait_until(lambda: not any(counted.used for counted in made))


@pytest.fixture
def make() -> Iterator[Make]:
    yield from making(lambda name: (HostNccl(), HostCuda(READERS_GPU if name == "nccl" else GPU)))


@pytest.fixture(params=TRANSPORTS)
def transport(request) -> str:
    return request.param


@pytest.fixture
def fetcher(transport, make) -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), [make(transport)])
    yield fetcher
    fetcher.close()


@pytest.fixture
def memfd() -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), create_transports(["memfd"]))
    yield fetcher
    fetcher.close()


@pytest.fixture(params=["tcp", "grpc"])
def stream(request) -> Iterator[Fetcher]:
    """Each transport that streams."""
    fetcher = Fetcher(host_id(), create_transports([request.param]))
    yield fetcher
    fetcher.close()


@pytest.fixture
def over_grpc() -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), create_transports(["grpc"]))
    yield fetcher
    fetcher.close()


def fetch(fetcher: Fetcher, batch: Batch, within_s: float = 20.0) -> FetchedRows:
    return fetcher.fetch(batch, time.monotonic() + within_s)


def fetch_array(fetcher: Fetcher, batch: Batch) -> np.ndarray:
    """Column "x"."""
    got = fetch(fetcher, batch)["x"]
    assert isinstance(got, np.ndarray)
    return got


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits, all of them where the type has no invalid ones: NaNs must arrive too."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    nbytes = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return np.frombuffer(rng.bytes(nbytes), CARRIERS[dtype]).reshape(shape)


def assert_same_bits(got: object, expected: np.ndarray) -> None:
    assert isinstance(got, np.ndarray)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def moved_to(batch: Batch, **changes: object) -> Batch:
    """The same rows with another idea of where they are."""

    def move(column: RemoteColumn) -> RemoteColumn:
        assert isinstance(column.place, ShardRun)
        shard = column.place.shard
        moved = replace(shard, endpoint=replace(shard.endpoint, **changes))
        return replace(column, place=column.place._replace(shard=moved))

    return Batch(batch.rows, {n: move(c) for n, c in batch.columns.items() if isinstance(c, RemoteColumn)})


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


@pytest.fixture
def big_peer(tmp_path) -> Iterator[PeerProcess]:
    peer = PeerProcess(tmp_path, arena_mib=1100)
    yield peer
    peer.close()


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


def test_the_arena_of_a_rank_that_died_is_let_go_of_although_nobody_reads(memfd, mortal_peer, peer):
    fetch(memfd, peer.put(random_array("int32", (4,))))
    before = Held.here()
    array = random_array("int32", (4,), seed=1)
    rows = fetch(memfd, mortal_peer.put(array))
    mortal_peer.kill()
    assert_same_bits(rows["x"], array)
    del rows
    assert_no_more_than(before)


def test_memory_is_not_read_through_a_transport_that_was_closed(peer):
    fetcher = Fetcher(host_id(), create_transports(["memfd"]))
    batch = peer.put(random_array("int32", (4,)))
    fetcher.close()
    before = Held.here()
    with pytest.raises(Refused, match=f"{re.escape(str(peer.endpoint))}: this end was closed"):
        fetch(fetcher, batch)
    assert_no_more_than(before)


def test_readers_map_an_arena_once_and_much_that_they_may_write_to_anew(memfd, peer):
    little, much = (peer.put(random_array("uint8", (nbytes,))) for nbytes in (COPIED_BYTES, COPIED_BYTES + 1))
    rows = [fetch(memfd, little)]
    mapped = Held.here().memfd_mappings
    rows += [fetch(memfd, batch) for batch in (little, much) for _ in range(3)]
    rows += [memfd.fetch(little, time.monotonic() + 20, writable=True) for _ in range(3)]
    assert Held.here().memfd_mappings == mapped
    rows += [memfd.fetch(much, time.monotonic() + 20, writable=True) for _ in range(3)]
    assert Held.here().memfd_mappings == mapped + 3


def test_a_shard_that_a_message_names_twice_is_looked_at_both_times(memfd, peer):
    """Where the second is right, the first may be anywhere: in another shard, or beyond the arena."""
    array = random_array("int64", (8,))
    batch = peer.put(array)
    good = batch["x"]
    assert isinstance(good, RemoteColumn)
    assert isinstance(good.place, ShardRun)
    shard = good.place.shard
    for offset in (shard.offset + 64, 80 * MIB - 4, 1 << 62):
        forged = replace(good, place=good.place._replace(shard=replace(shard, offset=offset)))
        both = Batch(3, {"x": forged.take(slice(0, 3)), "y": good.take(slice(5, 8))})
        with pytest.raises(Refused, match="was released"):
            fetch(memfd, both)


def test_rows_may_be_written_to_also_where_a_transport_gives_none_such(peer):
    class ReadOnly(MemfdTransport):
        def read(self, source, ranges, deadline):
            reading = super().read(source, ranges, deadline)
            return replace(reading, views=[memoryview(bytes(view)) for view in reading.views], remap=None)

    fetcher, array = Fetcher(host_id(), [ReadOnly()]), random_array("int32", (4,))
    got = fetcher.fetch(peer.put(array), time.monotonic() + 20, writable=True)["x"]
    assert isinstance(got, np.ndarray)
    got[:] = 0
    fetcher.close()


def test_a_peer_that_dies_between_reads_is_lost_and_what_was_read_stays_good(fetcher, mortal_peer):
    array = random_array("int32", (4,))
    batch = mortal_peer.put(array)
    got = fetch(fetcher, batch)
    mortal_peer.kill()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(fetcher, batch)
    got.verify()
    assert_same_bits(got["x"], array)


def test_a_peer_that_dies_in_the_middle_of_a_stream_is_lost(stream, mortal_peer):
    batch = mortal_peer.put(random_array("uint8", (1, 6 * MIB)))
    mortal_peer.ask("configure", pause_after=3)

    def kill_when_paused():
        assert mortal_peer.answer() == {"event": "paused"}
        mortal_peer.kill()

    killer = threading.Thread(target=kill_when_paused)
    killer.start()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(stream, batch, within_s=10)
    killer.join()


def test_a_peer_that_dies_before_it_hands_out_its_arena_is_lost(memfd, mortal_peer):
    batch = mortal_peer.put(random_array("uint8", (4,)))
    mortal_peer.stop()
    threading.Timer(0.2, mortal_peer.kill).start()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(memfd, batch, within_s=10)


def test_a_peer_that_hangs_ends_the_read_at_its_deadline(fetcher, mortal_peer):
    batch = mortal_peer.put(random_array("int32", (4,)))
    mortal_peer.stop()
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=re.escape(str(mortal_peer.endpoint))):
        fetch(fetcher, batch, within_s=0.5)
    assert time.monotonic() - start < 1.5


def test_a_peer_that_hangs_in_the_middle_of_a_stream_ends_the_read_at_its_deadline(stream, mortal_peer):
    batch = mortal_peer.put(random_array("uint8", (1, 6 * MIB)))
    mortal_peer.ask("configure", pause_after=3)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=re.escape(str(mortal_peer.endpoint))):
        fetch(stream, batch, within_s=0.5)
    assert time.monotonic() - start < 1.5


def test_memory_of_a_hanging_peer_that_is_known_already_can_be_read(memfd, mortal_peer):
    array = random_array("int32", (4,))
    batch = mortal_peer.put(array)
    fetch(memfd, batch)
    mortal_peer.stop()
    assert_same_bits(fetch(memfd, batch)["x"], array)


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


def test_a_reader_that_takes_nothing_neither_fills_its_source_nor_holds_up_others(peer):
    """What was sent to it waits in the kernel's buffers; the rest stays in the arena until there is room."""
    array = random_array("uint8", (1, 64 * MIB))
    batch = peer.put(array)
    before = anonymous_bytes(peer)
    fetcher = Fetcher(host_id(), create_transports(["tcp"]))
    with idle_reader(peer, batch) as connection:
        wait_until(lambda: queued_bytes(connection) > 0)
        for _ in range(
            2
        ):  # by then it would have been sent whatever it takes, if anything did not wait for it
            assert_same_bits(fetch(fetcher, batch)["x"], array)
        assert queued_bytes(connection) < 8 * MIB
        assert anonymous_bytes(peer) - before < 8 * MIB
        assert received_bytes(connection) == array.tobytes()
    fetcher.close()


@contextmanager
def idle_reader(peer: PeerProcess, batch: Batch) -> Iterator[socket.socket]:
    """A connection over plain tcp on which column "x" was asked for."""
    column = batch["x"]
    assert isinstance(column, RemoteColumn)
    assert isinstance(column.place, ShardRun)
    wanted = transfer_pb2.ByteRange(shard=column.place.shard.id, start=0, nbytes=column.place.nbytes)
    request = transfer_pb2.FetchRequest(epoch=EPOCH, ranges=[wanted]).SerializeToString()
    key = bytes.fromhex(peer.endpoint.data_key)
    with socket.create_connection(("127.0.0.1", peer.endpoint.data_port), 20) as connection:
        connection.sendall(struct.pack("<8s16sI", b"rlhftcp1", key, len(request)) + request)
        yield connection


def received_bytes(connection: socket.socket) -> bytes:
    """The data of all frames until the last."""
    received = []
    with connection.makefile("rb") as stream:
        while (header := struct.unpack("<II", stream.read(8)))[0] == 1:
            received.append(stream.read(header[1]))
    return b"".join(received)


def queued_bytes(connection: socket.socket) -> int:
    """What the kernel holds for a connection of this host: sent by the peer and not taken here."""
    here, there = connection.getsockname()[1], connection.getpeername()[1]
    queued = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        ports, (sending, receiving) = {local[-4:], remote[-4:]}, queues.split(":")
        if ports == {f"{here:04X}", f"{there:04X}"}:
            queued += int(receiving if local.endswith(f"{here:04X}") else sending, 16)
    return queued


def anonymous_bytes(peer: PeerProcess) -> int:
    """Memory of the peer's own, which its arena is not."""
    status = Path(f"/proc/{peer.process.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def test_rows_released_while_they_are_used_fail_to_verify(memfd, peer):
    got = fetch(memfd, peer.put(random_array("int32", (4,))))
    got.verify()
    peer.release()
    with pytest.raises(Refused, match="was released"):
        got.verify()


def test_rows_that_were_copied_stay_good_when_released(stream, peer):
    array = random_array("int32", (4,))
    got = fetch(stream, peer.put(array))
    peer.release()
    got.verify()
    assert_same_bits(got["x"], array)


def test_rows_that_lie_side_by_side_are_not_copied(memfd, peer):
    got = fetch_array(memfd, peer.put(random_array("uint8", (4, MIB))))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "rlhf-arena" in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    address = got.ctypes.data
    assert any(first <= address and address + got.nbytes <= last for first, last in spans)


def test_a_broken_stream_is_taken_up_where_it_broke(stream, peer):
    array = random_array("uint8", (1, 5 * MIB + 3))
    batch = peer.put_columns({"x": (array, "uint8", None), "y": (array[:, :9], "uint8", None)})
    peer.ask("configure", break_after=2)
    got = fetch(stream, batch)
    assert_same_bits(got["x"], array)
    assert_same_bits(got["y"], array[:, :9])
    unconfirmed = MIB if "tcp" in stream.traffic() else 0  # the last frame before the break is sent again
    assert peer.ask("served") == {"bytes": array.nbytes + 9 + unconfirmed}


def test_a_service_that_keeps_breaking_is_lost(stream, peer):
    batch = peer.put(random_array("uint8", (1, 100)))
    peer.ask("configure", break_after=0, always=True)
    try:
        with pytest.raises(ServiceLost, match=r"broken on purpose|the connection ended"):
            fetch(stream, batch)
    finally:
        peer.ask("configure")


class Canned(transfer_pb2_grpc.TransferServiceServicer):
    """Sends the same bytes whatever is asked."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def Fetch(self, request, context):
        yield transfer_pb2.FetchResponse(data=self.data)


@contextmanager
def canned_server(data: bytes, address: str = "127.0.0.1:0") -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(Canned(data), server)
    port = server.add_insecure_port(address)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_rank_that_is_back_at_its_address_is_reached_at_once(over_grpc, peer):
    """The connection is not held off by those that failed before."""
    array = random_array("int32", (4,))
    with canned_server(array.tobytes()) as address:
        batch = moved_to(peer.put(array), address=address)
    for _ in range(3):
        with pytest.raises(ServiceLost):
            fetch(over_grpc, batch)
    with canned_server(array.tobytes(), address):
        assert_same_bits(fetch(over_grpc, batch, within_s=0.5)["x"], array)


@pytest.mark.parametrize(("sent", "text"), [(15, "ended before all bytes"), (17, "1 bytes more than asked")])
def test_a_peer_that_sends_too_little_or_too_much_is_an_error(over_grpc, peer, sent, text):
    with canned_server(bytes(sent)) as address, pytest.raises(TransferError, match=f"{address}: .*{text}"):
        fetch(over_grpc, moved_to(peer.put(random_array("int32", (4,))), address=address))


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


@contextmanager
def canned_stream(data: bytes) -> Iterator[int]:
    """Answers the first request over plain tcp with these bytes; its port."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (frame(1, bytes(15)) + frame(2, b""), "ended before all bytes"),
        (frame(1, bytes(17)) + frame(2, b""), "1 bytes more than asked"),
        (frame(9, b""), "sent a frame of kind 9"),
    ],
)
def test_a_stream_that_is_not_as_it_should_be_is_an_error(peer, data, text):
    batch = peer.put(random_array("int32", (4,)))
    fetcher = Fetcher(host_id(), create_transports(["tcp"]))
    with canned_stream(data) as port, pytest.raises(TransferError, match=text):
        fetch(fetcher, moved_to(batch, data_port=port))
    fetcher.close()


def test_a_stream_that_broke_before_its_last_frame_was_confirmed_sends_it_again(peer, mortal_peer):
    """The bytes may be those of another shard: only the next frame, or the end, says that they were not."""
    array = random_array("int32", (4,))
    batch = peer.put(array)
    fetcher = Fetcher(host_id(), create_transports(["tcp"]))
    peer.ask("release")
    with canned_stream(frame(1, bytes(16))) as port:
        moved = moved_to(batch, data_port=port)
        with pytest.raises(DeadlineExceeded):  # asked again, this one is silent
            fetch(fetcher, moved, within_s=0.5)
    fetcher.close()


def test_a_reader_without_the_key_gets_nothing(peer):
    batch = peer.put(random_array("int32", (4,)))
    fetcher = Fetcher(host_id(), create_transports(["tcp"]))
    with pytest.raises(ServiceLost):
        fetch(fetcher, moved_to(batch, data_key="00" * 16))
    fetcher.close()


def test_restarts_of_a_source_leave_nothing_at_its_readers(make, transport, new_peer):
    """Each new one comes at a new address; what was held of the old ones goes."""
    fetcher = Fetcher(host_id(), [make(transport)])

    def work():
        peer = new_peer()
        fetch(fetcher, peer.put(random_array("int32", (4,))))
        peer.kill()
        peer.close()

    for _ in range(2):
        work()
    held = Held.here()
    for _ in range(2):
        work()
    assert_no_more_than(held)
    fetcher.close()


def test_whoever_sends_no_request_is_hung_up_on(peer):
    with socket.create_connection(("127.0.0.1", peer.endpoint.data_port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a-rank-of-the-cluster\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_ranks_on_the_same_host_use_memory_and_others_tcp(peer):
    batch = peer.put(random_array("int32", (4,)))
    for host, used in ((host_id(), {"memfd"}), ("another host", {"tcp"})):
        fetcher = Fetcher(host, create_transports())
        fetch(fetcher, batch)
        assert set(fetcher.traffic()) == used
        fetcher.close()


def test_network_namespaces_count_as_hosts():
    """Abstract sockets are not seen across network namespaces."""
    command = [sys.executable, "-c", "from nccl_transfer.transports import host_id; print(host_id())"]
    same = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    assert same == host_id()
    other = subprocess.run(["unshare", "-rn", *command], capture_output=True, text=True, timeout=30)
    if other.returncode != 0:
        pytest.skip(f"no network namespaces here: {other.stderr.strip()}")
    assert other.stdout.strip() != same


def test_where_no_transport_reaches_a_rank_the_error_says_why_for_each(peer):
    batch = moved_to(peer.put(random_array("int32", (4,))), address="", host_id="far")
    fetcher = Fetcher(host_id(), create_transports())
    with pytest.raises(
        TransferError,
        match=r"memfd: it is on host 'far', not on '.*'; tcp: it has no data port; grpc: it has no addr",
    ):
        fetch(fetcher, batch)
    fetcher.close()


def test_an_unknown_transport_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown transport 'rdma'; known: memfd, cuda_ipc, nccl, tcp"):
        create_transports(["rdma"])


def test_a_rank_reads_its_own_rows_without_a_transport():
    store = TensorStore(MIB)
    store.endpoint = Endpoint("127.0.0.1:1", host_id(), "", EPOCH, "actor", 0)
    array = random_array("int32", (4, 2))
    batch = Batch(4, {"x": store.put_column(array, "int32", Lease("session", 1))})
    fetcher = Fetcher(host_id(), [], store)
    got = fetch(fetcher, batch)
    assert_same_bits(got["x"], array)
    assert (fetcher.traffic(), got.fetched_bytes) == ({}, 0)
    store.release("session")
    with pytest.raises(Refused, match="was released"):
        got.verify()
    fetcher.close()
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_arena(peer):
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect('\\0' + sys.argv[1]); print(socket.recv_fds(s, 64, 1)[:2])"
    )
    command = [sys.executable, "-I", "-c", script, peer.endpoint.memfd_socket]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert answer.stdout.strip() == "(b'', [])", answer.stderr


def test_stat_says_what_the_store_holds(peer):
    peer.put(random_array("uint8", (1000,)))
    with grpc.insecure_channel(peer.endpoint.address) as channel:
        stat = transfer_pb2_grpc.TransferServiceStub(channel).Stat(transfer_pb2.StatRequest(), timeout=10)
    assert (stat.arena_bytes, stat.used_bytes, stat.shards) == (80 * MIB, 64 + 1024, 1)
    assert stat.peak_bytes >= stat.used_bytes


OVER_NCCL = pytest.mark.parametrize("transport", ["nccl"], indirect=True)
OVER_CUDA_IPC = pytest.mark.parametrize("transport", ["cuda_ipc"], indirect=True)
BETWEEN_GPUS = pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"], indirect=True)

PLACES = [
    ("cuda_ipc", "copy", 0),
    ("cuda_ipc", "copy", 3),
    ("nccl", "copy", 0),
    ("nccl", "copy", 1),
    ("nccl", "send", 0),
]
"""Where a transfer between GPUs can stop: in staging, at its beginning and on the way, and in the group."""


def two_columns(peer: PeerProcess) -> Batch:
    """Columns of 3 MiB each: several slots of staging memory, two messages of a group."""
    array = random_array("uint8", (3, MIB))
    return peer.put_columns(dict.fromkeys("xy", (array, "uint8", None)))


@pytest.fixture
def in_use(transport, make) -> Iterator[tuple[Fetcher, CountedCuda]]:
    """A fetcher and the GPU it receives into."""
    between = make(transport)
    assert isinstance(between, CudaIpcTransport | NcclTransport)
    fetcher = Fetcher(host_id(), [between])
    yield fetcher, between._cuda  # type: ignore[misc]
    fetcher.close()


@pytest.mark.parametrize(("transport", "at", "after"), PLACES, indirect=["transport"])
def test_a_peer_that_dies_in_the_middle_of_a_transfer_between_gpus_is_lost(
    fetcher, transport, mortal_peer, at, after
):
    batch = two_columns(mortal_peer)
    mortal_peer.ask("pause", at=at, after=after)

    def kill_when_paused():
        assert mortal_peer.answer() == {"event": "paused"}
        mortal_peer.kill()

    killer = threading.Thread(target=kill_when_paused)
    killer.start()
    start = time.monotonic()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(fetcher, batch, within_s=10)
    assert time.monotonic() - start < 5
    killer.join()


@pytest.mark.parametrize(("transport", "at", "after"), PLACES, indirect=["transport"])
def test_a_transfer_between_gpus_whose_transport_is_closed_ends_and_leaves_nothing(
    in_use, transport, peer, at, after
):
    (fetcher, gpu), batch = in_use, two_columns(peer)
    before = peer.ask("device_used")["bytes"]
    peer.ask("pause", at=at, after=after)
    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(fetch, fetcher, batch)
        assert peer.answer() == {"event": "paused"}
        fetcher.close()
        with pytest.raises(Refused, match=f"{re.escape(str(peer.endpoint))}: .*the transport was closed"):
            fetching.result(5)
        wait_until(lambda: gpu.used == 0)
    peer.ask("go_on")
    wait_until(lambda: peer.ask("device_used")["bytes"] <= before)


@BETWEEN_GPUS
def test_a_transport_between_gpus_that_was_closed_refuses(fetcher, peer):
    batch = two_columns(peer)
    fetch(fetcher, batch)
    fetcher.close()
    with pytest.raises(Refused, match="the transport was closed"):
        fetch(fetcher, batch)


@BETWEEN_GPUS
def test_a_source_that_is_back_at_its_address_is_read_from_also_once_it_was_forgotten(
    fetcher, peer, other_peer
):
    array = random_array("int32", (4,))
    batch = peer.put(array)
    fetch(fetcher, batch)
    peer.ask("end_sessions")
    fetch(fetcher, other_peer.put(array))
    assert_same_bits(fetch(fetcher, batch)["x"], array)


@pytest.mark.parametrize("reading", [False, True])
def test_closing_lets_go_of_the_memory_of_a_source_before_that_frees_it(mortal_peer, reading):
    copying = threading.Event()

    class Slow(HostCuda):
        def copy_out(self, data, pointer):
            copying.set()
            self.synchronize()
            super().copy_out(data, pointer)

        def synchronize(self):
            time.sleep(0.1)

    fetcher = Fetcher(host_id(), [CudaIpcTransport(Slow(GPU))])
    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(fetch, fetcher, mortal_peer.put(random_array("uint8", (3, MIB))))
        assert copying.wait(20) if reading else fetching.result(20)
        fetcher.close()
        assert (fetching.exception(5) is not None) == reading
    wait_until(lambda: mortal_peer.ask("device_used")["bytes"] == 0)
    assert mortal_peer.ask("freed_in_use") == {"times": 0}


@pytest.mark.parametrize(("transport", "at", "after"), PLACES, indirect=["transport"])
def test_a_transfer_between_gpus_that_stops_ends_at_its_deadline_and_leaves_nothing(
    transport, in_use, peer, at, after
):
    (fetcher, gpu), batch = in_use, two_columns(peer)
    fetch(fetcher, batch.take(np.arange(1)))
    held = gpu.used, peer.ask("device_used")["bytes"]
    peer.ask("pause", at=at, after=after)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=re.escape(str(peer.endpoint))):
        fetch(fetcher, batch, within_s=0.5)
    assert time.monotonic() - start < 1.5
    assert peer.answer() == {"event": "paused"}
    wait_until(lambda: gpu.used <= held[0])
    peer.ask("go_on")
    wait_until(lambda: peer.ask("device_used")["bytes"] <= held[1])
    assert fetch(fetcher, batch).fetched_bytes == batch.nbytes


@OVER_NCCL
@pytest.mark.parametrize(("at", "phase"), [("copy", "prepare"), ("send", "transfer")])
def test_a_group_that_fails_names_plan_peer_and_phase_and_the_next_has_a_new_communicator(
    fetcher, peer, at, phase
):
    batch = two_columns(peer)
    fetch(fetcher, batch)
    peer.ask("pause", at=at)
    with pytest.raises(
        DeadlineExceeded, match=rf"{re.escape(str(peer.endpoint))}: plan [0-9a-f]{{12}}, {phase}: no answer"
    ):
        fetch(fetcher, batch, within_s=0.5)
    assert peer.answer() == {"event": "paused"}
    peer.ask("go_on")
    fetch(fetcher, batch)
    fetch(fetcher, batch)
    assert peer.ask("communicator_epochs") == {"epochs": [2]}


@OVER_NCCL
def test_a_source_that_does_not_join_ends_the_read_at_its_deadline_and_may_join_later(fetcher, peer):
    batch, threads = two_columns(peer), threading.active_count()
    peer.ask("pause", at="join")
    with pytest.raises(DeadlineExceeded, match=r"plan [0-9a-f]{12}, attach: no answer"):
        fetch(fetcher, batch, within_s=0.5)
    assert peer.answer() == {"event": "paused"}
    peer.ask("go_on")
    fetch(fetcher, batch)
    fetcher.close()
    wait_until(lambda: threading.active_count() <= threads)


@OVER_NCCL
def test_a_refused_plan_leaves_the_communicator_as_it_is(fetcher, peer):
    batch = two_columns(peer)
    fetch(fetcher, batch)
    peer.release()
    with pytest.raises(Refused, match=r"plan [0-9a-f]{12}, prepare: shard \d+ was released"):
        fetch(fetcher, batch)
    fetch(fetcher, two_columns(peer))
    assert peer.ask("communicator_epochs") == {"epochs": [1]}


@OVER_NCCL
def test_a_manifest_tells_columns_types_and_shapes_and_one_that_contradicts_itself_is_refused(
    fetcher, peer, monkeypatch
):
    columns = {
        "tokens": (random_array("int32", (7,)), "int32", [3, 0, 4]),
        "hidden": (random_array("bfloat16", (3, 2, 5)), "bfloat16", None),
    }
    batch, told = peer.put_columns(columns), []

    def tell(r, rows=0):
        item = manifest_item(r)
        told.append((item.column, pb.ElementType.Name(item.dtype), list(item.shape), item.range.nbytes))
        item.shape[0] += rows
        return item

    monkeypatch.setattr("nccl_transfer.transports.gpu.nccl.manifest_item", tell)
    fetch(fetcher, batch)
    assert told == [
        ("tokens", "ELEMENT_TYPE_INT32", [7], 28),
        ("hidden", "ELEMENT_TYPE_BFLOAT16", [3, 2, 5], 60),
    ]
    monkeypatch.setattr("nccl_transfer.transports.gpu.nccl.manifest_item", partial(tell, rows=1))
    with pytest.raises(InvalidRequest, match=r"column 'tokens', .* 28 bytes are not the 32 of int32 \(8,\)"):
        fetch(fetcher, batch)
    monkeypatch.undo()
    fetch(fetcher, batch)
    assert peer.ask("communicator_epochs") == {"epochs": [1]}


@OVER_NCCL
@pytest.mark.parametrize("version", [0, 1])
def test_rows_of_a_rank_without_nccl_or_with_another_come_by_the_next_transport(
    make, transport, peer, version
):
    array = random_array("int32", (4,))
    fetcher = Fetcher(host_id(), [make(transport), *create_transports(["tcp"])])
    assert_same_bits(fetch(fetcher, moved_to(peer.put(array), nccl_version=version))["x"], array)
    assert set(fetcher.traffic()) == {"tcp"}
    fetcher.close()


def test_mixed_versions_of_nccl_are_refused_also_where_the_endpoint_says_otherwise(peer):
    fetcher = Fetcher(host_id(), [NcclTransport(HostNccl(22809), HostCuda(READERS_GPU))])
    batch = moved_to(peer.put(random_array("int32", (4,))), nccl_version=22809)
    with pytest.raises(Refused, match=r"NCCL is 2\.27\.3 here and 2\.28\.9 at the reader"):
        fetch(fetcher, batch)
    fetcher.close()


@BETWEEN_GPUS
@pytest.mark.parametrize("whose", ["the source's", "the reader's"])
def test_a_gpu_without_room_is_an_error_and_the_next_transfer_works(transport, in_use, peer, whose):
    (fetcher, gpu), array = in_use, random_array("uint8", (1, MIB))
    batch = peer.put(array)
    if whose == "the source's":
        peer.ask("limit_device", mib=0)
    elif transport == "nccl":
        gpu.capacity = 0
    else:
        pytest.skip("its reads need no memory of their own")
    with pytest.raises(OutOfSpace, match=r"has no .* bytes left"):
        fetch(fetcher, batch)
    gpu.capacity = 4 << 30
    peer.ask("limit_device", mib=4 << 10)
    assert_same_bits(fetch(fetcher, batch)["x"], array)


@BETWEEN_GPUS
def test_bytes_can_stay_on_the_gpu(make, transport, peer):
    array = random_array("uint8", (1, 5 * MIB + 7))
    column = peer.put(array)["x"]
    assert isinstance(column, RemoteColumn)
    between = make(transport)
    assert isinstance(between, CudaIpcTransport | NcclTransport)
    ranges = [ByteRange(column.shards[0], 0, 9), ByteRange(column.shards[0], 9, array.nbytes - 9)]
    buffer = between.receive(peer.endpoint, ranges, time.monotonic() + 20)
    got = bytearray(buffer.nbytes)
    between._cuda.copy_out(memoryview(got), buffer.pointer)
    assert got[:9] == array.tobytes()[:9]
    assert got[64 : 64 + array.nbytes - 9] == array.tobytes()[9:]
    buffer.free()
    between.close()


def run_reader(devices: str, transport: str, batch: Batch, within_s: float) -> subprocess.Popen[bytes]:
    """A process that fetches a batch; `devices` as for the peer."""
    message = to_proto(batch).SerializeToString().hex()
    command = [sys.executable, "-m", "contract.transport_reader", devices, transport, message, str(within_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS)


@pytest.fixture
def start_reader() -> Callable[[str, Batch, float], subprocess.Popen[bytes]]:
    """Starts a process that fetches a batch."""
    return partial(run_reader, "host")


@BETWEEN_GPUS
def test_a_reader_that_is_killed_leaves_nothing_on_the_gpu_of_its_source(transport, peer, start_reader):
    before, batch = peer.ask("device_used")["bytes"], two_columns(peer)
    peer.ask("pause", at="copy", after=1)
    reader = start_reader(transport, batch, 60)
    assert peer.answer() == {"event": "paused"}
    assert peer.ask("device_used")["bytes"] > before
    reader.kill()
    reader.communicate()
    peer.ask("go_on")
    wait_until(lambda: peer.ask("device_used")["bytes"] == before)


@BETWEEN_GPUS
def test_a_reader_that_is_killed_between_transfers_leaves_no_session_behind(transport, peer, start_reader):
    before, batch = peer.ask("device_used")["bytes"], two_columns(peer)
    reader = start_reader(transport, batch, 60)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"fetched\n"
    if transport == "nccl":
        assert peer.ask("communicator_epochs") == {"epochs": [1]}
    else:
        assert peer.ask("device_used")["bytes"] > before
    reader.kill()
    reader.communicate()
    wait_until(lambda: peer.ask("communicator_epochs") == {"epochs": []})
    wait_until(lambda: peer.ask("device_used")["bytes"] == before)


def test_a_reader_that_is_stopped_leaves_no_plan_behind_once_its_deadline_has_passed(peer, start_reader):
    before, batch = peer.ask("device_used")["bytes"], two_columns(peer)
    peer.ask("pause", at="send")
    reader = start_reader("nccl", batch, 3)
    assert peer.answer() == {"event": "paused"}
    reader.send_signal(signal.SIGSTOP)
    assert peer.ask("device_used")["bytes"] > before
    wait_until(lambda: peer.ask("device_used")["bytes"] == before)
    reader.kill()
    reader.communicate()


def test_requests_for_different_slots_may_arrive_in_any_order(peer):
    with grpc.insecure_channel(peer.endpoint.address) as channel:
        stub = transfer_pb2_grpc.TransferServiceStub(channel)
        lent = stub.OpenStaging(transfer_pb2.OpenStagingRequest(reader="reader", device_uuid=GPU), timeout=10)
        next(lent)
        for slot, generation in ((1, 2), (0, 1)):
            request = transfer_pb2.StageRequest(reader="reader", slot=slot, generation=generation)
            assert stub.Stage(request, timeout=10).generation == generation
        with pytest.raises(grpc.RpcError, match="generation 1 is not newer than 1"):
            stub.Stage(request, timeout=10)


@OVER_CUDA_IPC
def test_a_slot_that_holds_another_generation_is_an_error(fetcher, peer):
    batch = peer.put(random_array("uint8", (1, 3 * MIB)))
    peer.ask("forge_generation")
    with pytest.raises(TransferError, match=r"slot 0 holds generation 4711, not 1"):
        fetch(fetcher, batch)
    fetch(fetcher, batch)


@OVER_CUDA_IPC
def test_a_slot_that_changes_while_it_is_read_is_an_error(in_use, peer):
    (fetcher, gpu), batch = in_use, peer.put(random_array("uint8", (1, 3 * MIB)))
    copy_out = gpu.copy_out

    def copy_out_and_overtake(data, pointer):
        copy_out(data, pointer)
        if len(data) > 8:
            gpu.copy_in(pointer - 64, memoryview((4711).to_bytes(8, "little")))

    gpu.copy_out = copy_out_and_overtake
    with pytest.raises(TransferError, match=r"slot 0 holds generation 4711, not 1"):
        fetch(fetcher, batch)


def test_the_device_decides_which_transports_reach_a_rank():
    here, there = HostCuda("GPU-1"), "another host"
    ipc, nccl, source = CudaIpcTransport(here), NcclTransport(HostNccl(), here), Endpoint("a:1", there)
    assert (ipc.why_not(source, there), nccl.why_not(source, there)) == ("it has no GPU", "it has no GPU")
    same, other = replace(source, device_uuid="GPU-1"), replace(source, device_uuid="GPU-2")
    assert ipc.why_not(same, there) is None
    assert ipc.why_not(other, there) == "it is on GPU-2, not on GPU-1"
    assert nccl.why_not(same, there) == "both are on GPU-1, and NCCL takes one rank per GPU"
    assert nccl.why_not(other, there) == "it has no NCCL"
    assert nccl.why_not(replace(other, nccl_version=22809), there) == "NCCL is 2.28.9 there and 2.27.3 here"
    assert nccl.why_not(replace(other, nccl_version=22703), there) is None


def test_a_rank_tells_the_nccl_that_it_sends_by():
    store = TensorStore(MIB)
    for cuda, nccl, told in (
        (HostCuda(GPU), HostNccl(), 22703),
        (HostCuda(GPU), None, 0),
        (None, HostNccl(), 0),
    ):
        assert DeviceSources(store, cuda, nccl).nccl_version == told
    store.close()


@pytest.fixture(scope="module")
def shared_checked_peer(tmp_path_factory) -> Iterator[PeerProcess]:
    peer = PeerProcess(tmp_path_factory.mktemp("checked"), arena_mib=80, checksums=True)
    yield peer
    peer.close()


@pytest.fixture
def checked_peer(shared_checked_peer) -> Iterator[PeerProcess]:
    """A peer that computes checksums; empty."""
    yield shared_checked_peer
    shared_checked_peer.release()


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 5 * MIB + 7])
def test_bytes_that_match_their_checksums_arrive(fetcher, checked_peer, nbytes):
    array = random_array("uint8", (1, nbytes))
    assert_same_bits(fetch(fetcher, checked_peer.put(array))["x"], array)


def test_some_rows_of_a_shard_are_verified_too(fetcher, checked_peer):
    array = random_array("int32", (100, 1024))
    rows = np.array([3, 4, 90, 17])
    assert_same_bits(fetch(fetcher, checked_peer.put(array).take(rows))["x"], array[rows])


def shard_of(batch: Batch) -> Shard:
    column = batch["x"]
    assert isinstance(column, RemoteColumn)
    return column.shards[0]


def test_a_corrupted_byte_is_an_error_that_names_source_shard_and_column_and_lasts(
    fetcher, make, transport, checked_peer
):
    array = random_array("uint8", (2, MIB))
    batch = checked_peer.put(array)
    shard, place = shard_of(batch), re.escape(str(checked_peer.endpoint))
    checked_peer.ask("flip", shard=shard.id, byte=MIB + 70_000)
    with pytest.raises(
        TransferError,
        match=rf"{place}: column 'x', shard {shard.id}: the bytes from {17 * 65536} on do not match",
    ):
        fetch(fetcher, batch)
    checked_peer.ask("flip", shard=shard.id, byte=MIB + 70_000)
    with pytest.raises(TransferError, match=rf"{place}: .*shard {shard.id} is marked bad"):
        fetch(fetcher, batch)
    another = Fetcher(host_id(), [make(transport)])
    with pytest.raises(TransferError, match=rf"{place}: .*shard {shard.id} is marked bad"):
        fetch(another, batch.take(np.arange(1)))
    another.close()


def test_rows_in_use_fail_to_verify_once_their_shard_is_marked_bad(memfd, checked_peer):
    batch = checked_peer.put(random_array("uint8", (2, MIB)))
    got = fetch(memfd, batch)
    checked_peer.ask("flip", shard=shard_of(batch).id, byte=0)
    with pytest.raises(TransferError, match="do not match"):
        fetch(memfd, batch)
    with pytest.raises(TransferError, match="is marked bad"):
        got.verify()


def test_a_byte_that_is_corrupted_on_the_way_is_an_error_also_where_the_owner_cannot_be_told(
    over_grpc, checked_peer
):
    array = random_array("uint8", (1, 100))
    wrong = bytearray(array.tobytes())
    wrong[50] ^= 1
    with canned_server(bytes(wrong)) as address:
        batch = moved_to(checked_peer.put(array), address=address)
        with pytest.raises(TransferError, match=r"column 'x', .*do not match"):
            fetch(over_grpc, batch)
        with pytest.raises(TransferError, match=r"is marked bad: .*column 'x'"):
            fetch(over_grpc, batch)


def test_what_does_not_ask_for_checksums_is_not_verified(fetcher, peer):
    batch = peer.put(random_array("uint8", (2, 100)))
    peer.ask("flip", shard=shard_of(batch).id, byte=0)
    fetch(fetcher, batch)


def test_a_rank_verifies_its_own_rows_too():
    store = TensorStore(MIB, checksums=True)
    store.endpoint = Endpoint("127.0.0.1:1", host_id(), "", EPOCH, "actor", 0)
    batch = Batch(4, {"x": store.put_column(random_array("int32", (4, 2)), "int32", Lease("session", 1))})
    fetcher = Fetcher(host_id(), [], store)
    fetch(fetcher, batch)
    store._memory(shard_of(batch))[5] ^= 1
    with pytest.raises(TransferError, match="column 'x', shard 1: the bytes from 0 on do not match"):
        fetch(fetcher, batch)
    with pytest.raises(TransferError, match="is marked bad"):
        store.read_bytes(1, 0, 1)
    fetcher.close()
    store.close()


def assert_nothing_is_left_by(work: Callable[[], None], peer: PeerProcess) -> None:
    def open_there() -> int:
        return len(os.listdir(f"/proc/{peer.pid}/fd"))

    work()
    here, there = Held.here(), open_there()
    for _ in range(3):
        work()
    assert_no_more_than(here)
    wait_until(lambda: open_there() <= there)


def test_nothing_is_left_open_here_or_there(make, transport, peer):
    def work():
        fetcher = Fetcher(host_id(), [make(transport)])
        batch = peer.put(random_array("uint8", (4, MIB)))
        for _ in range(3):
            fetch(fetcher, Batch.concat([batch.take(np.arange(0, 1)), batch]))
        fetcher.close()
        peer.release()

    assert_nothing_is_left_by(work, peer)


def test_nothing_is_left_open_of_a_peer_that_died(make, transport, peer, new_peer):
    def work():
        fetcher, doomed = Fetcher(host_id(), [make(transport)]), new_peer()
        try:
            dead = doomed.put(random_array("uint8", (4,)))
            fetch(fetcher, Batch.concat([peer.put(random_array("uint8", (4,))), dead]))
            doomed.kill()
            with pytest.raises(ServiceLost):
                fetch(fetcher, dead)
        finally:
            doomed.close()
            fetcher.close()

    assert_nothing_is_left_by(work, peer)


def test_a_closed_arena_server_leaves_no_thread_and_no_descriptor():
    before = Held.here()
    store = TensorStore(MIB)
    store.endpoint = Endpoint("127.0.0.1:1", host_id(), "", EPOCH)
    server = ArenaServer(store)
    fetcher = Fetcher(host_id(), create_transports(["memfd"]))
    endpoint = replace(store.endpoint, memfd_socket=server.name)
    store.endpoint = endpoint
    fetch(fetcher, Batch(2, {"x": store.put_column(np.zeros(2), "float64", Lease("session", 1))}))
    server.close()
    fetcher.close()
    store.close()
    assert_no_more_than(before)
