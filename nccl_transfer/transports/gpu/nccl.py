"""The nccl transport, between two GPUs: a source sends and a reader receives in NCCL groups, under a transaction.

The reader calls the source's RPCs. Attach creates a communicator of the two. Prepare sends the manifest to the
source, which responds once the bytes are staged on its GPU. Commit then makes both sides enqueue their NCCL group.
Any failure except a refused Prepare, a missed deadline included, aborts the communicator on both sides, because NCCL
would wait forever. The next transfer creates a new communicator, with the next communicator epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import grpc
import numpy as np

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports.base import Reader, Reading
from nccl_transfer.transports.common import layout
from nccl_transfer.transports.gpu.communicator import (
    Nccl,
    own_nccl,
    version_text,
    why_no_nccl,
)
from nccl_transfer.transports.gpu.device import Cuda, DeviceBuffer, own_cuda
from nccl_transfer.transports.gpu.liveness import liveness_channel
from nccl_transfer.transports.gpu.nccl_client import NcclClient
from nccl_transfer.transports.gpu.peer_connection import PeerConnections


class NcclReader(Reader):
    """Receives bytes from the GPUs of other ranks into this rank's GPU; `read` then copies them to host memory.

    Args:
        nccl, cuda: NCCL and the GPU. Default: NCCL by cupy, and the current device of this process.
        channel: Opens a channel to an address; called again after a source has ended.
    """

    name = "nccl"

    def __init__(
        self,
        nccl: Nccl | None = None,
        cuda: Cuda | None = None,
        channel: Callable[[str], grpc.Channel] = liveness_channel,
    ) -> None:
        self._cuda = cuda or own_cuda()
        self._nccl = nccl or own_nccl()
        self._clients = PeerConnections(partial(NcclClient, self._nccl, self._cuda), channel)

    @classmethod
    def unavailable(cls) -> str | None:
        return why_no_nccl()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        if not source.device_uuid:
            return "it has no GPU"
        if source.device_uuid == self._cuda.uuid:
            return f"both are on {source.device_uuid}, and NCCL takes one rank per GPU"
        if not source.nccl_version:
            return "it offers no NCCL"
        if source.nccl_version != self._nccl.version:
            there, here = version_text(source.nccl_version), version_text(self._nccl.version)
            return f"NCCL is {there} there and {here} here"
        return None

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        buffer = self.receive(source, ranges, deadline)
        data = np.empty(buffer.nbytes, np.uint8).data
        try:
            self._cuda.copy_out(data, buffer.pointer)
        finally:
            buffer.free()
        offsets, _ = layout(r.nbytes for r in ranges)
        return Reading([data[o : o + r.nbytes] for o, r in zip(offsets, ranges, strict=True)])

    def receive(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> DeviceBuffer:
        """Reads into this rank's GPU instead of host memory. Arguments as in `read`.

        Returns:
            A buffer that contains each range at its offset in `layout` of the sizes of the ranges.

        Raises:
            OutOfSpace: One of the two GPUs has too little free memory. Other errors as raised by `read`.
        """
        return self._clients.to(source).receive(source, ranges, deadline)

    def close(self) -> None:
        self._clients.close()
