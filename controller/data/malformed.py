"""The error of a malformed row, and the check of a text that a row has to have."""

from __future__ import annotations

from typing import Any


class MalformedRow(Exception):
    """Raised where a row is malformed; its caller turns it into a ConfigError with its place."""


def check_text(text: Any, name: str) -> None:
    """Raises MalformedRow where the value of field `name` is not a text, or is empty."""
    if not isinstance(text, str) or not text:
        raise MalformedRow(f"{name} is not a text, or empty: {text!r}")
