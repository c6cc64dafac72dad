"""Weights sharded with FSDP2 (torch's `fully_shard`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from services.compute.torch_internals import global_offset
from services.storage.checkpoint import WeightShard


def shard_modules(
    modules: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool = True,
) -> None:
    """Shards each module with FSDP2, inner modules before the modules that contain them; gradients are summed.

    Args:
        dtype: type of weights and gradients. Gradients are reduced in this type or float32, whichever is finer.
        compute_dtype: type of forward and backward passes, default `dtype`.
    """
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for module in modules:
        sharded = fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )
        # FSDP averages gradients by default. gloo also supports plain sums only.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # In a mixture of experts, ranks may use different experts.
        sharded.set_reduce_scatter_unused_params(True, recurse=False)


def whole(x: Tensor) -> Tensor:
    """The whole tensor without its graph; a DTensor is gathered from its ranks. Collective."""
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def local_part(x: Tensor) -> Tensor:
    """This rank's shard of a tensor, in the same memory, without its graph."""
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def box(local: Tensor, parameter: Tensor) -> WeightShard:
    """The local shard of a parameter, or a tensor of its shape, as a box of the whole parameter."""
    offsets: Sequence[int] = (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        offsets = global_offset(parameter)
    return WeightShard(local, tuple(offsets), tuple(parameter.shape))
