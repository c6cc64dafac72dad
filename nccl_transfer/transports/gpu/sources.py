"""The source's side of the GPU transports: RPC handlers of a rank that has a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.gpu.communicator import Nccl, own_nccl, why_no_nccl
from nccl_transfer.transports.gpu.cuda_ipc_source import SLOT_BYTES, CudaIpcSource
from nccl_transfer.transports.gpu.device import Cuda, own_cuda, why_no_cuda
from nccl_transfer.transports.gpu.nccl_source import NcclSource
from rlhf.errors import Refused

NOT_OFFERED = "with certificates, only where the service's `transports` names nccl"


class DeviceSources:
    """RPC handlers of TransferService for the transports cuda_ipc and nccl.

    Args:
        store: Store that holds the shards.
        cuda: The GPU; if None, every request raises Refused.
        nccl: NCCL; if None, requests of the nccl transport raise Refused.
        slot_bytes: Data bytes of a slot of the staging memory of cuda_ipc. Default: SLOT_BYTES, 32 MiB.

    Attributes:
        device_uuid: UUID of the GPU, published as `Endpoint.device_uuid`; empty without a GPU.
        nccl_version: NCCL version, published as `Endpoint.nccl_version`; 0 without a GPU or NCCL.
    """

    def __init__(
        self, store: TensorStore, cuda: Cuda | None, nccl: Nccl | None, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.device_uuid = cuda.uuid if cuda is not None else ""
        self.nccl_version = nccl.version if cuda is not None and nccl is not None else 0
        self._staging = CudaIpcSource(store, cuda, slot_bytes) if cuda is not None else None
        self._nccl = NcclSource(store, nccl, cuda) if cuda is not None and nccl is not None else None

    @staticmethod
    def of_this_process(store: TensorStore, *, offers_nccl: bool) -> DeviceSources:
        """Creates the handlers with the GPU of this process, and with NCCL where it is offered, as far as cupy finds
        them."""
        cuda = own_cuda() if why_no_cuda() is None else None
        nccl = own_nccl() if offers_nccl and why_no_nccl() is None else None
        return DeviceSources(store, cuda, nccl)

    def handlers(self) -> dict[str, Callable[[Any, Any], Any]]:
        """Returns functions of (request, context) by method name, which return an awaitable, or an async iterator for
        Attach and OpenStaging. They raise RlhfError, which the server's boundary turns into a gRPC status."""
        return {
            "Attach": lambda request, _: self._nccl_source().attach(request),
            "Prepare": lambda request, _: self._nccl_source().prepare(request),
            "Commit": lambda request, _: self._nccl_source().commit(request),
            "Abort": lambda request, _: self._nccl_source().abort(request),
            "OpenStaging": lambda request, _: self._staging_source().open_staging(request),
            "Stage": lambda request, _: self._staging_source().stage(request),
        }

    def close(self) -> None:
        """Frees all staging memory and ends all communicators."""
        for source in (self._staging, self._nccl):
            if source is not None:
                source.close()

    def _nccl_source(self) -> NcclSource:
        if self._nccl is None:
            raise Refused(f"nothing is sent by NCCL from here: {why_no_nccl() or NOT_OFFERED}")
        return self._nccl

    def _staging_source(self) -> CudaIpcSource:
        if self._staging is None:
            raise Refused(f"nothing is lent from a GPU here: {why_no_cuda()}")
        return self._staging
