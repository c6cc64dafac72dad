"""RMS norms, gated activations and rotary embeddings by kernels that `torch.compile` makes, which read and write each
element once.

Operation by operation, as transformers computes them, each writes a tensor that the next one reads, and on a GPU
memory limits all of them. Forward and backward passes are compiled separately, so that a forward pass has the same bits
with and without gradients. Computation is in float32, or the finer type of the operands, and is rounded once.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from services.compute.torch_internals import compiled

_in_use = [False]


def use(*, compiled: bool) -> None:
    """Sets whether models of this process compute with the kernels of this module from now on, or operation by
    operation. Default: operation by operation."""
    _in_use[:] = [compiled]


def in_use() -> bool:
    """Returns whether models of this process compute with the kernels of this module."""
    return _in_use[0]


def name_in_use() -> Literal["eager", "compiled"]:
    """Returns the name of what is in use, as of the setting `kernels`."""
    return "compiled" if in_use() else "eager"


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Computes x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (Zhang and Sennrich 2019, "Root Mean
    Square Layer Normalization").

    Args:
        x: Input [..., H].
        weight_H: Weight [H].
        epsilon: Added to the mean of the squares.

    Returns:
        Output [..., H].
    """
    x_NH = _rows(x, 1)
    y_NH: Any = (
        _Norm.apply(x_NH, weight_H, epsilon) if torch.is_grad_enabled() else _norm(x_NH, weight_H, epsilon)[0]
    )
    return y_NH.view(x.shape)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Computes silu(gate) * up (Shazeer 2020, "GLU Variants Improve Transformer") of two tensors of one shape
    [..., I]; returns a tensor of that shape."""
    operands = _rows(gate, 1), _rows(up, 1)
    y_NI: Any = _Gated.apply(*operands) if torch.is_grad_enabled() else _gated(*operands)
    return y_NI.view(gate.shape)


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Applies rotary position embeddings (Su et al. 2021, "RoFormer"), in the layout of transformers, in which the
    first half of a head's elements rotates with the second half.

    Args:
        query, key: [B, H, T, D] and [B, K, T, D].
        cos, sin: Of the angles of each position, [B, T, D] or [1, T, D]; they get no gradient.

    Returns:
        Rotated queries [B, H, T, D] and keys [B, K, T, D].
    """
    query_NHD, key_NKD = (_rows(x.transpose(1, 2), 2) for x in (query, key))
    angles = [_rows(x.expand(len(query), -1, -1), 1) for x in (cos, sin)]
    operands = query_NHD, key_NKD, *angles
    both: Any = _Rotated.apply(*operands) if torch.is_grad_enabled() else _rotated(*operands)
    batch, tokens = query.shape[0], query.shape[2]
    return tuple(x.view(batch, tokens, *x.shape[1:]).transpose(1, 2) for x in both)  # type: ignore[return-value]


def _rows(x: Tensor, dimensions: int) -> Tensor:
    """Returns a contiguous tensor [N, ...] with the last `dimensions` dimensions of `x`."""
    return x.reshape(-1, *x.shape[-dimensions:]).contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@compiled
def _norm(x_NH: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns the output and 1 / rms(x), [N, 1]."""
    wide_NH = _wide(x_NH)
    scale_N1 = torch.rsqrt(wide_NH.square().mean(-1, keepdim=True) + epsilon)
    return (wide_NH * scale_N1 * weight_H).to(x_NH.dtype), scale_N1


@compiled
def _norm_gradients(
    of_y_NH: Tensor, x_NH: Tensor, weight_H: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor]:
    """With s = 1 / rms(x) and n = s x: d y_i / d x_j = s w_i ([i = j] - n_i n_j / H)."""
    normed_NH, slope_NH = _wide(x_NH) * scale_N1, _wide(of_y_NH)
    weighted_NH = slope_NH * weight_H
    of_x_NH = scale_N1 * (weighted_NH - normed_NH * (weighted_NH * normed_NH).mean(-1, keepdim=True))
    return of_x_NH.to(x_NH.dtype), (slope_NH * normed_NH).sum(0).to(weight_H.dtype)


@compiled
def _gated(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    return (F.silu(_wide(gate_NI)) * up_NI).to(gate_NI.dtype)


@compiled
def _gated_gradients(of_y_NI: Tensor, gate_NI: Tensor, up_NI: Tensor) -> tuple[Tensor, Tensor]:
    gate_wide_NI, slope_NI = _wide(gate_NI), _wide(of_y_NI)
    sigmoid_NI = torch.sigmoid(gate_wide_NI)
    silu_NI = gate_wide_NI * sigmoid_NI
    of_gate_NI = slope_NI * up_NI * (sigmoid_NI + silu_NI * (1 - sigmoid_NI))
    return of_gate_NI.to(gate_NI.dtype), (slope_NI * silu_NI).to(up_NI.dtype)


@compiled
def _rotated(query_NHD: Tensor, key_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(query_NHD, cos_ND, sin_ND), _rotate(key_NKD, cos_ND, sin_ND)


@compiled
def _rotated_gradients(
    of_query_NHD: Tensor, of_key_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor
) -> tuple[Tensor, Tensor]:
    return _rotate_back(of_query_NHD, cos_ND, sin_ND), _rotate_back(of_key_NKD, cos_ND, sin_ND)


def _rotate(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    wide_NHD = _wide(x_NHD)
    first, second = wide_NHD.chunk(2, dim=-1)
    turned_NHD = torch.cat((-second, first), dim=-1)
    return (wide_NHD * cos_ND[:, None] + turned_NHD * sin_ND[:, None]).to(x_NHD.dtype)


def _rotate_back(of_y_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Returns the product of a gradient and the transpose of `_rotate`."""
    wide_NHD = _wide(of_y_NHD)
    first, second = (wide_NHD * sin_ND[:, None]).chunk(2, dim=-1)
    return (wide_NHD * cos_ND[:, None] + torch.cat((second, -first), dim=-1)).to(of_y_NHD.dtype)


class _Norm(torch.autograd.Function):
    """Autograd function of `rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        y_NH, scale_N1 = _norm(x_NH, weight_H, epsilon)
        ctx.save_for_backward(x_NH, weight_H, scale_N1)
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_norm_gradients(_rows(gradients[0], 1), *ctx.saved_tensors), None


class _Gated(torch.autograd.Function):
    """Autograd function of `gated`."""

    @staticmethod
    def forward(ctx: Any, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NI, up_NI)
        return _gated(gate_NI, up_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return _gated_gradients(_rows(gradients[0], 1), *ctx.saved_tensors)


class _Rotated(torch.autograd.Function):
    """Autograd function of `rotated`."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*operands[2:])
        return _rotated(*operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotated_gradients(*(_rows(x, 2) for x in gradients), *ctx.saved_tensors), None, None
