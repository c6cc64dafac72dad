"""Whether responses to conversations end where the chat template ends a message, told at the start of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controller.config.config import Config
from controller.data.chat import Chat
from controller.data.prompts import PromptData
from rlhf.errors import ConfigError
from settings.generation import GeneratingTable

GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"


def messages_without_end(config: Config, data: tuple[PromptData, PromptData]) -> Iterator[str]:
    """Yields a line for each service that generates responses to conversations with a model among whose EOS tokens is
    none of the special tokens with which the chat template ends a message of the assistant, so that responses go on. A
    model whose files this host cannot read passes, and so does a template that ends messages without a special token.

    Args:
        config: Configuration of the run.
        data: Training prompts and held-out prompts.
    """
    if config.tokenizer is None or not any(each.has_conversations for each in data):
        return
    chat = Chat(config.tokenizer, options=config.data.chat_options)
    for name, table in config.services.items():
        if not (isinstance(table, GeneratingTable) and table.generates):
            continue
        directory = table.model_directory
        own = chat if directory == config.tokenizer else Chat(directory)
        try:
            ends = {token: own.token_id(token) for token in chat.ends_of_message()}
            known = {*configured_eos_ids(directory), own.token_id(own.eos_token)} - {None}
        except ConfigError:
            continue
        # A model without any EOS token is told by `responses_without_end`.
        if ends and None not in ends.values() and known and known.isdisjoint(ends.values()):
            token, number = next(iter(ends.items()))
            yield (
                f"services.{name}.model: the chat template ends a message of the assistant with {token!r}, which is no "
                f"EOS token of the model, so responses go on after it; add its id, {number}, to eos_token_id in "
                f"{directory / GENERATION_CONFIG}"
            )


def configured_eos_ids(directory: Path) -> set[int]:
    """Returns the ids of the EOS tokens in the generation config of a model directory, or in the model's config if it
    has no generation config. Raises ConfigError where neither can be read."""
    file = directory / GENERATION_CONFIG
    file = file if file.is_file() else directory / MODEL_CONFIG
    try:
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        given = table.get("eos_token_id", table.get("text_config", {}).get("eos_token_id"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    return {token for token in (given if isinstance(given, list) else [given]) if isinstance(token, int)}
