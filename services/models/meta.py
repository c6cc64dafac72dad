"""Models without memory: weights on the meta device, computed buffers with values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from services.compute.torch_internals import buffers_of, non_persistent_buffers
from services.compute.transformers_internals import initialize_module


def model_on_meta(
    auto_class: Any, directory: Path, dtype: torch.dtype, config: Any = None
) -> PreTrainedModel:
    """A model whose weights are on the meta device; computed buffers have values."""
    config = config or AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model: Any = auto_class.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if model.can_generate() and (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    compute_buffers(model, model)
    return model


def compute_buffers(module: nn.Module, model: Any) -> None:
    """Compute the buffers of a module and its children that are computed from the configuration and not in files. As in
    transformers' `smart_apply`, the innermost model that contains a module computes them.

    Raises:
        ValueError: the model does not compute a buffer; detected for floats, which are nan before.
    """
    for child in module.children():
        compute_buffers(child, child if isinstance(child, PreTrainedModel) else model)
    computed = {name: _without_values(x) for name, x in non_persistent_buffers(module).items()}
    buffers = buffers_of(module)
    buffers.update(computed)
    if computed:
        initialize_module(model, module)
    for name in computed:
        value = buffers[name]
        if value is None or bool(torch.isnan(value).any()):
            raise ValueError(f"{type(model).__name__} does not compute {name} of {type(module).__name__}")


def _without_values(on_meta: Tensor) -> Tensor:
    """A tensor in host memory; nan for floats, undefined for others."""
    if on_meta.is_floating_point():
        return torch.full_like(on_meta, float("nan"), device="cpu")
    return torch.empty_like(on_meta, device="cpu")
