"""Tensors of the host implementation of a GPU: arrays of numpy, since a process of the suite is to need no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from nccl_transfer.devices.tensors import DeviceBytes, DeviceTensors
from nccl_transfer.refs.dtypes import CARRIERS


class HostTensor:
    """An array, in the carrier of its element type, with the attributes of a tensor that the store reads."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array = array
        self.dtype = f"torch.{dtype}"
        self.shape = array.shape

    def __len__(self) -> int:
        return len(self.array)

    def detach(self) -> HostTensor:
        return self

    def contiguous(self) -> HostTensor:
        return HostTensor(np.ascontiguousarray(self.array), self.dtype.removeprefix("torch."))

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize


class HostTensors(DeviceTensors):
    """All of them; computes on stream 7."""

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, HostTensor)

    def stream(self) -> int:
        return 7

    def pointer(self, tensor: HostTensor) -> int:
        return tensor.array.ctypes.data

    def tensor(self, memory: DeviceBytes, dtype: str, shape: Sequence[int]) -> HostTensor:
        mapped = (ctypes.c_uint8 * memory.nbytes).from_address(memory.pointer)
        mapped.memory = memory  # type: ignore[attr-defined]
        return HostTensor(np.frombuffer(mapped, CARRIERS[dtype]).reshape(tuple(shape)), dtype)

    def join(self, parts: Sequence[HostTensor]) -> HostTensor:
        arrays = [part.array for part in parts]
        return HostTensor(np.concatenate(arrays), parts[0].dtype.removeprefix("torch."))

    def upload(self, array: np.ndarray, dtype: str) -> HostTensor:
        return HostTensor(array.copy(), dtype)

    def download(self, tensor: HostTensor) -> np.ndarray:
        return tensor.array.copy()
