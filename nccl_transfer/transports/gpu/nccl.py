"""Transport between GPUs by NCCL: pairs of ranks send and receive in groups, under a transaction.

The reader leads. Attach creates a communicator of two ranks. Prepare sends the manifest to the source, which
acknowledges once the bytes are staged on its GPU. Commit then makes both sides enter the group. Any later failure, a
deadline included, aborts the communicator on both sides, because NCCL would wait for ever; the next transfer creates a
new one, with the next communicator epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import grpc
import numpy as np

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports.base import Reading, Transport, layout
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


class NcclTransport(Transport):
    """Receives from GPUs of other ranks into this rank's GPU, and copies to host memory.

    Args:
        nccl, cuda: The library and the GPU; this process's own by default.
        channel: Opens a channel to an address; called anew for a source that had ended.
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
            return "it has no NCCL"
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
        """Reads into this rank's GPU, each range at its offset of `layout`. Errors as in `read`, and

        Raises:
            OutOfSpace: One of the two GPUs has no memory for the bytes.
        """
        return self._clients.to(source).receive(source, ranges, deadline)

    def close(self) -> None:
        self._clients.close()
