"""Time of a column by cuda_ipc into device memory of another process on the same GPU.

A column on the GPU is read from the source's arena there, by one copy. Of a column in host memory, three things are on
the way: memory for the bytes is allocated, the source stages them (host to device, a slot at a time), and the reader
copies each slot to its place (device to device) while the source fills the other. Each is timed apart too. The anchor
is one device-to-device copy of as many bytes. What comes from host memory cannot be faster than its staging.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import click
import grpc.aio
import numpy as np
import torch

from benchmarks.processes import TIMEOUT_S, ask, in_turns, process, timed
from nccl_transfer.devices.cuda import Cuda, DeviceBuffer
from nccl_transfer.devices.cupy_cuda import own_cuda
from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.plans import needed
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.sources import Sources
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.store.torch_device import TorchDevice
from nccl_transfer.testing.serving import add_handlers
from nccl_transfer.transports import host_id
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcTransport
from nccl_transfer.transports.gpu.cuda_ipc_source import SLOT_BYTES, SLOTS
from nccl_transfer.transports.memfd import MemfdTransport
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.v1 import common_pb2

ARENA_ROOM_BYTES = 1 << 20


@dataclass(frozen=True)
class DeviceTransfer:
    """Medians over rounds, in seconds, of moving a column into the reader's device memory.

    Attributes:
        arena_s: `CudaIpcReader.receive` of a column on the GPU, until the reader knows that the bytes are there.
        receive_s: The read of a column in host memory, all of it, until the GPU has done it.
        staging_s: Only host to device, slot by slot, in the source.
        slots_s: Only device to device, out of two slots that the source lends, in the reader.
        allocation_s: Only the memory that the bytes go to.
        copy_s: The anchor: one copy of as many bytes, device to device.
    """

    nbytes: int
    rounds: int
    arena_s: float
    receive_s: float
    staging_s: float
    slots_s: float
    allocation_s: float
    copy_s: float

    @property
    def arena_of_copy(self) -> float:
        """Rate of a read from the arena over that of the copy."""
        return self.copy_s / self.arena_s


MakeDevice = Callable[[], tuple[Cuda, DeviceTensors]]


def torch_on_gpu() -> tuple[Cuda, DeviceTensors]:
    """The GPU of this process, and its tensors."""
    return own_cuda(), TorchDevice(torch.device("cuda", torch.cuda.current_device()))


class Lender:
    """A rank on a GPU with a column in each of its arenas.

    Args:
        cuda: The GPU.
        tensors: Its tensors.
        arena_bytes: Room for the column.
        slot_bytes: Of the staging memory.
    """

    def __init__(self, cuda: Cuda, tensors: DeviceTensors, arena_bytes: int, slot_bytes: int) -> None:
        self.store = TensorStore(arena_bytes, device=(DeviceArena(cuda, arena_bytes), tensors))
        transports = [CudaIpcTransport(cuda, slot_bytes), MemfdTransport()]
        self.sources = Sources(self.store, "127.0.0.1", transports)
        self._cuda = cuda
        self._slot_bytes = slot_bytes
        self._slots = DeviceBuffer(cuda, SLOTS * slot_bytes)
        self._shard, self._nbytes = 0, 0

    def put(self, nbytes: int) -> list[bytes]:
        """Stores `expected(nbytes)` in host memory and on the GPU; returns the batches as messages."""
        self.store.release("benchmark")
        lease, device = Lease("benchmark", 1), self.store.device
        assert device is not None
        column = self.store.put_column(expected(nbytes), "uint8", lease)
        self._shard, self._nbytes = column.runs[0].shard.id, nbytes
        on_gpu = device.put_column(device.tensors.upload(expected(nbytes), "uint8"), lease)
        assert not device.spilled_bytes
        return [to_proto(Batch(each.rows, {"x": each})).SerializeToString() for each in (column, on_gpu)]

    def share(self) -> bytes:
        """Handle of memory of the kind that is lent to readers."""
        return self._cuda.share(self._slots.pointer)

    def stage(self) -> float:
        """Seconds of copying the column from the arena through the slots, without a reader."""
        started = time.perf_counter()
        for offset, start, nbytes in slots(self._nbytes, self._slot_bytes):
            pointer = self._slots.pointer + offset
            self.store.copy(self._shard, start, nbytes, lambda data, to=pointer: self._cuda.copy_in(to, data))
        self._cuda.synchronize()
        return time.perf_counter() - started


def expected(nbytes: int) -> np.ndarray:
    """The row to be sent, [1, nbytes] uint8."""
    return np.resize(np.arange(251, dtype=np.uint8), (1, nbytes))


def slots(nbytes: int, slot_bytes: int) -> list[tuple[int, int, int]]:
    """Slot, first byte and length of each piece of `nbytes`."""
    return [
        (number % SLOTS * slot_bytes, start, min(slot_bytes, nbytes - start))
        for number, start in enumerate(range(0, nbytes, slot_bytes))
    ]


def run_lender(make_device: MakeDevice, slot_bytes: int, arena_bytes: int, parent: Connection) -> None:
    """Body of a process: a lender behind a gRPC server, which answers requests until the pipe closes."""

    async def serve() -> None:
        lender = Lender(*make_device(), arena_bytes, slot_bytes)
        server = grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)))
        add_handlers(server, lender.sources.handlers(), lender.sources.services())
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        lender.store.endpoint = Endpoint(address, host_id(), 1, "lender", adverts=lender.sources.adverts())
        await server.start()
        with contextlib.suppress(EOFError):
            while True:
                method, *arguments = await asyncio.to_thread(parent.recv)
                parent.send(await asyncio.to_thread(getattr(lender, method), *arguments))
        lender.sources.close()
        await server.stop(None)
        lender.store.close()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


def measure_cuda_ipc(
    make_device: MakeDevice, sizes: Sequence[int], rounds: int, slot_bytes: int = SLOT_BYTES
) -> list[DeviceTransfer]:
    """Figures for each size, in bytes.

    Args:
        make_device: Makes the GPU and its tensors, here and in the process that lends; it is pickled.

    Raises:
        click.ClickException: The received bytes differ from those sent.
    """
    if not sizes:
        return []
    cuda, _ = make_device()
    with process(partial(run_lender, make_device, slot_bytes), max(sizes) + ARENA_ROOM_BYTES) as lender:
        return [_measure(cuda, lender, nbytes, rounds, slot_bytes) for nbytes in sizes]


def _measure(cuda: Cuda, lender: Connection, nbytes: int, rounds: int, slot_bytes: int) -> DeviceTransfer:
    batches = [from_proto(common_pb2.Batch.FromString(each)) for each in ask(lender, "put", nbytes)]
    ((source, ranges),), ((_, on_gpu),) = (needed(batch).items() for batch in batches)
    transport = CudaIpcTransport(cuda).reader()
    source_buffer, target = DeviceBuffer(cuda, nbytes), DeviceBuffer(cuda, nbytes)
    lent = cuda.open(ask(lender, "share"))

    def staged() -> DeviceBuffer:
        """Reads the rows, which are in host memory there, into device memory here, by way of staging memory."""
        buffer = DeviceBuffer(cuda, nbytes)
        client = transport._clients.to(source)

        def copy_piece(start: int, pointer: int, count: int) -> None:
            cuda.copy(buffer.pointer + start, pointer, count)

        client.read(source, ranges, copy_piece, time.monotonic() + TIMEOUT_S)
        return buffer

    def from_arena() -> None:
        transport.receive(source, on_gpu, target, [0], time.monotonic() + TIMEOUT_S)

    def receive() -> float:
        started = time.perf_counter()
        received = staged()
        cuda.synchronize()
        seconds = time.perf_counter() - started
        received.free()
        return seconds

    def allocate() -> float:
        started = time.perf_counter()
        buffer = DeviceBuffer(cuda, nbytes)
        seconds = time.perf_counter() - started
        buffer.free()
        return seconds

    def copy_slots() -> None:
        for offset, start, count in slots(nbytes, slot_bytes):
            cuda.copy(target.pointer + start, lent + offset, count)
        cuda.synchronize()

    def copy() -> None:
        cuda.copy(target.pointer, source_buffer.pointer, nbytes)
        cuda.synchronize()

    try:
        _check(cuda, staged(), nbytes)
        from_arena()
        _check(cuda, target, nbytes)
        seconds = in_turns(
            {
                "arena_s": timed(from_arena),
                "receive_s": receive,
                "staging_s": lambda: ask(lender, "stage"),
                "slots_s": timed(copy_slots),
                "allocation_s": allocate,
                "copy_s": timed(copy),
            },
            rounds,
        )
    finally:
        transport.close()
        cuda.close(lent)
    return DeviceTransfer(nbytes, rounds, **{name: statistics.median(each) for name, each in seconds.items()})


def _check(cuda: Cuda, received: DeviceBuffer, nbytes: int) -> None:
    """Raises ClickException where device memory does not hold what was sent."""
    got = np.empty(nbytes, np.uint8)
    cuda.copy_out(got.data, received.pointer)
    if not np.array_equal(got, expected(nbytes)[0]):
        raise click.ClickException(f"of {nbytes} bytes over cuda_ipc, some arrived wrong")
