"""Checks Hugging Face model directories on the local file system."""

from __future__ import annotations

from pathlib import Path

VALUE_HEAD_FILE = "value_head.safetensors"
"""Name of the file with a value head's weights, in the directory of its backbone."""
ADAPTERS = "adapter_config.json"
"""Name of the file with the configuration of adapters, as peft writes it."""


def require_model_directory(directory: Path) -> None:
    """Checks that a directory is that of a model.

    Raises:
        FileNotFoundError: It does not exist, or has no config.json.
        ValueError: It also has adapters, which transformers would add to a model that it loads with its weights, but
            not to one on the meta device: a frozen reference would be another model than the actor of the directory.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"model directory {directory} does not exist")
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} is not a model directory: it has no config.json")
    if (directory / ADAPTERS).is_file():
        raise ValueError(
            f"{directory} has adapters beside its model ({ADAPTERS}), which are not loaded; merge them into the "
            "weights, or remove that file to use the model without them"
        )


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, without the advice that transformers appends."""
    return str(error).partition("\n")[0]
