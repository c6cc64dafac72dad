"""Tensors of the host implementation of a GPU: arrays of numpy, since a process of the suite is to need no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from nccl_transfer.devices.cuda import Cuda, DeviceBuffer
from nccl_transfer.devices.cupy_cuda import CupyCuda
from nccl_transfer.devices.tensors import DeviceBytes, DeviceTensors
from nccl_transfer.refs.dtypes import CARRIERS

STREAM = 7


class HostTensor:
    """An array, in the carrier of its element type, with the attributes of a tensor that the store reads."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array = array
        self.dtype = f"torch.{dtype}"
        self.shape = array.shape
        self.memory: object = None

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
    """All of them; computes on a stream of its own.

    Args:
        cuda: The GPU.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._stream = STREAM
        if isinstance(cuda, CupyCuda):
            cuda.use()
            self._stream = cuda._runtime.streamCreateWithFlags(cuda._runtime.streamNonBlocking)

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, HostTensor)

    def stream(self) -> int:
        return self._stream

    def pointer(self, tensor: HostTensor) -> int:
        if isinstance(self._cuda, CupyCuda):
            tensor.memory = memory = DeviceBuffer(self._cuda, tensor.array.nbytes)
            self._cuda.copy_in(memory.pointer, tensor.array.reshape(-1).view(np.uint8).data)
            return memory.pointer
        return tensor.array.ctypes.data

    def tensor(self, memory: DeviceBytes, dtype: str, shape: Sequence[int]) -> HostTensor:
        mapped = (ctypes.c_uint8 * memory.nbytes).from_address(memory.pointer)
        mapped.memory = memory  # type: ignore[attr-defined]
        return HostTensor(np.frombuffer(memoryview(mapped), CARRIERS[dtype]).reshape(tuple(shape)), dtype)

    def join(self, parts: Sequence[HostTensor]) -> HostTensor:
        arrays = [part.array for part in parts]
        return HostTensor(np.concatenate(arrays), parts[0].dtype.removeprefix("torch."))

    def upload(self, array: np.ndarray, dtype: str) -> HostTensor:
        return HostTensor(array.copy(), dtype)

    def download(self, tensor: HostTensor) -> np.ndarray:
        return tensor.array.copy()
