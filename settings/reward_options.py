"""Options of the built-in reward functions, checked before a service has any rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from settings.explain import explain
from settings.strict import Strict


class GSM8KOptions(Strict):
    """Options of gsm8k."""

    mode: Literal["strict", "flexible"] = "strict"
    """Number that is compared: strict takes the one after the last ####, flexible the last of the response."""


class FormatOptions(Strict):
    """Options of format."""

    pattern: str = r"<think>.+?</think>\s*\S.*"
    """Regular expression that the whole response has to match; a dot also matches newlines."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"no regular expression: {error} (given: {pattern!r})") from None
        return pattern


class LengthOptions(Strict):
    """Options of length."""

    limit: float = Field(default=1000, ge=0)
    """Most characters of a response that scores 1."""
    fade: float = Field(default=0, ge=0)
    """Number of characters over which the score falls to 0."""


OPTIONS: Mapping[str, type[Strict]] = {
    "environment": Strict,
    "exact_match": Strict,
    "format": FormatOptions,
    "gsm8k": GSM8KOptions,
    "length": LengthOptions,
    "math": Strict,
}
"""Options of each built-in reward function."""


def check_options(function: str, given: Mapping[str, Any]) -> None:
    """Checks the options of a built-in reward function; those of other functions are not known here.

    Args:
        function: Name of the function.
        given: The options by name.

    Raises:
        ValueError: An option is unknown, or has a value that the function refuses.
    """
    kind = OPTIONS.get(function)
    try:
        if kind:
            kind.model_validate(given, strict=True)
    except ValidationError as error:
        raise ValueError(f"options.{explain(error, given, kind)}") from None
