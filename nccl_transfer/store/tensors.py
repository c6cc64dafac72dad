"""Conversion between arrays of the data plane and torch tensors, without a copy."""

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
"""Carriers of element types that numpy lacks: unsigned integers of the same size."""


@overload
def to_torch(values: np.ndarray, dtype: str) -> torch.Tensor: ...


@overload
def to_torch(values: Jagged[np.ndarray], dtype: str) -> Jagged[torch.Tensor]: ...


def to_torch(values: np.ndarray | Jagged[np.ndarray], dtype: str) -> torch.Tensor | Jagged[torch.Tensor]:
    """Converts an array of carriers to a tensor that shares its memory; a read-only array is copied.

    Args:
        values: [...] or jagged, in the carrier of `dtype` (see `nccl_transfer.refs.dtypes.CARRIERS`).
        dtype: Name of the element type, as in `FetchedRows.dtypes`.
    """
    if isinstance(values, Jagged):
        return Jagged(to_torch(values.values, dtype), values.lengths)
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    return tensor.view(getattr(torch, dtype))


@overload
def to_numpy_carrier(values: torch.Tensor) -> tuple[np.ndarray, str]: ...


@overload
def to_numpy_carrier(values: Jagged[torch.Tensor]) -> tuple[Jagged[np.ndarray], str]: ...


def to_numpy_carrier(
    values: torch.Tensor | Jagged[torch.Tensor],
) -> tuple[np.ndarray | Jagged[np.ndarray], str]:
    """Converts a tensor to the array that carries it, with equal strides, and the name of its element type. On CPU the
    array shares the tensor's memory; from a device the bytes are copied.

    Raises:
        InvalidRequest: Columns cannot have the element type.
    """
    if isinstance(values, Jagged):
        array, dtype = to_numpy_carrier(values.values)
        return Jagged(array, values.lengths), dtype
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise InvalidRequest(f"tensors of {dtype} cannot be stored; allowed: {', '.join(ITEM_BYTES)}")
    return values.detach().cpu().view(_CARRIED_AS.get(values.dtype, values.dtype)).numpy(), dtype
