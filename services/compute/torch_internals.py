"""Private names of torch that the product needs. Nothing public does the same; pyproject.toml bounds torch's version,
and tests/unit/test_internals.py checks that the names are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
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


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that `torch.compile` compiles when it is first called, and again for each further combination
    of types and shapes; `any_number_of_rows` leaves the first dimension of an argument open. The same code is made in
    every process: nothing is chosen by a measurement."""

    @cache
    def made() -> Callable[..., Any]:
        # Only here, since it imports the compiler, which takes a second.
        from torch._dynamo import config as dynamo
        from torch._inductor import config as inductor

        # With a pool of processes to compile in, they would outlive a service that is killed.
        inductor.compile_threads = 1
        inductor.deterministic = True
        # Types, sizes of a layer, and modes of autograd, each of which is a combination.
        dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
        return torch.compile(function, dynamic=False, fullgraph=True)

    @wraps(function)
    def run(*args: Any) -> Any:
        return made()(*args)

    return run


def any_number_of_rows(x: Tensor) -> Tensor:
    """Marks the first dimension of a tensor as one that functions of `compiled` are compiled once for; returns it."""
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x
