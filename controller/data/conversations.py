"""Rows with conversations, lists of messages: their prompts where a row has none of its own, and the last turn of the
assistant, which is the one that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.data.malformed import MalformedRow, check_field, check_text
from controller.data.text_files import Row
from controller.data.tool_calls import check_calls, without_filled_keys, without_null_keys

TRANSCRIPT = "messages"
"""Field with a whole conversation, whose last message is the response."""
BESIDE_CONTENT = (("tool_calls", "function_call"), ("reasoning_content", "thinking"))
"""Keys of a message of the assistant that chat templates render beside its content, one of each group."""


def with_turns(row: Row, columns: Sequence[str], *, fills_nulls: bool = False) -> Row:
    """Returns a row whose fields `columns` are texts, or messages to be rendered, and that has a prompt.

    A field of `columns` may be a conversation. Its last message, of the assistant, becomes the field: its text alone,
    unless it has any of `BESIDE_CONTENT`. The messages before it have to be those of the row's prompt, or there are
    none; where the row has no prompt, they become its prompt, and have to be the same in all of `columns`. A row
    without field `response` may have field `messages` in its place, with all of the conversation. Without `columns`,
    the conversation of a row without prompt becomes its prompt, less a last message of the assistant.

    Args:
        row: The row; it is not changed.
        columns: Names of the texts that the row needs beside its prompt.
        fills_nulls: Whether keys that an object lacks may be null in it; see `RowReader`.

    Raises:
        MalformedRow: A field is missing, or it is neither a text nor a conversation that ends with a message of the
            assistant to learn; or earlier messages are not those of the prompt, so that they would be lost; or the
            tool calls of a message are malformed.
    """
    # A dataset of transcripts and of pairs of prompt and response has null where a row is of the other kind.
    needed = ("prompt", *columns)
    row = {name: value for name, value in row.items() if value is not None or name not in needed}
    named = {name: name for name in needed}  # as in the row, for errors
    if "response" in columns and "response" not in row and TRANSCRIPT in row:
        named["response"] = TRANSCRIPT
        row = {name: value for name, value in row.items() if name not in ("prompt", TRANSCRIPT)} | {
            "response": row[TRANSCRIPT]
        }
    if not columns and "prompt" not in row:
        row = _with_prompt_of_conversation(row)
    for name in needed:
        check_calls(row.get(name), named[name])
    for name in columns:
        check_field(row, name, _advice(name))
    split = {name: _split(row[name], named[name]) for name in columns}
    if split and "prompt" not in row:
        row = {"prompt": _shared_prompt(split), **row}
    check_field(row, "prompt", _advice("prompt"))
    for name, (earlier, _) in split.items():
        if earlier and not _is_prompt(earlier, row["prompt"]):
            raise MalformedRow(
                f"{name} has {_counted(earlier)} before its last one that are not those of the prompt. Only the last "
                f'one is trained, so they would be lost: make them the prompt (columns.prompt = "" does so)'
            )
    row |= {name: last for name, (_, last) in split.items()}
    return {**row, **_cleaned(row, needed, fills_nulls=fills_nulls)}


def is_trained(message: Any, place: str) -> bool:
    """Whether a message of the assistant is in the loss: unless its `weight`, as in the format of OpenAI, is 0.

    Args:
        message: The message.
        place: Field and number of the message, for the error.

    Raises:
        MalformedRow: The weight is neither 0 nor 1.
    """
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise MalformedRow(
            f"{place}: weight is {weight!r}; allowed: 0, which leaves it out of the loss, and 1"
        )
    return weight != 0


def keys_beside_content(message: Mapping[str, Any]) -> list[list[str]]:
    """Returns the keys of a message that templates render beside its content, by the groups of `BESIDE_CONTENT`."""
    found = [[key for key in keys if message.get(key)] for keys in BESIDE_CONTENT]
    return [keys for keys in found if keys]


def _with_prompt_of_conversation(row: Row) -> Row:
    """Returns a row with a prompt in place of its conversation: its messages without the last one, if that is of the
    assistant; the row itself where it has none. Raises MalformedRow where the conversation has no other message."""
    for name in (TRANSCRIPT, "response", "chosen"):
        given = row.get(name)
        if given and isinstance(given, list) and isinstance(last := given[-1], dict):
            rest = {other: value for other, value in row.items() if other != name}
            prompt = given[:-1] if is_of_assistant(last) else given
            if not prompt:
                raise MalformedRow(
                    f"no field prompt, and {name} has no message before that of the assistant, to which it responds"
                )
            return {"prompt": prompt, **rest}
    return row


def is_of_assistant(last: dict[str, Any]) -> bool:
    """Whether the last message of a conversation is of the assistant, which one without a role is."""
    return last.get("role") in (None, "assistant")


def _cleaned(row: Row, names: Sequence[str], *, fills_nulls: bool) -> Row:
    """Returns the conversations and messages among the fields `names` of a row without keys whose value is null."""
    cleaned: Row = {}
    for name in names:
        given = row[name]
        messages = [given] if isinstance(given, dict) else given
        if not isinstance(messages, list):
            continue
        messages = without_null_keys(messages, fills_nulls=fills_nulls)
        cleaned[name] = messages[0] if isinstance(given, dict) else messages
    return cleaned


def _advice(name: str) -> str:
    return f'; if one of these is the {name}, name it: columns.{name} = "FIELD"'


def _split(given: Any, name: str) -> tuple[Sequence[Any], str | dict[str, Any]]:
    """Returns the messages before the last one of a conversation, and the last: its text, or all of it where it has any
    of `BESIDE_CONTENT`. Returns no messages for a text."""
    if not (given and isinstance(given, list)):
        check_text(given, name)
        return (), given
    last = given[-1]
    if not isinstance(last, dict):
        raise MalformedRow(f"{name} is a list, but not one of messages with role and content: {last!r}")
    if not is_of_assistant(last):
        raise MalformedRow(
            f"{name} ends with a message of {last['role']!r}; it must end with one of 'assistant'"
        )
    if not is_trained(last, f"{name}: message {len(given)}"):
        raise MalformedRow(
            f"{name}: message {len(given)}, the last one, has weight 0, so that nothing is trained of it; with "
            'data.turns = "all" sft trains the messages of the assistant before it'
        )
    if keys_beside_content(last):
        return given[:-1], {**last, "role": "assistant"}
    check_text(last.get("content"), f"{name}: content of the last message")
    return given[:-1], last["content"]


def _shared_prompt(split: dict[str, tuple[Sequence[Any], Any]]) -> list[Any]:
    """Returns the messages before the last one, which all conversations of a row share."""
    names = " and ".join(split)
    prompts = [list(earlier) for earlier, _ in split.values()]
    if not all(prompts):
        raise MalformedRow(
            f"no field prompt, and no conversations in {names} that begin with it (a text, or one message alone, is a "
            "response without its prompt; a dialogue that is one text has to be divided first, see docs/data.md)"
        )
    if any(without_filled_keys(prompt) != without_filled_keys(prompts[0]) for prompt in prompts):
        raise MalformedRow(f"{names} differ before their last messages, and only the last one is trained")
    return prompts[0]


def _is_prompt(earlier: Sequence[Any], prompt: Any) -> bool:
    """Whether messages are those of a prompt: the same messages, or one of the user with its text."""
    if isinstance(prompt, str):
        return without_filled_keys([*earlier]) == [{"role": "user", "content": prompt}]
    return isinstance(prompt, list) and without_filled_keys([*earlier]) == without_filled_keys(prompt)


def _counted(messages: Sequence[Any]) -> str:
    return "a message" if len(messages) == 1 else f"{len(messages)} messages"
