"""RMS norms on CPUs, in fewer passes over memory and with an explicit gradient.

The norms of transformers run one operation at a time, each writing a tensor that the next operation or the backward
pass reads again; docs/engines.md has the cost. On other devices and in types other than float32, the operations are
those of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from services.compute import fused
from services.compute.linear import is_cpu_float32

_NORMS = {f"{family}RMSNorm" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}

_TOGETHER = 1 << 16
"""Elements of each tensor that the backward pass processes at a time, so that they stay in a core's cache."""


def speed_up_norms(model: nn.Module) -> None:
    """Makes the RMS norms of a Llama, Mistral, Qwen2 or Qwen3 model compute as `RMSNorm` does; changes no other
    model. Weights, names and hooks are not changed, since the class of each module is assigned, as in
    `linear.speed_up`."""
    for module in model.modules():
        # Exactly these classes: subclasses may compute something else.
        if type(module).__name__ in _NORMS:
            module.__class__ = RMSNorm


class RMSNorm(nn.Module):
    """RMS norm, x / rms(x) * weight (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"), with a fused
    implementation for float32 on CPUs. Not constructed, but assigned as the class of transformers' modules."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if fused.in_use():
            return fused.rms_norm(hidden_states, self.weight, self.variance_epsilon)
        if is_cpu_float32(hidden_states) and is_cpu_float32(self.weight):
            arguments = hidden_states, self.weight, self.variance_epsilon
            return _Norm.apply(*arguments) if torch.is_grad_enabled() else _normed(*arguments)[0]  # type: ignore[return-value]
        x = hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class _Norm(torch.autograd.Function):
    """Autograd function of `RMSNorm` on CPUs. With s = 1 / rms(x) and n = s x: y = w n, and
    d y_i / d x_j = s w_i ([i = j] - n_i n_j / H)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        y, scale = _normed(x, weight_H, epsilon)
        ctx.save_for_backward(x, weight_H, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, scale = ctx.saved_tensors
        of_weight_H = torch.zeros_like(weight_H)
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        size = max(1, _TOGETHER // len(weight_H))
        whole = (x, scale, gradients[0], of_x)
        chunks = (each.reshape(-1, each.shape[-1]).split(size) for each in whole)
        for x_NH, scale_N1, of_y_NH, of_x_NH in zip(*chunks, strict=True):
            normed_NH = x_NH * scale_N1
            torch.mul(of_y_NH, normed_NH, out=of_x_NH)
            of_weight_H += of_x_NH.sum(dim=0)
            along_N1 = (of_x_NH @ weight_H).div_(-len(weight_H))[:, None]
            torch.mul(of_y_NH, weight_H, out=of_x_NH)
            of_x_NH.addcmul_(normed_NH, along_N1).mul_(scale_N1)
        return of_x, of_weight_H, None


def _normed(x: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns the normalized and weighted x, and 1 / rms(x)."""
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    scale = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (x * scale).mul_(weight_H), scale
