"""Loads a model with memory for those weights that this rank keeps at a ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from services.compute.linear import Linear, linear, speed_up, uses_onednn
from services.compute.torch_internals import buffers_of
from services.engines.zero.deepspeed_internals import partition_weights, zero3_linear_wrap
from services.models.loading import Load, Model, load_on_meta, materialize


def load_for_stage(
    load_model: Load, directory: Path, stage: int, device: torch.device, dtype: torch.dtype
) -> tuple[Model, dict[str, Tensor]]:
    """Loads the model of a Hugging Face directory, without the values of its weights if they can be read part by part.
    At stages 1 and 2 this rank has memory for all weights, at stage 3 for its partition and, while loading, for one
    whole weight. Collective at stage 3.

    Args:
        load_model: loads the model from a directory.
        directory: Hugging Face directory.
        stage: ZeRO stage, 1 to 3.
        device: device of this rank.
        dtype: type of the weights.

    Returns:
        The model, and those of its tensors that have no values yet, by name.

    Raises:
        FileNotFoundError: the directory does not exist or has no config.json.
        ValueError: the directory contains a different kind of model, or not all of its weights.
    """
    model = load_on_meta(load_model, directory, dtype)
    if stage < 3:
        empty = dict(materialize(model, device))
        nn.Module.to(model, device)
        return model, empty
    empty = {}

    def batches() -> Iterator[list[Tensor]]:
        for name, tensor in materialize(model, device):
            empty[name] = tensor
            if isinstance(tensor, nn.Parameter):
                yield [tensor]
        yield list(model.parameters())

    partition_weights(batches())
    for module in model.modules():
        buffers = buffers_of(module)
        buffers.update({name: x if x is None else x.to(device) for name, x in buffers.items()})
    speed_up(model, _GatheredLinear)
    return model, empty


class _GatheredLinear(Linear):
    """Linear layer whose weight is gathered only while it computes. Its backward pass reads the parameter again,
    while that of torch's layer would keep the gathered weight since the forward pass, and so in the end all weights
    of the model."""

    def forward(self, input: Tensor) -> Tensor:
        if uses_onednn(input, self.weight):
            return linear(input, self.weight, self.bias)
        return zero3_linear_wrap(input, self.weight, self.bias)
