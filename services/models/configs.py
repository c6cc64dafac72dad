"""Reads the configuration of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from services.models.directory import first_line

NO_CODE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options of transformers' loaders: nothing is downloaded, and no code in the directory is run. Without the second,
transformers asks at a terminal whether to run it."""


def load_config(directory: Path) -> PreTrainedConfig:
    """Reads the configuration of a Hugging Face directory, without running code in it.

    Raises:
        OSError: no such directory, or no config.json in it.
        ValueError: transformers does not know the model, as where it is code in the directory.
    """
    try:
        return AutoConfig.from_pretrained(directory, **NO_CODE)
    except ValueError as error:
        raise ValueError(first_line(error)) from error
