"""Helpers of the transport suite: rows, fetches, and sources that answer with canned bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from contract.loopback import CountedCuda
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.refs.batch import Batch
from nccl_transfer.registry import create_readers
from nccl_transfer.testing.peer_process import MIB, PeerProcess
from nccl_transfer.testing.transports.rows import random_array, wait_until
from nccl_transfer.transports import Reader
from nccl_transfer.transports.gpu.communicator import Nccl
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcReader
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
