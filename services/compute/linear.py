"""Linear layers that on CPUs compute with the library chosen in `services.compute.matmul`: MKL, which torch's own
linear layers use, or oneDNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.compute import matmul
from services.compute.matmul import onednn_product as _product


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Returns whether `linear` computes the product of these tensors with oneDNN: if both are float32 on a CPU,
    autocast is off and `matmul.backend()` is "onednn"."""
    is_float32 = is_cpu_float32(x) and is_cpu_float32(weight) and not torch.is_autocast_enabled("cpu")
    return is_float32 and matmul.backend() == "onednn"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x @ weight.T + bias, as `torch.nn.functional.linear`, with the chosen library.

    Args:
        x: input [..., in].
        weight: weight [out, in].
        bias: bias [out]; None for none.

    Returns:
        Output [..., out].
    """
    if not uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    # The bias is added separately with and without gradients, so that both give the same bits.
    y = _Product.apply(x, weight) if torch.is_grad_enabled() else _product(x, weight)
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """`torch.nn.Linear` that computes with `linear` of this module."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def speed_up(model: nn.Module, layer: type[Linear] = Linear) -> None:
    """Makes a model's modules of exactly the classes `nn.Linear` and `Linear` compute as `layer` does, in place. Their
    weights, names and hooks are not changed.

    The class of each module is assigned, since `nn.Linear` and `layer` have the same attributes and differ in `forward`
    alone. New modules would need the parameters, ties and hooks of the old ones, and a patch of torch's class would
    reach other models of the process.
    """
    for module in model.modules():
        # Exactly these classes: subclasses may compute something else.
        if type(module) in (nn.Linear, Linear):
            module.__class__ = layer


class _Product(torch.autograd.Function):
    """Autograd function of the product x @ weight.T, computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = _product(gradients[0], weight.t()) if ctx.needs_input_grad[0] else None
        return of_x, _outer(gradients[0], x) if ctx.needs_input_grad[1] else None


def _outer(of_y: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of a weight, [out, in], from those of the outputs and the inputs. The smaller operand is
    given to oneDNN first, since that is the one whose layout it changes by a copy."""
    of_y_T, x_T = of_y.flatten(0, -2).t(), x.flatten(0, -2).t()
    return _product(of_y_T, x_T) if len(of_y_T) <= len(x_T) else _product(x_T, of_y_T).t()


def is_cpu_float32(x: Tensor) -> bool:
    """Returns whether a tensor is float32 on a CPU, as oneDNN's products and the fused norms require."""
    return x.is_cpu and x.dtype == torch.float32
