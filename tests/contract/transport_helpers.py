"""Helpers of the transport suite: rows, fetches, and sources that answer with canned bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import numpy as np

from contract.loopback import CountedCuda
from contract.peer_process import MIB, PeerProcess
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.dtypes import CARRIERS, ITEM_BYTES
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Shard, ShardRun
from nccl_transfer.registry import create_readers
from nccl_transfer.rows import FetchedRows
from nccl_transfer.transports import Reader
from nccl_transfer.transports.gpu.communicator import Nccl
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcReader
from nccl_transfer.transports.gpu.device import Cuda
from nccl_transfer.transports.gpu.nccl import NcclReader
from rlhf.v1 import transfer_pb2, transfer_pb2_grpc

Make = Callable[[str], Reader]
"""Creates a transport of a name."""


def making(devices: Callable[[str], tuple[Nccl, Cuda]]) -> Iterator[Make]:
    """Yields a function that creates transports. GPU transports use `devices(name)` and must free their memory."""
    made: list[CountedCuda] = []

    def make(transport: str) -> Reader:
        if transport not in ("cuda_ipc", "nccl"):
            return create_readers([transport])[0]
        nccl, cuda = devices(transport)
        made.append(counted := CountedCuda(cuda))
        return NcclReader(nccl, counted) if transport == "nccl" else CudaIpcReader(counted)

    yield make
    wait_until(lambda: not any(counted.used for counted in made))


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
    """The same rows, with changed fields of their endpoint."""

    def move(column: RemoteColumn) -> RemoteColumn:
        assert isinstance(column.place, ShardRun)
        shard = column.place.shard
        moved = replace(shard, endpoint=replace(shard.endpoint, **changes))
        return replace(column, place=column.place._replace(shard=moved))

    return Batch(batch.rows, {n: move(c) for n, c in batch.columns.items() if isinstance(c, RemoteColumn)})


class Canned(transfer_pb2_grpc.TransferServiceServicer):
    """Answers every Fetch with the same bytes."""

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


def two_columns(peer: PeerProcess) -> Batch:
    """A batch of two columns of 3 MiB: several slots of staging memory, two messages of a group."""
    array = random_array("uint8", (3, MIB))
    return peer.put_columns(dict.fromkeys("xy", (array, "uint8", None)))


def shard_of(batch: Batch) -> Shard:
    column = batch["x"]
    assert isinstance(column, RemoteColumn)
    return column.shards[0]
