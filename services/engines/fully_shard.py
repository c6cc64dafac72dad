"""Shards weights with FSDP2 (torch's `fully_shard`), and reads and gathers the shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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
    unsharded: Collection[nn.Parameter] = (),
) -> None:
    """Applies FSDP2 to each module, with gradients summed over ranks instead of averaged.

    Args:
        modules: modules to shard; inner modules must come before the modules that contain them.
        mesh: one-dimensional mesh of the ranks to shard over.
        dtype: type of weights and gradients. Gradients are reduced in this type or float32, whichever is finer.
        compute_dtype: type of forward and backward passes. Default: `dtype`.
        unsharded: parameters that every rank keeps whole, each in its own type; they are not trained.
        reshard_after_forward: whether gathered weights are freed between forward and backward pass.
    """
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for module in modules:
        sharded = fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=set(unsharded) or None,
        )
        # FSDP averages gradients by default. gloo also supports plain sums only. On one rank there is nothing to
        # average, and FSDP would divide all gradients by 1.
        if mesh.size() > 1:
            sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # In a mixture of experts, ranks may use different experts.
        sharded.set_reduce_scatter_unused_params(True, recurse=False)


def whole(x: Tensor) -> Tensor:
    """Returns a whole tensor, detached; gathers it from its ranks if `x` is a DTensor. Collective."""
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def local_part(x: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or a plain tensor itself, detached and in the same memory."""
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def box(local: Tensor, parameter: Tensor) -> WeightShard:
    """Returns a `WeightShard` of the tensor `local`, with the shape of the whole `parameter` and the offset of this
    rank's shard in it. `local` is that shard, or a tensor with its shape, such as a moment."""
    offsets: Sequence[int] = (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        offsets = global_offset(parameter)
    return WeightShard(local, tuple(offsets), tuple(parameter.shape))
