"""Tools of a row, calls of them in its messages, and keys that a dataset fills with null."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from controller.data.malformed import MalformedRow
from controller.data.text_files import Row

TOOLS = "tools"
"""Field with the JSON schemas of the tools of a row's conversation."""
CALLS = "tool_calls"
"""Key of a message with the calls that the assistant makes in it."""


def tools_of(row: Row) -> list[Any] | None:
    """Returns the JSON schemas of the tools of a row: a list in field `TOOLS`, or a JSON text of one, as datasets have
    it whose schemas differ. None where the row has none.

    Raises:
        MalformedRow: The field is something else.
    """
    given = row.get(TOOLS)
    if given is None:
        return None
    try:
        tools = _from_json(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        tools = given
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise MalformedRow(
            f"tools is not a list of JSON schemas, which are objects, nor a JSON text of one: {given!r:.80}; where it "
            f'means something else, columns.{TOOLS} = "" leaves it out'
        )
    return tools


def check_calls(conversation: Any, name: str) -> None:
    """Raises MalformedRow where field `name` is a conversation and `tool_calls` of a message of it are not a list of
    calls, or the arguments of one are not an object, or a JSON text of one."""
    messages: list[Any] = conversation if isinstance(conversation, list) else []
    for number, message in enumerate(messages, 1):
        calls = message.get(CALLS) if isinstance(message, dict) else None
        if calls is None:
            continue
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise MalformedRow(
                f"{name}: {CALLS} of message {number} is not a list of calls, which are objects: {calls!r:.80}"
            )
        for call in calls:
            given = _function(call).get("arguments")
            if not isinstance(_parsed(given), dict):
                raise MalformedRow(
                    f"{name}: arguments of a call of message {number} are not an object, or a JSON text of one: "
                    f"{given!r:.80}"
                )


def with_parsed_arguments(messages: Sequence[Any]) -> Sequence[Any]:
    """Returns messages whose tool calls have objects as arguments, which chat templates expect, where they have a JSON
    text, as in the API of OpenAI, or none. Returns `messages` itself where nothing changes."""
    parsed = [_with_parsed_arguments(message) for message in messages]
    return parsed if any(new is not old for new, old in zip(parsed, messages, strict=True)) else messages


def without_null_keys(messages: Sequence[Any], *, fills_nulls: bool) -> list[Any]:
    """Returns messages without the keys whose value is null, which templates may take for given ones; `role` and
    `content`, which every message has, stay. With `fills_nulls` (see `RowReader`) also the objects in the values, such
    as the parts of a content, are without such keys."""
    return [
        {
            key: without_filled_keys(value) if fills_nulls else value
            for key, value in message.items()
            if value is not None or key in ("role", "content")
        }
        if isinstance(message, dict)
        else message
        for message in messages
    ]


def without_filled_keys(value: Any) -> Any:
    """Returns a JSON value in which no object has a key whose value is null: those that Arrow fills in where other rows
    have them, at any depth."""
    if isinstance(value, dict):
        return {key: without_filled_keys(each) for key, each in value.items() if each is not None}
    return [without_filled_keys(each) for each in value] if isinstance(value, list) else value


def _with_parsed_arguments(message: Any) -> Any:
    calls = message.get(CALLS) if isinstance(message, Mapping) else None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return message
    if all(isinstance(_function(call).get("arguments"), dict) for call in calls):
        return message
    return {**message, CALLS: [_parsed_call(call) for call in calls]}


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = _function(call)
    parsed = {**function, "arguments": _parsed(function.get("arguments"))}
    return parsed if function is call else {**call, "function": parsed}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """Returns the object with name and arguments of a call: its `function`, or the call itself."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _parsed(arguments: Any) -> Any:
    """Returns the value in a JSON text, an empty object for an empty text or null; other values, and other texts, as
    they are."""
    try:
        return _from_json(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        return arguments


def _from_json(text: str) -> Any:
    """Returns the value in a JSON text. Raises ValueError or RecursionError where there is none, or one with half of a
    surrogate pair, which no request can hold."""
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value
