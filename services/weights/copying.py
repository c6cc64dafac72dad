"""Copies values of weights between tensors, in parts that stay in the processor's cache from one use to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PART_BYTES = 256 << 10
"""Most bytes of a part; half of it fits into the second-level cache of any processor that ranks run on."""

Step = Callable[[int], None]
"""Function of a number of elements, counted from the first in row-major order."""


def _nothing(stop: int) -> None:
    """The step that does nothing."""


@torch.no_grad()
def copy_values(target: Tensor, values: Tensor, before: Step = _nothing, after: Step = _nothing) -> None:
    """Copies `values` to `target`, of the same shape and perhaps of another element type, layout or device. On the CPU,
    bytes that need no change are copied by memcpy: torch's loop, which first reads what it overwrites, has about two
    thirds of its rate.

    Args:
        target, values: The tensors.
        before: Called before each part is copied, with the number of elements that are copied after it; ends the copy
            by raising. Default: nothing.
        after: Called after each part, with the same number. Default: nothing.
    """
    on_cpu = target.device.type == values.device.type == "cpu"
    if on_cpu and target.dtype == values.dtype and target.is_contiguous() and values.is_contiguous():
        _copy_bytes(bytes_of(target), bytes_of(values), target.element_size(), before, after)
        return
    done = 0
    for to, part in _rows(target, values) if on_cpu else [(target, values)]:
        done += part.numel()
        before(done)
        to.copy_(part)
        after(done)


class Incoming(ABC):
    """Values of weights on their way to a place."""

    @abstractmethod
    def copy_to(self, target: Tensor) -> None:
        """Copies the values to `target`, which has the same shape and may have another element type, layout or device.
        Other threads may continue the copy after the call returns; `wait`, and the end of the iterator that yields the
        values, wait for them.

        Raises:
            TransferError: The values do not match their checksums, so `target` must not be used.
            RlhfError: The source can no longer be read, for this reason.
        """

    @abstractmethod
    def wait(self) -> None:
        """Waits until the values are at their place. Raises as `copy_to`."""


@dataclass(frozen=True)
class Values(Incoming):
    """Values in memory of this process that are verified as they are copied.

    Attributes:
        tensor: The values, in memory that is not to be modified.
        verify: Called before elements are copied, with the number of elements up to the last of them; raises
            TransferError if they are not those that were sent. Default: they are.
    """

    tensor: Tensor
    verify: Step = _nothing

    def copy_to(self, target: Tensor) -> None:
        """Copies the values as `copy_values` does.

        Raises:
            TransferError: They are not those that were sent; a part of `target` was overwritten with verified values.
        """
        copy_values(target, self.tensor, before=self.verify)

    def wait(self) -> None:
        """Does nothing: `copy_to` has copied them."""


def _copy_bytes(target: np.ndarray, values: np.ndarray, item_bytes: int, before: Step, after: Step) -> None:
    for start in range(0, len(values), PART_BYTES):
        stop = min(start + PART_BYTES, len(values))
        before(stop // item_bytes)
        np.copyto(target[start:stop], values[start:stop])
        after(stop // item_bytes)


def _rows(target: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs of views that cut both tensors along the first axis into parts of about PART_BYTES."""
    if values.nbytes <= PART_BYTES:
        return [(target, values)]
    rows = max(1, PART_BYTES * len(values) // values.nbytes)
    return list(zip(target.split(rows), values.split(rows), strict=True))


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Returns the memory of a contiguous tensor on the CPU, as a flat array of bytes."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
