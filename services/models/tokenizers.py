"""Tokenizers of Hugging Face directories."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from services.models.directory import first_line, require_model_directory
from services.models.value_model import ValueModel, transformer_of


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Raises FileNotFoundError or ValueError, naming the directory, where there is no tokenizer to load."""
    require_model_directory(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no tokenizer that can be loaded: {first_line(error)}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        # Of some families transformers makes one where there is none, with nothing but special tokens.
        raise ValueError(f"{directory} has no files of a tokenizer, such as tokenizer.json")
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | ValueModel) -> None:
    """Raises ValueError where the tokenizer has ids that the model has no embedding for."""
    backbone = transformer_of(model)
    embedding: Any = backbone.get_input_embeddings()
    check_vocabulary(tokenizer, embedding.num_embeddings, backbone.name_or_path)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, model: Path | str | None
) -> None:
    """Raises ValueError where the tokenizer has ids for which the model, named for the message, has no embedding."""
    num_ids = max(tokenizer.get_vocab().values()) + 1
    if num_ids > num_embeddings:
        raise ValueError(
            f"tokenizer and model do not match: the tokenizer {tokenizer.name_or_path} has {num_ids} token ids, "
            f"the model {model} has {num_embeddings} embeddings"
        )


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (hex) of the map from token to id: equal where two services mean the same by a token id."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()
