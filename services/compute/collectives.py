"""Collectives over a process group that have gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the sum of `x` over a group (all-reduce). The backward pass passes the gradient on unchanged."""
    return x if group.size() == 1 else _SumForward.apply(x, group)


def fan_out(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns `x` unchanged, as the input of column-parallel layers. The backward pass all-reduces the gradient."""
    return x if group.size() == 1 else _SumBackward.apply(x, group)


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sends slice i of `x` [S, ...] to rank i of a group of S ranks; returns the slices that this rank receives, in the
    order of ranks, [S, ...]. The backward pass exchanges gradients the same way."""
    return _AllToAll.apply(x, group)  # type: ignore[return-value]


class _SumForward(torch.autograd.Function):
    """Autograd function of `sum_over`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    """Autograd function of `fan_out`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _AllToAll(torch.autograd.Function):
    """Autograd function of `all_to_all`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
