"""Private names of transformers that the product needs. Nothing public does the same; pyproject.toml bounds the version
of transformers, and tests/unit/test_internals.py checks that the names are there.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping


def converts_weights(model: PreTrainedModel) -> bool:
    """Returns whether transformers converts a model's tensors when it reads and writes files."""
    return bool(get_model_conversion_mapping(model, add_legacy=False) or model._get_dtype_plan(model.dtype))


def initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Initializes the weights of a module as its model does after construction, and computes its buffers, such as
    rotary frequencies."""
    model._init_weights(module)


def block_class_names(model: PreTrainedModel) -> set[str]:
    """Returns the class names of a model's transformer blocks: the modules that transformers does not split over
    devices."""
    return set(model._no_split_modules or ())
