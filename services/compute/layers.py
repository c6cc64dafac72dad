"""Faster layers for models of the Llama family, in place of those of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.activations import SiLUActivation

from services.compute import fused
from services.compute.norms import speed_up_norms
from services.compute.transformers_internals import Rotation, replace_rotation, rotation_of

LARGEST_ERROR = 1e-2
"""Largest norm of the difference between a tensor with and without the kernels, over its norm: both with TF32."""

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_MLPS = {f"{family}MLP" for family in _FAMILIES}
_ATTENTIONS = {f"{family}Attention" for family in _FAMILIES}


def speed_up_layers(model: nn.Module) -> None:
    """Makes a Llama, Mistral, Qwen2 or Qwen3 model compute norms, gated activations and rotary embeddings with the
    kernels of `fused`, while these are in use, and norms in float32 on CPUs as `RMSNorm` does; changes no other model.
    Weights, names and hooks are not changed."""
    speed_up_norms(model)
    for module in model.modules():
        # Exactly these classes: subclasses may compute something else.
        name = type(module).__name__
        if name in _MLPS and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
            module.__class__ = GatedMLP
        elif name in _ATTENTIONS:
            replace_rotation(module, _fused_if_in_use(rotation_of(module)))


class GatedMLP(nn.Module):
    """MLP of the Llama family, down(silu(gate(x)) * up(x)), for transformers' modules, whose class it becomes."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if fused.in_use():
            return self.down_proj(fused.gated(self.gate_proj(x), self.up_proj(x)))
        # In this order, so that without gradients the gate is freed before the other product is made.
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def why_not_fused(device: torch.device) -> str:
    """Compiles the kernels of `fused` for a device and compares outputs and gradients of a small model with those
    without them; returns why they cannot be used there, or an empty text. Takes seconds where the compiler has not
    cached them. They are not in use afterwards."""
    try:
        plain, compiled = (_outputs_and_gradients(device, are_fused=each) for each in (False, True))
        # Relative to each tensor, since some gradients are a thousand times smaller than others.
        if not all((x - y).norm() <= LARGEST_ERROR * y.norm() for x, y in zip(compiled, plain, strict=True)):
            return "their results are not close to those without them"
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
        return str(error).strip().partition("\n")[0] or type(error).__name__
    finally:
        fused.use(compiled=False)
    return ""


def _outputs_and_gradients(device: torch.device, *, are_fused: bool) -> list[Tensor]:
    """Returns the output of a small random model and the gradients of its weights, computed in float32."""
    fused.use(compiled=are_fused)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaModel(
            LlamaConfig(
                vocab_size=8,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
            )
        )
    speed_up_layers(model.to(device))
    with torch.enable_grad():
        output_BTH = model(torch.arange(6, device=device).view(2, 3), use_cache=False).last_hidden_state
        gradients = torch.autograd.grad(output_BTH.square().sum(), list(model.parameters()))
    return [output_BTH.detach(), *gradients]


def _fused_if_in_use(plain: Rotation) -> Rotation:
    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return (fused.rotated if fused.in_use() else plain)(query, key, cos, sin)

    return rotate
