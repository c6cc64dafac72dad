"""Private names of torch that the product needs. Nothing public does the same; pyproject.toml bounds torch's version,
and tests/unit/test_internals.py checks that the names are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

onednn_linear: Any = (
    torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
)
"""Operator of oneDNN's linear layer, which inductor uses; None in a build of torch without oneDNN. torch's public
linear uses MKL for float32."""


def global_offset(x: DTensor) -> tuple[int, ...]:
    """Returns the offset of this rank's shard in the global tensor, per dimension. DTensor has no public name for
    it."""
    return tuple(compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1])


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the dictionary of the buffers registered on a module itself, not its children. Changing it changes the
    module; unlike `setattr`, this keeps a buffer non-persistent."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of a module itself, not its children, that are not in its `state_dict()`, by name."""
    buffers = ((name, module._buffers[name]) for name in module._non_persistent_buffers_set)
    return {name: x for name, x in buffers if x is not None}


def registered_tensors(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yields two dictionaries by name, of the parameters and of the buffers registered on a module itself, not its
    children. Changing them changes the module. A tied tensor is under each of its names."""
    yield module._parameters
    yield module._buffers
