"""Floating-point operations of training a transformer, and peak rates of devices."""

from __future__ import annotations

from settings.memory.shape import ModelShape

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
}
"""Peak dense bfloat16 rates of NVIDIA's GPUs from the data sheets, by a part of their name; the first match counts."""


def layer_weights(model: ModelShape) -> int:
    """Returns the number of weights of the matrices of one layer of a dense model."""
    (layer,) = model.layer_kinds
    return sum(weight.numel for weight in layer.weights if len(weight.shape) == 2)


def training_flops(
    model: ModelShape, rows: int, prompt_tokens: int, new_tokens: int, *, is_critic: bool = False
) -> float:
    """Operations that the model needs for one forward and backward pass over rows of one length. Recomputation, masked
    positions and products with vectors do not count.

    Six operations for each weight and token, two in the forward pass and four in the backward pass (Kaplan et al. 2020,
    "Scaling Laws for Neural Language Models", section 2.1). Each token attends to itself and those before it. The
    output layer, which a critic lacks, is computed for response tokens only.
    """
    length = prompt_tokens + new_tokens
    in_layers = rows * length * layer_weights(model)
    # Scores and weighted values, each a product of head_dim for every pair of tokens and every head.
    in_attention = rows * length * (length + 1) // 2 * 2 * model.heads * model.head_dim
    at_output = 0 if is_critic else rows * new_tokens * model.vocabulary * model.hidden
    return 6.0 * (model.layers * (in_layers + in_attention) + at_output)


def known_peak_tflops(device_name: str) -> float | None:
    """Peak bfloat16 rate of a GPU, in TFLOP/s; None for a GPU that is not in the table."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)
