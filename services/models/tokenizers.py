"""Loads tokenizers of Hugging Face directories, and compares their vocabularies with models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from services.models.configs import NO_CODE
from services.models.directory import first_line, require_model_directory
from services.models.value_model import ValueModel, transformer_of
from settings.model_files import has_vocabulary


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face directory.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory has no tokenizer that can be loaded, or adapters beside its model.
    """
    require_model_directory(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, **NO_CODE)
    except (OSError, ValueError) as error:
        if not has_vocabulary(directory):
            raise ValueError(_no_files(directory)) from error
        raise ValueError(f"{directory} has no tokenizer that can be loaded: {first_line(error)}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        # Without tokenizer files, transformers returns a tokenizer of special tokens alone for some families.
        raise ValueError(_no_files(directory))
    return tokenizer


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer adds its BOS token at the start of texts."""
    begin = [tokenizer.bos_token_id]
    return _ids("a", tokenizer, add_special_tokens=False)[:1] != begin == _ids("a", tokenizer)[:1]


def adds_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer adds its EOS token at the end of texts."""
    end = [tokenizer.eos_token_id]
    return _ids("a", tokenizer, add_special_tokens=False)[-1:] != end == _ids("a", tokenizer)[-1:]


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    return tokenizer(text, **options)["input_ids"]


def _no_files(directory: Path) -> str:
    return f"{directory} has no files of a tokenizer, such as tokenizer.json"


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | ValueModel) -> None:
    """Raises ValueError if the tokenizer has token ids for which the model has no embedding."""
    backbone = transformer_of(model)
    embedding: Any = backbone.get_input_embeddings()
    check_vocabulary(tokenizer, embedding.num_embeddings, backbone.name_or_path)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, model: Path | str | None
) -> None:
    """Raises ValueError if the tokenizer has token ids that are not below `num_embeddings`, the number of embeddings
    of the model. Special tokens other than those that begin, end and pad texts may lie beyond, as the image token of
    Gemma 3 does; `tokenize_texts` refuses texts that contain one.

    Args:
        tokenizer: tokenizer of the model.
        num_embeddings: number of embeddings of the model.
        model: name of the model, for the message.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    own: Any = tokenizer
    unused = special - {own.bos_token_id, own.eos_token_id, own.pad_token_id, own.unk_token_id}
    num_ids = max(number for number in tokenizer.get_vocab().values() if number not in unused) + 1
    if num_ids > num_embeddings:
        raise ValueError(
            f"tokenizer and model do not match: the tokenizer {tokenizer.name_or_path} has {num_ids} token ids, "
            f"the model {model} has {num_embeddings} embeddings"
        )


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the sha256 (hex) of the map from token to id, which is equal for services whose token ids have the same
    meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()
