"""FetchedRows from one process to another on one host: over memfd beside a memcpy, over tcp beside a raw socket."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.processes import TIMEOUT_S, ask, in_turns, process, receive, timed
from benchmarks.transfer_batch import SEQUENCES, TOKEN_COLUMNS, ppo_columns
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.registry import create_readers, served_transports
from nccl_transfer.rows import FetchedRows
from nccl_transfer.sources import Sources
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.store.tensors import to_numpy_carrier
from nccl_transfer.transports import host_id
from rlhf.v1 import common_pb2

HAND_OFF_PARTS = ("put", "plan", "attach", "first touch", "writable attach", "writable first touch", "memcpy")


@dataclass(frozen=True)
class HandOff:
    """Medians over rounds, in seconds, of the steps of one hand-off.

    Attributes:
        put_s: The tensor's bytes into the arena: the one copy on the way.
        plan_s: References to a message and back.
        attach_s: Until the reader has views of the rows.
        first_touch_s: A byte of every page of this hand-off's views, the first time. The reader has read earlier
            hand-offs from the same pages of the arena.
        writable_attach_s, writable_first_touch_s: The same for views that may be written to.
        total_s: Put, plan, attach and first touch.
        writable_total_s: The same with writable views.
        memcpy_s: A warm copy of as many bytes into a memfd.
    """

    nbytes: int
    rounds: int
    put_s: float
    plan_s: float
    attach_s: float
    first_touch_s: float
    writable_attach_s: float
    writable_first_touch_s: float
    total_s: float
    writable_total_s: float
    memcpy_s: float

    @property
    def put_of_memcpy(self) -> float:
        """Rate of the put over that of the memcpy."""
        return self.memcpy_s / self.put_s


@dataclass(frozen=True)
class Stream:
    """Medians over rounds, in seconds, of moving `nbytes` to another process on loopback."""

    nbytes: int
    rounds: int
    tcp_s: float
    socket_s: float

    @property
    def of_socket(self) -> float:
        """Rate over that of the raw socket."""
        return self.socket_s / self.tcp_s


class Producer:
    """A process that holds tensors, puts them into its arena on request, and serves them."""

    def __init__(self, arena_bytes: int) -> None:
        self.store = TensorStore(arena_bytes)
        self.sources = Sources(self.store, "127.0.0.1", served_transports())
        self.store.endpoint = Endpoint(
            "127.0.0.1:0", host_id(), 1, "producer", adverts=self.sources.adverts()
        )
        self.steps = 0
        self.tensor = torch.empty(0)
        self.target = np.empty(0, np.float32)

    def make(self, nbytes: int) -> float:
        """Makes a tensor of `nbytes`, and a memfd with resident pages to copy it to; returns seconds of that copy."""
        self.tensor = torch.arange(nbytes // 4, dtype=torch.float32).reshape(64, -1)
        fd = os.memfd_create("benchmark")
        os.posix_fallocate(fd, 0, nbytes)
        self.target = np.frombuffer(mmap.mmap(fd, nbytes), np.float32).reshape(64, -1)
        os.close(fd)
        return self.memcpy()

    def memcpy(self) -> float:
        """Seconds of a plain copy of the tensor into memory of the arena's kind."""
        started = time.perf_counter()
        np.copyto(self.target, self.tensor.numpy())
        return time.perf_counter() - started

    def put(self) -> tuple[float, float, bytes]:
        """Seconds of the put and of the message, and the message."""
        self.store.release("benchmark")
        self.steps += 1
        started = time.perf_counter()
        array, dtype = to_numpy_carrier(self.tensor)
        column = self.store.put_column(array, dtype, Lease("benchmark", self.steps))
        put = time.perf_counter()
        message = to_proto(Batch(column.rows, {"x": column})).SerializeToString()
        return put - started, time.perf_counter() - put, message

    def put_batch(self) -> bytes:
        """The batch of PPO, as a message."""
        self.store.release("benchmark")
        columns = {
            name: self.store.put_column(values, TOKEN_COLUMNS[name], Lease("benchmark", 1))
            for name, values in ppo_columns().items()
        }
        return to_proto(Batch(SEQUENCES, columns)).SerializeToString()

    def close(self) -> None:
        self.sources.close()
        self.store.close()


def run_producer(arena_bytes: int, parent: Connection) -> None:
    """Body of a process that calls a producer's methods on request until the other end of the pipe closes."""
    producer = Producer(arena_bytes)
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        while True:
            method, *arguments = parent.recv()
            parent.send(getattr(producer, method)(*arguments))
    producer.close()


def run_socket(nbytes: int, parent: Connection) -> None:
    """Body of a process that sends `nbytes` to a client for each byte that it receives."""
    source = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection, contextlib.suppress(KeyboardInterrupt, ConnectionError):
            while connection.recv(1):
                connection.sendall(source)


def measure_hand_off(producer: Connection, nbytes: int, rounds: int) -> HandOff:
    """From the tensor in the producer to every page read here."""
    ask(producer, "make", nbytes)
    fetcher = Fetcher(host_id(), create_readers(["memfd"]))
    taken: dict[str, list[float]] = {name: [] for name in HAND_OFF_PARTS}
    for number in range(rounds + 1):
        put_s, encode_s, message = ask(producer, "put")
        started = time.perf_counter()
        batch = from_proto(common_pb2.Batch.FromString(message))
        planned = time.perf_counter()
        # The second finds in the caches what the first has read: they take turns at being first.
        reads = {writable: read(fetcher, batch, writable) for writable in (number % 2 == 0, number % 2 == 1)}
        seconds = (put_s, encode_s + planned - started, *reads[False], *reads[True], ask(producer, "memcpy"))
        if number:  # the first round faults the arena's pages in
            for name, part in zip(HAND_OFF_PARTS, seconds, strict=True):
                taken[name].append(part)
    fetcher.close()
    put_s, plan_s, attach_s, touch_s, writable_attach_s, writable_touch_s, memcpy_s = (
        statistics.median(taken[name]) for name in HAND_OFF_PARTS
    )
    total, writable_total = (
        put_s + plan_s + part for part in (attach_s + touch_s, writable_attach_s + writable_touch_s)
    )
    return HandOff(nbytes, rounds, put_s, plan_s, attach_s, touch_s, writable_attach_s, writable_touch_s, total,
                   writable_total, memcpy_s)  # fmt: skip


def read(fetcher: Fetcher, batch: Batch, writable: bool) -> tuple[float, float]:
    """Seconds until there are views, and until a byte of every page was read."""
    started = time.perf_counter()
    rows = fetcher.fetch(batch, time.monotonic() + TIMEOUT_S, writable=writable)
    attached = time.perf_counter()
    touch(rows)
    touched = time.perf_counter()
    rows.verify()
    return attached - started, touched - attached


def touch(rows: FetchedRows) -> int:
    """Reads a byte of every page."""
    values = rows["x"]
    assert isinstance(values, np.ndarray)
    return int(values.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].sum())


def measure_stream(producer: Connection, nbytes: int, rounds: int) -> Stream:
    """The same bytes through the tcp transport and through a raw socket, into fresh memory."""
    ask(producer, "make", nbytes)
    _, _, message = ask(producer, "put")
    batch = from_proto(common_pb2.Batch.FromString(message))
    fetcher = Fetcher(host_id(), create_readers(["tcp"]))
    with (
        process(run_socket, nbytes) as sender,
        socket.create_connection(("127.0.0.1", receive(sender)), TIMEOUT_S) as connection,
    ):

        def raw() -> None:
            target, filled = np.empty(nbytes, np.uint8).data, 0
            connection.send(b"g")
            while filled < nbytes:
                filled += connection.recv_into(target[filled:])

        def tcp() -> None:
            fetcher.fetch(batch, time.monotonic() + TIMEOUT_S)

        seconds = in_turns({"tcp": timed(tcp), "socket": timed(raw)}, rounds)
    fetcher.close()
    return Stream(nbytes, rounds, statistics.median(seconds["tcp"]), statistics.median(seconds["socket"]))
