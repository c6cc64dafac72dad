"""The error of a malformed row, and the checks of a field that a row has to have."""

from __future__ import annotations

from typing import Any

from controller.data.text_files import Row

MOST_NAMED = 16
"""Maximum number of fields of a row that a message lists."""


class MalformedRow(Exception):
    """Raised where a row is malformed; its caller turns it into a ConfigError with its place."""


def check_field(row: Row, name: str, advice: str = "") -> None:
    """Raises MalformedRow where a row has no field `name`. The message lists the fields that it has, and ends with
    `advice`. A row that is not a JSON object is read as one without fields."""
    if not row:
        raise MalformedRow(f"not a JSON object with a {name}")
    if name not in row:
        raise MalformedRow(f"no field {name}, only: {fields_of(row)}{advice}")


def fields_of(row: Row) -> str:
    """Returns the names of a row's fields for messages, of many the first ones."""
    names = [*map(str, row)]
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "") or "none"


def check_text(text: Any, name: str) -> None:
    """Raises MalformedRow where the value of field `name` is not a text, or is empty."""
    if not isinstance(text, str) or not text:
        raise MalformedRow(f"{name} is not a text, or empty: {text!r}")
