"""Loads a model with memory for the weights that a rank keeps."""

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
    """A model of a Hugging Face directory. At stages 1 and 2 a rank has memory for all weights, at stage 3 for its
    parts and, during loading, for one whole weight.

    Returns:
        The model, and its tensors without values yet, by name.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
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
    """A linear layer whose weight is gathered while it computes. Its backward pass reads the parameter again; torch's
    own would keep the gathered weight of the forward pass, and so in the end all weights of the model."""

    def forward(self, input: Tensor) -> Tensor:
        if uses_onednn(input, self.weight):
            return linear(input, self.weight, self.bias)
        return zero3_linear_wrap(input, self.weight, self.bias)
