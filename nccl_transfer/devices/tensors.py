"""Interface between the memory of a GPU and the tensors of a framework, which the data plane does not import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class DeviceBytes(Protocol):
    """Bytes in device memory. They stay there for as long as the object is referenced.

    Attributes:
        pointer: Address of the first byte.
        nbytes: Size in bytes.
    """

    pointer: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes as an array [nbytes] uint8."""
        ...


class DeviceTensors(ABC):
    """Tensors of one device."""

    @abstractmethod
    def holds(self, tensor: Any) -> bool:
        """Whether an object is a tensor on the device."""

    @abstractmethod
    def stream(self) -> int:
        """Returns the current stream of the calling thread, on which it computes."""

    @abstractmethod
    def pointer(self, tensor: Any) -> int:
        """Returns the address of the first byte of a contiguous tensor on the device."""

    @abstractmethod
    def tensor(self, memory: DeviceBytes, dtype: str, shape: Sequence[int]) -> Any:
        """Returns a contiguous tensor of `memory`, without a copy. It and its views keep a reference to `memory`.

        Args:
            memory: Bytes of the tensor.
            dtype: Name of the element type, a key of `nccl_transfer.refs.dtypes.ITEM_BYTES`.
            shape: Shape of the tensor.
        """

    @abstractmethod
    def join(self, parts: Sequence[Any]) -> Any:
        """Concatenates tensors on the device along their first axis, on the current stream."""

    @abstractmethod
    def upload(self, array: np.ndarray, dtype: str) -> Any:
        """Copies an array, in the carrier of `dtype` (`nccl_transfer.refs.dtypes.CARRIERS`), to the device."""

    @abstractmethod
    def download(self, tensor: Any) -> np.ndarray:
        """Copies a tensor to the host; returns an array in the carrier of its element type."""
