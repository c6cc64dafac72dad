"""Checks Hugging Face model directories on the local file system."""

from __future__ import annotations

from pathlib import Path

VALUE_HEAD_FILE = "value_head.safetensors"
"""Name of the file with a value head's weights, in the directory of its backbone."""


def require_model_directory(directory: Path) -> None:
    """Raises FileNotFoundError if `directory` does not exist or has no config.json."""
    if not directory.is_dir():
        raise FileNotFoundError(f"model directory {directory} does not exist")
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} is not a model directory: it has no config.json")


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, without the advice that transformers appends."""
    return str(error).partition("\n")[0]
