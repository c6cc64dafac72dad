"""The text that ends a response that an algorithm learns: in a conversation, what the chat template puts there."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from controller.config.config import Config
from controller.data.chat import TOKENIZER_CONFIG, Chat
from rlhf.errors import ConfigError

RESPONSE_END = "response_end"
"""Name of the text of a row that ends its responses where the EOS token of the tokenizer does not."""
GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"


class TemplateEnds:
    """Ends of responses to conversations as the chat template of a run ends messages of the assistant. Files of the
    model are read when they are first needed.

    Args:
        config: Configuration of the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    def usual(self) -> str:
        """Returns the end of responses that are the content of a message; see `response_end`."""
        return self._usual

    def split(self, turn: str) -> tuple[str, str]:
        """Splits a rendered message of the assistant into the response and what ends it, as `response_end` describes
        the end; see `Chat.split_turn`."""
        chat, known = self._tokens
        try:
            text, end = chat.split_turn(turn, known)
        except ConfigError:  # without tokenizer.json
            return turn, ""
        return text, "" if end == chat.eos_token else end

    @cached_property
    def _usual(self) -> str:
        return response_end(self._config)

    @cached_property
    def _tokens(self) -> tuple[Chat, set[int]]:
        """The chat template and tokenizer of the run, and the ids of the tokens that end responses."""
        directory = self._config.tokenizer
        assert directory is not None, "a message was rendered"
        return _tokens_of(self._config, directory)


def response_end(config: Config) -> str:
    """Returns the text with which the chat template of a run ends responses; see `Chat.end_of_response`. Empty where
    that is the EOS token of the tokenizer, which ends other responses too; where it is not a special token; and where
    the files of the model cannot be read."""
    directory = config.tokenizer
    if directory is None or not (directory / TOKENIZER_CONFIG).is_file():
        return ""
    chat, known = _tokens_of(config, directory)
    try:
        end = chat.end_of_response(known)
        return "" if end == chat.eos_token else end
    except ConfigError:
        return ""


def _tokens_of(config: Config, directory: Path) -> tuple[Chat, set[int]]:
    """Returns chat template and tokenizer of a directory, and the ids of the tokens that end responses: the EOS tokens
    of its model, none where it has a tokenizer alone, and `rollout.stop_token_ids`."""
    chat = Chat(directory, options=config.data.chat_options)
    stops = set(config.rollout.stop_token_ids)
    try:
        return chat, eos_ids(chat, directory) | stops
    except ConfigError:
        return chat, stops


def eos_ids(chat: Chat, directory: Path) -> set[int]:
    """Returns the ids of the EOS tokens of a model: that of its tokenizer, and those in its generation config, or in
    its config if it has no generation config.

    Args:
        chat: The tokenizer.
        directory: Model directory.

    Raises:
        ConfigError: A file cannot be read.
    """
    file = directory / GENERATION_CONFIG
    file = file if file.is_file() else directory / MODEL_CONFIG
    try:
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        given = table.get("eos_token_id", table.get("text_config", {}).get("eos_token_id"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    every = [chat.token_id(chat.eos_token), *(given if isinstance(given, list) else [given])]
    return {token for token in every if isinstance(token, int)}
