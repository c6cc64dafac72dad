"""Copies values of weights between tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def copy_values(target: Tensor, values: Tensor) -> None:
    """Copies `values` to `target`, of the same shape and perhaps of another element type, layout or device. On the CPU,
    bytes that need no change are copied by memcpy: torch's loop, which first reads what it overwrites, has about two
    thirds of its rate."""
    plain = target.dtype == values.dtype and target.is_contiguous() and values.is_contiguous()
    if plain and target.device.type == values.device.type == "cpu":
        np.copyto(_bytes(target), _bytes(values))
    else:
        target.copy_(values)


def _bytes(tensor: Tensor) -> np.ndarray:
    """Returns the memory of a contiguous tensor on the CPU, as a flat array of bytes."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
