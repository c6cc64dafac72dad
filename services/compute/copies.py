"""Copies between host memory and a device, many tensors at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes that each tensor's place in the common buffer is a multiple of: at least the size of any element."""


def copy_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns tensors on a device, in order, of the same shapes and types. Those in host memory are copied there in one
    copy, for which a GPU's host does not wait, and become contiguous views of one buffer; those that are on the device
    are returned as they are."""
    own = [x for x in tensors if x.device != device]
    if not own or device.type == "cpu":
        return [x.to(device) for x in tensors]
    staged = [_bytes_of(x) for x in own]
    sizes = [-(-len(each) // _ALIGNMENT) * _ALIGNMENT for each in staged]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, each in zip(buffer.split(sizes), staged, strict=True):
        part[: len(each)] = each
    parts = buffer.to(device, non_blocking=True).split(sizes)
    copied = iter(
        part[: len(each)].view(x.dtype).view(x.shape)
        for part, each, x in zip(parts, staged, own, strict=True)
    )
    return [x if x.device == device else next(copied) for x in tensors]


def _bytes_of(x: Tensor) -> Tensor:
    """Returns the elements of a tensor as bytes, in one dimension."""
    if not x.numel():  # strides are arbitrary then, and may not allow a view
        return torch.empty(0, dtype=torch.uint8)
    return x.contiguous().view(-1).view(torch.uint8)
