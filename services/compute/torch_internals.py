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


TYPICAL_ROWS = 8192
"""Number of rows that `compiled` generates code for. The code is right for any number."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that `torch.compile` compiles when it is first called, and again for each further combination
    of types and shapes, but once for all sizes of the first dimension. That is the same, N, of all its arguments with
    more than one dimension.

    The same code is made in every process, whatever N it sees first: nothing is chosen by a measurement, nor by N.
    """

    @cache
    def made() -> Callable[..., Any]:
        # Not by setting torch's configuration: it is one per thread, and autograd has threads of its own on a GPU;
        # and each compilation sets `deterministic` back.
        compile: Any = torch.compile  # whose overloads omit `recompile_limit`
        return compile(
            function,
            dynamic=False,
            fullgraph=True,
            # Types, sizes of a layer, and modes of autograd, each of which is a combination.
            recompile_limit=64,
            # With a pool of processes to compile in, they would outlive a service that is killed.
            options={"compile_threads": 1, "deterministic": True},
        )

    @wraps(function)
    def run(*args: Any) -> Any:
        run_compiled = made()  # first, since it imports the compiler, which takes a second
        return run_compiled(*(_of_any_length(x) if isinstance(x, Tensor) else x for x in args))

    return run


def _of_any_length(x: Tensor) -> Tensor:
    """Returns the same memory as a tensor for which functions of `compiled` are compiled once, whatever it is a view
    of, whether it has a gradient, and, with more than one dimension, however large the first is."""
    x = x.detach()
    if x.ndim > 1:
        # Unknown, and not only dynamic: blocks and splits of sums would be chosen by the size in the first call, which
        # differs in a process that was restarted.
        torch._dynamo.decorators.mark_unbacked(x, 0, hint_override=TYPICAL_ROWS, shape_id="rows")
    return x
