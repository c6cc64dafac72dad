"""What every transport promises, checked on each of them with a real second process at the other end."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from nccl_transfer.batch import ITEM_BYTES, Batch, Endpoint, RemoteColumn
from nccl_transfer.columns import Jagged
from nccl_transfer.fetch import CARRIERS, Fetcher, Rows
from nccl_transfer.store import Lease, TensorStore
from nccl_transfer.transports import ArenaServer, create_transports, host_id
from nccl_transfer.wire import endpoint_from_proto, from_proto
from rlhf.errors import ConfigError, DeadlineExceeded, Refused, ServiceLost, TransferError
from rlhf.v1 import common_pb2 as pb
from rlhf.v1 import transfer_pb2, transfer_pb2_grpc

PEER = Path(__file__).with_name("transport_peer.py")
EPOCH = 3
MIB = 1 << 20

pytestmark = pytest.mark.timeout(60)


class PeerProcess:
    """A second process that stores what it is told to, and serves it."""

    def __init__(self, directory: Path, arena_mib: int = 16, epoch: int = EPOCH) -> None:
        command = [sys.executable, str(PEER), str(arena_mib), str(epoch)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        return self.answer()

    def try_put(self, columns: dict[str, tuple[np.ndarray, str, list[int] | None]], layout: str) -> dict:
        step = next(self.steps)
        described = {}
        for number, (name, (array, dtype, lengths)) in enumerate(columns.items()):
            path = self.directory / f"{os.getpid()}-{self.process.pid}-{step}-{number}.npy"
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
        self.ask("release", through_step=next(self.steps))

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


@pytest.fixture(params=["memfd", "tcp"])
def transport(request) -> str:
    return request.param


@pytest.fixture
def fetcher(transport) -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), create_transports([transport]))
    yield fetcher
    fetcher.close()


@pytest.fixture
def memfd() -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), create_transports(["memfd"]))
    yield fetcher
    fetcher.close()


@pytest.fixture
def tcp() -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), create_transports(["tcp"]))
    yield fetcher
    fetcher.close()


def fetch(fetcher: Fetcher, batch: Batch, within_s: float = 20.0) -> Rows:
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
        shards = tuple(replace(s, endpoint=replace(s.endpoint, **changes)) for s in column.shards)
        return replace(column, shards=shards)

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


@pytest.mark.full
def test_a_gibibyte_arrives(fetcher, tmp_path):
    peer = PeerProcess(tmp_path, arena_mib=1100)
    try:
        array = random_array("uint8", (1, 1 << 30))
        assert np.array_equal(fetch_array(fetcher, peer.put(array)), array)
    finally:
        peer.close()


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


def test_what_the_reader_writes_neither_the_peer_nor_later_reads_see(fetcher, peer):
    array = random_array("int32", (1000, 8))
    batch = peer.put(array)
    fetch_array(fetcher, batch)[:] = 0
    assert_same_bits(fetch(fetcher, batch)["x"], array)


def test_threads_may_read_at_the_same_time(fetcher, peer):
    arrays = [random_array("uint8", (4, 100_000 + 1000 * i), seed=i) for i in range(8)]
    batches = [peer.put(array) for array in arrays]
    wrong = []

    def read(number):
        for turn in range(5):
            which = (number + turn) % 8
            if not np.array_equal(fetch_array(fetcher, batches[which]), arrays[which]):
                wrong.append((number, which))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not wrong


def test_rows_of_several_ranks_arrive_in_one_batch(fetcher, peer, mortal_peer):
    array = random_array("int32", (10, 2))
    both = Batch.concat([peer.put(array[:6]), mortal_peer.put(array[6:])])
    assert_same_bits(fetch(fetcher, both)["x"], array)


def test_released_rows_are_refused(fetcher, peer):
    batch = peer.put(random_array("int32", (4,)))
    fetch(fetcher, batch)
    peer.release()
    with pytest.raises(Refused, match=rf"{re.escape(str(peer.endpoint))}: shard \d+ was released"):
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
    beyond = Batch(4, {"x": replace(column, element=column.element + 1)})
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


def test_a_peer_that_dies_in_the_middle_of_a_stream_is_lost(tcp, mortal_peer):
    batch = mortal_peer.put(random_array("uint8", (1, 6 * MIB)))
    mortal_peer.ask("configure", pause_after=3)

    def kill_when_paused():
        assert mortal_peer.answer() == {"event": "paused"}
        mortal_peer.kill()

    killer = threading.Thread(target=kill_when_paused)
    killer.start()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(tcp, batch, within_s=10)
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


def test_a_peer_that_hangs_in_the_middle_of_a_stream_ends_the_read_at_its_deadline(tcp, mortal_peer):
    batch = mortal_peer.put(random_array("uint8", (1, 6 * MIB)))
    mortal_peer.ask("configure", pause_after=3)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=re.escape(str(mortal_peer.endpoint))):
        fetch(tcp, batch, within_s=0.5)
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


def test_a_full_arena_is_an_error_that_says_which_key_raises_it(peer):
    reply = peer.try_put({"x": (random_array("uint8", (81 * MIB,)), "uint8", None)}, "as it is")
    assert reply["error"] == "OutOfSpace"
    assert "81.0 MiB do not fit into the arena of 80.0 MiB" in reply["message"]
    assert "raise arena_mb" in reply["message"]


def test_rows_released_while_they_are_used_fail_to_verify(memfd, peer):
    got = fetch(memfd, peer.put(random_array("int32", (4,))))
    got.verify()
    peer.release()
    with pytest.raises(Refused, match="was released"):
        got.verify()


def test_rows_that_were_copied_stay_good_when_released(tcp, peer):
    array = random_array("int32", (4,))
    got = fetch(tcp, peer.put(array))
    peer.release()
    got.verify()
    assert_same_bits(got["x"], array)


def test_rows_that_lie_side_by_side_are_not_copied(memfd, peer):
    got = fetch_array(memfd, peer.put(random_array("uint8", (4, MIB))))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "rlhf-arena" in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    address = got.ctypes.data
    assert any(first <= address and address + got.nbytes <= last for first, last in spans)


def test_a_broken_stream_is_taken_up_where_it_broke(tcp, peer):
    array = random_array("uint8", (1, 5 * MIB + 3))
    batch = peer.put_columns({"x": (array, "uint8", None), "y": (array[:, :9], "uint8", None)})
    peer.ask("configure", break_after=2)
    got = fetch(tcp, batch)
    assert_same_bits(got["x"], array)
    assert_same_bits(got["y"], array[:, :9])
    assert peer.ask("served") == {"bytes": array.nbytes + 9}


def test_a_service_that_keeps_breaking_is_lost(tcp, peer):
    batch = peer.put(random_array("uint8", (1, 100)))
    peer.ask("configure", break_after=0, always=True)
    try:
        with pytest.raises(ServiceLost, match="broken on purpose"):
            fetch(tcp, batch)
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


def test_a_rank_that_is_back_at_its_address_is_reached_at_once(tcp, peer):
    """The connection is not held off by those that failed before."""
    array = random_array("int32", (4,))
    with canned_server(array.tobytes()) as address:
        batch = moved_to(peer.put(array), address=address)
    for _ in range(3):
        with pytest.raises(ServiceLost):
            fetch(tcp, batch)
    with canned_server(array.tobytes(), address):
        assert_same_bits(fetch(tcp, batch, within_s=0.5)["x"], array)


@pytest.mark.parametrize(("sent", "text"), [(15, "ended before all bytes"), (17, "1 bytes more than asked")])
def test_a_peer_that_sends_too_little_or_too_much_is_an_error(tcp, peer, sent, text):
    with canned_server(bytes(sent)) as address, pytest.raises(TransferError, match=f"{address}: .*{text}"):
        fetch(tcp, moved_to(peer.put(random_array("int32", (4,))), address=address))


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
        TransferError, match=r"memfd: it is on host 'far', not on '.*'; tcp: it has no address"
    ):
        fetch(fetcher, batch)
    fetcher.close()


def test_an_unknown_transport_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown transport 'rdma'; known: memfd, tcp"):
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


def open_here() -> tuple[int, int, int]:
    """(descriptors, mapped arenas, threads) of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("rlhf-arena"), threading.active_count()


def test_nothing_is_left_open_here_or_there(transport, peer, tmp_path):
    def work():
        fetcher = Fetcher(host_id(), create_transports([transport]))
        doomed = PeerProcess(tmp_path)
        try:
            alive, dead = peer.put(random_array("uint8", (4, MIB))), doomed.put(random_array("uint8", (4,)))
            for _ in range(3):
                fetch(fetcher, Batch.concat([alive.take(np.arange(0, 1)), alive]))
            fetch(fetcher, dead)
            doomed.kill()
            with pytest.raises(ServiceLost):
                fetch(fetcher, dead)
        finally:
            doomed.close()
            fetcher.close()

    def open_there() -> int:
        return len(os.listdir(f"/proc/{peer.process.pid}/fd"))

    work()
    here, there = open_here(), open_there()
    for _ in range(3):
        work()
    wait_until(lambda: all(now <= before for now, before in zip(open_here(), here, strict=True)))
    wait_until(lambda: open_there() <= there)


def test_a_closed_arena_server_leaves_no_thread_and_no_descriptor():
    before = open_here()
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
    assert open_here() == before
