"""Whether responses to conversations end where the chat template ends a message, told at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controller.config.config import Config
from controller.data.chat import Chat
from controller.data.prompts import PromptData
from controller.data.response_end import GENERATION_CONFIG, eos_ids
from rlhf.errors import ConfigError
from settings.generation import GeneratingTable


def messages_without_end(
    config: Config, data: tuple[PromptData, PromptData], columns: Sequence[str] = ()
) -> Iterator[str]:
    """Yields a line for each service that generates responses to conversations with a model among whose EOS tokens, and
    in `rollout.stop_token_ids`, is none of the special tokens with which the chat template ends a message of the
    assistant, so that responses go on. Where an algorithm learns from responses of the data, the line is of each
    actor, whose model learns this end, or it is that this end cannot be found. A model whose files this host cannot
    read passes, and so does a template that ends messages without a special token.

    Args:
        config: Configuration of the run.
        data: Training prompts and held-out prompts.
        columns: Names of the texts that the algorithm reads beside the prompt; with any, it generates no responses.
    """
    if config.tokenizer is None or not any(each.has_conversations for each in data):
        return
    chat = Chat(config.tokenizer, options=config.data.chat_options)
    try:
        learned = chat.ends_of_message()
    except ConfigError as error:
        if columns:
            yield (
                "responses to conversations end with the EOS token of the tokenizer, also where the chat template ends "
                f"a message of the assistant otherwise, which cannot be found out: {error}"
            )
        return
    for name, table in config.services.items():
        if not (isinstance(table, GeneratingTable) and (table.generates or columns)):
            continue
        directory = table.model_directory
        own = chat if directory == config.tokenizer else Chat(directory)
        try:
            ends = {token: own.token_id(token) for token in learned}
            known = eos_ids(own, directory) | (set() if columns else set(config.rollout.stop_token_ids))
        except ConfigError:
            continue
        # A model without any EOS token is told by `responses_without_end`.
        if ends and None not in ends.values() and known and known.isdisjoint(ends.values()):
            token, number = next(iter(ends.items()))
            yield (
                f"services.{name}.model: the chat template ends a message of the assistant with {token!r}, which is no "
                f"EOS token of the model, so responses go on after it; add its id, {number}, to eos_token_id in "
                f"{directory / GENERATION_CONFIG}{'' if columns else ', or to rollout.stop_token_ids'}"
            )
