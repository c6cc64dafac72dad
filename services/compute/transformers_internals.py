"""Private names of transformers that the product needs. Nothing public does the same; pyproject.toml bounds the version
of transformers, and tests/unit/test_internals.py checks that the names are there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import build_glob_alternation


def converts_weights(model: PreTrainedModel) -> bool:
    """Returns whether transformers converts a model's tensors when it reads and writes files."""
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def give_own_types(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Converts those tensors of a model, in place, to the types in which transformers keeps them whatever the model's
    type is, such as biases of routers in float32.

    Args:
        model: model in `dtype`.
        dtype: type of the other weights.
    """
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    patterns, pattern_of_group, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (found := patterns.search(name)) is not None:
            tensor.data = tensor.data.to(plan[pattern_of_group[str(found.lastgroup)]])


def supports_sdpa(auto_class: Any, config: PreTrainedConfig) -> bool:
    """Returns whether transformers computes the model of a configuration with torch's scaled_dot_product_attention.

    Args:
        auto_class: auto class that chooses the model's class.
        config: configuration, of a type that the auto class knows; of others, for which it raises an error with the
            known ones, returns True.
    """
    kind: Any = type(config)
    if kind not in auto_class._model_mapping:
        return True
    found = auto_class._model_mapping[kind]
    return all(each._supports_sdpa for each in (found if isinstance(found, tuple) else (found,)))


def initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Initializes the weights of a module as its model does after construction, and computes its buffers, such as
    rotary frequencies."""
    model._init_weights(module)


def block_class_names(model: PreTrainedModel) -> set[str]:
    """Returns the class names of a model's transformer blocks: the modules that transformers does not split over
    devices."""
    return set(model._no_split_modules or ())


Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Applies rotary embeddings: (query, key, cos, sin) to rotated queries and keys."""
_ROTATION = "apply_rotary_pos_emb"


def rotation_of(attention: nn.Module) -> Rotation:
    """Returns the function with which an attention module of the Llama family applies rotary embeddings."""
    return type(attention).forward.__globals__[_ROTATION]


def replace_rotation(attention: nn.Module, rotation: Rotation) -> None:
    """Makes an attention module of the Llama family apply rotary embeddings with another function. The `forward` of
    its class finds the function among the globals of its Python module; this module gets a `forward` with globals of
    its own, so that other models of the process are not changed."""
    forward: Any = type(attention).forward
    own = FunctionType(forward.__code__, {**forward.__globals__, _ROTATION: rotation}, forward.__name__)
    own.__defaults__, own.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    attention.forward = MethodType(own, attention)
