"""The adapter of cupy over its fake, in the process that reads."""

from __future__ import annotations

import fake_cupy

from contract.peer_process import GPU, READERS_GPU
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.devices.cupy_cuda import CupyCuda
from nccl_transfer.transports.gpu.communicator import CupyNccl, Nccl


def fake_gpus(transport: str) -> tuple[Nccl, Cuda]:
    """Returns NCCL and the GPU by which a transport reads. The current device of the calling thread is another."""
    fake_cupy.install(fake_cupy.UUIDS.index(READERS_GPU if transport == "nccl" else GPU))
    cuda = CupyCuda()
    nccl = CupyNccl(cuda)
    fake_cupy.install(0)
    return nccl, cuda
