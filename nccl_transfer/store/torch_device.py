"""Tensors of torch on a GPU, as the data plane sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nccl_transfer.devices.tensors import DeviceBytes, DeviceTensors
from nccl_transfer.store.tensors import to_numpy_carrier, to_torch


class TorchDevice(DeviceTensors):
    """Tensors of torch on one GPU.

    Args:
        device: The GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.device == self._device

    def stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def pointer(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def tensor(self, memory: DeviceBytes, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        # The tensor's memory holds a reference to `memory`.
        flat = torch.as_tensor(memory, device=self._device)
        return flat.view(getattr(torch, dtype)).reshape(tuple(shape))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def upload(self, array: np.ndarray, dtype: str) -> torch.Tensor:
        return to_torch(array, dtype).to(self._device)

    def download(self, tensor: torch.Tensor) -> np.ndarray:
        return to_numpy_carrier(tensor)[0]
