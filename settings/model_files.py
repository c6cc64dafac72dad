"""Checks of the files of a model directory on this host before anything loads them, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

INDEX = "model.safetensors.index.json"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")
"""Patterns of the names of files with weights in formats that are not read."""
LFS_POINTER = b"version https://git-lfs"
"""First bytes of the file that Git LFS leaves in place of one that was not downloaded."""

TOKENIZER_FILES = ("*token*", "vocab*", "*.model")
"""Patterns of the names of files that a tokenizer is loaded from."""
_OF_SPECIAL_TOKENS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
"""Names of those that describe its special tokens alone."""


def has_vocabulary(directory: Path) -> bool:
    """Returns whether a directory has a file with the vocabulary of a tokenizer. Tokenizers of bytes have none."""
    return any(name not in _OF_SPECIAL_TOKENS for name in _tokenizer_files(directory))


def model_problem(directory: Path, *, has_weights: bool) -> str:
    """Returns why the files of a model directory, which has a config.json, cannot be loaded, as far as their names and
    first bytes tell; empty where nothing is wrong with them.

    Args:
        directory: The directory.
        has_weights: Whether it should have weights, beside config and tokenizer.
    """
    try:
        is_table = isinstance(json.loads((directory / "config.json").read_text(encoding="utf-8")), dict)
    except (OSError, ValueError) as error:
        return f"{directory / 'config.json'} cannot be read: {error}"
    if not is_table:
        return f"{directory / 'config.json'} is no JSON object"
    if not any(_tokenizer_files(directory)):
        return f"directory {directory} has no files of a tokenizer, such as tokenizer.json"
    return next(_faults_of_weights(directory), "") if has_weights else ""


def _tokenizer_files(directory: Path) -> Iterator[str]:
    return (path.name for pattern in TOKENIZER_FILES for path in directory.glob(pattern))


def _faults_of_weights(directory: Path) -> Iterator[str]:
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        others = (path.name for pattern in OTHER_FORMATS for path in sorted(directory.glob(pattern)))
        other = next(others, "")
        advice = f"; {other} is not read: load it with transformers, and save it with save_pretrained"
        yield f"directory {directory} has no weights as *.safetensors{advice if other else ''}"
    for path in found:
        try:
            with path.open("rb") as file:
                is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"
            continue
        if is_pointer:
            yield f"{path} is a pointer of Git LFS in place of the weights, which `git lfs pull` downloads"
    missing = _named_by_index(directory) - {path.name for path in found}
    if missing:
        yield f"directory {directory} has no {min(missing)}, which {INDEX} names"


def _named_by_index(directory: Path) -> set[str]:
    try:
        weights = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, LookupError, TypeError):
        return set()
    return {str(name) for name in weights.values()} if isinstance(weights, dict) else set()
