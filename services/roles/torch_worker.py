"""Base class of workers that compute with torch."""

from __future__ import annotations

from typing import Any

import torch

from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.devices.cupy_cuda import own_cuda
from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.store.torch_device import TorchDevice
from services.compute.device_memory import allocated_bytes, peak_allocated_bytes
from services.roles.device import device_identity, rank_device, use_device
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
