"""Hugging Face model directories on the local file system."""

from __future__ import annotations

from pathlib import Path

VALUE_HEAD_FILE = "value_head.safetensors"
"""Weights of a value head, in the directory of its backbone."""


def require_model_directory(directory: Path) -> None:
    """Raises FileNotFoundError where `directory` is missing or has no config.json."""
    if not directory.is_dir():
        raise FileNotFoundError(f"model directory {directory} does not exist")
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} is not a model directory: it has no config.json")


def first_line(error: Exception) -> str:
    """The first line of an error message: transformers appends advice."""
    return str(error).partition("\n")[0]
