"""The source of `two_gpu_check`: a process on GPU 1 that holds and serves one row."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.dtypes import CARRIERS, ITEM_BYTES
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire import to_proto
from nccl_transfer.sources import Sources
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.serving import add_handlers
from nccl_transfer.transports.gpu.communicator import Nccl
from nccl_transfer.transports.gpu.nccl import NcclTransport
from rlhf.channels import listen, open_server
from rlhf.contract import CHANNEL_OPTIONS

TYPED_SHAPE = (257, 3)
"""Shape of the row in the columns of each element type."""

EPOCH = 2

Devices = Callable[[int], tuple[Nccl, Cuda]]
"""A picklable function that takes the number of a GPU, makes it the current device, and returns NCCL and the GPU."""


def names(sizes: Sequence[int]) -> list[str]:
    """Returns the names of the columns: each size in decimal, for a column of bytes, and each element type."""
    return [*map(str, sizes), *ITEM_BYTES]


def expected(name: str) -> np.ndarray:
    """Returns the values of a column, the same random bits in every process: [1, size] uint8, or [1, *TYPED_SHAPE] in
    the carrier of an element type."""
    shape = (1, *TYPED_SHAPE) if name in ITEM_BYTES else (1, int(name))
    dtype = np.dtype(CARRIERS[dtype_of(name)])
    data = np.random.default_rng(list(name.encode())).bytes(math.prod(shape) * dtype.itemsize)
    if name == "bool":
        return (np.frombuffer(data, np.uint8) % 2).astype(bool).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def dtype_of(name: str) -> str:
    return name if name in ITEM_BYTES else "uint8"


def serve(devices: Devices, sizes: Sequence[int], reader: Connection) -> None:
    """Serves one row on GPU 1 until the other end of `reader` is closed, then exits this process with code 0. Sends the
    batch, by reference and serialized, over `reader` once it serves."""
    asyncio.run(_serve(*devices(1), sizes, reader))
    os._exit(0)  # does not wait for NCCL's threads


async def _serve(nccl: Nccl, cuda: Cuda, sizes: Sequence[int], reader: Connection) -> None:
    rows = {name: expected(name) for name in names(sizes)}
    store = TensorStore(sum(row.nbytes + (1 << 12) for row in rows.values()), checksums=True)
    sources = Sources(store, "127.0.0.1", [NcclTransport(nccl, cuda)])
    methods = [method for service in sources.services() for method in service.values()]
    server, _ = open_server(CHANNEL_OPTIONS, {each.path: each.access for each in methods})
    add_handlers(server, sources.handlers(), sources.services())
    address = f"127.0.0.1:{listen(server, '127.0.0.1:0')}"
    store.endpoint = Endpoint(
        address,
        epoch=EPOCH,
        service="source",
        adverts=sources.adverts(),
    )
    await server.start()
    lease = Lease("check", 1)
    columns = {name: store.put_column(row, dtype_of(name), lease) for name, row in rows.items()}
    reader.send_bytes(to_proto(Batch(1, columns)).SerializeToString())
    await asyncio.to_thread(reader.poll, None)  # until its end: the reader sends nothing
    await server.stop(None)
