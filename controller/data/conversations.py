"""Rows with conversations, lists of messages: their prompts where a row has none of its own, and the last turn of the
assistant, which is the one that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controller.data.malformed import MalformedRow, check_field, check_text
from controller.data.text_files import Row

TRANSCRIPT = "messages"
"""Field with a whole conversation, whose last message is the response."""


def with_turns(row: Row, columns: Sequence[str]) -> Row:
    """Returns a row whose fields `columns` are texts, and that has a prompt.

    A field of `columns` may be a conversation. Its last message, of the assistant, becomes the field's text. The
    messages before it have to be those of the row's prompt, or there are none; where the row has no prompt, they become
    its prompt, and have to be the same in all of `columns`. A row without field `response` may have field `messages` in
    its place, with all of the conversation.

    Args:
        row: The row; it is not changed.
        columns: Names of the texts that the row needs beside its prompt.

    Raises:
        MalformedRow: A field is missing, or it is neither a text nor a conversation that ends with a text of the
            assistant; or earlier messages are not those of the prompt, so that they would be lost.
    """
    if "response" in columns and "response" not in row and TRANSCRIPT in row:
        row = {name: value for name, value in row.items() if name not in ("prompt", TRANSCRIPT)} | {
            "response": row[TRANSCRIPT]
        }
    for name in columns:
        check_field(row, name, _advice(name))
    split = {name: _split(row[name], name) for name in columns}
    if split and "prompt" not in row:
        row = {"prompt": _shared_prompt(split), **row}
    check_field(row, "prompt", _advice("prompt"))
    for name, (earlier, _) in split.items():
        if earlier and not _is_prompt(earlier, row["prompt"]):
            raise MalformedRow(
                f"{name} has {_counted(earlier)} before its last one that are not those of the prompt. Only the last "
                f'one is trained, so they would be lost: make them the prompt (columns.prompt = "" does so)'
            )
    return {**row, **{name: text for name, (_, text) in split.items()}} if split else row


def _advice(name: str) -> str:
    return f'; if one of these is the {name}, name it: columns.{name} = "FIELD"'


def _split(given: Any, name: str) -> tuple[Sequence[Any], str]:
    """Returns the messages before the last one of a conversation, and the text of the last; no messages for a text."""
    if not (given and isinstance(given, list)):
        check_text(given, name)
        return (), given
    last = given[-1]
    if not isinstance(last, dict):
        raise MalformedRow(f"{name} is a list, but not one of messages with role and content: {last!r}")
    if last.get("role", "assistant") != "assistant":
        raise MalformedRow(
            f"{name} ends with a message of {last['role']!r}; it must end with one of 'assistant'"
        )
    check_text(last.get("content"), f"{name}: content of the last message")
    return given[:-1], last["content"]


def _shared_prompt(split: dict[str, tuple[Sequence[Any], str]]) -> list[Any]:
    """Returns the messages before the last one, which all conversations of a row share."""
    names = " and ".join(split)
    prompts = [list(earlier) for earlier, _ in split.values()]
    if not all(prompts):
        raise MalformedRow(
            f"no field prompt, and no conversations in {names} that begin with it (a text, or one message alone, is a "
            "response without its prompt; a dialogue that is one text has to be divided first, see docs/data.md)"
        )
    if any(_plain(prompt) != _plain(prompts[0]) for prompt in prompts):
        raise MalformedRow(f"{names} differ before their last messages, and only the last one is trained")
    return prompts[0]


def _is_prompt(earlier: Sequence[Any], prompt: Any) -> bool:
    """Whether messages are those of a prompt: the same messages, or one of the user with its text."""
    if isinstance(prompt, str):
        return _plain(earlier) == [{"role": "user", "content": prompt}]
    return isinstance(prompt, list) and _plain(earlier) == _plain(prompt)


def _plain(messages: Sequence[Any]) -> list[Any]:
    """Returns messages without the keys that a dataset fills with null where other messages have them."""
    return [
        {key: value for key, value in message.items() if value is not None}
        if isinstance(message, dict)
        else message
        for message in messages
    ]


def _counted(messages: Sequence[Any]) -> str:
    return "a message" if len(messages) == 1 else f"{len(messages)} messages"
