"""Base class of workers that compute with torch."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.devices.cupy_cuda import own_cuda
from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.store.torch_device import TorchDevice
from rlhf.v1 import worker_pb2
from services.compute import fused, matmul
from services.compute.device_memory import allocated_bytes, peak_allocated_bytes
from services.roles.device import device_identity, rank_device, use_device
from services.roles.kernel_choice import choose_kernels
from services.roles.matmul_choice import choose_matmul
from services.runtime.ranks import Ranks
from services.runtime.worker import Worker
from settings.service import ServiceTable


class TorchWorker(Worker):
    """Worker that computes with torch on one device.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.
        more: Arguments of the next base class.

    Attributes:
        torch_device: The device of this rank.
    """

    def __init__(self, table: ServiceTable, ranks: Ranks, *more: Any) -> None:
        self.table, self.torch_device = table, rank_device()
        self.prepare_thread()
        super().__init__(table, ranks, *more)

    @classmethod
    def uses_torch(cls, table: ServiceTable) -> bool:
        return True

    def prepare_thread(self) -> None:
        torch.set_num_threads(self.table.threads)
        use_device(self.torch_device)

    def choose_libraries(self) -> None:
        """Chooses the library of matrix products on CPUs and the kernels that the table asks for, the same on all
        ranks. Collective. Raises ConfigError where one cannot be used."""
        if self.torch_device.type == "cpu":
            choose_matmul(self.table.matmul, self.ranks)
        choose_kernels(self.table.kernels, self.torch_device, self.ranks)

    def libraries(self) -> worker_pb2.DescribeResponse:
        """Returns the fields of Describe on which, beside the table, the bits of results depend: the GPU, the CPU's
        capability, versions of libraries, and what `choose_libraries` has chosen."""
        on_gpu = self.torch_device.type == "cuda"
        versions = {"transformers": transformers.__version__}
        return worker_pb2.DescribeResponse(
            torch=torch.__version__,
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            matmul=matmul.backend() if self.torch_device.type == "cpu" else "",
            kernels=fused.name_in_use(),
            gpu=torch.cuda.get_device_name(self.torch_device) if on_gpu else "",
            libraries=versions | ({"cuda": torch.version.cuda or ""} if on_gpu else {}),
        )

    def device(self) -> dict[str, str]:
        return device_identity(self.torch_device)

    def gpu(self) -> tuple[Cuda, DeviceTensors] | None:
        if self.torch_device.type != "cuda":
            return None
        torch.cuda.empty_cache()  # the arena is allocated beside torch's memory
        return own_cuda(), TorchDevice(self.torch_device)

    def device_memory(self) -> int:
        return allocated_bytes(self.torch_device)

    def peak_device_memory(self) -> int:
        return peak_allocated_bytes(self.torch_device)
