"""Rewards that are Python functions of text: the built-in ones, and those of users, found by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlhf.errors import ConfigError
from rlhf.plugins import PluginError, load_object
from services.reward import mathematics, verifiers
from services.reward.conventions import asks_for_tokens, bound, convention_of, is_async

Unit = Literal["row", "group", "batch"]
"""Rows that one call of a function scores; see `unit_of`."""
Verdict = float | Sequence[float] | Mapping[str, Any]
"""A score of a response; one score per response token; or a mapping with either as "score", whose other numbers become
metrics (`scorers.extras`)."""
RewardFunction = Callable[[str, str, str, Mapping[str, Any]], Verdict]
"""Maps (prompt, response, ground truth, metadata) to a verdict."""
BatchFunction = Callable[
    [Sequence[str], Sequence[str], Sequence[str], Sequence[Mapping[str, Any]]], Sequence[Verdict]
]
"""Maps lists of prompts, responses, ground truths and metadata to one verdict per row."""


def exact_match(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Returns 1 if response and ground truth are equal except for whitespace at both ends, else 0. Raises ValueError
    where there is no ground truth."""
    if not ground_truth.strip():
        raise ValueError("the row has no ground truth")
    return float(response.strip() == ground_truth.strip())


def environment(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Returns the reward that the environment of an episode has given. Raises ValueError where it has given none."""
    if "environment_reward" not in metadata:
        raise ValueError(
            "rollout.environment has given no reward: its method reward is missing or returned None"
        )
    return float(metadata["environment_reward"])


BUILT_IN: dict[str, RewardFunction] = {
    "environment": environment,
    "exact_match": exact_match,
    "format": verifiers.form,
    "gsm8k": verifiers.gsm8k,
    "length": verifiers.length,
    "math": mathematics.math,
}
for _function in BUILT_IN.values():
    if _function is not environment:
        _function.score_range = (0.0, 1.0)  # type: ignore[attr-defined]


def find_function(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Returns a reward function with its options bound, as its `unit_of` says: a `RewardFunction` of one row, a
    `GroupFunction`, or a `BatchFunction`. An `async` function returns awaitables of the same. Functions with the
    signature of verl's or TRL's rewards are adapted (`conventions.bound`).

    Args:
        name: Name of a built-in function, or "module:function".
        options: Keyword arguments of every call. Default: none.

    Raises:
        ConfigError: The function does not exist, cannot be imported, needs a package that is not installed, does not
            take an option, or has another signature.
    """
    function = _find(name)
    module = required_module(name)
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(f"function: {name} needs {module}; pip install 'rlhf-cluster[{name}]'")
    return bound(name, function, options or {})


def unit_of(name: str) -> Unit:
    """Returns what one call of a function scores: a row; a group, all responses to a prompt (`groups.over_groups`); or
    a batch, any rows, as TRL's rewards do. Raises ConfigError if there is no function `name`."""
    if is_over_groups(name):
        return "group"
    return "batch" if convention_of(_find(name)) == "trl" else "row"


def is_awaited(name: str) -> bool:
    """Returns whether a function is `async`. Raises ConfigError if there is no function `name`."""
    return is_async(_find(name))


def wants_tokens(name: str) -> bool:
    """Returns whether a function has a parameter `conventions.TOKENS`. Raises ConfigError if there is no function
    `name`."""
    return asks_for_tokens(_find(name))


def truth_reader(name: str) -> Callable[[str], object] | None:
    """Returns the function that parses a ground truth, the attribute `read_truth` of a verifier; None for functions
    that are not verifiers, as those that are `async` or do not score rows one by one. Raises ConfigError if there is no
    function `name`.

    A verifier runs in separate processes, since it may never return. It reads the ground truth first; if that fails,
    the row is an error. Any later failure is caused by the response, which scores 0.
    """
    is_verifier = unit_of(name) == "row" and not is_awaited(name)
    return getattr(_find(name), "read_truth", None) if is_verifier else None


def warm_up(name: str) -> None:
    """Imports the modules that a built-in function needs, so that its first call is fast. Does nothing for others."""
    getattr(BUILT_IN.get(name), "warm_up", lambda: None)()


def score_range(name: str) -> tuple[float, float] | None:
    """Returns the lowest and the highest score of a function, its attribute `score_range`; None if it has none. Raises
    ConfigError if there is no function `name`."""
    return getattr(_find(name), "score_range", None)


def is_over_groups(name: str) -> bool:
    """Returns whether a function scores all responses to a prompt at once; see `groups.over_groups`. Raises ConfigError
    if there is no function `name`."""
    return bool(getattr(_find(name), "over_groups", False))


def required_module(name: str) -> str:
    """Returns the name of the optional module that a function needs, or "" if it needs none. Raises ConfigError
    if there is no function `name`."""
    return getattr(_find(name), "required_module", "")


def _find(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigError(
            f"function: {name!r} is neither module:function nor one of: {', '.join(sorted(BUILT_IN))}"
        )
    try:
        function = load_object(name, object)
    except PluginError as error:
        raise ConfigError(f"function: {error}") from error
    if not callable(function):
        raise ConfigError(f"function: {name!r} is not callable")
    return function
