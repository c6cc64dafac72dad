"""Builds models whose weights are on the meta device, while buffers that are computed have values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from services.compute.torch_internals import buffers_of, non_persistent_buffers
from services.compute.transformers_internals import (
    give_own_types,
    initialize_module,
    supports_sdpa,
)
from services.models.configs import load_config


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
        ValueError: the model does not compute one of its buffers.
    """
    config = config or load_config(directory)
    attention = attention_of(auto_class, config)
    with torch.device("meta"):
        model: Any = auto_class.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    if model.can_generate() and (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    compute_buffers(model, model)
    give_own_types(model, dtype)
    return model


def attention_of(auto_class: Any, config: Any) -> str:
    """Returns the name of the attention that transformers computes a model with, as argument `attn_implementation`:
    "sdpa", or the model's own, "eager", where "sdpa" does not compute it. That is the case for types that transformers
    has no "sdpa" for, such as gpt_oss with its attention sinks, and for a model that caps attention scores, as Gemma 2
    does: "sdpa" ignores the cap without an error.

    Args:
        auto_class: transformers' auto class of the model.
        config: configuration of the model.
    """
    is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if supports_sdpa(auto_class, config) and not is_capped else "eager"


def compute_buffers(module: nn.Module, model: Any) -> None:
    """Computes the non-persistent buffers of a module and its children, which are not in files but follow from the
    configuration, such as rotary frequencies. As in transformers' `smart_apply`, the innermost model that contains a
    module computes them, for each module or for all of the model's at once.

    Args:
        module: the module.
        model: the innermost transformers model that contains it.

    Raises:
        ValueError: the model does not compute a buffer. Detected for floating-point buffers alone, which are nan
            before.
    """
    for part in module.children():
        compute_buffers(part, part if isinstance(part, PreTrainedModel) else model)
    computed = {name: _without_values(x) for name, x in non_persistent_buffers(module).items()}
    buffers_of(module).update(computed)
    if computed or module is model:
        initialize_module(model, module)
    for owner in module.modules() if module is model else ():
        for name in non_persistent_buffers(owner):
            value = buffers_of(owner)[name]
            if value is None or bool(torch.isnan(value).any()):
                raise ValueError(f"{type(model).__name__} does not compute {name} of {type(owner).__name__}")


def _without_values(on_meta: Tensor) -> Tensor:
    """Returns a tensor in host memory like one on the meta device; nan if floating-point, otherwise undefined."""
    if on_meta.is_floating_point():
        return torch.full_like(on_meta, float("nan"), device="cpu")
    return torch.empty_like(on_meta, device="cpu")
