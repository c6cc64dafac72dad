"""Linear layers through oneDNN are linear layers: values and gradients of float64, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.compute.linear import Linear, linear, speed_up

# Of sums of up to 48 products of numbers around 1.
TOLERANCE = 2e-5


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(function, *inputs: Tensor) -> list[Tensor]:
    """Of a weighted sum of what a function makes of its inputs: the values and the gradient of each input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape).cos()).sum().backward()
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48), (1, 1, 48)])
@pytest.mark.parametrize("num_outputs", [20, 60])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_float64(shape: tuple[int, ...], num_outputs: int, has_bias: bool):
    bias = [make(num_outputs, seed=2)] if has_bias else []
    inputs = [make(*shape), make(num_outputs, 48, seed=1), *bias]
    ours = gradients(linear, *inputs)
    expected = gradients(F.linear, *(x.double() for x in inputs))
    assert len(ours) == len(expected) == len(inputs) + 1
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=TOLERANCE, rtol=0)


def test_transposed_weights_and_slices_of_inputs_need_no_copy_by_the_caller():
    x, weight = make(3, 9, 48)[:, 2:], make(48, 20, seed=1).t()
    for ours, expected in zip(
        gradients(linear, x, weight), gradients(F.linear, x.double(), weight.double()), strict=True
    ):
        torch.testing.assert_close(ours.double(), expected, atol=TOLERANCE, rtol=0)


def test_with_and_without_gradients_the_bits_are_the_same():
    x, weight, bias = make(7, 48), make(20, 48, seed=1).requires_grad_(), make(20, seed=2)
    with torch.no_grad():
        without = linear(x, weight, bias)
    assert torch.equal(linear(x, weight, bias), without)


def test_an_input_that_needs_no_gradient_gets_none():
    x, weight = make(7, 48), make(20, 48, seed=1).requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_computed_by_torch(dtype: torch.dtype):
    x, weight = make(7, 48, dtype=dtype), make(20, 48, dtype=dtype, seed=1)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_autocast_computes_in_its_type():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(make(7, 48), make(20, 48)).dtype == torch.bfloat16


def test_a_model_keeps_its_weights_and_their_names():
    class Derived(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(48, 20), nn.Sequential(Derived(20, 4)))
    before = {name: x.data_ptr() for name, x in model.named_parameters()}
    speed_up(model)
    assert [type(layer) for layer in (model[0], *model[1].children())] == [Linear, Derived]
    assert {name: x.data_ptr() for name, x in model.named_parameters()} == before
