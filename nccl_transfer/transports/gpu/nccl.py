"""The nccl transport, between two GPUs: a source sends and a reader receives in NCCL groups, under a transaction.

The reader calls the source's RPCs. Attach creates a communicator of the two. Prepare sends the manifest to the
source, which responds once shards on its GPU are pinned, and those in host memory staged on its GPU. Commit then
makes both sides enqueue their NCCL group. Any failure except a refused Prepare, a missed deadline included, aborts
the communicator on both sides, because NCCL would wait forever. The next transfer creates a new communicator, with
the next communicator epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from nccl_transfer.devices.cuda import Cuda, check_uuid
from nccl_transfer.devices.cupy_cuda import own_cuda
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import (
    DEVICE_TO_DEVICE,
    HOST_TO_DEVICE,
    HOST_TO_HOST,
    DeviceMemory,
    Reader,
    Reading,
    Transport,
)
from nccl_transfer.transports.common import layout
from nccl_transfer.transports.gpu.communicator import (
    Nccl,
    own_nccl,
    version_text,
    why_no_nccl,
)
from nccl_transfer.transports.gpu.device_read import DeviceRead
from nccl_transfer.transports.gpu.nccl_client import NcclClient
from nccl_transfer.transports.gpu.nccl_source import ADVERT, NcclSource
from nccl_transfer.transports.gpu.peer_connection import PeerConnections

ROUTES = frozenset({HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_DEVICE})


class NcclReader(Reader):
    """Receives bytes from the GPUs of other ranks into this rank's GPU; `read` then copies them to host memory.

    Args:
        nccl, cuda: NCCL and the GPU.
    """

    name = "nccl"
    routes = ROUTES

    def __init__(self, nccl: Nccl, cuda: Cuda) -> None:
        self._cuda = cuda
        self._nccl = nccl
        self._clients = PeerConnections(partial(NcclClient, self._nccl, self._cuda))

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        advert = source.adverts.get(self.name, b"")
        if len(advert) <= ADVERT.size:
            return "it offers no NCCL"
        (version,), device = ADVERT.unpack_from(advert), advert[ADVERT.size :]
        if device == self._cuda.uuid.encode():
            return f"both are on {self._cuda.uuid}, and NCCL takes one rank per GPU"
        if version != self._nccl.version:
            return f"NCCL is {version_text(version)} there and {version_text(self._nccl.version)} here"
        return None

    def check_advert(self, advert: bytes) -> None:
        if len(advert) <= ADVERT.size:
            raise ValueError(f"{len(advert)} bytes, too few for a version of NCCL and the UUID of a GPU")
        check_uuid(advert[ADVERT.size :])

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        offsets, total = layout(r.nbytes for r in ranges)
        data = np.empty(total, np.uint8).data
        self._clients.to(source).read(source, ranges, offsets, data, deadline)
        return Reading([data[o : o + r.nbytes] for o, r in zip(offsets, ranges, strict=True)])

    def receive(
        self,
        source: Endpoint,
        ranges: Sequence[ByteRange],
        memory: DeviceMemory,
        offsets: Sequence[int],
        deadline: float,
    ) -> None:
        self._clients.to(source).receive(DeviceRead(source, ranges, memory, offsets, deadline))

    def forget(self, source: Endpoint) -> None:
        self._clients.forget(source)

    def close(self) -> None:
        self._clients.close()


class NcclTransport(Transport):
    """Sends between GPUs by NCCL, in plaintext between hosts; the advert is the version of NCCL and the UUID of the
    GPU.

    Args:
        nccl, cuda: NCCL and the GPU. Default: NCCL by cupy, and the current device of this process.
    """

    name = NcclReader.name
    routes = ROUTES
    needs_gpu = True

    def __init__(self, nccl: Nccl | None = None, cuda: Cuda | None = None) -> None:
        self._nccl = nccl
        self._cuda = cuda

    def unavailable(self) -> str | None:
        return why_no_nccl()

    def source(self, store: TensorStore, host: str) -> NcclSource:
        cuda = self._cuda or (store.device.arena.cuda if store.device is not None else own_cuda())
        return NcclSource(store, self._nccl or own_nccl(), cuda)

    def reader(self) -> NcclReader:
        return NcclReader(self._nccl or own_nccl(), self._cuda or own_cuda())
