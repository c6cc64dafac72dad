"""Builds models whose weights are on the meta device, while buffers that are computed have values."""

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
    """Builds a model whose weights are on the meta device and whose computed buffers have values.

    Args:
        auto_class: transformers' auto class of the model, such as AutoModelForCausalLM.
        directory: Hugging Face directory of the model.
        dtype: type of the weights.
        config: configuration of the model. Default: that of the directory.

    Raises:
        ValueError: the model does not compute one of its buffers, or has attention that is not computed here.
    """
    config = config or AutoConfig.from_pretrained(directory, local_files_only=True)
    require_computed_attention(config)
    with torch.device("meta"):
        model: Any = auto_class.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if model.can_generate() and (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    compute_buffers(model, model)
    return model


def require_computed_attention(config: Any) -> None:
    """Raises ValueError for a model that caps its attention scores, as Gemma 2 does: the attention "sdpa" of
    transformers, which all engines use, ignores the cap without an error."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None:
        raise ValueError(
            f"the model caps attention scores (attn_logit_softcapping {cap:g} in config.json), which is not supported"
        )


def compute_buffers(module: nn.Module, model: Any) -> None:
    """Computes the non-persistent buffers of a module and its children, which are not in files but follow from the
    configuration, such as rotary frequencies. As in transformers' `smart_apply`, the innermost model that contains a
    module computes them.

    Args:
        module: the module.
        model: the innermost transformers model that contains it.

    Raises:
        ValueError: the model does not compute a buffer. Detected for floating-point buffers alone, which are nan
            before.
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
    """Returns a tensor in host memory like one on the meta device; nan if floating-point, otherwise undefined."""
    if on_meta.is_floating_point():
        return torch.full_like(on_meta, float("nan"), device="cpu")
    return torch.empty_like(on_meta, device="cpu")
