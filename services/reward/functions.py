"""Rewards that are Python functions of text."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.errors import ConfigError

RewardFunction = Callable[[str, str, str, Mapping[str, Any]], float | Sequence[float]]
"""(prompt, response, ground truth, metadata) to a score of the response, or one per response token."""


def exact_match(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """1 where response and ground truth are the same text, spaces at both ends apart; else 0."""
    return float(response.strip() == ground_truth.strip())


BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match}


def find_function(name: str) -> RewardFunction:
    """A built-in function by name, or any by "module:function".

    Raises:
        ConfigError: There is no such function; the text lists the built-in ones, or has the import's error.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"function: {name!r} is neither module:function nor one of: {known}")
    try:
        function: RewardFunction = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"function: {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(f"function: {name!r} is not callable")
    return function
