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
    """WeightShard modules with FSDP2 so that gradients are summed, each on its own, what it holds before itself.

    Args:
        dtype: of the weights, their gradients and their reduction, which is in float32 or finer.
        compute_dtype: of forward and backward, default `dtype`.
    """
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for module in modules:
        sharded = fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )
        # Gradients are summed over ranks, where FSDP would average them. A plain sum is also all that gloo has.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # In a mixture of experts each rank may use other experts.
        sharded.set_reduce_scatter_unused_params(True, recurse=False)


def whole(x: Tensor) -> Tensor:
    """All of a tensor, gathered from all ranks where they share it, without its graph."""
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory and not its graph."""
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def box(local: Tensor, parameter: Tensor) -> WeightShard:
    """Where the local part of a parameter, or a tensor shaped like it, lies in the whole."""
    offsets: Sequence[int] = (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        offsets = global_offset(parameter)
    return WeightShard(local, tuple(offsets), tuple(parameter.shape))
