"""Loads models from Hugging Face directories.

Everything is read from local directories; nothing is downloaded, and no code that comes with a model is run. Models are
in eval mode, since dropout would make the log-probabilities in training differ from those in sampling. A model
loaded with `on_meta` has its weights on the meta device; buffers that are computed from the configuration and new heads
have values. `services.models.weights` reads the weights, part by part.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from services.compute.layers import speed_up_layers
from services.compute.linear import speed_up
from services.models.configs import NO_CODE, load_config
from services.models.directory import VALUE_HEAD_FILE, first_line, require_model_directory
from services.models.meta import attention_of, model_on_meta
from services.models.tokenizers import load_tokenizer
from services.models.value_model import ValueModel


def load_causal_lm(
    directory: Path, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> PreTrainedModel:
    """Loads a causal language model, in eval mode and, unless `on_meta`, on the CPU.

    Args:
        directory: Hugging Face directory.
        dtype: type of the weights.
        on_meta: whether the weights are on the meta device, without values.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
    """
    return _load(AutoModelForCausalLM, directory, dtype, on_meta=on_meta)


def load_value_model(
    directory: Path, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> ValueModel:
    """Loads a value model, or adds a new value head, of zeros, to the backbone of a causal language model; in eval
    mode and, unless `on_meta`, on the CPU.

    Args:
        directory: Hugging Face directory of a value model that `write_model` wrote, or of a causal language model.
        dtype: type of the weights.
        on_meta: whether the weights of the backbone are on the meta device, without values.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
    """
    model = ValueModel(_load(AutoModel, directory, dtype, on_meta=on_meta))
    if (directory / VALUE_HEAD_FILE).exists():
        model.value_head.load_state_dict(load_file(directory / VALUE_HEAD_FILE))
    return model.eval()


def load_scoring_model(
    directory: Path, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> PreTrainedModel:
    """Loads a sequence-classification model, all of whose weights must be in the directory; in eval mode and, unless
    `on_meta`, on the CPU.

    Args:
        directory: Hugging Face directory.
        dtype: type of the weights.
        on_meta: whether the weights are on the meta device, without values.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
    """
    return _load(AutoModelForSequenceClassification, directory, dtype, on_meta=on_meta)


def load_classifier(
    directory: Path, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> PreTrainedModel:
    """Loads a sequence-classification model, or adds a new head with one label to the backbone of a causal language
    model. A new head is zero, so that all scores are 0 and the first update changes the head alone.

    Args:
        directory: Hugging Face directory of a sequence-classification model or of a causal language model.
        dtype: type of the weights.
        on_meta: whether the weights, except those of a new head, are on the meta device, without values.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
    """
    require_model_directory(directory)
    config = load_config(directory)
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        return _load(AutoModelForSequenceClassification, directory, dtype, on_meta=on_meta)
    if config.get_text_config().pad_token_id is None:
        config.pad_token_id = config.get_text_config().pad_token_id = load_tokenizer(directory).pad_token_id
    config.num_labels = 1
    model: Any = _load(
        AutoModelForSequenceClassification, directory, dtype, {"score.weight"}, on_meta=on_meta, config=config
    )
    model.score.weight = nn.Parameter(torch.zeros_like(model.score.weight, device="cpu"))
    return model


def _load(
    auto_class: type,
    directory: Path,
    dtype: torch.dtype,
    new: Set[str] = frozenset(),
    *,
    on_meta: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Loads a model with one of transformers' auto classes.

    Args:
        new: names of weights that may be missing in the directory, for which transformers draws values.
        options: further arguments of `from_pretrained`, or of `model_on_meta`.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory cannot be loaded or has adapters beside its model, a weight has another shape, or one
            is missing that is not in `new`.
    """
    require_model_directory(directory)
    try:
        if on_meta:
            return _prepared(model_on_meta(auto_class, directory, dtype, **options))
        config = load_config(directory)
        model, report = auto_class.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attention_of(auto_class, config),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers' error has no names
            **NO_CODE,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = first_line(error)
        raise ValueError(f"{directory} cannot be loaded with {auto_class.__name__}: {cause}") from error
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ValueError(
            f"{directory} has a weight {name} of shape {list(found)}, where its config.json expects {list(expected)}"
        )
    missing = sorted(set(report["missing_keys"]) - new)
    if missing:
        raise ValueError(f"{directory} lacks {len(missing)} weights of its model, the first is {missing[0]}")
    return _prepared(model)


def _prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model the faster layers of `services.compute`, in place, and puts it into eval mode; returns the
    model."""
    speed_up(model)
    speed_up_layers(model)
    return model.eval()
