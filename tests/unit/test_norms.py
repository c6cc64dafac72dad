"""RMS norms of our own are those of transformers: values and gradients of float64."""

from __future__ import annotations

import copy
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from unit.test_linear import gradients, make
from unit.test_packing import make_model

from services.compute.norms import RMSNorm, speed_up_norms

Model = TypeVar("Model", bound=nn.Module)


def sped_up(model: Model) -> Model:
    speed_up_norms(model)
    return model


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


# The last has more numbers than are worked on together.
@pytest.mark.parametrize("shape", [(48,), (1, 1, 48), (2, 5, 3, 48), (1, 3000, 48)])
def test_a_norm_and_its_gradients_are_those_of_float64(shape: tuple[int, ...]):
    x, weight = make(*shape), make(48, seed=1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        module = sped_up(nn.Sequential(LlamaRMSNorm(48, eps=1e-6)))[0]
        assert isinstance(module, RMSNorm)
        module._parameters.pop("weight")
        module.weight = weight  # type: ignore[assignment]
        return module(x)

    expected = gradients(exact_norm, x.double(), weight.double())
    for ours, exact in zip(gradients(norm, x, weight), expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


def test_a_norm_of_what_does_not_lie_in_order():
    x, weight = make(5, 48, 7).transpose(1, 2), make(48, seed=1)
    norm = LlamaRMSNorm(48)
    norm.weight.data.copy_(weight)
    sped_up(nn.Sequential(norm))
    for ours, exact in zip(
        gradients(norm, x), gradients(lambda x: exact_norm(x, weight.double()), x.double()), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_of_other_types_are_those_of_transformers(dtype: torch.dtype):
    theirs = LlamaRMSNorm(48).to(dtype)
    ours = sped_up(nn.Sequential(copy.deepcopy(theirs)))
    x = make(2, 5, 48, dtype=dtype)
    assert torch.equal(ours(x), theirs(x))


def test_other_models_of_the_process_stay_as_they_are():
    rotate, theirs = modeling_llama.apply_rotary_pos_emb, make_model("llama")
    sped_up(make_model("llama"))
    assert modeling_llama.apply_rotary_pos_emb is rotate
    assert {type(m).__name__ for m in theirs.modules() if "Norm" in type(m).__name__} == {"LlamaRMSNorm"}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_computes_the_same_and_keeps_its_names(kind: str):
    theirs, ours = make_model(kind), make_model(kind).float()
    ids = torch.arange(24).view(2, 12)
    sped_up(ours)
    assert not any("RMSNorm" in type(m).__name__ and type(m) is not RMSNorm for m in ours.modules())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for model in (theirs, ours):
        model(ids).logits.log_softmax(-1)[..., 1].sum().backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.double() - y.grad).norm() <= 1e-5 * y.grad.norm(), name


def test_other_norms_stay():
    class Derived(LlamaRMSNorm):
        pass

    model = nn.Sequential(Derived(4), nn.LayerNorm(4))
    assert [type(layer) for layer in sped_up(model)] == [Derived, nn.LayerNorm]


def test_with_and_without_gradients_the_bits_are_the_same():
    model = sped_up(make_model("qwen3").float())
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        without = model(ids).logits
    assert torch.equal(model(ids).logits, without)
