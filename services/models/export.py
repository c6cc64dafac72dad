"""Writes models as Hugging Face directories, and computes hashes of weights."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from services.compute.transformers_internals import converts_weights
from services.models.directory import VALUE_HEAD_FILE
from services.models.experts import EXPERTS
from services.models.value_model import ValueModel, transformer_of


def has_files_by_parts(model: PreTrainedModel | ValueModel) -> bool:
    """Returns whether `services.models.weights` reads and writes the files of a model tensor by tensor. False for some
    mixtures of experts and for quantized models, whose tensors transformers converts, all at once."""
    transformer = transformer_of(model)
    if getattr(transformer.config, "quantization_config", None):
        return False
    return transformer.config.model_type in EXPERTS or not converts_weights(transformer)


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Returns one sha256 (hex) over name, dtype, shape and bytes of all tensors, in the given order; callers sort
    them by name.

    The hash depends on the weights alone, not on files, their number or their metadata.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_model(
    model: PreTrainedModel | ValueModel,
    weights: Mapping[str, Tensor],
    directory: Path,
) -> None:
    """Writes weights as a Hugging Face directory with the configuration of `model`.

    A value model is written as its backbone, which AutoModel loads, with `VALUE_HEAD_FILE` beside it.

    Args:
        model: model with the configuration and architecture; its own weights are not read.
        weights: whole tensors by their names in `model.state_dict()`, tied weights once.
        directory: existing directory.

    Raises:
        OSError: a file could not be written.
    """
    try:
        if isinstance(model, ValueModel):
            save_file(_under("value_head.", weights), directory / VALUE_HEAD_FILE)
            model.backbone.save_pretrained(directory, state_dict=_under("backbone.", weights))
        else:
            with _without_generation_config(model):
                model.save_pretrained(directory, state_dict=dict(weights))
    except SafetensorError as error:
        raise OSError(f"model directory {directory} could not be written: {error}") from error


def write_config(
    model: PreTrainedModel | ValueModel,
    directory: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the configuration files of a Hugging Face directory.

    Args:
        model: model with the configuration.
        directory: existing directory.
        dtype: type of the weights, which the configuration names. Default: that of the model.

    Raises:
        OSError: a file could not be written.
    """
    transformer = transformer_of(model)
    transformer.config.architectures = [type(transformer).__name__]
    save_config(transformer.config, directory, dtype or transformer.dtype)
    if transformer.can_generate() and transformer.generation_config is not None:
        save_generation_config(transformer.generation_config, directory)


def save_generation_config(config: GenerationConfig, directory: Path) -> None:
    """Writes a generation configuration to generation_config.json as it is: `GenerationConfig.save_pretrained` refuses
    those of some published models, which have a temperature without `do_sample`.

    Raises:
        OSError: the file could not be written.
    """
    config.to_json_file(directory / GENERATION_CONFIG_NAME, use_diff=True, keys_to_pop=["compile_config"])


@contextlib.contextmanager
def _without_generation_config(model: Any) -> Iterator[None]:
    """Context manager in which `model.save_pretrained` writes a default generation configuration, which
    `save_generation_config` replaces."""
    if not model.can_generate():
        yield
        return
    config, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = config


def save_config(config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> None:
    """Writes a model's configuration to config.json, with `dtype` as the type of its weights; `config` is not
    changed.

    Raises:
        OSError: a file could not be written.
    """
    config = copy.deepcopy(config)
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        if each is not None:
            each.dtype = dtype
    config.save_pretrained(directory)


def _under(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights whose names begin with `prefix`, by name without it, as contiguous tensors."""
    return {
        name.removeprefix(prefix): x.contiguous() for name, x in weights.items() if name.startswith(prefix)
    }
