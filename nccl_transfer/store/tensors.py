"""Conversion between the numpy arrays of the data plane and torch tensors, without a copy where possible."""

from __future__ import annotations

from typing import overload

import numpy as np
import torch

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import ITEM_BYTES
from rlhf.errors import InvalidRequest

_CARRIED_AS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""Torch dtype that carries each element type that numpy lacks: an unsigned integer of the same size."""


def to_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Converts a numpy array to a tensor of the same shape, which shares its memory; a read-only array is copied.

    Args:
        array: Array of any shape, in the carrier of `dtype` (`nccl_transfer.refs.dtypes.CARRIERS`).
        dtype: Name of the element type, as in `FetchedRows.dtypes`.
    """
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(getattr(torch, dtype))


@overload
def to_numpy_carrier(values: torch.Tensor) -> tuple[np.ndarray, str]: ...


@overload
def to_numpy_carrier(values: Jagged[torch.Tensor]) -> tuple[Jagged[np.ndarray], str]: ...


def to_numpy_carrier(
    values: torch.Tensor | Jagged[torch.Tensor],
) -> tuple[np.ndarray | Jagged[np.ndarray], str]:
    """Converts a tensor to a numpy array, with equal strides, in the carrier of its element type. The array of a CPU
    tensor shares its memory; the bytes of a device tensor are copied.

    Returns:
        The array, and the name of the tensor's element type.

    Raises:
        InvalidRequest: Columns cannot have the tensor's element type.
    """
    if isinstance(values, Jagged):
        array, dtype = to_numpy_carrier(values.values)
        return Jagged(array, values.lengths), dtype
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise InvalidRequest(f"tensors of {dtype} cannot be stored; allowed: {', '.join(ITEM_BYTES)}")
    return values.detach().cpu().view(_CARRIED_AS.get(values.dtype, values.dtype)).numpy(), dtype
